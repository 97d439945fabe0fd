// The warpgroup that computes S, P and dv of the CTA's keys (v3/backward_roles.h).
#pragma once

#include "kernels/v3/backward_roles.h"

namespace fattn::v3 {

template <class Spec>
struct ValueRole : RoleBase<Spec> {
  using Base = RoleBase<Spec>;
  using typename Base::Element;
  using typename Base::Mask;
  using typename Base::Shape;
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

  const float scale;  // own_scale()
  int row;            // the first of the block whose P is published next
  int head = 0;       // with terms: its query head
  [[no_unique_address]] MaskWord<Spec, Shape::kMask> mask;
  [[no_unique_address]] BiasOfPairs<Spec, Shape::kBias> bias;
  float s[32], dv[Spec::kHeaddimV / 2];
  unsigned weights[4][4];

  static constexpr bool kTerms = Shape::kMask || Shape::kBias != 0;
  // The bias of the first block, of all blocks: ptxas spilled 4 bytes otherwise.
  static constexpr bool kReadsLate = Shape::kBias == 2, kReadsAllLate = kReadsLate && Shape::kDbias;
  using Base::kWatches;

  __device__ __forceinline__ ValueRole(const BackwardCall& params, unsigned shared_address, BackwardBarriers<Spec> of, TilePlace of_keys)
      : Base(params, shared_address, of, of_keys), scale(own_scale<typename Spec::Score>(params.call)), row(of_keys.first_row()) {}

  __device__ __forceinline__ void issue_s() {
    ptx::mbarrier_wait(barriers.q_full(queries.stage), queries.parity);
    ptx::wgmma_fence();
    Base::template issue_scores<TileK, TileQ, Spec::kHeaddim>(s, 0, Shape::kOffsetQ);
  }
  __device__ __forceinline__ void issue_dv() {
    ptx::mbarrier_wait(barriers.dout_full(last.stage), last.parity);
    ptx::wgmma_fence();
    Base::template issue_sum<TileDout>(dv, weights, Shape::kOffsetDout);
  }
  // The exponentials of the block that S was issued for last; its queries are not needed any more. With softcap publish() does that.
  template <bool kCareful>
  __device__ __forceinline__ void weigh() {
    if constexpr (Spec::Score::kCapped) {
      Spec::Score::apply(s, p.call);
    } else {
      if constexpr (Shape::kBias != 0) {
        bias.template exponentials<kCareful>(s, lse_place(), scale, p, tile, head, row, tile.key());
      } else if constexpr (Shape::kAlibi) {
        if constexpr (Mask::kCausal && !Shape::kPacked) {
          exponentials_on_line(s, lse_place(), scale, {Mask{}, p.call, Base::keys(), slope(), tile.key(), row});
        } else {  // no registers for both ways
          const float of = slope(), distance = static_cast<float>(own_distance(p.call, Base::keys(), tile.key(), row));
#pragma unroll
          for (int i = 0; i < 32; i += 4) exponentials_of(s, i, lse_place(), scale, of, distance);
        }
      } else {
        RowValues lse;
        lse.read(lse_place());
        exponentials(s, lse, scale);
      }
      free_queries();
    }
  }
  __device__ __forceinline__ unsigned lse_place() const { return shared + Shape::kOffsetLse + last.stage * Shape::kRowBytes; }
  __device__ __forceinline__ float slope() const { return slope_of_block<Spec>(shared, last.stage); }
  __device__ __forceinline__ void free_queries() const {
    ptx::warp_sync();
    if (Base::first_lane()) ptx::mbarrier_arrive(barriers.q_empty(last.stage));
  }
  // Four of the thread's pairs, 4 i to 4 i + 3.
  static __device__ __forceinline__ void publish(unsigned to, int i, float a, float b, float c, float d) {
    ptx::st_shared_16(to + static_cast<unsigned>(2048 * i), uint4{__float_as_uint(a), __float_as_uint(b), __float_as_uint(c), __float_as_uint(d)});
  }
  // The same of capped scores t, which become P while P (1 - t^2) leaves: there are no registers for both.
  __device__ __forceinline__ void publish_capped(unsigned to) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float slope[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) slope[e] = __fmaf_rn(-s[4 * i + e], s[4 * i + e], 1.0f);
      if constexpr (Shape::kAlibi)
        exponentials_of(s, 4 * i, lse_place(), scale, this->slope(), static_cast<float>(own_distance(p.call, Base::keys(), tile.key(), row)));
      else
        exponentials_of(s, 4 * i, lse_place(), scale);
      publish(to, i, s[4 * i] * slope[0], s[4 * i + 1] * slope[1], s[4 * i + 2] * slope[2], s[4 * i + 3] * slope[3]);
    }
    free_queries();
    const auto take_away = [&](int i) {
      s[i] = kHiddenWeight;
      ptx::st_shared_4(to + static_cast<unsigned>(2048 * (i / 4) + 4 * (i % 4)), __float_as_uint(kHiddenWeight));
    };
    if (hides_some()) for_each_hidden<Mask>(p, Base::keys(), tile.key(), row, take_away);
    mask.for_each_hidden(take_away);
  }
  // Terms of the block whose P is published next. kLate: weigh() reads a bias.
  template <bool kLate>
  __device__ __forceinline__ void read_terms() {
    if constexpr (Shape::kMask) mask.read(p, tile.batch(), head, row, tile.key());
    if constexpr (Shape::kBias != 0 && !kLate) bias.read(p, tile, head, row, tile.key());
  }
  __device__ __forceinline__ bool hides_some() const {
    if constexpr (Shape::kPacked || Shape::kDocuments)
      return tile.hides(0, row);
    else
      return hides<Mask>(p, Base::keys(), tile.key(), row);
  }
  __device__ __forceinline__ void hide_some() {
    if constexpr (Shape::kDocuments) {
      hide<typename Mask::Pairs>(s, p, Base::keys(), tile.key(), row);
      hide_other_documents<Spec>(s, p, tile.template entry<Shape::kPacked>(), tile.key(), row);
    } else {
      for_each_hidden<Mask>(p, Base::keys(), tile.key(), row, [&](int i) { s[i] = kHiddenWeight; });
    }
  }
  // P of the block, for dS: before it is rounded. With softcap P (1 - t^2), t the capped scores. kCareful: the tile meets Inf or NaN
  // (v3/backward_watch.h).
  template <bool kCareful>
  __device__ __forceinline__ void publish() {
    if constexpr (!Spec::Score::kCapped)
      if (hides_some()) hide_some();
    mask.hide(s);
    if constexpr (kCareful) Base::take_nonfinite_out();
    if constexpr (kCareful && Shape::kDropout) {
#pragma unroll
      for (float& x : s)
        if (__float_as_uint(x) == 0) x = __uint_as_float(kNoWeight);
    }
    if constexpr (Shape::kDropout) mark_dropped(s, KeptBits<Spec>{shared, barriers}.take(0, p_place.parity));
    ptx::mbarrier_wait(barriers.p_empty(), p_place.parity ^ 1);
    const unsigned to = Base::own_weights();
    if constexpr (Spec::Score::kCapped) {
      publish_capped(to);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) publish(to, i, s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3]);
    }
    ptx::warp_sync();
    if (Base::first_lane()) ptx::mbarrier_arrive(barriers.p_full());
    p_place.next();
    row += Shape::kBlockM;
    if (row >= tile.template rows_end<Mask, Shape::kPacked>(p)) {
      row = tile.first_row();  // of the next query head
      if constexpr (kTerms) ++head;
    }
  }
  // dV of the block in stage `free`: P of the next block may take its operand's registers.
  __device__ __forceinline__ void values_done(unsigned free) {
    ptx::wgmma_wait<0>();
    ptx::pin(weights);
    if (Base::first_lane()) ptx::mbarrier_arrive(barriers.dout_empty(free));
  }
  // P for dV.
  __device__ __forceinline__ void round() {
    pack<Element>(weights, s);
    if constexpr (Shape::kDropout) drop_marked(weights);
    ptx::pin(weights);
  }

  __device__ __forceinline__ void run() {
#pragma unroll
    for (float& x : dv) x = 0;
    if constexpr (kTerms) {
      head = tile.head_k() * p.call.group;
      if constexpr (Shape::kMask) ptx::wait_for_kernel_before();  // which makes words of it
      read_terms<kReadsLate>();
    }
    ptx::mbarrier_wait(barriers.k_full(), 0);
    ptx::pin(dv);
    issue_s();
    Base::next_issued();
    ptx::wgmma_wait<0>();
    ptx::pin(s);
    Watch<Spec>{tile}.choose([&] { blocks_carefully(); }, [&] { blocks(); });
    ptx::pin(dv);
    ptx::mbarrier_wait(barriers.v_done(), 0);
    store_gradient<Spec, TileV, false, Spec::kHeaddimV>(dv, p, tile, shared + Shape::kOffsetV, 0, 2);
    if (threadIdx.x % 128 == 0) ptx::bulk_wait_read<0>();
  }
  // All blocks of a tile that meets Inf or NaN, one after the other: small before fast.
  __device__ __forceinline__ void blocks_carefully() {
#pragma unroll 1
    for (int left = Base::steps();;) {
      weigh<true>();
      publish<true>();
      round();
      issue_dv();
      values_done(last.stage);
      if (--left == 0) return;
      ptx::pin(dv);
      read_terms<true>();
      issue_s();
      Base::next_issued();
      ptx::wgmma_wait<0>();
      ptx::pin(s);
    }
  }
  // All blocks, from the first one's scores on; dv is there on return.
  __device__ __forceinline__ void blocks() {
    weigh<kReadsLate>();
    publish<false>();
    round();
#pragma unroll 1
    for (int left = Base::steps(); --left > 0;) {
      const unsigned free = last.stage;
      read_terms<kReadsAllLate>();
      issue_s();
      issue_dv();
      Base::next_issued();
      ptx::wgmma_wait<1>();
      ptx::pin(s);
      if constexpr (Spec::Score::kCapped) values_done(free);  // the cap wants those registers
      weigh<kReadsAllLate>();
      publish<false>();
      if constexpr (!Spec::Score::kCapped) values_done(free);
      round();
    }
    issue_dv();
    ptx::wgmma_wait<0>();
  }
};

}  // namespace fattn::v3
