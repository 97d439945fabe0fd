// How a warpgroup's rows of dk and dv leave: through the tile of the keys (values) in shared memory, which nobody reads any more, by TMA.
#pragma once

#include "kernels/ptx/async_proxy.h"
#include "kernels/ptx/barrier.h"
#include "kernels/ptx/tensor_copy.h"
#include "kernels/v3/backward_fragments.h"
#include "kernels/v3/backward_nonfinite.h"
#include "kernels/v3/backward_watch.h"

namespace fattn::v3 {

// What a sum is multiplied by at the end: dk and dq (`scaled`), dv. Row sums are as if dropout's part of it were there already.
template <PairFeatures kPair>
__device__ __forceinline__ float gradient_factor(const AttentionParams& p, bool scaled) {
  const float factor = scaled ? p.softmax_scale : 1.0f;
  if constexpr (kPair.dropout) return factor * pairs_of(p).dropout_scale;
  return factor;
}

// Rows [begin, end) of a warp's in the tile, of packed sequences.
template <class Tile, bool kIsDk>
__device__ __forceinline__ void store_rows(const BackwardCall& p, TilePlace tile, unsigned in_shared, int begin, int end) {
  const TensorStrides& s = kIsDk ? p.call.dk_strides : p.call.dv_strides;
  auto* const first = static_cast<unsigned short*>(kIsDk ? p.call.dk : p.call.dv) + tile.head_k() * s.head + (tile.k_begin() + tile.key()) * s.row;
  const int units = (kIsDk ? p.work.columns : p.work.columns_v) / 8;
#pragma unroll 1
  for (int index = static_cast<int>(own_lane()); index < (end - begin) * units; index += 32) {
    const int row = begin + index / units, column = index % units * 8;
    *reinterpret_cast<uint4*>(first + row * s.row + column) = ptx::ld_shared_16(element_place<Tile>(in_shared, row, column));
  }
}

// Rows [in_tile, in_tile + 64) of the CTA's tile: into shared memory,
template <class Spec, class Tile, bool kIsDk, int kWidth>
__device__ __forceinline__ void write_tile(const float (&x)[kWidth / 2], const BackwardCall& p, unsigned in_shared, int in_tile) {
  const unsigned row = static_cast<unsigned>(in_tile) + own_warp_row();
  write_gradient<typename Spec::Element, Tile>(x, gradient_factor<kPairOf<Spec>>(p.call, kIsDk), in_shared + 128 * row);
}
// what sees an Inf or NaN of a careful tile,
template <class Spec>
__device__ __forceinline__ void take_nonfinite(const BackwardCall& p, TilePlace tile, unsigned in_shared, int in_tile, bool is_dk) {
  NonfiniteSums<Spec>{p, tile, is_dk}.take(in_shared, in_tile + static_cast<int>(own_warp_row()), tile.key() + in_tile);
}
// and away. `barrier`: a named one of the warpgroup.
template <class Spec, class Tile, bool kIsDk>
__device__ __forceinline__ void store_tile(const BackwardCall& p, TilePlace tile, unsigned in_shared, int in_tile, int barrier) {
  [[maybe_unused]] const int row = in_tile + static_cast<int>(own_warp_row());
  if constexpr (kPairOf<Spec>.packed) {
    const int rows = tile.keys<false, true>().keys - tile.key();  // behind them are another sequence's, where TMA would write too
    if (rows < in_tile + 64) {
      ptx::warp_sync();
      return store_rows<Tile, kIsDk>(p, tile, in_shared, row, min(row + 16, rows));
    }
  }
  if constexpr (kPairOf<Spec>.lengths) {
    ptx::warp_sync();
    clear_rows<Tile>(in_shared, max(row, tile.keys<true, false>().keys - tile.key()), row + 16, static_cast<int>(own_lane()), 32);
  }
  ptx::async_proxy_fence();
  ptx::bar_sync(barrier, 128);
  if (static_cast<int>(threadIdx.x) % 128 == 0 && (kPairOf<Spec>.packed || tile.key() + in_tile < p.call.seqlen_k)) {
    const auto place = [&](int column) -> ptx::TensorPlace {
      if constexpr (kPairOf<Spec>.packed)
        return {column, tile.k_begin() + tile.key() + in_tile, tile.head_k(), 0};
      else
        return {column, tile.key() + in_tile, tile.head_k(), tile.batch()};
    };
    for (int column = 0; column < Tile::kColumns; ++column)
      ptx::tensor_store(kIsDk ? &p.dk : &p.dv, in_shared + static_cast<unsigned>(column * Tile::kColumnBytes + 128 * in_tile), place(64 * column));
    ptx::bulk_commit();
  }
}

template <class Spec, class Tile, bool kIsDk, int kWidth>
__device__ __forceinline__ void store_gradient(const float (&x)[kWidth / 2], const BackwardCall& p, TilePlace tile, unsigned in_shared, int in_tile,
                                               int barrier) {
  write_tile<Spec, Tile, kIsDk, kWidth>(x, p, in_shared, in_tile);
  if constexpr (Watch<Spec>::kWatches)
    if (Watch<Spec>{tile}.queries_careful()) [[unlikely]]
      take_nonfinite<Spec>(p, tile, in_shared, in_tile, kIsDk);
  store_tile<Spec, Tile, kIsDk>(p, tile, in_shared, in_tile, barrier);
}

}  // namespace fattn::v3
