// Masks as the loop bodies take them: functions of a lane's position in a tile of scores. Geometry: shared/mask.h.
#pragma once

#include "shared/mask.h"

namespace fattn {

// The keys [0, end) that each row of a lane sees, counted from the lane's first column of the tile. Row `half` of 16-row tile `i` is
// lane / 4 + 8 * half of that tile; column `e` of 8-key tile `n` is 8 n + e, e = 0 or 1.
template <int kRowTiles>
struct VisibleKeys {
  int end[kRowTiles][2];
  __device__ __forceinline__ bool operator()(int i, int half, int n, int e) const { return 8 * n + e < end[i][half]; }
};

// For the 16 * kRowTiles rows from `row` and the keys from `key`, whose number `column` is the lane's first column.
template <int kRowTiles>
__device__ __forceinline__ VisibleKeys<kRowTiles> visible_keys(const core::Mask32& mask, int row, int key, int lane_row, int column) {
  VisibleKeys<kRowTiles> visible;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      visible.end[i][half] = mask.visible_end(row + i * 16 + half * 8 + lane_row) - key - column;
    }
  }
  return visible;
}

}  // namespace fattn
