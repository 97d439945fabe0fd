// The shared memory of the kernel of dbias (v3/backward_dbias.h), and which tiles of scores are added up there.
#pragma once

#include "kernels/pair.h"
#include "kernels/ptx/mbarrier.h"
#include "kernels/v3/backward_schedule.h"
#include "kernels/v3/backward_terms.h"
#include "kernels/v3/operand_tile.h"

namespace fattn::v3 {

// Spec: Element, Mask, Score, kHeaddim, kHeaddimV, kPair.
template <class Spec>
struct DbiasShape {
  static constexpr int kGroups = 2, kBlockN = 64 * kGroups, kBlockM = kV3BackwardRows, kBlocks = 2;  // blocks of queries in a tile
  static constexpr int kThreads = 128 * (kGroups + 1), kMainRegisters = 240, kLoaderRegisters = 24;
  using TileK = OperandTile<kBlockN, Spec::kHeaddim>;
  using TileV = OperandTile<kBlockN, Spec::kHeaddimV>;
  using TileQ = OperandTile<kBlockM, Spec::kHeaddim>;
  using TileDout = OperandTile<kBlockM, Spec::kHeaddimV>;
  static constexpr int kKeyStages = 2, kStages = Spec::kHeaddim <= 64 && Spec::kHeaddimV <= 64 ? 4 : 2;
  static constexpr int kRowBytes = 4 * kBlockM;
  static constexpr int kOffsetV = kKeyStages * TileK::kBytes;
  static constexpr int kOffsetQ = kOffsetV + kKeyStages * TileV::kBytes;
  static constexpr int kOffsetDout = kOffsetQ + kStages * TileQ::kBytes;
  static constexpr int kOffsetLse = kOffsetDout + kStages * TileDout::kBytes;
  static constexpr int kOffsetRowSum = kOffsetLse + kStages * kRowBytes;
  static constexpr int kOffsetBarriers = kOffsetRowSum + kStages * kRowBytes;
  static constexpr int kSharedBytes = kOffsetBarriers + 16 * (kKeyStages + kStages);
};

// Keys with values, and queries with all that belongs to them, come under one barrier each.
template <class Spec>
struct DbiasBarriers {
  using Shape = DbiasShape<Spec>;
  unsigned first;
  __device__ __forceinline__ unsigned k_full(unsigned stage) const { return first + 8 * stage; }
  __device__ __forceinline__ unsigned k_empty(unsigned stage) const { return k_full(Shape::kKeyStages + stage); }
  __device__ __forceinline__ unsigned q_full(unsigned stage) const { return k_full(2 * Shape::kKeyStages + stage); }
  __device__ __forceinline__ unsigned q_empty(unsigned stage) const { return q_full(Shape::kStages + stage); }
  __device__ __forceinline__ void init() const {
    for (unsigned i = 0; i < Shape::kKeyStages; ++i) {
      ptx::mbarrier_init(k_full(i), 1);
      ptx::mbarrier_init(k_empty(i), 4 * Shape::kGroups);
    }
    for (unsigned i = 0; i < Shape::kStages; ++i) {
      ptx::mbarrier_init(q_full(i), 1);
      ptx::mbarrier_init(q_empty(i), 4 * Shape::kGroups);
    }
    ptx::mbarrier_init_fence();
  }
};

// What is added up in one tile of dbias: tiles of scores of one head of one batch entry each. All roles ask here.
template <class Spec>
struct DbiasTiles {
  static constexpr int kRows = DbiasShape<Spec>::kBlockM * DbiasShape<Spec>::kBlocks;
  struct Tile {
    int batch, head, row;
  };

  int batch, head, row, key;     // the first tile's
  int entries, heads;            // that are added up
  long long begin = 0, end = 0;  // of the tiles, those of this CTA

  static __device__ __forceinline__ int key_tiles(const PairParams& call) {
    return (call.seqlen_k + DbiasShape<Spec>::kBlockN - 1) / DbiasShape<Spec>::kBlockN;
  }
  static __device__ __forceinline__ int row_tiles(const PairParams& call) { return (call.seqlen_q + kRows - 1) / kRows; }
  static __device__ __forceinline__ int own_tiles(const PairParams& call) { return call.dbias_rows == 1 ? 1 : row_tiles(call); }
  // Calls visit(tiles) for each tile of dbias that is the CTA's.
  template <class Visit>
  static __device__ __forceinline__ void for_each(const BackwardCall& p, Visit visit) {
    const PairParams& call = pairs_of(p.call);
    const int count = key_tiles(call) * own_tiles(call) * call.dbias_heads * call.dbias_batch;
#pragma unroll 1
    for (int index = static_cast<int>(blockIdx.x); index < count; index += static_cast<int>(gridDim.x)) visit(DbiasTiles(p, index));
  }

  __device__ __forceinline__ DbiasTiles(const BackwardCall& p, int index) {
    const PairParams& call = pairs_of(p.call);
    const int key_tiles = DbiasTiles::key_tiles(call), row_tiles = DbiasTiles::row_tiles(call), own_tiles = DbiasTiles::own_tiles(call);
    const bool shared_rows = call.dbias_rows == 1;
    const int in_heads = index / key_tiles, of_heads = in_heads / own_tiles;
    key = (index - in_heads * key_tiles) * DbiasShape<Spec>::kBlockN;
    batch = of_heads / call.dbias_heads;
    head = of_heads - batch * call.dbias_heads;
    entries = call.batch / call.dbias_batch;
    heads = call.nheads / call.dbias_heads;
    const int seen = Spec::Mask::first_row(p.call, Keys<false>{}, key) / kRows;  // tiles of queries before see none of the keys
    const int own = in_heads - of_heads * own_tiles, first = shared_rows ? seen : own;
    row = first * kRows;
    const int rows = shared_rows ? max(0, row_tiles - seen) : own >= seen;
    const long long tiles = static_cast<long long>(rows) * entries * heads;
    begin = tiles * blockIdx.y / gridDim.y;
    end = tiles * (blockIdx.y + 1) / gridDim.y;
  }
  __device__ __forceinline__ Tile at(long long index) const {
    const int of_entry = static_cast<int>(index / entries), of_head = of_entry / heads;
    return {batch + static_cast<int>(index - static_cast<long long>(of_entry) * entries), head + of_entry - of_head * heads, row + of_head * kRows};
  }
};

}  // namespace fattn::v3
