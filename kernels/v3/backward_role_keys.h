// The warpgroup that computes dP, dS and dk of the CTA's keys, from the P that the other leaves in shared memory (v3/backward_roles.h).
#pragma once

#include "kernels/v3/backward_roles.h"

namespace fattn::v3 {

template <class Spec>
struct KeyRole : RoleBase<Spec> {
  using Base = RoleBase<Spec>;
  using typename Base::Element;
  using typename Base::Shape;
  using typename Base::TileDs;
  using TileK = typename Shape::TileK;
  using TileV = typename Shape::TileV;
  using TileQ = typename Shape::TileQ;
  using TileDout = typename Shape::TileDout;
  using Base::barriers;
  using Base::last;
  using Base::p;
  using Base::p_place;
  using Base::queries;
  using Base::shared;
  using Base::tile;

  Ring<Shape::kStagesDs> ds;  // of the block that is published next
  int row = 0, head = 0;      // its first, and its query head: with dbias
  float dp[32], dk[Spec::kHeaddim / 2];
  unsigned gradients[4][4];

  __device__ __forceinline__ KeyRole(const BackwardCall& params, unsigned shared_address, BackwardBarriers<Spec> of, TilePlace of_keys)
      : Base(params, shared_address, of, of_keys) {}

  __device__ __forceinline__ void issue_dp() {
    ptx::mbarrier_wait(barriers.dout_full(queries.stage), queries.parity);
    ptx::wgmma_fence();
    Base::template issue_scores<TileV, TileDout, Spec::kHeaddimV>(dp, Shape::kOffsetV, Shape::kOffsetDout);
  }
  __device__ __forceinline__ void issue_dk() {
    ptx::mbarrier_wait(barriers.q_full(last.stage), last.parity);  // as the other warpgroup, but each sees its own copies' barrier
    ptx::wgmma_fence();
    Base::template issue_sum<TileQ>(dk, gradients, Shape::kOffsetQ);
  }
  // dS of the block that dP was issued for last, from P before it was rounded; the block's dout is not needed any more.
  template <bool kCareful>
  __device__ __forceinline__ void differentiate() {
    if constexpr (kCareful) Base::take_nonfinite_out();
    RowValues row_sums;
    row_sums.read(shared + Shape::kOffsetRowSum + last.stage * Shape::kRowBytes);
    if constexpr (!Shape::kDropout) subtract(dp, row_sums);
    ptx::warp_sync();
    if (Base::first_lane()) ptx::mbarrier_arrive(barriers.dout_empty(last.stage));
    ptx::mbarrier_wait(barriers.p_full(), p_place.parity);
    const unsigned from = Base::own_weights();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      uint4 x = ptx::ld_shared_16(from + static_cast<unsigned>(2048 * i));
      if constexpr (Shape::kDropout) {
        unsigned* const of[4] = {&x.x, &x.y, &x.z, &x.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& d = dp[4 * i + e];
          d = (static_cast<int>(*of[e]) < 0 ? 0.0f : d) - (e % 2 == 0 ? row_sums.of[i].x : row_sums.of[i].y);
          *of[e] &= 0x7fffffffu;
        }
      }
      if constexpr (Shape::kDbias) {  // of hidden pairs 0
        const unsigned of[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (static_cast<int>(of[e]) < 0) dp[4 * i + e] = 0;
      }
      dp[4 * i] *= __uint_as_float(x.x);
      dp[4 * i + 1] *= __uint_as_float(x.y);
      dp[4 * i + 2] *= __uint_as_float(x.z);
      dp[4 * i + 3] *= __uint_as_float(x.w);
    }
    if constexpr (kCareful) select_seen(from);
    ptx::warp_sync();
    if (Base::first_lane()) ptx::mbarrier_arrive(barriers.p_empty());
    p_place.next();
  }
  // dS of hidden pairs, and of rows without a gradient, is -0, and a 0 of others +0. `from`: P.
  __device__ __forceinline__ void select_seen(unsigned from) {
    const unsigned lse = shared + Shape::kOffsetLse + last.stage * Shape::kRowBytes + own_lane() % 4 * 8;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 l = ptx::ld_shared_f32x2(lse + static_cast<unsigned>(32 * i));
      const uint4 x = ptx::ld_shared_16(from + static_cast<unsigned>(2048 * i));
      const unsigned of[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& ds = dp[4 * i + e];
        if ((of[e] & 0x7fffffffu) <= kNoWeight) ds = fabsf(ds) * 0.0f;
        if (of[e] == __float_as_uint(kHiddenWeight) || (e % 2 == 0 ? l.x : l.y) == kInfinity) ds = kHiddenWeight;
      }
    }
  }
  __device__ __forceinline__ void publish() {
    pack<Element>(gradients, dp);
    ptx::pin(gradients);
    if constexpr (Shape::kDbias) {
      write_dbias<Spec>(dp, p, tile, head, row, tile.key());
      row += Shape::kBlockM;
      if (row >= tile.template rows_end<typename Spec::Mask, Shape::kPacked>(p)) row = tile.first_row(), ++head;
    }
    ptx::mbarrier_wait(barriers.ds_empty(ds.stage), ds.parity ^ 1);
    const FragmentPlace<TileDs> place(shared + Shape::kOffsetDs + ds.stage * TileDs::kBytes + own_warp_row() * 128);
#pragma unroll
    for (unsigned step = 0; step < 4; ++step) ptx::stmatrix_x4(place.at(step), gradients[step]);
    ptx::async_proxy_fence();
    ptx::warp_sync();
    if (Base::first_lane()) ptx::mbarrier_arrive(barriers.ds_full(ds.stage));
    ds.next();
  }

  __device__ __forceinline__ void run() {
#pragma unroll
    for (float& x : dk) x = 0;
    if constexpr (Shape::kDbias) row = tile.first_row(), head = tile.head_k() * p.call.group;
    ptx::mbarrier_wait(barriers.v_full(), 0);
    ptx::pin(dk);
    issue_dp();
    Base::next_issued();
    ptx::wgmma_wait<0>();
    ptx::pin(dp);
    Watch<Spec>{tile}.choose([&] { blocks_carefully(); }, [&] { blocks(); });
    ptx::pin(dk);
    ptx::mbarrier_wait(barriers.k_done(), 0);
    store_gradient<Spec, TileK, true, Spec::kHeaddim>(dk, p, tile, shared, 0, 3);
    if (threadIdx.x % 128 == 0) ptx::bulk_wait_read<0>();
  }
  // All blocks of a tile that meets Inf or NaN, one after the other.
  __device__ __forceinline__ void blocks_carefully() {
    int left = Base::steps();
#pragma unroll 1
    for (;;) {
      differentiate<true>();
      publish();
      issue_dk();
      ptx::wgmma_wait<0>();
      ptx::pin(dk);
      ptx::pin(gradients);
      if (Base::first_lane()) ptx::mbarrier_arrive(barriers.q_empty(last.stage));
      if (--left == 0) break;
      issue_dp();
      Base::next_issued();
      ptx::wgmma_wait<0>();
      ptx::pin(dp);
    }
    if (Base::first_lane()) ptx::mbarrier_arrive(barriers.v_done());
  }
  // All blocks, from the first one's dP on; dk is there on return.
  __device__ __forceinline__ void blocks() {
    differentiate<false>();
    publish();
#pragma unroll 1
    for (int left = Base::steps(); --left > 0;) {
      const unsigned free = last.stage;
      issue_dk();
      issue_dp();
      Base::next_issued();
      ptx::wgmma_wait<1>();  // dK: dS of the next block may take its operand's registers
      ptx::pin(gradients);
      if (Base::first_lane()) ptx::mbarrier_arrive(barriers.q_empty(free));
      ptx::wgmma_wait<0>();
      ptx::pin(dp);
      differentiate<false>();
      publish();
    }
    if (Base::first_lane()) ptx::mbarrier_arrive(barriers.v_done());
    issue_dk();
    ptx::wgmma_wait<0>();
  }
};

}  // namespace fattn::v3
