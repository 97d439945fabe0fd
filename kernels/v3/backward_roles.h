// Two warpgroups that compute dv and dk of the CTA's 64 keys, for heads so wide that the registers of one do not hold both. One has
//   S^T = K Q^T    P^T = exp2(S^T scale - lse)    dV += P^T dO
// and leaves P in fp32 in shared memory to the other:
//   dP^T = V dO^T    dS^T = P^T (dP^T - row_sum)    dK += dS^T Q
// In brackets what runs on the tensor cores meanwhile; j is the block:
//   values  S(j), dV(j-1) issued | S(j) awaited | P(j), to shared memory [dV(j-1)] | dV(j-1) awaited
//   keys    dK(j-1), dP(j) issued | dK(j-1) awaited [dP(j)] | dP(j) awaited | dS(j) from P(j), to shared memory
// dK goes before dP because the queries of a block are held longest, from its S to its dK, and there are only two stages of them.
#pragma once

#include "kernels/ptx/wgmma.h"
#include "kernels/tile/for_each.h"
#include "kernels/v3/backward_alibi.h"
#include "kernels/v3/backward_careful.h"
#include "kernels/v3/backward_documents.h"
#include "kernels/v3/backward_dropout.h"
#include "kernels/v3/backward_fragments.h"
#include "kernels/v3/backward_schedule.h"
#include "kernels/v3/backward_shape.h"
#include "kernels/v3/backward_store.h"
#include "kernels/v3/backward_terms.h"
#include "kernels/v3/backward_watch.h"
#include "kernels/v3/ring.h"

namespace fattn::v3 {

// With dropout in place of a weight of 0, whose sign may say that it is dropped: -0 is of hidden pairs. It rounds to 0.
inline constexpr unsigned kNoWeight = 1;

// What both have: scores of the tile's rows (K or V) with a block's (Q or dO), and a sum over the queries of a block of the other tile.
template <class Spec>
struct RoleBase {
  using Shape = BackwardShape<Spec>;
  using Element = typename Spec::Element;
  using Mask = typename Spec::Mask;
  using TileDs = typename Shape::TileDs;

  const BackwardCall& p;
  const unsigned shared;
  const BackwardBarriers<Spec> barriers;
  const TilePlace tile;

  Ring<Spec::kStages> queries, last;  // of the present block and of the one before
  Ring<1> p_place;                    // of P of the block that is published next

  __device__ __forceinline__ RoleBase(const BackwardCall& params, unsigned shared_address, BackwardBarriers<Spec> of, TilePlace of_keys)
      : p(params), shared(shared_address), barriers(of), tile(of_keys) {}

  __device__ __forceinline__ int steps() const { return tile.blocks() * p.call.group; }
  __device__ __forceinline__ bool first_lane() const { return own_lane() == 0; }
  __device__ __forceinline__ auto keys() const { return tile.keys<Shape::kLengths, Shape::kPacked>(); }  // of the batch entry

  static constexpr bool kWatches = Watch<Spec>::kWatches;
  // Takes Inf and NaN out of the block, if the tile meets some in q or dout. By both roles, behind S and dP of the block, before it is published.
  __device__ __forceinline__ void take_nonfinite_out() const {
    if (!Watch<Spec>{tile}.queries_careful()) return;
    ptx::mbarrier_wait(barriers.q_full(last.stage), last.parity);  // what this thread has not seen of it yet
    ptx::mbarrier_wait(barriers.dout_full(last.stage), last.parity);
    clear_block<Element, typename Shape::TileQ, typename Shape::TileDout>(q_tile(), dout_tile(), static_cast<int>(threadIdx.x) - 128, 256);
  }
  __device__ __forceinline__ unsigned q_tile() const { return shared + static_cast<unsigned>(Shape::kOffsetQ) + last.stage * Shape::TileQ::kBytes; }
  __device__ __forceinline__ unsigned dout_tile() const {
    return shared + static_cast<unsigned>(Shape::kOffsetDout) + last.stage * Shape::TileDout::kBytes;
  }

  template <class TileA, class TileB, int kWidth>
  __device__ __forceinline__ void issue_scores(float (&d)[32], int offset_a, int offset_b) const {
    const unsigned a = ptx::wgmma_descriptor(shared + static_cast<unsigned>(offset_a), 0);
    const unsigned b = ptx::wgmma_descriptor(shared + static_cast<unsigned>(offset_b), 0) + queries.stage * (TileB::kBytes / 16);
    ptx::forget(d);
    tile::for_each<0, kWidth / 16>([&](auto step) {
      constexpr int kStep = decltype(step)::value;
      ptx::wgmma<Element, (kStep > 0)>(d, a + TileA::step(kStep), b + TileB::step(kStep));
    });
    ptx::wgmma_commit();
  }
  // In two halves, if one instruction would take more registers than a thread has at launch, which is what ptxas allows it.
  template <class TileB, int kCount>
  __device__ __forceinline__ void issue_sum(float (&d)[kCount], const unsigned (&a)[4][4], int offset_b) const {
    const unsigned b = ptx::wgmma_descriptor(shared + static_cast<unsigned>(offset_b), TileB::kColumnBytes) + last.stage * (TileB::kBytes / 16);
    constexpr int kParts = kCount > 96 ? 2 : 1, kPart = kCount / kParts;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      float(&half)[kPart] = *reinterpret_cast<float(*)[kPart]>(&d[part * kPart]);
#pragma unroll
      for (int step = 0; step < 4; ++step)
        ptx::wgmma<Element, true, ptx::Major::kOther>(half, a[step],
                                                      b + static_cast<unsigned>(part * (kPart / 32) * (TileB::kColumnBytes / 16) + step * 128));
    }
    ptx::wgmma_commit();
  }

  // P is exchanged in the order of registers, because the same thread of the other warpgroup takes it: s[4 i ..] is 2048 i bytes further.
  __device__ __forceinline__ unsigned own_weights() const { return shared + Shape::kOffsetP + ptx::opaque(threadIdx.x) % 128 * 16; }
  __device__ __forceinline__ void next_issued() {
    last = queries;
    queries.next();
  }
};

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
