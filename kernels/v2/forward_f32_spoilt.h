// Values that are not finite, in v2's forward pass in fp32: the products take them for 0 (tile/split_tile.h), and what is here adds them to o of the
// rows that see them. So nothing of them comes to other rows, and such a block costs what it costs to read its values once more.
#pragma once

#include "kernels/ptx/shared_memory.h"
#include "kernels/ptx/warp.h"
#include "kernels/v2/global_row.h"

namespace fattn::v2 {

// What a CTA of v2 has found in its tile, in 12 bytes of shared memory. Warps are at most one block apart, so that two places do for blocks.
struct OddNotes {
  unsigned address;

  // By one thread, before a barrier.
  __device__ __forceinline__ void clear() const {
    ptx::st_shared_8(address, {0, 0});
    ptx::st_shared_4(address + 8, 0);
  }
  // A score may be NaN that is none: q or k holds Inf, or numbers whose products are beyond what split operands can tell.
  __device__ __forceinline__ void doubt_scores() const { ptx::st_shared_4(address, 1); }
  __device__ __forceinline__ bool scores_in_doubt() const { return ptx::ld_shared_4(address) != 0; }
  // Values of block `block` are not finite.
  __device__ __forceinline__ void spoil(int block) const { ptx::st_shared_4(of_block(block), static_cast<unsigned>(block + 1)); }
  __device__ __forceinline__ bool spoilt(int block) const { return ptx::ld_shared_4(of_block(block)) == static_cast<unsigned>(block + 1); }
  __device__ __forceinline__ bool some_spoilt() const { return (ptx::ld_shared_4(address + 4) | ptx::ld_shared_4(address + 8)) != 0; }

 private:
  __device__ __forceinline__ unsigned of_block(int block) const { return address + 4 + 4 * static_cast<unsigned>(block % 2); }
};

// o(i, n, half, e): the lane's sum of row 16 i + 8 half + lane / 4 of the warp's and column 8 n + lane % 4 * 2 + e. exists(i, half): whether that row
// is there; sees(i, half, key): and sees it. The values are those of the keys [first, end). All lanes of a warp together.
template <int kRowTiles, int kHeaddimV, class Rows, class Sum, class Exists, class Sees>
__device__ __forceinline__ void add_spoilt_values(const Rows& v, int first, int end, int lane, Sum&& o, Exists&& exists, Sees&& sees) {
  constexpr int kColumnTiles = (kHeaddimV + 7) / 8;
  bool open = false;  // whether a sum changes: what is infinite already does by the other sign and by NaN alone
#pragma unroll
  for (int n = 0; n < kColumnTiles; ++n) {
    float odd[2] = {0, 0};  // of two columns: the sum of what is not finite there
#pragma unroll 1
    for (int key = first + lane / 4; key < end; key += 8) {
      const float* const from = v.row(key) + 8 * n + lane % 4 * 2;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float x = 8 * n + lane % 4 * 2 + e < kHeaddimV ? from[e] : 0.0f;
        odd[e] += is_finite(x) ? 0.0f : x;
      }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int other = 4; other < 32; other *= 2) odd[e] += ptx::shfl_xor(odd[e], other);
#pragma unroll
      for (int row = 0; row < 2 * kRowTiles; ++row) {
        const float sum = o(row / 2, n, row % 2, e), changed = sum + odd[e];
        open = open || (exists(row / 2, row % 2) && (is_finite(sum) ? odd[e] != 0 : sum == sum && changed != changed));
      }
    }
  }
  if (ptx::ballot(open) == 0) return;
#pragma unroll 1
  for (int key = first; key < end; ++key) {
    unsigned rows = 0;
#pragma unroll
    for (int row = 0; row < 2 * kRowTiles; ++row) rows |= sees(row / 2, row % 2, key) ? 1u << row : 0u;
    const float* const from = v.row(key) + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float x = 8 * n + lane % 4 * 2 + e < kHeaddimV ? from[8 * n + e] : 0.0f;
        if (is_finite(x)) continue;
#pragma unroll
        for (int row = 0; row < 2 * kRowTiles; ++row)
          if ((rows >> row & 1) != 0) o(row / 2, n, row % 2, e) += x;
      }
    }
  }
}

}  // namespace fattn::v2
