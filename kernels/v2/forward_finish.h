// What leaves a tile of v2's forward pass (kernels/v2/forward.h):  o = O / sum    lse = ln 2 (m + log2 sum)
#pragma once

#include "kernels/constants.h"
#include "kernels/pair.h"
#include "kernels/ptx/convert.h"
#include "kernels/ptx/reduce.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/ptx/special_registers.h"
#include "kernels/ptx/warp.h"
#include "kernels/sequence.h"
#include "kernels/v2/forward_shape.h"
#include "kernels/v2/forward_state.h"
#include "kernels/v2/own_bits.h"
#include "kernels/v2/schedule.h"
#include "kernels/v2/store_pair.h"

namespace fattn::v2 {

// The row of o that is `row` behind the tile's first.
template <class T>
__device__ __forceinline__ T* first_row_of_o(const AttentionParams& p, const Place& place, int row) {
  return static_cast<T*>(p.o) + place.batch * p.o_strides.batch + (place.row + row) * p.o_strides.row + place.head * p.o_strides.head;
}

// Writes the warp's rows of o, through its rows of the query tile so that whole rows are stored, in fp32 from registers, and lse.
template <class Spec>
__device__ __forceinline__ void finish(WarpState<Spec>& w, const AttentionParams& call, unsigned tile_q) {
  using Shape = ForwardShape<Spec>;
  // Found again rather than kept in registers all the way.
  const Place place = place_of<Shape::kBlockM, Shape::kEntriesTogether>(call, ptx::opaque(static_cast<int>(blockIdx.x)));
  const auto& p = entry_params<kPairOf<Spec>>(call, place.batch);
  const auto [warp, lane] = ptx::thread_place();
  using TileO = typename Shape::TileO;
  const int warp_row = warp * Shape::kWarpRows;
  const int rows = p.seqlen_q - place.row - warp_row;  // that exist, from the warp's first
  constexpr int kPitch = TileO::kRowBytes > Shape::TileQ::kRowBytes ? TileO::kRowBytes : Shape::TileQ::kRowBytes;
  const unsigned tile_o = tile_q + static_cast<unsigned>(warp_row * kPitch);
  constexpr bool kFp32Out = kPairOf<Spec>.fp32_out;
  ptx::warp_sync();  // after the warp's last reads of queries

  w.give_back();
  if constexpr (own_bits<Spec>()) add_zero(w.o);
#pragma unroll
  for (int i = 0; i < Spec::kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = w.softmax.sum[i][half];
      sum += ptx::shfl_xor(sum, 1);
      sum += ptx::shfl_xor(sum, 2);
      sum += first_sum<kPairOf<Spec>>(p, place.batch);
      const bool empty = sum == 0;
      [[maybe_unused]] float sinked_lse;
      if constexpr (kPairOf<Spec>.sinks) {
        const SinkedRow<> sinked(sink_of(pairs_of(p), place.head), w.softmax.shift[i][half], sum, empty);
        sum = sinked.sum;
        sinked_lse = sinked.lse;
      }
      const float inverse = (kPairOf<Spec>.dropout ? pairs_of(p).dropout_scale : 1.0f) / sum;
      const int row = i * 16 + half * 8 + lane / 4;
      [[maybe_unused]] float* fp32_row = nullptr;
      if constexpr (kFp32Out) fp32_row = first_row_of_o<float>(p, place, warp_row) + row * p.o_strides.row;
#pragma unroll
      for (int n = 0; n < 2 * WarpState<Spec>::kDepthO; ++n) {
        const float low = empty ? 0.0f : w.o[i][n][2 * half] * inverse;
        const float high = empty ? 0.0f : w.o[i][n][2 * half + 1] * inverse;
        if constexpr (kFp32Out)
          store_pair<Spec::kHeaddimV, Spec::kAligned>(fp32_row, n * 8 + lane % 4 * 2, low, high, row < rows);
        else
          ptx::st_shared_4(tile_o + TileO::offset(row, n) + lane % 4 * 4, ptx::pack2<typename Spec::Element>(low, high));
      }
      if (p.lse != nullptr && lane % 4 == 0 && row < rows) {
        constexpr float kLn2 = 0.693147180559945309f;
        p.lse[place.batch * p.lse_strides.batch + (place.row + warp_row + row) * p.lse_strides.row + place.head * p.lse_strides.head] =
            kPairOf<Spec>.sinks ? sinked_lse
            : empty             ? -kInfinity
                                : fmaf(-w.softmax.shift[i][half], kLn2, logf(sum));
      }
    }
  }
  if constexpr (kFp32Out) return;
  ptx::warp_sync();

  auto* o = first_row_of_o<unsigned short>(p, place, warp_row);
  constexpr int kUnits = (Spec::kHeaddimV + 7) / 8;
#pragma unroll 4
  for (int index = lane; index < Shape::kWarpRows * kUnits; index += 32) {
    const int row = index / kUnits, unit = index % kUnits;
    if (row >= rows) break;
    const uint4 x = ptx::ld_shared_16(tile_o + TileO::offset(row, unit));
    unsigned short* to = o + row * p.o_strides.row + unit * 8;
    if constexpr (Spec::kAligned) {
      *reinterpret_cast<uint4*>(to) = x;
    } else {
      const unsigned word[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (unit * 8 + e < Spec::kHeaddimV) to[e] = static_cast<unsigned short>(word[e / 2] >> (e % 2 * 16));
      }
    }
  }
}
}  // namespace fattn::v2
