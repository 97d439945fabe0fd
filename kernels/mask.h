// Masks as the loop bodies take them: functions of a lane's position in a tile of scores. Geometry: device_abi/mask.h.
#pragma once

#include "device_abi/attention_params.h"
#include "device_abi/mask.h"
#include "kernels/constants.h"

namespace fattn {

// The mask of a specialisation with windows, for a batch entry that has `seqlen_k` keys.
__device__ __forceinline__ core::Mask32 window_mask(const AttentionParams& p, int seqlen_k) {
  const FeatureParams& features = static_cast<const FeatureParams&>(p);
  return {p.seqlen_q, seqlen_k, false, features.window_left, features.window_right};
}
__device__ __forceinline__ core::Mask32 window_mask(const AttentionParams& p) {
  const FeatureParams& features = static_cast<const FeatureParams&>(p);
  return {p.seqlen_q, p.seqlen_k, false, features.window_left, features.window_right};
}

// The keys [begin, end) that each row of a lane sees, counted from the lane's first column of the tile; without kBegins [0, end). Row `half` of
// 16-row tile `i` is lane / 4 + 8 * half of that tile; column `e` of 8-key tile `n` is 8 n + e, e = 0 or 1.
template <int kRowTiles, bool kBegins>
struct VisibleKeys {
  int end[kRowTiles][2];
  int begin[kBegins ? kRowTiles : 1][2];
  __device__ __forceinline__ bool is_before(int i, int half, int key) const {
    if constexpr (kBegins) return key < begin[i][half];
    return false;
  }
  __device__ __forceinline__ bool operator()(int i, int half, int n, int e) const {
    return 8 * n + e < end[i][half] && !is_before(i, half, 8 * n + e);
  }
  // Scores of what a row does not see.
  template <int kTiles>
  __device__ __forceinline__ void hide(float (&s)[kRowTiles][kTiles][4]) const {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[i][n][e] = (*this)(i, e / 2, n, e % 2) ? s[i][n][e] : -kInfinity;
      }
    }
  }
};

// In place of VisibleKeys where every row sees all keys.
struct AllKeys {
  template <class Scores>
  __device__ __forceinline__ void hide(Scores&) const {}
};

template <bool kAll, class Keys>
struct AllKeysOr {
  using Type = Keys;
};
template <class Keys>
struct AllKeysOr<true, Keys> {
  using Type = AllKeys;
};

// For the 16 * kRowTiles rows from `row` and the keys from `key`, whose number `column` is the lane's first column.
template <int kRowTiles, bool kBegins>
__device__ __forceinline__ VisibleKeys<kRowTiles, kBegins> visible_keys(const core::Mask32& mask, int row, int key, int lane_row, int column) {
  VisibleKeys<kRowTiles, kBegins> visible;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      visible.end[i][half] = mask.visible_end(row + i * 16 + half * 8 + lane_row) - key - column;
      if constexpr (kBegins) visible.begin[i][half] = mask.visible_begin(row + i * 16 + half * 8 + lane_row) - key - column;
    }
  }
  return visible;
}

}  // namespace fattn
