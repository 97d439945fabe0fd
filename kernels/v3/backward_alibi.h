// ALiBi in the v3 backward kernel: -slope |distance| beside the scaled score, in units of log2.
//
// Nearly every block of queries is on one side of the diagonal of the warpgroup's keys: there the distance is a line, whose part of the query joins
// lse while the product is awaited, and whose part of the key joins the scaled score: an addition a pair. Blocks that cross the diagonal take the
// distance of each pair; under a causal mask none does, because what is behind the diagonal is hidden.
// Layout of scores: v3/backward_fragments.h.
#pragma once

#include "kernels/ptx/math.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/v3/backward_fragments.h"
#include "kernels/v3/backward_shape.h"

namespace fattn::v3 {

// The slope of a block's query head lies beside its lse.
template <class Spec>
__device__ __forceinline__ float slope_of_block(unsigned shared, unsigned slot) {
  return ptx::ld_shared_f32(shared + static_cast<unsigned>(BackwardShape<Spec>::kOffsetSlopes) + 4 * slot);
}

// Of the thread's first pair: key own_key(), query `row` + own_column() are aligned if it is 0.
template <class Keys>
__device__ __forceinline__ int own_distance(const AttentionParams& p, Keys keys, int key, int row) {
  return row + keys.count(p) - keys.queries(p) - key + static_cast<int>(own_lane() % 4 * 2) - static_cast<int>(own_warp_row() + own_lane() / 4);
}

struct AlibiLine {
  float step;      // of a query, down
  float first[2];  // of the block's first query of the thread, for each of its keys
  bool crosses;    // a block that has both signs of the distance

  template <class Mask, class Keys>
  __device__ __forceinline__ AlibiLine(Mask, const AttentionParams& p, Keys keys, float slope, int key, int row) {
    const int shift = keys.count(p) - keys.queries(p);
    const bool behind = Mask::kCausal || row + shift >= key + 63;
    crosses = !behind && row + shift + kV3BackwardRows - 1 > key;
    step = behind ? slope : -slope;
    const int distance = own_distance(p, keys, key, row);
    first[0] = -step * static_cast<float>(distance);
    first[1] = -step * static_cast<float>(distance - 8);
  }
};

// s = exp2(s * scale + first - lse), lse where it is in shared memory: no other registers hold it.
__device__ __forceinline__ void exponentials_on_line(float (&s)[32], unsigned lse, float scale, const AlibiLine& line) {
  const unsigned from = lse + own_lane() % 4 * 8;
#pragma unroll
  for (int i = 0; i < 32; i += 4) {
    const float2 l = ptx::ld_shared_f32x2(from + static_cast<unsigned>(8 * i));
    const float of[2] = {__fmaf_rn(line.step, static_cast<float>(2 * i), l.x), __fmaf_rn(line.step, static_cast<float>(2 * i + 1), l.y)};
#pragma unroll
    for (int e = 0; e < 4; ++e) s[i + e] = ptx::ex2(__fmaf_rn(s[i + e], scale, line.first[e / 2]) - of[e % 2]);
  }
}

// s[first ..] = exp2(s * scale - slope |distance| - lse), four pairs, lse where it is in shared memory; `distance` is own_distance().
__device__ __forceinline__ void exponentials_of(float (&s)[32], int first, unsigned lse, float scale, float slope, float distance) {
  const float2 l = ptx::ld_shared_f32x2(lse + own_lane() % 4 * 8 + static_cast<unsigned>(8 * first));
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float term = -slope * fabsf(distance + static_cast<float>(2 * first + e % 2 - e / 2 * 8));
    s[first + e] = ptx::ex2(__fmaf_rn(s[first + e], scale, term) - (e % 2 == 0 ? l.x : l.y));
  }
}

}  // namespace fattn::v3
