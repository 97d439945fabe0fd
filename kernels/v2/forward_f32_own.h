// batch_invariant in fp32 (kernels/v2/forward_f32.h, kOwnBits): numbers are three bf16 each (tile/three_parts.h) in place of two fp16 at a scale that
// follows from the rest of their tile, every product is six. Every step's reference is the maximum of a row's own scores, and a row that came to be
// no number is computed again, whatever else is in its tile. Included by these specialisations alone: others would have other machine code with it.
#pragma once

#include "kernels/ptx/async_copy.h"
#include "kernels/ptx/ldmatrix.h"
#include "kernels/ptx/math.h"
#include "kernels/tile/for_each.h"
#include "kernels/tile/three_parts.h"
#include "kernels/v2/forward_f32.h"

namespace fattn::v2 {

template <class Spec>
__device__ __forceinline__ void ForwardF32<Spec>::split_own_queries(float sign) {
  tile::ThreePartCopy<TileQ, Shape::kThreads, Spec::kHeaddim, Spec::kAligned>::split(tile_q, sign);
}

// Splits block j, once its copies have arrived, makes it visible to all, and loads the next one where no one reads any more.
template <class Spec>
template <class Load>
__device__ __forceinline__ void ForwardF32<Spec>::enter_own_block(int j, int begin, int end, const Load& load_block) {
  static_assert(kNotesOdd);
  if constexpr (Spec::kStages == 1) {
    if (j != end - 1) {
      __syncthreads();
      load_block(j, false);
    }
  }
  ptx::cp_async_wait<0>();
  const unsigned stage = tile_q + Shape::kQueryBytes + static_cast<unsigned>(j % Spec::kStages) * Shape::kStageBytes;
  tile::ThreePartCopy<TileK, Shape::kThreads, Spec::kHeaddim, Spec::kAligned>::split(stage, 1.0f);
  tile::ThreePartCopy<TileV, Shape::kThreads, Spec::kHeaddimV, Spec::kAligned>::split_finite(stage + Shape::kValueOffset, [&] { notes().spoil(j); });
  __syncthreads();
  if constexpr (Spec::kStages == 2) {
    if (j > begin) load_block(j - 1, false);
  }
}

// s = q k^T of kStepN keys from `k_address`.
template <class Spec>
__device__ __forceinline__ void ForwardF32<Spec>::own_scores(float (&s)[kRowTiles][kStepTiles][4], unsigned k_address) {
  static_assert(!Spec::kQueriesInRegisters);
  const unsigned q_address = ptx::opaque(this->q_address);
  float first[kStepTiles][kRowTiles][4] = {}, rest[kStepTiles][kRowTiles][4] = {};
  for_each<0, kDepthQ>([&](auto d) {
    constexpr int kUnit = 2 * decltype(d)::value;
    unsigned a[3][kRowTiles][4];
#pragma unroll
    for (int part = 0; part < 3; ++part) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i)
        ptx::ldmatrix_x4(a[part][i], TileQ::template advance<kUnit>(q_address) + i * 16 * TileQ::kRowBytes + part * TileQ::kBytes);
    }
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      unsigned k[3][4];
#pragma unroll
      for (int part = 0; part < 3; ++part)
        ptx::ldmatrix_x4(k[part], TileK::template advance<kUnit>(k_address) + chunk * 16 * TileK::kRowBytes + part * TileK::kBytes);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
          tile::multiply_parts(first[2 * chunk + half][i], rest[2 * chunk + half][i], a[0][i], a[1][i], a[2][i], k[0] + 2 * half, k[1] + 2 * half,
                               k[2] + 2 * half);
      }
    }
  });
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int n = 0; n < kStepTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[i][n][e] = first[n][i][e] + rest[n][i][e];
    }
  }
}

// Two neighbouring weights, to register `place` of the A operand.
template <class Spec>
__device__ __forceinline__ void ForwardF32<Spec>::split_own(Weights& w, float x, float y, int chunk, int i, int place) {
  unsigned part[3];
  tile::three_parts(x, y, part);
  w.high[chunk][i][place] = part[0], w.low[chunk][i][place] = part[1], w.low[kChunks + chunk][i][place] = part[2];
}

// o += p v. Products are summed over 16 keys by the matrix instructions, and then added to nearest.
template <class Spec>
__device__ __forceinline__ void ForwardF32<Spec>::add_own_values(const Weights& w, unsigned v_address) {
  for_each<0, kDepthO>([&](auto d) {
    constexpr int kD = decltype(d)::value;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      unsigned v[3][4];
#pragma unroll
      for (int part = 0; part < 3; ++part)
        ptx::ldmatrix_x4_trans(v[part], TileV::template advance<2 * kD>(v_address) + chunk * 16 * TileV::kRowBytes + part * TileV::kBytes);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float t[4] = {};
          tile::multiply_parts(t, t, w.high[chunk][i], w.low[chunk][i], w.low[kChunks + chunk][i], v[0] + 2 * half, v[1] + 2 * half, v[2] + 2 * half);
#pragma unroll
          for (int e = 0; e < 4; ++e) o[i][2 * kD + half][e] = __fadd_rn(o[i][2 * kD + half][e], t[e]);
        }
      }
    }
  });
}

}  // namespace fattn::v2
