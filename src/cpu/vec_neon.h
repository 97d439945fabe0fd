// Vec layer for AArch64 Advanced SIMD. Names: vec_types.h.
#pragma once

#include <arm_neon.h>
#include <stdint.h>

#include "cpu/vec_types.h"

namespace fattn::core::FATTN_ISA {

typedef float32x4_t F32;
constexpr int kLanes = 4;
constexpr int kPanelVecs = 4;  // 6 x 4 accumulators of 32 registers
constexpr bool kHasDot = false;
constexpr bool kFetchesAhead = false;
constexpr int64_t kInPlace = 0;

#define FATTN_INLINE static inline __attribute__((always_inline))

FATTN_INLINE F32 set1(float x) { return vdupq_n_f32(x); }
FATTN_INLINE F32 zero() { return vdupq_n_f32(0.0f); }
FATTN_INLINE F32 load(const float* p) { return vld1q_f32(p); }
FATTN_INLINE void store(float* p, F32 v) { vst1q_f32(p, v); }
FATTN_INLINE F32 add(F32 a, F32 b) { return vaddq_f32(a, b); }
FATTN_INLINE F32 sub(F32 a, F32 b) { return vsubq_f32(a, b); }
FATTN_INLINE F32 mul(F32 a, F32 b) { return vmulq_f32(a, b); }
FATTN_INLINE F32 div(F32 a, F32 b) { return vdivq_f32(a, b); }
FATTN_INLINE F32 sqrt(F32 a) { return vsqrtq_f32(a); }
FATTN_INLINE F32 fma(F32 a, F32 b, F32 c) { return vfmaq_f32(c, a, b); }
FATTN_INLINE F32 max(F32 a, F32 b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
FATTN_INLINE bool all_smaller(F32 x, float limit) { return vminvq_u32(vcaltq_f32(x, set1(limit))) != 0; }
FATTN_INLINE F32 where_equal(F32 a, F32 b, F32 x, F32 y) { return vbslq_f32(vceqq_f32(a, b), x, y); }
FATTN_INLINE F32 keep_from(F32 x, int first, F32 other) {
  const int32_t lanes[4] = {0, 1, 2, 3};
  return vbslq_f32(vcgeq_s32(vld1q_s32(lanes), vdupq_n_s32(first)), x, other);
}
FATTN_INLINE F32 keep_below(F32 x, int end, F32 other) {
  const int32_t lanes[4] = {0, 1, 2, 3};
  return vbslq_f32(vcltq_s32(vld1q_s32(lanes), vdupq_n_s32(end)), x, other);
}
FATTN_INLINE float sum(F32 v) { return vaddvq_f32(v); }
FATTN_INLINE float largest_lane(F32 v) { return vmaxvq_f32(v); }
FATTN_INLINE F32 load(const f16* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits))); }
FATTN_INLINE F32 load(const bf16* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&p->bits), 16)); }
FATTN_INLINE void store(f16* p, F32 v) { vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32(v))); }
FATTN_INLINE void store(bf16* p, F32 v) {
  const uint32x4_t bits = vreinterpretq_u32_f32(v);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
  vst1_u16(&p->bits, vshrn_n_u32(vbslq_u32(vceqq_f32(v, v), rounded, quiet), 16));
}
FATTN_INLINE F32 shift_exponent(F32 t) { return vreinterpretq_f32_s32(vshlq_n_s32(vreinterpretq_s32_f32(t), 23)); }
FATTN_INLINE F32 load(const uint8_t* p) {
  const uint32_t some[4] = {p[0], p[1], p[2], p[3]};
  return vcvtq_f32_u32(vld1q_u32(some));
}

typedef uint32x4_t U32;
FATTN_INLINE U32 set1_u32(uint32_t x) { return vdupq_n_u32(x); }
FATTN_INLINE U32 load_u32(const uint32_t* p) { return vld1q_u32(p); }
FATTN_INLINE void store_u32(uint32_t* p, U32 v) { vst1q_u32(p, v); }
FATTN_INLINE U32 xor_u32(U32 a, U32 b) { return veorq_u32(a, b); }
FATTN_INLINE void multiply_wide(U32 x, U32 m, U32& high, U32& low) {
  const U32 first = vreinterpretq_u32_u64(vmull_u32(vget_low_u32(x), vget_low_u32(m))), last = vreinterpretq_u32_u64(vmull_high_u32(x, m));
  low = vuzp1q_u32(first, last);
  high = vuzp2q_u32(first, last);
}
FATTN_INLINE F32 keep_not_below(F32 x, U32 word, U32 limit) {
  return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x), vcgeq_u32(word, limit)));
}
FATTN_INLINE F32 keep_if(F32 x, U32 word, U32 bit) { return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x), vtstq_u32(word, bit))); }
FATTN_INLINE F32 where_bit(U32 word, U32 bit, F32 x, F32 y) { return vbslq_f32(vtstq_u32(word, bit), x, y); }
FATTN_INLINE uint32_t nonzero_bytes(const uint8_t* p) { return nonzero_bytes_by_words(p); }

}  // namespace fattn::core::FATTN_ISA

#include "cpu/exp2.h"

namespace fattn::core::FATTN_ISA {

FATTN_INLINE F32 exp2(F32 x) { return exp2_by_magic(x); }
FATTN_INLINE F32 exp2_weight(F32 x) { return vbslq_f32(vcltq_f32(x, set1(kLeastWeight)), zero(), exp2(x)); }
FATTN_INLINE void transpose(F32 (&r)[4]) {
  const float32x4x2_t ab = vtrnq_f32(r[0], r[1]), cd = vtrnq_f32(r[2], r[3]);
  r[0] = vcombine_f32(vget_low_f32(ab.val[0]), vget_low_f32(cd.val[0]));
  r[1] = vcombine_f32(vget_low_f32(ab.val[1]), vget_low_f32(cd.val[1]));
  r[2] = vcombine_f32(vget_high_f32(ab.val[0]), vget_high_f32(cd.val[0]));
  r[3] = vcombine_f32(vget_high_f32(ab.val[1]), vget_high_f32(cd.val[1]));
}
FATTN_INLINE F32 sum_each(const F32 (&r)[4]) { return vpaddq_f32(vpaddq_f32(r[0], r[1]), vpaddq_f32(r[2], r[3])); }

}  // namespace fattn::core::FATTN_ISA
