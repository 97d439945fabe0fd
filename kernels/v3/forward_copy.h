// The two warps that copy: one loads queries, keys and values with TMA, one stores o. A single thread of each works, of packed sequences all lanes of
// the second.
#pragma once

#include "kernels/ptx/shared_memory.h"
#include "kernels/ptx/special_registers.h"
#include "kernels/ptx/tensor_copy.h"
#include "kernels/v3/block_order.h"
#include "kernels/v3/forward_shape.h"
#include "kernels/v3/load_columns.h"
#include "kernels/v3/tiles_of_cta.h"

namespace fattn::v3 {

// Copies the columns of an operand tile that begins at `at`, or of one of kParts of its rows; `barrier` expects the bytes.
template <class Tile, int kParts = 1>
__device__ __forceinline__ void load_tile(unsigned tile, const TensorMap& map, unsigned barrier, ptx::TensorPlace at) {
  ptx::mbarrier_arrive_expect(barrier, Tile::kBytes / kParts);
  load_columns<Tile>(tile, map, barrier, at);
}

// The queries of the CTA's tile `nth`.
template <class Spec, class Place>
__device__ __forceinline__ void load_queries(const ForwardCall& p, unsigned shared, Barriers<Spec> barriers, const Place& place, int nth) {
  using Shape = ForwardShape<Spec>;
  const QueryBuffer<Spec::kQueryBuffers> buffer(nth);
  ptx::mbarrier_wait(barriers.q_empty(buffer.stage), buffer.parity ^ 1);
  load_tile<typename Shape::TileQ>(shared + buffer.stage * Shape::kQueryBytes, p.q, barriers.q_full(buffer.stage),
                                   {0, place.first_query() + place.row, place.head, place.batch});
}

// The same by warpgroup, the last first: it begins with the first block, and each of the others perhaps later.
template <class Spec>
struct GroupsLeft {
  int left = Spec::kGroups;  // whose queries are still to come
  template <class Place>
  __device__ __forceinline__ void load_queries(const ForwardCall& p, unsigned shared, Barriers<Spec> barriers, const Place& place, int nth) {
    using Shape = ForwardShape<Spec>;
    if (left == 0) return;
    const auto group = static_cast<unsigned>(--left);
    ptx::mbarrier_wait(barriers.q_empty(0, group), QueryBuffer<1>(static_cast<unsigned>(nth)).parity ^ 1);
    load_tile<typename Shape::TileQ, Shape::kGroups>(shared + group * 64 * 128, p.q, barriers.q_full(0, group),
                                                     {0, place.first_query() + place.row + left * 64, place.head, place.batch});
  }
};

// Tile by tile: the queries, and blocks of keys and values in their order (v3/block_order.h), keys one block ahead.
template <class Spec>
__device__ __forceinline__ void load_forward(const ForwardCall& p, unsigned shared, Barriers<Spec> barriers) {
  using Shape = ForwardShape<Spec>;
  Ring<Spec::kStagesK> k;
  Ring<Spec::kStagesV> v;
  for (int nth = 0;; ++nth) {
    const int number = tile_number<Spec>(p, shared, nth);
    if (number < 0) break;
    take_next_tile<Spec>(p, shared, nth);
    const auto place = tile_place<Spec>(p, shared, nth, number);
    if constexpr (!Shape::kKeysFirst) load_queries<Spec>(p, shared, barriers, place, nth);
    const auto load_k = [&](int block) {
      ptx::mbarrier_wait(barriers.k_empty(k.stage), k.parity ^ 1);
      load_tile<typename Shape::TileK>(shared + Shape::kOffsetK + k.stage * Shape::TileK::kBytes, p.k, barriers.k_full(k.stage),
                                       {0, place.first_key() + block * Shape::kBlockN, place.head_k, place.batch});
      k.next();
    };
    const auto load_v = [&](int block) {
      ptx::mbarrier_wait(barriers.v_empty(v.stage), v.parity ^ 1);
      load_tile<typename Shape::TileV>(shared + Shape::kOffsetV + v.stage * Shape::TileV::kBytes, p.v, barriers.v_full(v.stage),
                                       {0, place.first_key() + block * Shape::kBlockN, place.head_k, place.batch});
      v.next();
    };
    const auto keys = keys_of<Spec>(p.call, place);
    int block = first_block<Spec, Shape::kBlockM>(p.call, keys, place.row);
    const int first = block_begin<typename Spec::Mask, Shape::kBlockN>(p.call, keys, place.row);
    load_k(block);
    GroupsLeft<Spec> groups;
    if constexpr (Shape::kQueriesByGroup)
      groups.load_queries(p, shared, barriers, place, nth);
    else if constexpr (Shape::kKeysFirst)
      load_queries<Spec>(p, shared, barriers, place, nth);
    if constexpr (kFromDiagonal<Spec>) {
      for (int next; (next = block_after<Spec, Shape::kBlockM>(p.call, keys, place.row, block)) >= 0; block = next) {
        load_k(next);
        load_v(block);
      }
      load_v(block);
    } else {
      for (; block > first; --block) {
        load_k(block - 1);
        load_v(block);
        if constexpr (Shape::kQueriesByGroup) groups.load_queries(p, shared, barriers, place, nth);
      }
      load_v(first);
    }
    if constexpr (Shape::kQueriesByGroup)
      while (groups.left > 0) groups.load_queries(p, shared, barriers, place, nth);
  }
}

// Of packed sequences: the `rows` rows of o that a warpgroup has before another sequence's, from where TMA would store all 64. All lanes of the warp.
template <class Spec>
__device__ __forceinline__ void store_last_rows(const ForwardCall& p, unsigned tile, const PackedPlace& place, int row, int rows) {
  using TileO = typename ForwardShape<Spec>::TileO;
  // Four rows at once, eight elements a lane. There are 32 registers.
#pragma unroll 1
  for (int column = 0; column < TileO::kColumns; ++column, tile += TileO::kColumnBytes) {
    const int lane = static_cast<int>(ptx::opaque(threadIdx.x)) % 32, unit = lane % 8, left = p.work.columns_v - column * 64 - unit * 8;
    auto* to = static_cast<unsigned short*>(p.call.o) + place.head * p.call.o_strides.head + (place.q_begin + row + lane / 8) * p.call.o_strides.row +
               column * 64 + unit * 8;
#pragma unroll 1
    for (int in_tile = lane / 8; in_tile < rows; in_tile += 4, to += 4 * p.call.o_strides.row) {
      const unsigned from = tile + static_cast<unsigned>(in_tile * 128 + (unit ^ (in_tile % 8)) * 16);
      if (left >= 8) {
        *reinterpret_cast<uint4*>(to) = ptx::ld_shared_16(from);
      } else {
#pragma unroll 1
        for (int e = 0; e < left; ++e) to[e] = ptx::ld_shared_2(from + static_cast<unsigned>(2 * e));
      }
    }
  }
}

// Stores each warpgroup's rows of o when they are in the buffer of the queries, and then gives the buffer back. A single thread; of packed sequences
// a warp.
template <class Spec>
__device__ __forceinline__ void store_forward(const ForwardCall& p, unsigned shared, Barriers<Spec> barriers) {
  using Shape = ForwardShape<Spec>;
  using TileO = typename Shape::TileO;
  for (int nth = 0;; ++nth) {
    const int number = tile_number<Spec>(p, shared, nth);
    if (number < 0) break;
    const auto place = tile_place<Spec>(p, shared, nth, number);
    const QueryBuffer<Spec::kQueryBuffers> buffer(nth);
    for (int group = 0; group < Shape::kGroups; ++group) {
      ptx::mbarrier_wait(barriers.o_full(buffer.stage, group), buffer.parity);
      const int row = place.row + group * 64;
      if constexpr (kPairOf<Spec>.packed) {
        const int rows = place.keys.rows - row;
        if (rows < 64) {
          store_last_rows<Spec>(p, shared + buffer.stage * Shape::kQueryBytes + group * 64 * 128, place, row, max(0, rows));
          continue;
        }
        if (threadIdx.x % 32 != 0) continue;
      } else if (row >= p.call.seqlen_q) {
        continue;
      }
      for (int column = 0; column < TileO::kColumns; ++column)
        ptx::tensor_store(&p.o, shared + buffer.stage * Shape::kQueryBytes + column * TileO::kColumnBytes + group * 64 * 128,
                          {column * 64, place.first_query() + row, place.head, place.batch});
    }
    ptx::bulk_commit();
    ptx::bulk_wait_read<0>();
    if constexpr (kTrustsValues<Spec>)
      if (tile_in_turn<Spec>(p, nth + 1) < 0) ptx::bulk_wait<0>();  // perhaps the tile is stored again
    if constexpr (kPairOf<Spec>.packed) {
      ptx::warp_sync();  // after all reads
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barriers.q_empty(buffer.stage));
    } else {
      ptx::mbarrier_arrive(barriers.q_empty(buffer.stage));
    }
  }
  ptx::bulk_wait<0>();
}

}  // namespace fattn::v3
