// Memory by inline assembly, so that no compiler leaves a load out or calls memcpy; exponentials by intrinsics, where the compiler schedules as it
// does in the library's kernels.
#include "measure/rate_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fattn::measure {
namespace {

// Of src/cpu/exp2.h: 2^f for f in [-0.5, 0.5].
constexpr float kPolynomial[6] = {0.00132647273F, 0.00967151299F, 0.0555073358F, 0.240222424F, 0.693147004F, 1.0F};
constexpr float kMagic = 12582912.0F + 127.0F;  // rounds to an integer n and leaves the exponent of 2^n in the lowest bits
constexpr float kBack = -1.5F;                  // 2^x - 1.5 is in [-1, -0.5] again where x is in [-1, 0]

typedef float Quad __attribute__((vector_size(16)));
typedef int32_t Bits __attribute__((vector_size(16)));

void exp_base(int64_t iterations) {
  Quad x[8];
  for (int i = 0; i < 8; ++i) x[i] = Quad{-0.1F, -0.2F, -0.3F, -0.4F} - 0.05F * static_cast<float>(i);
  for (int64_t n = 0; n < iterations; ++n)
    for (Quad& v : x) {
      const Quad shifted = v + kMagic, f = v - (shifted - kMagic);
      Quad p = f * kPolynomial[0] + kPolynomial[1];
      for (int c = 2; c < 6; ++c) p = p * f + kPolynomial[c];
      v = p * reinterpret_cast<Quad>(reinterpret_cast<Bits>(shifted) << 23) + kBack;
    }
  for (const Quad& v : x) {
    const Quad kept = v;
    asm volatile("" : : "m"(kept));
  }
}

void read_base(const void* from, size_t bytes, int64_t rounds) {
  const Quad* const quads = static_cast<const Quad*>(from);
  for (int64_t n = 0; n < rounds; ++n)
    for (size_t i = 0; i < bytes / sizeof(Quad); i += 8) {
      Quad sum = quads[i];
      for (size_t j = 1; j < 8; ++j) sum += quads[i + j];
      asm volatile("" : : "m"(sum) : "memory");
    }
}

void copy_base(void* to, const void* from, size_t bytes, int64_t rounds) {
  Quad* const out = static_cast<Quad*>(to);
  const Quad* const in = static_cast<const Quad*>(from);
  for (int64_t n = 0; n < rounds; ++n)
    for (size_t i = 0; i < bytes / sizeof(Quad); i += 8) {
      for (size_t j = 0; j < 8; ++j) out[i + j] = in[i + j];
      asm volatile("" : : : "memory");
    }
}

#if defined(__x86_64__)

__attribute__((target("avx2,fma"))) void exp_avx2(int64_t iterations) {
  __m256 x[8];
  for (int i = 0; i < 8; ++i) x[i] = _mm256_set1_ps(-0.1F - 0.05F * static_cast<float>(i));
  const __m256 magic = _mm256_set1_ps(kMagic), back = _mm256_set1_ps(kBack);
  for (int64_t n = 0; n < iterations; ++n)
    for (__m256& v : x) {
      const __m256 clamped = _mm256_max_ps(_mm256_set1_ps(-127.0F), v);
      const __m256 shifted = _mm256_add_ps(clamped, magic), f = _mm256_sub_ps(clamped, _mm256_sub_ps(shifted, magic));
      __m256 p = _mm256_fmadd_ps(_mm256_set1_ps(kPolynomial[0]), f, _mm256_set1_ps(kPolynomial[1]));
      for (int c = 2; c < 6; ++c) p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(kPolynomial[c]));
      p = _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(shifted), 23)));
      v = _mm256_add_ps(p, back);
    }
  for (const __m256& v : x) {
    const __m256 kept = v;
    asm volatile("" : : "m"(kept));
  }
}

__attribute__((target("avx512f"))) void exp_avx512(int64_t iterations) {
  __m512 x[12];
  for (int i = 0; i < 12; ++i) x[i] = _mm512_set1_ps(-0.1F - 0.05F * static_cast<float>(i));
  const __m512 back = _mm512_set1_ps(kBack);
  for (int64_t n = 0; n < iterations; ++n)
    for (__m512& v : x) {
      const __m512 whole = _mm512_maskz_roundscale_ps(0xFFFF, v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = _mm512_sub_ps(v, whole);
      __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(kPolynomial[0]), f, _mm512_set1_ps(kPolynomial[1]));
      for (int c = 2; c < 6; ++c) p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(kPolynomial[c]));
      p = _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(v, _mm512_set1_ps(-125.0F), _CMP_NLT_UQ), p, whole);
      v = _mm512_add_ps(p, back);
    }
  for (const __m512& v : x) {
    const __m512 kept = v;
    asm volatile("" : : "m"(kept));
  }
}

// Eight loads, or eight loads and stores, of a register each, until `bytes` are done.
#define FATTN_EIGHT(op) op(0) op(1) op(2) op(3) op(4) op(5) op(6) op(7)
#define FATTN_LOAD256(i) "vmovups " #i "*32(%[from],%[at]), %%ymm" #i "\n\t"
#define FATTN_STORE256(i) "vmovups %%ymm" #i ", " #i "*32(%[to],%[at])\n\t"
#define FATTN_LOAD512(i) "vmovups " #i "*64(%[from],%[at]), %%zmm1" #i "\n\t"
#define FATTN_STORE512(i) "vmovups %%zmm1" #i ", " #i "*64(%[to],%[at])\n\t"
#define FATTN_MEMORY_LOOP(body, step, ...)                                                                        \
  for (int64_t n = 0; n < rounds; ++n) {                                                                          \
    size_t at = 0;                                                                                                \
    asm volatile(".p2align 5\n\t1:\n\t" body "add $" step ", %[at]\n\tcmp %[bytes], %[at]\n\tjb 1b\n\tvzeroupper" \
                 : [at] "+r"(at)                                                                                  \
                 : [from] "r"(from), [to] "r"(to), [bytes] "r"(bytes)                                             \
                 : "cc", "memory", __VA_ARGS__);                                                                  \
  }
#define FATTN_LOW "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7"
#define FATTN_HIGH "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", "xmm16", "xmm17"

__attribute__((target("avx2"))) void copy_avx2(void* to, const void* from, size_t bytes, int64_t rounds) {
  FATTN_MEMORY_LOOP(FATTN_EIGHT(FATTN_LOAD256) FATTN_EIGHT(FATTN_STORE256), "256", FATTN_LOW)
}
__attribute__((target("avx2"))) void read_avx2(const void* from, size_t bytes, int64_t rounds) {
  const void* const to = from;
  FATTN_MEMORY_LOOP(FATTN_EIGHT(FATTN_LOAD256), "256", FATTN_LOW)
}
__attribute__((target("avx512f"))) void copy_avx512(void* to, const void* from, size_t bytes, int64_t rounds) {
  FATTN_MEMORY_LOOP(FATTN_EIGHT(FATTN_LOAD512) FATTN_EIGHT(FATTN_STORE512), "512", FATTN_HIGH)
}
__attribute__((target("avx512f"))) void read_avx512(const void* from, size_t bytes, int64_t rounds) {
  const void* const to = from;
  FATTN_MEMORY_LOOP(FATTN_EIGHT(FATTN_LOAD512), "512", FATTN_HIGH)
}

#undef FATTN_EIGHT
#undef FATTN_LOAD256
#undef FATTN_STORE256
#undef FATTN_LOAD512
#undef FATTN_STORE512
#undef FATTN_MEMORY_LOOP
#undef FATTN_LOW
#undef FATTN_HIGH

#endif

}  // namespace

ExpKernel exp_kernel(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx2) return {8 * 8, exp_avx2};
  if (isa == Isa::kAvx512 || isa == Isa::kAvx512Bf16 || isa == Isa::kAmx) return {12 * 16, exp_avx512};
#endif
  (void)isa;
  return {8 * 4, exp_base};
}

MemoryKernel memory_kernel(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx2) return {read_avx2, copy_avx2};
  if (isa == Isa::kAvx512 || isa == Isa::kAvx512Bf16 || isa == Isa::kAmx) return {read_avx512, copy_avx512};
#endif
  (void)isa;
  return {read_base, copy_base};
}

}  // namespace fattn::measure
