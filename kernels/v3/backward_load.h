// Loads of the v3 backward kernel, by one thread: the keys and values of the tile, and block after block of queries with what belongs to them.
#pragma once

#include "kernels/constants.h"
#include "kernels/pair.h"
#include "kernels/ptx/async_proxy.h"
#include "kernels/ptx/bulk_copy.h"
#include "kernels/ptx/dependent_launch.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/v3/backward_schedule.h"
#include "kernels/v3/backward_shape.h"
#include "kernels/v3/load_columns.h"
#include "kernels/v3/ring.h"

namespace fattn::v3 {

// Behind the blocks, of masks that begin and of packed sequences; the others need no register for it.
template <bool kHas>
struct LoaderEnd {};
template <>
struct LoaderEnd<true> {
  int end;
};

// Zeros in the rows [first, end) of a tile in shared memory, by `threads` of them.
template <class Tile>
__device__ __forceinline__ void clear_rows(unsigned tile, int first, int end, int thread, int threads) {
#pragma unroll 1
  for (int column = 0; column < Tile::kColumns; ++column)
#pragma unroll 1
    for (int unit = 8 * first + thread; unit < 8 * end; unit += threads)
      ptx::st_shared_16(tile + static_cast<unsigned>(column * Tile::kColumnBytes + 16 * unit), uint4{0, 0, 0, 0});
}

// Whether a batch entry ends inside the tile: what k and v hold behind it must not be looked at. Behind a packed sequence are other ones, whose keys
// are hidden as keys are that a mask hides; only rows behind the last sequence, which may hold anything, are not looked at. With lengths any rows may
// be such.
template <class Shape>
__device__ __forceinline__ bool ends_inside(const BackwardCall& p, TilePlace tile) {
  if constexpr (Shape::kPacked) {
    if (tile.keys<false, true>().keys >= tile.key() + Shape::kBlockN) return false;
    const PairParams& call = pairs_of(p.call);
    if (call.lengths != nullptr) return true;
    const int last = call.cu_seqlens_k[call.batch * call.cu_seqlens_k_stride];
    return last < call.total_k && tile.k_begin() + tile.key() + Shape::kBlockN > last;
  }
  if constexpr (Shape::kLengths) {
    const int keys = tile.keys<true, false>().keys;
    return keys < p.call.seqlen_k && keys < tile.key() + Shape::kBlockN;
  }
  return false;
}

// The slope of the head whose queries are next, times log2(e).
template <bool kAlibi>
struct LoaderSlope {
  __device__ __forceinline__ void read(const AttentionParams&, int, int) {}
  __device__ __forceinline__ void write(unsigned) const {}
};
template <>
struct LoaderSlope<true> {
  float slope;
  __device__ __forceinline__ void read(const AttentionParams& call, int batch, int head) {
    const PairParams& p = pairs_of(call);
    if (head < p.nheads) slope = p.alibi_slopes[batch * p.alibi_batch_stride + head * p.alibi_head_stride] * kLog2e;
  }
  __device__ __forceinline__ void write(unsigned address) const { ptx::st_shared_f32(address, slope); }
};

template <class Spec>
struct BackwardLoader : LoaderEnd<Spec::Mask::kEnds || kPairOf<Spec>.packed> {
  using Shape = BackwardShape<Spec>;
  static constexpr bool kPacked = Shape::kPacked;
  using TileQ = typename Shape::TileQ;
  using TileDout = typename Shape::TileDout;
  using TileK = typename Shape::TileK;
  using TileV = typename Shape::TileV;
  using Mask = typename Spec::Mask;

  const BackwardCall& p;
  const unsigned shared;
  const BackwardBarriers<Spec> barriers;
  int batch, head, first_row, row;
  int left;  // blocks
  [[no_unique_address]] LoaderSlope<Shape::kAlibi> slope;
  Ring<Spec::kStages> ring;
  Ring<Shape::kRowSlots> slot;

  __device__ __forceinline__ BackwardLoader(const BackwardCall& params, unsigned shared_address, BackwardBarriers<Spec> of)
      : p(params), shared(shared_address), barriers(of), left(0) {}

  // Rows of packed sequences are counted from a head's first in the workspace on; the tile says how much further they are in the tensors.
  __device__ __forceinline__ TilePlace sequence() const { return {shared + static_cast<unsigned>(Shape::kOffsetTile)}; }
  __device__ __forceinline__ ptx::TensorPlace block_place() const {
    if constexpr (kPacked)
      return {0, sequence().further() + row, head, 0};
    else
      return {0, row, head, batch};
  }
  __device__ __forceinline__ long long workspace_row() const {
    if constexpr (kPacked) return static_cast<long long>(head) * p.work.row_blocks * kV3BackwardRows;
    return (static_cast<long long>(batch) * p.call.nheads + head) * p.work.row_blocks * kV3BackwardRows;
  }
  // A block of queries and its lse come under one barrier, the block's dout and its row sums under another.
  __device__ __forceinline__ void load_q_tile() const {
    const unsigned barrier = barriers.q_full(ring.stage);
    slope.write(shared + static_cast<unsigned>(Shape::kOffsetSlopes) + 4 * static_cast<unsigned>(slot.stage));
    ptx::mbarrier_arrive_expect(barrier, TileQ::kBytes + Shape::kRowBytes);
    load_columns<TileQ>(shared + Shape::kOffsetQ + ring.stage * TileQ::kBytes, p.q, barrier, block_place());
  }
  __device__ __forceinline__ void load_lse() const {
    const unsigned to = shared + Shape::kOffsetLse + slot.stage * Shape::kRowBytes;
    ptx::bulk_load(to, p.work.lse_log2 + workspace_row() + row, Shape::kRowBytes, barriers.q_full(ring.stage));
  }
  __device__ __forceinline__ void load_dout_tile() const {
    const unsigned barrier = barriers.dout_full(ring.stage);
    ptx::mbarrier_arrive_expect(barrier, TileDout::kBytes + Shape::kRowBytes);
    load_columns<TileDout>(shared + Shape::kOffsetDout + ring.stage * TileDout::kBytes, p.dout, barrier, block_place());
  }
  __device__ __forceinline__ void load_row_sums() const {
    const unsigned to = shared + Shape::kOffsetRowSum + slot.stage * Shape::kRowBytes;
    ptx::bulk_load(to, p.call.row_sum + workspace_row() + row, Shape::kRowBytes, barriers.dout_full(ring.stage));
  }
  __device__ __forceinline__ void load_q() const {
    load_q_tile();
    load_lse();
  }
  __device__ __forceinline__ void load_dout() const {
    load_dout_tile();
    load_row_sums();
  }
  __device__ __forceinline__ int rows_end() const {
    if constexpr (Mask::kEnds || kPacked) return this->end;
    return p.work.row_blocks * Shape::kBlockM;
  }
  __device__ __forceinline__ void advance() {
    --left;
    ring.next();
    slot.next();
    row += Shape::kBlockM;
    if (row >= rows_end()) {
      row = first_row;
      ++head;
      slope.read(p.call, batch, head);
    }
  }
  // The next block, if there is one.
  __device__ __forceinline__ void next() {
    if (left == 0) return;
    load_q();
    load_dout();
    advance();
  }

  static __device__ __forceinline__ int first_key(TilePlace tile) {
    if constexpr (kPacked) return tile.k_begin();
    return 0;
  }
  static __device__ __forceinline__ int in_tensor(TilePlace tile) {
    if constexpr (kPacked) return 0;
    return tile.batch();
  }
  __device__ __forceinline__ void load_keys(TilePlace tile) const {
    ptx::mbarrier_arrive_expect(barriers.k_full(), TileK::kBytes);
    load_columns<TileK>(shared, p.k, barriers.k_full(), {0, first_key(tile) + tile.key(), tile.head_k(), in_tensor(tile)});
  }
  __device__ __forceinline__ void load_values(TilePlace tile) const {
    ptx::mbarrier_arrive_expect(barriers.v_full(), TileV::kBytes);
    load_columns<TileV>(shared + Shape::kOffsetV, p.v, barriers.v_full(), {0, first_key(tile) + tile.key(), tile.head_k(), in_tensor(tile)});
  }

  // Keys and values of a tile in which a batch entry ends, by all threads of the CTA before they take their roles: zeros behind its last.
  __device__ __forceinline__ void load_last_keys(TilePlace tile) const {
    if (threadIdx.x == 0) {
      load_keys(tile);
      load_values(tile);
    }
    const int thread = static_cast<int>(threadIdx.x), first = tile.keys<Shape::kLengths, kPacked>().keys - tile.key();
    ptx::mbarrier_wait(barriers.k_full(), 0);
    clear_rows<TileK>(shared, first, Shape::kBlockN, thread, Shape::kThreads);
    ptx::mbarrier_wait(barriers.v_full(), 0);
    clear_rows<TileV>(shared + Shape::kOffsetV, first, Shape::kBlockN, thread, Shape::kThreads);
    ptx::async_proxy_fence();
    __syncthreads();
  }

  __device__ __forceinline__ void to_first_block(TilePlace tile) {
    batch = tile.batch();
    head = tile.head_k() * p.call.group;
    slope.read(p.call, batch, head);
    first_row = row = tile.first_row();
    if constexpr (Mask::kEnds || kPacked) this->end = tile.rows_end<Mask, kPacked>(p);
    if constexpr (kPacked) {
      const int before = tile.place() * Shape::kBlockM;
      first_row = row = row + before;
      this->end += before;
    }
    left = tile.blocks() * p.call.group;
  }

  // Keys, values and the first block are asked for by the thread that made the barriers, before others know of them; all but what the kernel before
  // writes. Not where something is to be found out first.
  static constexpr bool kAhead = !Shape::kLengths && !kPacked && !Shape::kDocuments && !Shape::kMaskBlocks;
  __device__ __forceinline__ void load_ahead(TilePlace tile) {
    to_first_block(tile);
    load_keys(tile);
    load_q_tile();
    load_values(tile);
    load_dout_tile();
  }

  // The rest of these, and as many blocks as there is room for.
  __device__ __forceinline__ void begin(TilePlace tile) {
    to_first_block(tile);
    if constexpr (kAhead) {
      ptx::wait_for_kernel_before();  // which writes lse_log2 and row_sum
      load_lse();
      load_row_sums();
      advance();
    } else {
      const bool keys_are_there = Shape::kMaskBlocks || ends_inside<Shape>(p, tile);  // load_last_keys(), begin_masked_tile()
      if (!keys_are_there) load_keys(tile);
      ptx::wait_for_kernel_before();
      next();
      if (!keys_are_there) load_values(tile);
    }
#pragma unroll 1
    for (int i = 1; i < (Spec::kByRole ? Spec::kStages : Spec::kStages - 1); ++i) next();
  }

  // Where each warpgroup reads everything: no barriers give stages back. dS of a block is there when all of them are done with the block before it:
  // the block after the next may then be loaded, into the stage of the former (of three), and its lse and row sums into the slot of the latter.
  __device__ __forceinline__ void run_behind_ds() {
    Ring<Shape::kStagesDs> ds;
#pragma unroll 1
    while (left > 0) {
      ptx::mbarrier_wait(barriers.ds_full(ds.stage), ds.parity);
      next();
      ds.next();
    }
  }

  // By role, with barriers for each tile. The stages that begin() filled are waited for as the others.
  __device__ __forceinline__ void run_behind_readers() {
    Ring<Spec::kStages> done;
#pragma unroll 1
    for (; left > 0; done.next()) {
      ptx::mbarrier_wait(barriers.q_empty(done.stage), done.parity);
      load_q();
      ptx::mbarrier_wait(barriers.dout_empty(done.stage), done.parity);
      load_dout();
      advance();
    }
  }

  __device__ __forceinline__ void run(TilePlace tile) {
    begin(tile);
    if constexpr (Spec::kByRole)
      run_behind_readers();
    else
      run_behind_ds();
  }
};

}  // namespace fattn::v3
