// A warpgroup that computes dk and dv of 64 keys of its own. Both, and one block's scores, stay in its registers:
//   S^T = K Q^T    P^T = exp2(S^T scale - lse)    dP^T = V dO^T    dS^T = P^T (dP^T - row_sum)    dV += P^T dO    dK += dS^T Q
// dS^T also goes to shared memory, for dq. What runs on the tensor cores meanwhile is in brackets; j is the block:
//   dV(j-1) awaited | dS(j-1) | dS(j-1) to shared memory | S(j), dK(j-1) issued | S(j) awaited | P(j) [dK(j-1)] | dP(j), dV(j) issued | dP(j) awaited
// Registers of a product under way are not touched. With headdim 64 and 3 warpgroups they are 144, with 128 and 2 208, of which the sums, a block's
// scores and two operands take all but 16: hence row sums start dP instead of being subtracted, and rings take one register.
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

template <class Spec>
struct KeyGradients {
  using Shape = BackwardShape<Spec>;
  using Element = typename Spec::Element;
  using Mask = typename Spec::Mask;
  using TileK = typename Shape::TileK;
  using TileV = typename Shape::TileV;
  using TileQ = typename Shape::TileQ;
  using TileDout = typename Shape::TileDout;
  using TileDs = typename Shape::TileDs;

  // Keys of other warpgroups may be seen by blocks of queries behind the last that sees one of this.
  static constexpr bool kSkipsBehind = Mask::kBegins && Shape::kKeyGroups > 1 && !Shape::kPacked;
  // Of packed sequences: the tile says what it hides, and 64 keys behind the last compute nothing. Softcap and dropout leave no registers for that.
  static constexpr bool kLimits = Shape::kPacked && !Spec::Score::kCapped && !Shape::kDropout;
  // Others: 64 keys behind seqlen_k, which tiles of 192 have at every power of two. One H200, headdim 64, no mask, time with them computed over time
  // without: seqlen 512 1.065, 1024 1.076, 2048 1.017, 4096 1.018. Tiles of 128 keys have them at odd multiples of 64 alone.
  static constexpr bool kEndsEarly = !Shape::kPacked && Shape::kKeyGroups == 3;
  static constexpr bool kDocuments = Shape::kDocuments;
  static constexpr bool kWatches = Watch<Spec>::kWatches;

  const BackwardCall& p;
  unsigned shared;
  BackwardBarriers<Spec> barriers;
  TilePlace tile;
  const int group;    // of the CTA's
  const float scale;  // own_scale()

  float s[32], dp[32];
  float dk[Spec::kHeaddim / 2], dv[Spec::kHeaddimV / 2];
  unsigned weights[4][4];  // P^T, A operand of dV
  // What keep_rest() keeps of P^T (with softcap keep_slopes(), with dropout P^T itself), then dS^T, A operand of dK.
  unsigned gradients[4][4];
  unsigned kept;  // with dropout: which of the block's pairs stay
  RowValues lse;
  TightRing<Spec::kStages> queries;  // and dout
  unsigned step = 0;                 // blocks whose dS is published
  int row = 0;                       // the present block's first
  [[no_unique_address]] MaskWord<Spec, Shape::kMask> mask;
  [[no_unique_address]] BiasOfPairs<Spec, Shape::kBias> bias;

  __device__ __forceinline__ KeyGradients(const BackwardCall& params, unsigned shared_address, BackwardBarriers<Spec> of, TilePlace of_keys,
                                          int own_group)
      : p(params), shared(shared_address), barriers(of), tile(of_keys), group(own_group), scale(own_scale<typename Spec::Score>(params.call)) {}

  // Of dS, lse and row sums of the present block.
  __device__ __forceinline__ unsigned slot() const { return step % Shape::kStagesDs; }
  __device__ __forceinline__ int key() const { return tile.key() + 64 * group; }
  __device__ __forceinline__ auto keys() const { return tile.keys<Shape::kLengths, Shape::kPacked>(); }  // of the batch entry

  // --- products, of the whole warpgroup ---

  template <class TileA, class TileB, int kWidth, bool kAccumulate>
  __device__ __forceinline__ void issue_scores(float (&d)[32], int offset_a, int offset_b) {
    const unsigned a = ptx::wgmma_descriptor(shared + static_cast<unsigned>(offset_a + 64 * 128 * group), 0);
    const unsigned b = ptx::wgmma_descriptor(shared + static_cast<unsigned>(offset_b), 0) + queries.stage() * (TileB::kBytes / 16);
    if constexpr (!kAccumulate) ptx::forget(d);
    tile::for_each<0, kWidth / 16>([&](auto step) {
      constexpr int kStep = decltype(step)::value;
      ptx::wgmma<Element, (kAccumulate || kStep > 0)>(d, a + TileA::step(kStep), b + TileB::step(kStep));
    });
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void issue_s() { issue_scores<TileK, TileQ, Spec::kHeaddim, false>(s, 0, Shape::kOffsetQ); }
  __device__ __forceinline__ void issue_dp() { issue_scores<TileV, TileDout, Spec::kHeaddimV, true>(dp, Shape::kOffsetV, Shape::kOffsetDout); }

  template <class TileB, int kCount>
  __device__ __forceinline__ void issue_sum(float (&d)[kCount], const unsigned (&a)[4][4], int offset_b, unsigned stage) {
    const unsigned b = ptx::wgmma_descriptor(shared + static_cast<unsigned>(offset_b), TileB::kColumnBytes) + stage * (TileB::kBytes / 16);
#pragma unroll
    for (int step = 0; step < 4; ++step) ptx::wgmma<Element, true, ptx::Major::kOther>(d, a[step], b + static_cast<unsigned>(step * 128));
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void issue_dv() { issue_sum<TileDout>(dv, weights, Shape::kOffsetDout, queries.stage()); }
  __device__ __forceinline__ void issue_dk(unsigned stage) { issue_sum<TileQ>(dk, gradients, Shape::kOffsetQ, stage); }

  // --- what a block goes through ---

  __device__ __forceinline__ unsigned take_kept() const { return KeptBits<Spec>{shared, barriers}.take(group, step); }
  __device__ __forceinline__ unsigned lse_place() const { return shared + Shape::kOffsetLse + slot() * Shape::kRowBytes; }
  __device__ __forceinline__ float slope() const { return slope_of_block<Spec>(shared, slot()); }
  __device__ __forceinline__ AlibiLine line() const { return {Mask{}, p.call, keys(), slope(), key(), row}; }
  __device__ __forceinline__ void read_lse() {
    if constexpr (!Spec::Score::kCapped && !Shape::kAlibi && Shape::kBias == 0) lse.read(lse_place());
  }
  template <bool kCareful>
  __device__ __forceinline__ void take_exponentials();
  __device__ __forceinline__ void take_each_exponential();
  __device__ __forceinline__ void take_capped();
  __device__ __forceinline__ bool hides_some() const {
    if constexpr (kLimits || kDocuments)
      return tile.hides(group, row);
    else
      return hides<Mask>(p, keys(), key(), row);
  }
  __device__ __forceinline__ void hide_in(float (&x)[32]) {
    if constexpr (kDocuments) {
      if (!hides_some()) return;
      hide<typename Mask::Pairs>(x, p, keys(), key(), row);
      hide_other_documents<Spec>(x, p, tile.entry<Shape::kPacked>(), key(), row);
    } else {
      if (hides_some()) hide<Mask>(x, p, keys(), key(), row);
    }
    mask.hide(x);
  }

  __device__ __forceinline__ unsigned q_tile() const { return shared + Shape::kOffsetQ + queries.stage() * TileQ::kBytes; }
  __device__ __forceinline__ unsigned dout_tile() const { return shared + Shape::kOffsetDout + queries.stage() * TileDout::kBytes; }
  // Takes Inf and NaN out of the block, whose dout has come, if the tile meets some in q or dout.
  __device__ __forceinline__ void take_nonfinite_out() const {
    if (!Watch<Spec>{tile}.queries_careful()) return;
    ptx::mbarrier_wait(barriers.q_full(queries.stage()), queries.parity());
    ptx::mbarrier_wait(barriers.dout_full(queries.stage()), queries.parity());
    clear_block<Element, TileQ, TileDout>(q_tile(), dout_tile(), static_cast<int>(threadIdx.x) - 128, 128 * Shape::kKeyGroups);
  }

  // dK of the block before, whose operand gives its registers back.
  __device__ __forceinline__ void end_dk() {
    ptx::wgmma_wait<0>();
    ptx::pin(gradients);
  }

  template <bool kCareful>
  __device__ __forceinline__ void weigh();
  template <bool kCareful>
  __device__ __forceinline__ void differentiate();
  __device__ __forceinline__ void write_ds() {
    ptx::mbarrier_wait(barriers.ds_empty(slot()), (step / Shape::kStagesDs & 1) ^ 1);
    const unsigned rows = shared + Shape::kOffsetDs + slot() * TileDs::kBytes + (static_cast<unsigned>(64 * group) + own_warp_row()) * 128;
    const FragmentPlace<TileDs> place(rows);
#pragma unroll
    for (unsigned step = 0; step < 4; ++step) ptx::stmatrix_x4(place.at(step), gradients[step]);
  }
  __device__ __forceinline__ void publish_ds() {
    ptx::async_proxy_fence();
    ptx::warp_sync();
    if (own_lane() == 0) ptx::mbarrier_arrive(barriers.ds_full(slot()));
    ++step;
  }
  __device__ __forceinline__ void next_block() {
    queries.next();
    row += Shape::kBlockM;
    if (row >= tile.rows_end<Mask, Shape::kPacked>(p)) row = tile.first_row();  // of the next query head
  }
  // The query head of block `index` of the tile.
  __device__ __forceinline__ int head(unsigned index) const {
    return tile.head_k() * p.call.group + (p.call.group == 1 ? 0 : static_cast<int>(index / static_cast<unsigned>(tile.blocks())));
  }

  // What is read of the present block's terms ahead of its scores; it is block `index` of the tile.
  __device__ __forceinline__ void read_mask(unsigned index) {
    if constexpr (Shape::kMask) mask.read(p, tile.batch(), head(index), row, key());
  }
  __device__ __forceinline__ void read_bias(unsigned index) {
    if constexpr (Shape::kBias != 0) bias.read(p, tile, head(index), row, key());
  }

  // The first blocks of the tile, in which no query sees a key of the warpgroup. There remains one block at least.
  __device__ __forceinline__ int hidden_before() const {
    return min(tile.blocks() - 1, (Mask::first_row(p.call, keys(), key()) - tile.first_row()) / Shape::kBlockM);
  }
  // Steps up to the last block of the last query head in which some query sees a key of the warpgroup.
  __device__ __forceinline__ int steps() const {
    const int all = tile.blocks() * p.call.group;
    if constexpr (kSkipsBehind) {
      const int end = row_end<Mask>(p.call, keys(), min(key() + 63, keys().count(p.call) - 1));
      const int hidden = (tile.first_row() + tile.blocks() * Shape::kBlockM - end) / Shape::kBlockM;
      return all - max(0, min(hidden, tile.blocks() - 1 - max(0, hidden_before())));
    }
    return all;
  }
  // Blocks whose dS is 0.
  __device__ __forceinline__ void skip_blocks(int count) {
#pragma unroll
    for (int i = 0; i < 16; ++i) gradients[i / 4][i % 4] = 0x80008000u;  // as of hidden pairs
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      if constexpr (Shape::kDropout) take_kept();
      if constexpr (kWatches) take_nonfinite_out();
      write_ds();
      publish_ds();
      next_block();
    }
  }

  __device__ __forceinline__ void run() {
    row = tile.first_row();
    if constexpr (kLimits)
      if (key() >= keys().keys) return skip_blocks(tile.blocks() * p.call.group);  // not there
    if constexpr (kEndsEarly)
      if (key() >= p.call.seqlen_k) return skip_blocks(tile.blocks() * p.call.group);
    if constexpr (Shape::kMask) ptx::wait_for_kernel_before();  // which makes words of it
    if constexpr (Mask::kUneven) skip_blocks(hidden_before());
    read_mask(step);
    read_bias(step);
#pragma unroll
    for (float& x : dk) x = 0;
#pragma unroll
    for (float& x : dv) x = 0;
    ptx::mbarrier_wait(barriers.k_full(), 0);
    ptx::mbarrier_wait(barriers.q_full(queries.stage()), queries.parity());
    ptx::pin(dk);
    ptx::pin(dv);
    ptx::wgmma_fence();
    issue_s();
    ptx::mbarrier_wait(barriers.v_full(), 0);
    read_lse();
    ptx::wgmma_wait<0>();
    ptx::pin(s);
    const Watch<Spec> watch{tile};
    if constexpr (kWatches && Shape::kBias == 0 && !Shape::kAlibi) {
      weigh<true>();
      watch.choose([&] { blocks_carefully(); }, [&] { blocks(); });
    } else {  // the others have no registers to weigh before it is known whether all is finite
      const auto carefully = [&] {
        weigh<true>();
        blocks_carefully();
      };
      watch.choose(carefully, [&] {
        weigh<false>();
        blocks();
      });
    }
    ptx::pin(dk);
    ptx::pin(dv);
    if constexpr (kSkipsBehind) skip_blocks(tile.blocks() * p.call.group - static_cast<int>(step));
    store();
  }
  // As blocks(), of a tile that meets Inf or NaN: one product after the other, small before fast.
  __device__ __forceinline__ void blocks_carefully() {
    // Addresses of its own: else ptxas holds in registers what this and blocks() have in common.
    const unsigned of_all = shared, of_barriers = barriers.first, of_tile = tile.address;
    shared = ptx::opaque(of_all);
    barriers.first = ptx::opaque(of_barriers);
    tile.address = ptx::opaque(of_tile);
    walk_carefully();
    shared = of_all;
    barriers.first = of_barriers;
    tile.address = of_tile;
  }
  __device__ __forceinline__ void walk_carefully() {
#pragma unroll 1
    for (;;) {
      differentiate<true>();
      write_ds();
      ptx::wgmma_fence();
      issue_dk(queries.stage());
      publish_ds();
      ptx::wgmma_wait<0>();
      ptx::pin(dk);
      ptx::pin(gradients);
      if (static_cast<int>(step) >= steps()) return;
      next_block();
      read_mask(step);
      if constexpr (!BiasOfPairs<Spec, Shape::kBias>::kReadsItself) read_bias(step);
      ptx::mbarrier_wait(barriers.q_full(queries.stage()), queries.parity());
      ptx::wgmma_fence();
      issue_s();
      read_lse();
      ptx::wgmma_wait<0>();
      ptx::pin(s);
      weigh<true>();
    }
  }
  // All blocks, but what was done of the first; the sums are there on return.
  __device__ __forceinline__ void blocks() {
#pragma unroll 1
    while (static_cast<int>(step) + 1 < steps()) {  // under way: dV of the block before
      if constexpr (Shape::kMask) {
        next_block();
        read_mask(step + 1);
      }
      differentiate<false>();
      write_ds();
      if constexpr (!Shape::kMask) next_block();
      read_bias(step + 1);  // into registers that dP has had
      ptx::mbarrier_wait(barriers.q_full(queries.stage()), queries.parity());
      ptx::wgmma_fence();
      issue_s();
      issue_dk(queries.last());
      publish_ds();
      read_lse();
      ptx::wgmma_wait<1>();
      ptx::pin(s);
      weigh<false>();
    }
    differentiate<false>();
    write_ds();
    publish_ds();
    ptx::wgmma_fence();
    issue_dk(queries.stage());
    ptx::wgmma_wait<0>();
  }
  __device__ __forceinline__ void store() {
    // Only this warpgroup read its rows of V; those of K are read for dq too.
    const unsigned values = shared + Shape::kOffsetV;
    // With Inf or NaN in q or dout dv waits until dk gives its registers back.
    const auto careful = [&] {
      if constexpr (kWatches) return Watch<Spec>{tile}.queries_careful();
      return false;
    };
    write_tile<Spec, TileV, false, Spec::kHeaddimV>(dv, p, values, 64 * group);
    if (!careful()) store_tile<Spec, TileV, false>(p, tile, values, 64 * group, 2 + group);
    ptx::mbarrier_wait(barriers.k_done(), 0);
    write_tile<Spec, TileK, true, Spec::kHeaddim>(dk, p, shared, 64 * group);
    if constexpr (kWatches)
      if (careful()) [[unlikely]] {
#pragma unroll 1
        for (int is_dk = 0; is_dk < 2; ++is_dk) take_nonfinite<Spec>(p, tile, is_dk == 0 ? values : shared, 64 * group, is_dk == 1);
        store_tile<Spec, TileV, false>(p, tile, values, 64 * group, 2 + group);
      }
    store_tile<Spec, TileK, true>(p, tile, shared, 64 * group, 2 + group);
    if (threadIdx.x % 128 == 0) ptx::bulk_wait_read<0>();
  }
};

}  // namespace fattn::v3
