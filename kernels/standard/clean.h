// Algorithm standard, where pairs may be hidden: a copy of what is multiplied with weights or dS, with 0 in place of Inf and NaN, because a hidden
// pair's weight of 0 would make NaN of them. Which rows had some, and where, is noted for kernels/standard/finish.h.
//
// Most tensors have none: 16 bytes are looked at as they are, and stored as they are. The last rows come first, so that the product, which begins
// with the first, finds those in the cache.
//
// Spec: Element, kAligned, kThreads. A CTA takes kStandardCleanRows rows of one head.
#pragma once

#include "device_abi/standard_params.h"
#include "kernels/constants.h"
#include "kernels/ptx/warp.h"
#include "kernels/standard/element_unit.h"

namespace fattn::standard {

// The highest bit of each element of a word that is Inf or NaN: its exponent, and only such a one, has a carry where 1 is added.
template <class Element>
__device__ __forceinline__ unsigned nonfinite_of(unsigned word) {
  if constexpr (is_wide<Element>) return (word & 0x7f800000u) + 0x00800000u & 0x80000000u;
  if constexpr (is_same<Element, f16>) return (word & 0x7c007c00u) + 0x04000400u & 0x80008000u;
  return (word & 0x7f807f80u) + 0x00800080u & 0x80008000u;
}
// The word with 0 in place of those.
template <class Element>
__device__ __forceinline__ unsigned cleaned(unsigned word) {
  const unsigned nonfinite = nonfinite_of<Element>(word);
  if constexpr (is_wide<Element>) return nonfinite != 0 ? 0 : word;
  return word & ~((nonfinite >> 15) * 0xffffu);
}

template <class Spec>
class CleanRows {
  using Element = typename Spec::Element;
  static constexpr int kWidth = kUnit<Element>, kWarps = Spec::kThreads / 32;
  static constexpr int kAhead = 2;  // rows of a lane that are loaded before the first is stored

  __device__ static uint4 load(const Bits<Element>* row, int column, int width) {
    if (Spec::kAligned && column + kWidth <= width) return __ldcs(reinterpret_cast<const uint4*>(row + column));  // nobody reads it again soon
    float x[kWidth];
    load_unit<Element, false>(row, column, width, x);
    return pack<Element>(x);
  }
  __device__ static bool all_finite(const uint4& u) {
    return (nonfinite_of<Element>(u.x) | nonfinite_of<Element>(u.y) | nonfinite_of<Element>(u.z) | nonfinite_of<Element>(u.w)) == 0;
  }

  // By the lanes of a row that has some.
  __device__ static void mark(const StandardCleanParams& p, const Bits<Element>* from, unsigned* marks, int lane) {
#pragma unroll 1
    for (int word = lane; word < p.words; word += p.lanes) {
      unsigned plus = 0, minus = 0;
#pragma unroll 1
      for (int i = 0; i < 32 && 32 * word + i < p.width; ++i) {
        const float x = widened<Element>(from[32 * word + i]);
        if (!(x < kInfinity)) plus |= 1u << i;
        if (!(x > -kInfinity)) minus |= 1u << i;
      }
      marks[word] = plus;
      marks[p.words + word] = minus;
    }
  }

 public:
  __device__ static void run(const StandardCleanParams& p) {
    __shared__ unsigned spoilt[2];
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
    const int blocks = (p.seqlen + kStandardCleanRows - 1) / kStandardCleanRows;
    const int rows_of_warp = 32 / p.lanes, step = kWarps * rows_of_warp;
#pragma unroll 1
    for (long long number = static_cast<long long>(p.batch) * p.heads * blocks - 1 - blockIdx.x; number >= 0; number -= gridDim.x) {
      const long long of_all_heads = number / p.heads, batch = of_all_heads / blocks;  // heads side by side at the same time, as they often lie
      const int head_of_entry = static_cast<int>(number % p.heads), block = static_cast<int>(of_all_heads % blocks);
      const int first_row = block * kStandardCleanRows, rows = min(kStandardCleanRows, p.seqlen - first_row);
      const long long head = batch * p.heads + head_of_entry;
      const auto* const from =
          static_cast<const Bits<Element>*>(p.from) + batch * p.strides.batch + head_of_entry * p.strides.head + first_row * p.strides.row;
      const long long first = head * p.seqlen + first_row;
      auto* const to = static_cast<Bits<Element>*>(p.to) + first * p.pitch;
      if (thread == 0) spoilt[0] = spoilt[1] = 0;
      __syncthreads();
#pragma unroll 1
      for (int begin = warp * rows_of_warp; begin < rows; begin += kAhead * step) {
        const int row = begin + lane / p.lanes;
        unsigned nonfinite = 0;  // bit i: in the row `row + i * step`
#pragma unroll 1
        for (int column = lane % p.lanes * kWidth; column < p.pitch; column += p.lanes * kWidth) {
          uint4 unit[kAhead];
#pragma unroll
          for (int i = 0; i < kAhead; ++i)
            if (row + i * step < rows) unit[i] = load(from + (row + i * step) * p.strides.row, column, p.width);
#pragma unroll
          for (int i = 0; i < kAhead; ++i) {
            if (row + i * step >= rows) continue;
            if (!all_finite(unit[i])) {
              nonfinite |= 1u << i;
              unit[i] = {cleaned<Element>(unit[i].x), cleaned<Element>(unit[i].y), cleaned<Element>(unit[i].z), cleaned<Element>(unit[i].w)};
            }
            *reinterpret_cast<uint4*>(to + static_cast<long long>(row + i * step) * p.pitch + column) = unit[i];
          }
        }
        if (ptx::vote_all(nonfinite == 0)) continue;
#pragma unroll 1
        for (int i = 0; i < kAhead; ++i) {
          unsigned bad = ptx::ballot((nonfinite >> i & 1) != 0);
          bad = bad >> lane / p.lanes * p.lanes & (p.lanes == 32 ? ~0u : (1u << p.lanes) - 1);  // of the row's lanes
          if (bad == 0) continue;
          const int own = row + i * step;
          if (lane % p.lanes == 0) atomicOr(&spoilt[own / 32], 1u << own % 32);
          mark(p, from + own * p.strides.row, p.marks + (first + own) * (2 * p.words), lane % p.lanes);
        }
      }
      __syncthreads();
      if (thread == 0) p.spoilt[head * blocks + block] = static_cast<unsigned long long>(spoilt[1]) << 32 | spoilt[0];
    }
  }
};

template <class Spec>
__device__ __forceinline__ void clean_rows(const StandardCleanParams& p) {
  CleanRows<Spec>::run(p);
}

}  // namespace fattn::standard
