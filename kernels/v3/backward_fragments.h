// What the warpgroups of the v3 backward kernel do with their registers between products. Scores are transposed, S^T = K Q^T: a row is a key, a
// column a query, so that the accumulators of P^T and dS^T are A operands of dV = P^T dO and dK = dS^T Q.
//
// Of a 64 x 64 block, a thread has s[4 i + e]: key lane / 4 + 8 (e / 2) of its warp's 16, query 8 i + 2 (lane % 4) + e % 2 of the block; as pairs in
// 16 bits, bits[i / 2][i % 2 * 2 + e / 2].
#pragma once

#include "kernels/constants.h"
#include "kernels/fine_weights.h"
#include "kernels/ptx/async_proxy.h"
#include "kernels/ptx/convert.h"
#include "kernels/ptx/math.h"
#include "kernels/ptx/shared_pair.h"
#include "kernels/ptx/special_registers.h"
#include "kernels/ptx/stmatrix.h"
#include "kernels/ptx/tensor_copy.h"
#include "kernels/ptx/warp.h"
#include "kernels/v3/backward_schedule.h"
#include "kernels/v3/backward_shape.h"
#include "kernels/v3/mask.h"

namespace fattn::v3 {

// Where the thread is, found again at each call to keep registers free.
__device__ __forceinline__ unsigned own_lane() { return ptx::opaque(threadIdx.x) % 32; }
// The warp's first row of its warpgroup's 64.
__device__ __forceinline__ unsigned own_warp_row() { return ptx::opaque(threadIdx.x) / 2 & 48; }

// What scores are multiplied by in the exponential, in a register of its own: an operand of every exponential, it would be a uniform register, which
// costs issue slots. With softcap there is none left.
template <class Score>
__device__ __forceinline__ float own_scale(const AttentionParams& p) {
  if constexpr (Score::kCapped)
    return Score::exponent_scale(p);
  else
    return ptx::shfl(Score::exponent_scale(p), static_cast<int>(threadIdx.x) % 32);
}

// lse or row sums of a block, as the columns of scores need them.
struct RowValues {
  float2 of[kV3BackwardRows / 8];
  __device__ __forceinline__ void read(unsigned address) {
    const unsigned from = address + own_lane() % 4 * 8;
#pragma unroll
    for (int i = 0; i < kV3BackwardRows / 8; ++i) of[i] = ptx::ld_shared_f32x2(from + static_cast<unsigned>(32 * i));
  }
};

// s = exp2(s * scale - lse)
__device__ __forceinline__ void exponentials(float (&s)[32], const RowValues& lse, float scale) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float2 l = lse.of[i];
    s[4 * i] = ptx::ex2(__fmaf_rn(s[4 * i], scale, -l.x));
    s[4 * i + 1] = ptx::ex2(__fmaf_rn(s[4 * i + 1], scale, -l.y));
    s[4 * i + 2] = ptx::ex2(__fmaf_rn(s[4 * i + 2], scale, -l.x));
    s[4 * i + 3] = ptx::ex2(__fmaf_rn(s[4 * i + 3], scale, -l.y));
  }
}

// The same with lse where it is in shared memory: no other registers need hold it.
__device__ __forceinline__ void exponentials_of(float (&s)[32], int first, unsigned lse, float scale) {
  const float2 l = ptx::ld_shared_f32x2(lse + own_lane() % 4 * 8 + static_cast<unsigned>(8 * first));
#pragma unroll
  for (int e = 0; e < 4; ++e) s[first + e] = ptx::ex2(__fmaf_rn(s[first + e], scale, e % 2 == 0 ? -l.x : -l.y));
}

template <class Element>
__device__ __forceinline__ void pack(unsigned (&bits)[4][4], const float (&x)[32]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) bits[i / 4][i % 4] = ptx::pack2<Element>(x[2 * i], x[2 * i + 1]);
}

// dp -= row_sum
__device__ __forceinline__ void subtract(float (&dp)[32], const RowValues& row_sum) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float2 d = row_sum.of[i];
    dp[4 * i] -= d.x;
    dp[4 * i + 1] -= d.y;
    dp[4 * i + 2] -= d.x;
    dp[4 * i + 3] -= d.y;
  }
}

// dp = -row_sum, to which the product is added: no other registers need hold row sums.
__device__ __forceinline__ void begin_dp(float (&dp)[32], unsigned row_sums) {
  const unsigned from = row_sums + own_lane() % 4 * 8;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float2 d = ptx::ld_shared_f32x2(from + static_cast<unsigned>(32 * i));
    dp[4 * i] = dp[4 * i + 2] = -d.x;
    dp[4 * i + 1] = dp[4 * i + 3] = -d.y;
  }
}

// What rounding P to `weights`, 16 bits each, took away, so that dS is made of P in fp32: rounding that too would be a third of dq's and dk's error.
// bf16: the lower half of the fp32 number, off by 2^15, because the upper half was rounded and not cut (midway between two, where the even one is the
// lower, multiply() takes P one bf16 ulp too small). fp16: the difference as bf16.
// kAtOnce: pair by pair, which takes fewer registers in most kernels.
template <class Element, bool kAtOnce>
__device__ __forceinline__ void pack_and_keep_rest(unsigned (&weights)[4][4], unsigned (&rest)[4][4], const float (&p)[32]) {
  if constexpr (!kAtOnce) pack<Element>(weights, p);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float low = p[2 * i], high = p[2 * i + 1];
    if constexpr (kAtOnce) weights[i / 4][i % 4] = ptx::pack2<Element>(low, high);
    const unsigned pair = weights[i / 4][i % 4];
    if constexpr (is_same<Element, bf16>)
      rest[i / 4][i % 4] = __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x5410) ^ 0x80008000u;
    else
      rest[i / 4][i % 4] = ptx::cvt_bf16x2(low - ptx::low_float<Element>(pair), high - ptx::high_float<Element>(pair));
  }
}

// dS = P (dP - row_sum) in place of what keep_rest() kept.
template <class Element>
__device__ __forceinline__ void multiply(unsigned (&rest)[4][4], const unsigned (&weights)[4][4], const float (&dp)[32]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const unsigned pair = weights[i / 4][i % 4];
    unsigned& to = rest[i / 4][i % 4];
    float low, high;
    if constexpr (is_same<Element, bf16>) {
      low = __uint_as_float(__byte_perm(to, pair, 0x5410) - 0x8000u);
      high = __uint_as_float(__byte_perm(to, pair, 0x7632) - 0x8000u);
    } else {
      low = ptx::low_float<Element>(pair) + ptx::low_float<bf16>(to);
      high = ptx::high_float<Element>(pair) + __uint_as_float(to);  // with the other's bits below its own, less than an ulp of a rest
    }
    to = ptx::pack2<Element>(low * dp[2 * i], high * dp[2 * i + 1]);
  }
}

// With softcap: P (1 - t^2) of four pairs, 4 i to 4 i + 3, t their capped scores; dS is that times (dP - row_sum). There are registers for 16 bits of
// it.
template <class Element>
using FineSlopes = FineWeights<Element, 15>;
template <class Element>
__device__ __forceinline__ void keep_slopes(unsigned (&slopes)[4][4], int i, const float (&t)[4], const float (&p)[32]) {
  using Fine = FineSlopes<Element>;
  const auto slope = [&](int e) { return __fmaf_rn(-(p[4 * i + e] * t[e]), t[e], p[4 * i + e]) * Fine::kUnit; };
#pragma unroll
  for (int key = 0; key < 2; ++key) slopes[i / 2][i % 2 * 2 + key] = Fine::encode(slope(2 * key), slope(2 * key + 1));
}
// Nothing of pairs whose P is 0: of those that were hidden after keep_slopes().
__device__ __forceinline__ void hide_slopes(unsigned (&slopes)[4][4], const float (&p)[32]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) slopes[i / 4][i % 4] &= (p[2 * i] == 0 ? 0u : 0xffffu) | (p[2 * i + 1] == 0 ? 0u : 0xffff0000u);
}
// dS = P (1 - t^2) (dP - row_sum) in their place.
template <class Element>
__device__ __forceinline__ void multiply_slopes(unsigned (&slopes)[4][4], const float (&dp)[32]) {
  using Fine = FineSlopes<Element>;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    unsigned& pair = slopes[i / 4][i % 4];
    pair = ptx::pack2<Element>(Fine::low(pair) * Fine::kPart * dp[2 * i], Fine::high(pair) * Fine::kPart * dp[2 * i + 1]);
  }
}

// Calls visit(i) for the thread's pairs that the mask hides, or whose keys and queries do not exist.
// `key`: the warpgroup's first; `row`: the block's first query.
template <class Mask, class Keys, class Visit>
__device__ __forceinline__ void for_each_hidden(const BackwardCall& p, Keys keys, int key, int row, Visit visit) {
  constexpr int kNone = 1 << 30;
  const int own_key = key + static_cast<int>(own_warp_row() + own_lane() / 4), column = row + static_cast<int>(own_lane() % 4 * 2);
  const int first0 = own_key < keys.count(p.call) ? Mask::first_row(p.call, keys, own_key) - column : kNone;
  const int first1 = own_key + 8 < keys.count(p.call) ? Mask::first_row(p.call, keys, own_key + 8) - column : kNone;
  const int end0 = row_end<Mask>(p.call, keys, own_key) - column, end1 = Mask::kBegins ? row_end<Mask>(p.call, keys, own_key + 8) - column : end0;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int query = i / 4 * 8 + i % 2;
    if (query < (i % 4 < 2 ? first0 : first1) || query >= (i % 4 < 2 ? end0 : end1)) visit(i);
  }
}

// Their weights, whatever was computed for them: a query that does not exist was loaded as zeros, which an Inf in k makes NaN.
template <class Mask, class Keys>
__device__ __forceinline__ void hide(float (&x)[32], const BackwardCall& p, Keys keys, int key, int row) {
  for_each_hidden<Mask>(p, keys, key, row, [&](int i) { x[i] = kHiddenWeight; });
}

// Whether the block of queries from `row` on hides pairs of the 64 keys from `key` on.
template <class Mask, class Keys>
__device__ __forceinline__ bool hides(const BackwardCall& p, Keys keys, int key, int row) {
  return key + 64 > keys.count(p.call) || row + kV3BackwardRows > row_end<Mask>(p.call, keys, key) ||
         (Mask::kUneven && row < Mask::first_row(p.call, keys, key + 63));
}

// Where the thread writes its part of 16 columns of its warp's rows with stmatrix. `rows`: the address of the first of the warp's 16 rows in column 0
// of the tile.
template <class Tile>
struct FragmentPlace {
  unsigned first;
  __device__ __forceinline__ explicit FragmentPlace(unsigned rows) {
    const unsigned lane = own_lane();
    first = rows + lane % 16 * 128 + (lane / 16 ^ lane % 8) * 16;
  }
  // Steps of 16 columns change bits of the unit of 16 bytes that its column does not: the swizzle takes the exclusive or of both.
  __device__ __forceinline__ unsigned at(unsigned step) const { return (first ^ step % 4 * 32) + step / 4 * Tile::kColumnBytes; }
};

// A gradient of the warpgroup's 64 rows, times `factor`, into the rows of a tile from `rows` on (of this warp).
template <class Element, class Tile, int kCount>
__device__ __forceinline__ void write_gradient(const float (&x)[kCount], float factor, unsigned rows) {
  const FragmentPlace<Tile> place(rows);
#pragma unroll
  for (unsigned step = 0; step < kCount / 8; ++step) {
    unsigned fragment[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) fragment[i] = ptx::pack2<Element>(x[8 * step + 2 * i] * factor, x[8 * step + 2 * i + 1] * factor);
    ptx::stmatrix_x4(place.at(step), fragment);
  }
}

}  // namespace fattn::v3
