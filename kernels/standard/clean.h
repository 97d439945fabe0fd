// Algorithm standard, where pairs may be hidden: a copy of what is multiplied with weights or dS, with 0 in place of Inf and NaN, because a hidden
// pair's weight of 0 would make NaN of them. Which rows had some, and where, is noted for kernels/standard/finish.h.
//
// Spec: Element, kAligned, kThreads. A CTA takes kStandardCleanRows rows of one head.
#pragma once

#include "kernels/constants.h"
#include "kernels/ptx/warp.h"
#include "kernels/standard/element_unit.h"
#include "shared/standard_params.h"

namespace fattn::standard {

template <class Spec>
__device__ __forceinline__ void clean_rows(const StandardCleanParams& p) {
  using Element = typename Spec::Element;
  constexpr int kWidth = kUnit<Element>, kWarps = Spec::kThreads / 32;
  __shared__ unsigned spoilt[2];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int blocks = (p.seqlen + kStandardCleanRows - 1) / kStandardCleanRows;
  const long long head = blockIdx.x / blocks;
  const int first_row = static_cast<int>(blockIdx.x % blocks) * kStandardCleanRows;
  const long long batch = head / p.heads;
  const auto* from = static_cast<const Bits<Element>*>(p.from) + batch * p.strides.batch + head % p.heads * p.strides.head;
  auto* to = static_cast<Bits<Element>*>(p.to) + head * p.seqlen * p.pitch;
  if (thread < 2) spoilt[thread] = 0;
  __syncthreads();
  const int rows_of_warp = 32 / p.lanes;
#pragma unroll 1
  for (int begin = warp * rows_of_warp; begin < kStandardCleanRows; begin += kWarps * rows_of_warp) {
    const int in_block = begin + lane / p.lanes, row = first_row + in_block;
    const bool exists = in_block < kStandardCleanRows && row < p.seqlen;
    bool finite = true;
    if (exists) {
      for (int column = lane % p.lanes * kWidth; column < p.pitch; column += p.lanes * kWidth) {
        float x[kWidth];
        load_unit<Element, Spec::kAligned>(from + row * p.strides.row, column, p.width, x);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          const bool good = fabsf(x[e]) < kInfinity;
          finite = finite && good;
          x[e] = good ? x[e] : 0.0f;
        }
        store_unit<Element, true>(to + static_cast<long long>(row) * p.pitch, column, p.pitch, x);
      }
    }
    unsigned bad = ptx::ballot(!finite);
    if (bad == 0) continue;
    bad = bad >> lane / p.lanes * p.lanes & (p.lanes == 32 ? ~0u : (1u << p.lanes) - 1);  // of the row's lanes
    if (bad == 0) continue;
    if (lane % p.lanes == 0) atomicOr(&spoilt[in_block / 32], 1u << in_block % 32);
    unsigned* const marks = p.marks + (head * p.seqlen + row) * (2 * p.words);
    for (int word = lane % p.lanes; word < p.words; word += p.lanes) {
      unsigned plus = 0, minus = 0;
#pragma unroll 1
      for (int i = 0; i < 32 && 32 * word + i < p.width; ++i) {
        const float x = widened<Element>(from[row * p.strides.row + 32 * word + i]);
        if (!(x < kInfinity)) plus |= 1u << i;
        if (!(x > -kInfinity)) minus |= 1u << i;
      }
      marks[word] = plus;
      marks[p.words + word] = minus;
    }
  }
  __syncthreads();
  if (thread == 0) p.spoilt[blockIdx.x] = static_cast<unsigned long long>(spoilt[1]) << 32 | spoilt[0];
}

}  // namespace fattn::standard
