// Which tiles of queries a CTA computes, in which order, and which blocks of keys a tile meets. All roles of a CTA ask here.
#pragma once

#include "kernels/v3/mask.h"
#include "shared/attention_params.h"
#include "shared/tensor_map.h"
#include "shared/v3_forward_work.h"

namespace fattn::v3 {

// The kernel's parameters.
struct ForwardCall {
  const AttentionParams& call;  // heads_per_section as place_of() takes it
  const V3ForwardWork& work;
  const TensorMap &q, &k, &v, &o;  // boxes of a tile of queries, of a block of keys (twice), of 64 rows of o
};

// The number of the CTA's tile `nth`, -1 after the last. In turns: to and fro under an uneven mask, where tiles become ever shorter, so that whoever
// had the longest of one turn gets the shortest of the next.
template <class Mask>
__device__ __forceinline__ int tile_number(const ForwardCall& p, int nth) {
  const int cta = static_cast<int>(blockIdx.x), ctas = static_cast<int>(gridDim.x);
  int number;
  if (p.work.tiles_per_cta > 0) {
    number = nth < p.work.tiles_per_cta ? cta * p.work.tiles_per_cta + nth : p.work.tiles;
  } else {
    number = nth * ctas + (Mask::kUneven && nth % 2 == 1 ? ctas - 1 - cta : cta);
  }
  return number < p.work.tiles ? number : -1;
}

__device__ __forceinline__ int divide(int x, const Divisor& by) {
  return static_cast<int>(__umulhi(2 * static_cast<unsigned>(x), by.factor) >> by.shift);
}

struct Place {
  int row;  // first query of the tile
  int head, head_k, batch;
};

// Tiles of one section of (batch, head) pairs run side by side, so that their keys and values stay in L2; those of the last queries (under a causal
// mask the longest) first.
template <int kBlockM>
__device__ __forceinline__ Place place_of(const ForwardCall& p, int number) {
  const AttentionParams& call = p.call;
  const V3ForwardWork& work = p.work;
  const int section = divide(number, work.by_section);
  const int in_section = number - section * (call.heads_per_section * work.row_tiles);
  const bool last = section == work.sections - 1;
  const int turn = divide(in_section, last ? work.by_heads_of_last : work.by_heads);
  const int nth = section * call.heads_per_section + in_section - turn * (last ? work.heads_of_last : call.heads_per_section);
  const int batch = divide(nth, work.by_nheads), head = nth - batch * call.nheads;
  return {(work.row_tiles - 1 - turn) * kBlockM, head, divide(head, work.by_group), batch};
}

// Blocks of keys [begin, end) that some of the rows [row, row + count) see; at least one, which may be hidden whole.
template <class Mask, int kBlockN, class Keys>
__device__ __forceinline__ int block_end(const AttentionParams& p, Keys keys, int row, int count) {
  const int end = Mask::visible_end(p, keys, row + count - 1);
  return max(1, (end + kBlockN - 1) / kBlockN);
}
template <class Mask, int kBlockN, class Keys>
__device__ __forceinline__ int block_begin(const AttentionParams& p, Keys keys, int row) {
  return visible_begin<Mask>(p, keys, row) / kBlockN;
}

}  // namespace fattn::v3
