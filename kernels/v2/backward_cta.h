// A CTA of the backward pass (kernels/v2/backward.h): its phases, members that are defined beside this file; backward.h has their order and includes
// all.
#pragma once

#include "device_abi/attention_params.h"
#include "device_abi/backward_layout.h"
#include "kernels/pair.h"
#include "kernels/tile/fragment.h"
#include "kernels/v2/backward_place.h"
#include "kernels/v2/backward_scores.h"
#include "kernels/v2/fragment_store.h"
#include "kernels/v2/swizzled_tile.h"

namespace fattn::v2 {

template <class Spec>
class Backward : BackwardScores<Spec> {
  using Place = BackwardPlace<Spec>;
  using Scores = BackwardScores<Spec>;
  // clang-format off
  using Place::kTile, Place::kWidth, Place::kWidthV, Place::kBlockM, Place::kBlockN, Place::kThreads, Place::kGroupWarps, Place::kPipelined;
  using Place::kExchange, Place::kWindow, Place::kCapped, Place::kMasked, Place::kPair, Place::kTwoForms, Place::kHides, Place::kByIds, Place::kWholeWeights;
  using Place::kFine, Place::kRoundedLater, Place::kReadLate, typename Place::Fine;
  using Place::kByDocument, Place::kKeys, Place::kQueries, Place::kChunk, Place::kKeyTiles, Place::kChunkTiles, Place::kColumns, Place::kColumnsV;
  using Place::kSumTiles, Place::kDqRowWarps, Place::kDqRows, Place::kDqColumns, Place::kDqSpan, typename Place::KLoader, typename Place::VLoader;
  using typename Place::Bits, typename Place::Element, Place::p, Place::shared, Place::thread, Place::lane, Place::warp, Place::values;
  using Place::key_group, Place::member, Place::batch, Place::head_k, Place::first_key, Place::first_block, Place::diagonal, Place::left_diagonal;
  using typename Place::Step, Place::after, Place::before, Place::seqlen_k, Place::blocks_end, Place::take_tile, Place::narrow;
  using Place::of_one_document, Place::nth_key_block, Place::at, Place::load_keys, Place::load_queries, Place::commit, Place::wait_for_loads;
  using Place::kAllThreads, Place::kRoleThreads, Place::weights_barrier, Place::role_barrier, Place::q_tile, Place::dout_tile, Place::ds_tile;
  using Place::p_tile, Place::lse_rows, Place::read_again;
  using Scores::hide, Scores::weights, Scores::pair_weights, Scores::copy, Scores::score_gradients, Scores::pair_score_gradients;
  using Scores::whole_score_gradients, Scores::add_to_dbias;
  // clang-format on

  // ---- compute: products ----
  __device__ static void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) { tile::mma<Element, Spec::kLevel>(d, a, b0, b1); }

  template <int kRowTiles, int kColumnTiles>
  __device__ static void clear(float (&d)[kRowTiles][kColumnTiles][4]) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) d[i][j][e] = 0;
  }

  template <int kRowTiles, int kColumnTiles>
  __device__ static void fill(float (&d)[kRowTiles][kColumnTiles][4], float x) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) d[i][j][e] = x;
  }

  template <int kInner>
  __device__ static void multiply_rows(float (&d)[kKeyTiles][kChunkTiles][4], unsigned a_tile, unsigned b_tile,
                                       const BlockAddress<kInner, kInner, LaneOrder::kColumnMajor>& a_at,
                                       const BlockAddress<kInner, kInner, LaneOrder::kRowMajor>& b_at, int b_row);
  template <int kSpan, int kInner>
  __device__ static void accumulate(float (&d)[kKeyTiles][kSumTiles][4], const unsigned (&a)[kKeyTiles][4], unsigned b_tile,
                                    const BlockAddress<kInner, kSpan, LaneOrder::kColumnMajor>& b_at, int b_row);
  template <int kSpan, int kInner>
  __device__ void accumulate_others(float (&sum)[kKeyTiles][kSumTiles][4], unsigned a_tile, unsigned b_tile,
                                    const BlockAddress<kInner, kSpan, LaneOrder::kColumnMajor>& b_at) const;
  // kRoundedLater: what was sent, as dV takes it.
  __device__ static void round(unsigned (&bits)[kChunkTiles / 2][kKeyTiles][4]) {
#pragma unroll
    for (int j = 0; j < kChunkTiles / 2; ++j)
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) bits[j][i][e] = Fine::rounded(bits[j][i][e]);
  }
  __device__ static void store_chunk(const FragmentStore<kBlockM, kQueries>& store, unsigned tile, int row,
                                     const unsigned (&bits)[kChunkTiles / 2][kKeyTiles][4]);
  template <int kSpan, int kRowTiles, int kColumnTiles, class Load>
  __device__ static void mark(float (&d)[kRowTiles][kColumnTiles][4], const unsigned (&seen)[kRowTiles][4], const Load& load);
  template <int kSpan, int kInner>
  __device__ void accumulate_careful(float (&sum)[kKeyTiles][kSumTiles][4], unsigned a_tile, unsigned b_tile,
                                     const BlockAddress<kInner, kSpan, LaneOrder::kColumnMajor>& b_at, unsigned lse_at, int first_query,
                                     int head) const;
  __device__ void compute_values(float (&dv)[kKeyTiles][kSumTiles][4], int stage, int first_query, bool masked, int head) const;
  __device__ void compute_keys(float (&dk)[kKeyTiles][kSumTiles][4], int stage, int first_query, bool masked, int head) const;
  __device__ void clear_ds(int stage) const;

  __device__ void compute_dq(Step step, int stage, bool keys_nonfinite) const;

 public:
  using Scores::Scores;

  __device__ void run();

 private:
  template <int kInner, int kSpan>
  __device__ void store_gradient(unsigned tile, const float (&d)[kKeyTiles][kSumTiles][4], float scale, int first_column) const;
  template <int kHeaddim, int kSpan>
  __device__ void store_fp32_gradient(void* to, const TensorStrides& s, const float (&d)[kKeyTiles][kSumTiles][4], float scale,
                                      int first_column) const;
};

}  // namespace fattn::v2
