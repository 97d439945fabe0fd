// Products of the forward pass in fp32 (kernels/v2/forward_f32.h), each of three:  S = Q K^T    O += P V
#pragma once

#include "kernels/ptx/ldmatrix.h"
#include "kernels/ptx/warp.h"
#include "kernels/tile/for_each.h"
#include "kernels/tile/split_product.h"
#include "kernels/v2/forward_f32_state.h"

namespace fattn::v2 {

// s = q k^T of kStepN keys from `k_address`, in the units of the split operands.
template <class Spec>
__device__ __forceinline__ void ForwardF32<Spec>::scores(float (&s)[kRowTiles][kStepTiles][4], unsigned k_address) {
  // With queries from shared memory all keys of the step take part in each read of them; otherwise 16 at a time, which takes fewer registers.
  constexpr int kGroup = Spec::kQueriesInRegisters ? 1 : kChunks;
  const unsigned q_address = ptx::opaque(this->q_address);
#pragma unroll
  for (int first = 0; first < kChunks; first += kGroup) {
    float high[2 * kGroup][kRowTiles][4] = {}, low[2 * kGroup][kRowTiles][4] = {};
    for_each<0, kDepthQ>([&](auto d) {
      constexpr int kD = decltype(d)::value, kUnit = 2 * kD;
      if constexpr (kWide && kD % 2 == 0) ptx::warp_sync();  // as in add_values()
      unsigned loaded[2][kRowTiles][4];
      if constexpr (!Spec::kQueriesInRegisters) {
        const unsigned from = TileQ::template advance<kUnit>(q_address);
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          ptx::ldmatrix_x4(loaded[0][i], from + i * 16 * TileQ::kRowBytes);
          ptx::ldmatrix_x4(loaded[1][i], from + i * 16 * TileQ::kRowBytes + TileQ::kBytes);
        }
      }
      auto& a = Spec::kQueriesInRegisters ? q[Spec::kQueriesInRegisters ? kD : 0] : loaded;
#pragma unroll
      for (int chunk = 0; chunk < kGroup; ++chunk) {
        unsigned k_high[4], k_low[4];
        const unsigned from = TileK::template advance<kUnit>(k_address) + (first + chunk) * 16 * TileK::kRowBytes;
        ptx::ldmatrix_x4(k_high, from);
        ptx::ldmatrix_x4(k_low, from + TileK::kBytes);
#pragma unroll
        for (int half = 0; half < 2; ++half)
          tile::multiply_split(high[2 * chunk + half], low[2 * chunk + half], a[0], a[1], k_high + 2 * half, k_low + 2 * half);
      }
    });
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int n = 0; n < 2 * kGroup; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[i][2 * first + n][e] = high[n][i][e] + low[n][i][e];
      }
    }
  }
}

// o += p v.
template <class Spec>
__device__ __forceinline__ void ForwardF32<Spec>::add_values(const Weights& w, unsigned v_address, float inverse) {
  for_each<0, kDepthO>([&](auto d) {
    constexpr int kD = decltype(d)::value;
    unsigned v_high[kChunks][4], v_low[kChunks][4];
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const unsigned from = TileV::template advance<2 * kD>(v_address) + chunk * 16 * TileV::kRowBytes;
      ptx::ldmatrix_x4_trans(v_high[chunk], from);
      ptx::ldmatrix_x4_trans(v_low[chunk], from + TileV::kBytes);
    }
    // No need of it, but the compiler then takes fewer operands at once: with as many as it likes, wide outputs leave it too few registers.
    if constexpr (kWide && kD % 2 == 1) ptx::warp_sync();
    float t[kRowTiles][2][4];
    tile::product_split(t, w.high, w.low, v_high, v_low);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o[i][2 * kD + half][e] = fmaf(t[i][half][e], inverse, o[i][2 * kD + half][e]);
      }
    }
  });
}

}  // namespace fattn::v2
