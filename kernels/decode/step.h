// A warp's step over kBlockN keys: scores, weights, their product with the values. The maximum is taken in every step: it is the memory that limits.
#pragma once

#include "kernels/decode/shape.h"
#include "kernels/mask.h"
#include "kernels/softmax.h"
#include "kernels/tile/for_each.h"
#include "kernels/tile/fragment.h"

namespace fattn::decode {

using tile::for_each;

// What a warp keeps in registers from step to step.
template <class Spec>
struct WarpState {
  static constexpr int kRowTiles = Spec::kRowTiles;

  float o[kRowTiles][2 * Shape<Spec>::kDepthO][4];
  Softmax<kRowTiles> softmax;
  unsigned q[Spec::kQueriesInRegisters ? Shape<Spec>::kDepthQ : 1][kRowTiles][4];
  unsigned q_address;  // of this lane
  float scale;

  __device__ __forceinline__ void start(unsigned query_address, float softmax_scale_log2) {
    q_address = query_address;
    scale = softmax_scale_log2;
    softmax.start();
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int n = 0; n < 2 * Shape<Spec>::kDepthO; ++n) o[i][n][0] = o[i][n][1] = o[i][n][2] = o[i][n][3] = 0;
    }
    if constexpr (Spec::kQueriesInRegisters)
      for_each<0, Shape<Spec>::kDepthQ>([&](auto d) { load_queries<decltype(d)::value>(q[decltype(d)::value]); });
  }

  // Columns 16 kD.. of the warp's queries.
  template <int kD>
  __device__ __forceinline__ void load_queries(unsigned (&to)[kRowTiles][4]) const {
    using TileQ = typename Shape<Spec>::TileQ;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) ptx::ldmatrix_x4(to[i], TileQ::template advance<2 * kD>(q_address) + i * 16 * TileQ::kRowBytes);
  }
};

// The addresses are this lane's in the stage.
template <class Spec>
__device__ __forceinline__ void step(WarpState<Spec>& w, unsigned k_address, unsigned v_address, const VisibleKeys<Spec::kRowTiles, false>& visible) {
  using TileK = typename Shape<Spec>::TileK;
  using TileV = typename Shape<Spec>::TileV;
  using Element = typename Spec::Element;
  constexpr int kRowTiles = Spec::kRowTiles, kChunks = Spec::kBlockN / 16, kLevel = 80;

  // s = q k^T
  float s[kRowTiles][2 * kChunks][4];
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int n = 0; n < 2 * kChunks; ++n) s[i][n][0] = s[i][n][1] = s[i][n][2] = s[i][n][3] = 0;
  }
  for_each<0, Shape<Spec>::kDepthQ>([&](auto d) {
    constexpr int kD = decltype(d)::value;
    unsigned loaded[kRowTiles][4];
    if constexpr (!Spec::kQueriesInRegisters) w.template load_queries<kD>(loaded);
    auto& q = Spec::kQueriesInRegisters ? w.q[Spec::kQueriesInRegisters ? kD : 0] : loaded;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      unsigned k[4];
      ptx::ldmatrix_x4(k, TileK::template advance<2 * kD>(k_address) + chunk * 16 * TileK::kRowBytes);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        tile::mma<Element, kLevel>(s[i][2 * chunk], q[i], k[0], k[1]);
        tile::mma<Element, kLevel>(s[i][2 * chunk + 1], q[i], k[2], k[3]);
      }
    }
  });

  visible.hide(s);
  const Rest<kRowTiles> rest = w.softmax.template raise<true>(s, 0, 2 * kChunks, w.scale, w.o);

  // o += p v
  for_each<0, kChunks>([&](auto chunk) {
    constexpr int kChunk = decltype(chunk)::value;
    Weights<kRowTiles> weights;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      weights.template weigh<Element, true>(s[i][2 * kChunk], i, 0, w.softmax, w.scale, rest);
      weights.template weigh<Element, true>(s[i][2 * kChunk + 1], i, 1, w.softmax, w.scale, rest);
    }
    weights.add_to(w.softmax);
    for_each<0, Shape<Spec>::kDepthO>([&](auto d) {
      constexpr int kD = decltype(d)::value;
      unsigned v[4];
      ptx::ldmatrix_x4_trans(v, TileV::template advance<2 * kD>(v_address) + kChunk * 16 * TileV::kRowBytes);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        tile::mma<Element, kLevel>(w.o[i][2 * kD], weights.p[i], v[0], v[1]);
        tile::mma<Element, kLevel>(w.o[i][2 * kD + 1], weights.p[i], v[2], v[3]);
      }
    });
  });
  const float lacked = rest.packed();
  if (!ptx::vote_all(lacked == 0)) [[unlikely]]
    w.softmax.give_back(lacked, w.o);
}

}  // namespace fattn::decode
