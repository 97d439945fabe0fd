// ALiBi in v3's forward pass: the term -slope |row + shift - key| of a score, in units of log2, beside the scale. In a block whose keys all lie
// on one side of the diagonal it is a straight line: from the distance of a lane's first key every other one is a constant number of steps, so that a
// weight costs one operation more than without. Specialisations without PairFeatures::alibi have none of this.
#pragma once

#include "kernels/constants.h"
#include "kernels/pair.h"
#include "kernels/v3/schedule.h"

namespace fattn::v3 {

// The slope of a head, times log2(e), and where a lane's rows are.
template <bool kAlibi>
struct Slope {
  template <class Place>
  static __device__ __forceinline__ Slope of(const AttentionParams&, const Place&) {
    return {};
  }
};
template <>
struct Slope<true> {
  float value;
  int first;  // the lane's first key of block 0, less the key that its first row is aligned with
  template <class Place>
  static __device__ __forceinline__ Slope of(const AttentionParams& params, const Place& place) {
    const PairParams& p = pairs_of(params);
    return {p.alibi_slopes[place.entry() * p.alibi_batch_stride + place.head * p.alibi_head_stride] * kLog2e, 0};
  }
  // How far the lane's first key of a block, which begins with `key`, is from the keys that its rows are aligned with; negative before them.
  __device__ __forceinline__ void distances(float (&distance)[2], int key) const {
    const int away = key + first;
    distance[0] = static_cast<float>(away);
    distance[1] = static_cast<float>(away - 8);
  }
};

// The key that a row is aligned with.
template <class Keys>
__device__ __forceinline__ int aligned_key(const AttentionParams& p, Keys keys, int row) {
  return row + keys.count(p) - keys.queries(p);
}

// How many keys element i of a lane's scores is behind the lane's first one (kernels/ptx/wgmma.h).
__device__ __forceinline__ constexpr int key_of(int i) { return i / 4 * 8 + i % 2; }

// Scores with their terms, in units of log2. `distance`: of the lane's first key from its two rows; negative before them. kBefore: no visible key is
// behind its row.
template <bool kBefore, int kScores>
__device__ __forceinline__ void add_alibi(float (&s)[kScores], float scale, float slope, const float (&distance)[2]) {
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    const float away = distance[i >> 1 & 1] + static_cast<float>(key_of(i));
    s[i] = fmaf(s[i], scale, kBefore ? slope * away : -slope * fabsf(away));
  }
}

// The terms of a block all of whose keys are on one side of its rows, less the references: that of a lane's key `i` is
// first[row] + rise * key_of(i).
template <bool kAlibi>
struct LineOfTerms {
  __device__ __forceinline__ void begin(bool, const Slope<false>&, int, const float (&)[2]) {}
};
template <>
struct LineOfTerms<true> {
  float rise = 0, first[2];
  // Of the block that begins with `key`; behind: its keys are behind the rows.
  __device__ __forceinline__ void begin(bool behind, const Slope<true>& slope, int key, const float (&reference)[2]) {
    rise = behind ? -slope.value : slope.value;
    slope.distances(first, key);
#pragma unroll
    for (int r = 0; r < 2; ++r) first[r] = fmaf(rise, first[r], -reference[r]);
  }
};

}  // namespace fattn::v3
