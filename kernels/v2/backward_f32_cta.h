// A CTA of the backward pass in fp32 (kernels/v2/backward_f32.h): its phases, members that are defined beside this file; backward_f32.h has their
// order and includes all.
#pragma once

#include "device_abi/attention_params.h"
#include "device_abi/backward_f32_layout.h"
#include "device_abi/backward_layout.h"
#include "kernels/pair.h"
#include "kernels/tile/split_product.h"
#include "kernels/tile/split_tile.h"
#include "kernels/v2/backward_f32_place.h"
#include "kernels/v2/backward_f32_scores.h"
#include "kernels/v2/fragment_store.h"
#include "kernels/v2/swizzled_tile.h"

namespace fattn::v2 {

template <class Spec>
class BackwardF32 : BackwardF32Scores<Spec> {
  using Place = BackwardF32Place<Spec>;
  using Scores = BackwardF32Scores<Spec>;
  // clang-format off
  using Place::kTile, Place::kWidth, Place::kWidthV, Place::kBlockM, Place::kBlockN, Place::kSplitBefore, Place::kWindow, Place::kCapped;
  using Place::kMasked, Place::kPair, Place::kHides, typename Place::TileK, typename Place::TileV, typename Place::TileQ, typename Place::TileDout;
  using typename Place::TileDs, Place::kKeys, Place::kChunk, Place::kChunks, Place::kKeyTiles, Place::kChunkTiles, Place::kDepths, Place::kParts;
  using Place::kColumns, Place::kColumnsV, Place::kSumTiles, Place::kDqRowWarps, Place::kDqRows, Place::kDqColumns, Place::kDqSpan;
  using Place::kWeightFactor, Place::kGradientFactor, Place::p, Place::shared, Place::stage, Place::this_thread, Place::this_lane, Place::this_warp;
  using Place::computes_values, Place::this_group, Place::batch, Place::head_k, Place::first_key, Place::part, Place::query_inverse;
  using Place::dout_inverse, Place::key_inverse, Place::value_inverse, Place::found_params, typename Place::Step, Place::after, Place::seqlen_q;
  using Place::seqlen_k, Place::diagonal, Place::left_diagonal, Place::first_block, Place::blocks_end, Place::mask, Place::nth_key_block;
  using Place::take_tile, Place::at, Place::v_tile, Place::q_tile, Place::dout_tile, Place::lse_at, Place::row_sum_at, Place::ds_tile;
  using Place::load_keys, Place::load_queries, Place::split_keys, Place::split_queries, Place::clear_infinite_keys, Place::infinite_keys;
  using Scores::dropout_scale, Scores::kept_share, Scores::hide, Scores::spoil, Scores::weights, Scores::pair_weights, Scores::add_to_dbias;
  // clang-format on

  // ---- compute: products ----
  template <int kRowTiles, int kColumnTiles>
  __device__ static void clear(float (&d)[kRowTiles][kColumnTiles][4]) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) d[i][j][e] = 0;
  }

  template <class TileA, class TileB, int kInner>
  __device__ static void multiply_rows(float (&d)[kKeyTiles][kChunkTiles][4], unsigned a_tile, unsigned b_tile,
                                       const BlockAddress<kInner, kInner, LaneOrder::kColumnMajor>& a_at,
                                       const BlockAddress<kInner, kInner, LaneOrder::kRowMajor>& b_at, int b_row);

  // A chunk of P^T or dS^T as A operands.
  struct Fragments {
    unsigned high[kDepths][kKeyTiles][4], low[kDepths][kKeyTiles][4];
    __device__ Fragments(const float (&x)[kKeyTiles][kChunkTiles][4], float factor) {
#pragma unroll
      for (int j = 0; j < kChunkTiles; ++j)
#pragma unroll
        for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            tile::split2(x[i][j][2 * half] * factor, x[i][j][2 * half + 1] * factor, high[j / 2][i][j % 2 * 2 + half],
                         low[j / 2][i][j % 2 * 2 + half]);
    }
  };

  template <class TileB, int kInner, int kSpan>
  __device__ static void accumulate(float (&sum)[kKeyTiles][kSumTiles][4], const Fragments& a, unsigned b_tile,
                                    const BlockAddress<kInner, kSpan, LaneOrder::kColumnMajor>& b_at, float factor, float factor2);

  // A chunk of P^T in shared memory: every lane writes its own numbers, and the same lane of the other warp reads them.
  __device__ unsigned p_slot(int chunk) const {
    return shared + kTile.p_offset() + static_cast<unsigned>((this_group() * kChunks + chunk) * kKeys * kChunk * 4 + this_lane() * 16);
  }
  // Barriers of a key group, one a chunk: the chunk is written, and the first warp goes on to the next. (Arriving without waiting would do, but
  // compute-sanitizer's racecheck then finds hazards in any program.)
  __device__ int weights_barrier(int chunk) const { return 1 + this_group() * kChunks + chunk; }

  __device__ void compute_values(float (&dv)[kKeyTiles][kSumTiles][4], int first_query, bool masked, [[maybe_unused]] int head) const;
  __device__ void compute_keys(float (&dk)[kKeyTiles][kSumTiles][4], int first_query, bool masked, [[maybe_unused]] int head) const;
  __device__ void store_ds(const FragmentStore<kBlockM, kBlockM>& to, int row, int block, const unsigned (&high)[4], const unsigned (&low)[4]) const;
  __device__ void clear_ds() const;
  __device__ void compute_dq(Step step) const;
  template <bool kIsDk>
  __device__ void store_gradient(const float (&d)[kKeyTiles][kSumTiles][4], float scale) const;
  __device__ void load_next(Step now);

 public:
  using Scores::Scores;

  __device__ void run();
};

}  // namespace fattn::v2
