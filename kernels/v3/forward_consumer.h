// A consumer warpgroup: 64 rows of queries, whose scores, weights and output stay in registers. One block of keys follows the other, across tiles:
// while the weights of one block are computed, the tensor cores multiply those of the block before with v.
#pragma once

#include "device_abi/lowest.h"
#include "kernels/ptx/async_proxy.h"
#include "kernels/ptx/barrier.h"
#include "kernels/ptx/special_registers.h"
#include "kernels/ptx/stmatrix.h"
#include "kernels/ptx/wgmma.h"
#include "kernels/tile/for_each.h"
#include "kernels/v3/alibi.h"
#include "kernels/v3/block_order.h"
#include "kernels/v3/dropout_bits.h"
#include "kernels/v3/forward_mask_words.h"
#include "kernels/v3/forward_shape.h"
#include "kernels/v3/forward_terms.h"
#include "kernels/v3/hidden_values.h"
#include "kernels/v3/schedule.h"
#include "kernels/v3/scores_again.h"
#include "kernels/v3/softmax.h"
#include "kernels/v3/store_row.h"
#include "kernels/v3/tiles_of_cta.h"

namespace fattn::v3 {

using tile::for_each;

// Named barriers: 1 to kGroups are turns, from kOwnBarrier on one for each warpgroup by itself.
inline constexpr int kOwnBarrier = 8;
inline constexpr int kMostBlocks = 0x7fffffff;
// See Consumer::wildness.
inline constexpr int kWild = 4, kWildBefore = 12, kVeryWildBefore = 999, kVeryWild = 1000;

template <class Spec>
struct Consumer {
  using Shape = ForwardShape<Spec>;
  using Element = typename Spec::Element;
  using Mask = typename Spec::Mask;
  using Buffer = QueryBuffer<Spec::kQueryBuffers>;
  using Keys = typename KeysOf<Spec>::Type;
  using Kept = typename KeysOf<Spec>::Kept;
  static constexpr int kBlockN = Shape::kBlockN;
  static constexpr int kGroups = Shape::kGroups;
  static constexpr bool kTurns = Spec::kPingPong && kGroups > 1;
  static constexpr bool kJoin = Spec::kQueryBuffers == 2;  // a tile's first scores are computed beside the last product of the tile before
  static constexpr bool kAlibi = kPairOf<Spec>.alibi, kDropout = kPairOf<Spec>.dropout, kDocuments = kPairOf<Spec>.documents;
  // The tiles of a window are joined across blocks that the warpgroup passes over, if there is room for the values that it has not come to.
  static constexpr bool kJoinsPast = Shape::kSkipsBefore && kJoin && Spec::kStagesV > kGroups;
  static constexpr bool kTerms = kPairTerms<Spec>;  // which hide pairs anywhere
  static constexpr bool kStaged = kStagedTerms<Spec>, kMaskAlone = kTerms && !kStaged;
  static constexpr bool kNothingBehind = is_same<Mask, CausalMask>;  // its row
  // The widest heads have no register to spare beside documents, and with softcap or dropout still fewer. (Packed sequences leave some.)
  static constexpr bool kManyFeatures = kDropout || Spec::Score::kCapped;
  static constexpr bool kTightDocuments = kDocuments && Spec::kHeaddimV > 192 && !(kPairOf<Spec>.packed && kManyFeatures);
  static constexpr bool kTightest = kTightDocuments && kManyFeatures;
  // Whether keys are there is looked at early: that takes a register, which masks do not leave in fp16.
  static constexpr bool kLooksEarly = !(kTightest || (kMaskAlone && kGroups == 3 && kBlockN == 128 && is_same<Element, f16>));
  // Weights are packed when it is known that they stay: scores and packed weights do not fit beside random numbers.
  static constexpr bool kPacksLast =
      kDropout && (!kDocuments || kTightest) && !kTerms && (kGroups == 4 || Spec::kHeaddimV > 192 || (kAlibi && kBlockN == 128));
  // Weights that dominate are brought back by a factor. Softcap leaves four warpgroups no registers for it: they make scores again.
  static constexpr bool kScalesDominant = !(Spec::Score::kCapped && kGroups == 4);
  using Slope = v3::Slope<kAlibi>;
  using DropoutBits = v3::DropoutBits<Spec, kDropout>;
  using Terms = PairTerms<Spec, kStaged>;
  using Visible = VisiblePairs<Spec, kPairOf<Spec>.mask>;
  static_assert(!((kAlibi || kDropout) && Spec::Score::kCapped), "no registers");
  static_assert(!(kTerms && (kAlibi || kDropout || kDocuments || kPairOf<Spec>.packed || Mask::kBegins || Spec::Score::kCapped)), "not built");

  const ForwardCall& p;
  const unsigned shared;
  const Barriers<Spec> barriers;
  const int group;
  const float scale;
  const typename Spec::Score::template Curve<Element> curve;

  float s[kBlockN / 2];  // scores, then weights
  unsigned weights[kBlockN / 16][4];
  float o[Spec::kHeaddimV / 2];
  float factor[2];
  Softmax<Element, kBlockN> softmax;

  Ring<Spec::kStagesK> k;
  Ring<Spec::kStagesV> v;
  bool k_is_there = false;  // looked at early: the next block of keys has arrived
  // How wild the scores of the warp's rows are. Beyond kWild every block takes a maximum, which then costs less than to find weights that dominate.
  // Blocks whose maxima change nothing calm it down. From kVeryWildBefore on it stays to the end of the tile: weights are beyond all bounds in many
  // blocks. Capped scores are tanh itself from the first that left the curve to the tile's end: until then it is 0.
  int wildness = 0;
  int row = 0;    // the tile's first
  Kept keys;      // of the tile's batch entry
  int block = 0;  // whose weights are computed; under a mask of pairs counted from the tile's first
  Slope slope;    // of the tile's head

  DropoutBits bits;   // of the block whose weights are computed
  Terms terms;        // likewise
  Visible visible;    // likewise
  bool seen = false;  // with kStaged: each of the warp's rows has seen a key whose score is not that of a bias meant to hide (device_abi/lowest.h)

  // The scale in a register of its own: an operand of every exponential, it would be a uniform register, which costs issue slots. Three warpgroups
  // with blocks of 128 keys have none left beside a mask.
  __device__ __forceinline__ Consumer(const ForwardCall& params, unsigned shared_address, Barriers<Spec> of, int own_group)
      : p(params),
        shared(shared_address),
        barriers(of),
        group(own_group),
        scale(own_scale(params.call.softmax_scale_log2)),
        curve(Spec::Score::template curve<Element>(params.call)) {}

  static __device__ __forceinline__ float own_scale(float of_call) {
    if constexpr (kAlibi || (kMaskAlone && kGroups * kBlockN < 384))
      return __uint_as_float(__float_as_uint(of_call) + ptx::zero_of_lane());  // a uniform value is found out, exchanged or not
    return ptx::shfl(of_call, static_cast<int>(threadIdx.x) % 32);
  }

  // Where the thread is, found again at each call to keep registers free.
  static __device__ __forceinline__ int lane() { return ptx::opaque(static_cast<int>(threadIdx.x)) % 32; }
  // The warp's first row in the tile, and the lane's; its other one is 8 further.
  __device__ __forceinline__ int warp_row() const { return group * 64 + ptx::opaque(static_cast<int>(threadIdx.x)) / 32 % 4 * 16; }
  __device__ __forceinline__ int own_row() const { return warp_row() + lane() / 4; }
  __device__ __forceinline__ unsigned q_tile(unsigned buffer) const { return shared + buffer * Shape::kQueryBytes; }
  __device__ __forceinline__ unsigned k_tile(unsigned stage) const { return shared + Shape::kOffsetK + stage * Shape::TileK::kBytes; }

  // --- products, of the whole warpgroup ---

  // s = q k^T
  __device__ __forceinline__ void issue_scores(unsigned buffer) {
    ptx::forget(s);
    const unsigned a = ptx::wgmma_descriptor(shared + static_cast<unsigned>(group * 64 * 128), 0) + buffer * (Shape::kQueryBytes / 16);
    const unsigned b = ptx::wgmma_descriptor(shared + Shape::kOffsetK, 0) + k.stage * (Shape::TileK::kBytes / 16);
    for_each<0, Shape::kDepth>([&](auto step) {
      constexpr int kStep = decltype(step)::value;
      ptx::wgmma<Element, (kStep > 0)>(s, a + Shape::TileQ::step(kStep), b + Shape::TileK::step(kStep));
    });
    ptx::wgmma_commit();
  }
  // o += weights v
  __device__ __forceinline__ void issue_output() {
    const unsigned b = ptx::wgmma_descriptor(shared + Shape::kOffsetV, Shape::TileV::kColumnBytes) + v.stage * (Shape::TileV::kBytes / 16);
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step)
      ptx::wgmma<Element, true, ptx::Major::kOther>(o, weights[step], b + static_cast<unsigned>(step * 128));
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void wait_k() const {
    if (!k_is_there) ptx::mbarrier_wait(barriers.k_full(k.stage), k.parity);
  }
  __device__ __forceinline__ void wait_v() const {
    if constexpr (kHidesPairs<Spec>) ptx::mbarrier_wait(barriers.v_good(v.stage), v.parity);
    if constexpr (!kHidesPairs<Spec> || kStaged) ptx::mbarrier_wait(barriers.v_full(v.stage), v.parity);
  }
  // The blocks that the latest products read; the rings are one further already.
  __device__ __forceinline__ void free_k() const {
    if (lane() == 0) ptx::mbarrier_arrive(barriers.k_empty(k.last()));
  }
  __device__ __forceinline__ void free_v() const {
    if (lane() == 0) ptx::mbarrier_arrive(barriers.v_empty(v.last()));
  }
  // Where consumers do this: their last scores of the tile are done.
  __device__ __forceinline__ void free_queries(unsigned buffer) const {
    ptx::warp_sync();
    if (lane() == 0) ptx::mbarrier_arrive(barriers.q_empty(buffer, static_cast<unsigned>(group)));
  }
  __device__ __forceinline__ void wait_turn() const {
    if constexpr (kTurns) ptx::bar_sync(1 + group, 256);
  }
  __device__ __forceinline__ void pass_turn() const {
    if constexpr (kTurns) ptx::bar_arrive(1 + (group + 1 == kGroups ? 0 : group + 1), 256);
  }

  // Which weights of a block stay, if there is dropout: drawn while the tensor cores multiply.
  __device__ __forceinline__ void draw(int first_row, int of) { bits.draw(p.call, first_row + group * 64, of); }

  // The bias of a block, if there is one: read while the tensor cores multiply.
  __device__ __forceinline__ void read_terms() { terms.read(p, shared, barriers, warp_row(), lane()); }
  template <bool kExact>
  __device__ __forceinline__ void add_terms() {
    constexpr float kLn2 = 0.693147180559945309f;
    terms.template apply<kExact>(s, scale * kLn2);
  }
  // What scores are multiplied by in the exponential: after a bias they have their own scale.
  __device__ __forceinline__ float exponent_scale() const { return Terms::kAdds ? kLog2e : scale; }

  // Both products, in this warpgroup's turn.
  __device__ __forceinline__ void issue_products(unsigned buffer) {
    wait_k();
    wait_turn();
    ptx::pin(o);
    ptx::pin(weights);
    ptx::wgmma_fence();
    issue_scores(buffer);
    wait_v();
    ptx::wgmma_fence();  // ptxas puts one here in any case: a loop stands between the products
    issue_output();
    pass_turn();
    k.next();
    v.next();
    k_is_there = kLooksEarly && ptx::mbarrier_test(barriers.k_full(k.stage), k.parity);
  }
  // The scores are there; o is under way until output_done().
  __device__ __forceinline__ void scores_done() {
    products_done();
    Spec::Score::apply(s, p.call);
  }
  // The same, of q and k alone.
  __device__ __forceinline__ void products_done() {
    ptx::wgmma_wait<1>();
    ptx::pin(s);
  }
  __device__ __forceinline__ void output_done() {
    ptx::wgmma_wait<0>();
    ptx::pin(o);
    ptx::pin(weights);
    free_v();
  }

  // --- softmax, of each warp ---

  // Hides what the lane's rows do not see of block `of`. The branches are the warp's: most blocks that rows end in are none that they begin in.
  __device__ __forceinline__ void hide(int of) {
    of += visible.first_block(p);
    if constexpr (kMaskAlone) {  // in its words
      const int first = of * kBlockN + lane() % 4 * 2;
      visible.hide_behind(Mask::visible_end(p.call, keys, row + own_row()) - first, Mask::visible_end(p.call, keys, row + own_row() + 8) - first);
    } else if constexpr (kDocuments) {
      hide_other_documents(of);
      if (Mask::visible_end(p.call, keys, row + warp_row()) < (of + 1) * kBlockN) hide_behind(of);
    } else {
      hide_behind(of);
    }
    if constexpr (Mask::kBegins)
      if (Mask::visible_begin(p.call, keys, row + warp_row() + 15) > of * kBlockN) hide_before(of);
  }
  __device__ __forceinline__ void hide_by_words() {
    if constexpr (kPairOf<Spec>.mask) visible.hide(s, static_cast<unsigned>(pairs_of(p.call).tile_groups));  // which packed sequences have
  }
  __device__ __forceinline__ void hide_behind(int of) {
    const int first = of * kBlockN + lane() % 4 * 2;  // this lane's first key
    const int end0 = Mask::visible_end(p.call, keys, row + own_row()) - first, end1 = Mask::visible_end(p.call, keys, row + own_row() + 8) - first;
#pragma unroll
    for (int i = 0; i < kBlockN / 2; ++i)
      if (i / 4 * 8 + i % 2 >= (i % 4 < 2 ? end0 : end1)) s[i] = -kInfinity;
  }
  __device__ __forceinline__ void hide_before(int of) {
    const int first = of * kBlockN + lane() % 4 * 2;
    const int begin0 = Mask::visible_begin(p.call, keys, row + own_row()) - first,
              begin1 = Mask::visible_begin(p.call, keys, row + own_row() + 8) - first;
#pragma unroll
    for (int i = 0; i < kBlockN / 2; ++i)
      if (i / 4 * 8 + i % 2 < (i % 4 < 2 ? begin0 : begin1)) s[i] = -kInfinity;
  }
  // Keys of other documents than the row's.
  __device__ __forceinline__ void hide_other_documents(int of) {
    if (keys.one_begin <= of && of < keys.one_end) return;
    Keys found = keys;
    if constexpr (kTightest) found.entry = ptx::opaque(found.entry);  // addresses of its own ids are not kept
    const int id0 = found.id_of_query(p.call, row + own_row()), id1 = found.id_of_query(p.call, row + own_row() + 8);
    const int2* const ids = reinterpret_cast<const int2*>(found.ids_of_block(p.call, of)) + lane() % 4;
    if constexpr (kTightDocuments) {  // not all ids at once
      static_assert(kBlockN / 2 <= 32);
      unsigned hidden = 0;
#pragma unroll 1
      for (int n = kBlockN / 8 - 1; n >= 0; --n) {
        const int2 id = ids[n * 4];
        hidden = hidden << 4 | (id.x != id0 ? 1u : 0u) | (id.y != id0 ? 2u : 0u) | (id.x != id1 ? 4u : 0u) | (id.y != id1 ? 8u : 0u);
      }
#pragma unroll
      for (int i = 0; i < kBlockN / 2; ++i)
        if ((hidden & 1u << i) != 0) s[i] = -kInfinity;
    } else {
#pragma unroll
      for (int n = 0; n < kBlockN / 8; ++n) {
        const int2 id = ids[n * 4];
        if (id.x != id0) s[4 * n] = -kInfinity;
        if (id.y != id0) s[4 * n + 1] = -kInfinity;
        if (id.x != id1) s[4 * n + 2] = -kInfinity;
        if (id.y != id1) s[4 * n + 3] = -kInfinity;
      }
    }
  }
  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int i = 0; i < kBlockN / 4; ++i) weights[i / 4][i % 4] = ptx::pack2<Element>(s[2 * i], s[2 * i + 1]);
    bits.drop(weights);
  }
  __device__ __forceinline__ void rescale() {
#pragma unroll
    for (int i = 0; i < Spec::kHeaddimV / 2; ++i) o[i] *= factor[i >> 1 & 1];
  }

  // Whether each of the warpgroup's rows has seen a key: its warps multiply together, so none goes another way alone.
  __device__ __forceinline__ bool group_has_references() const {
    return ptx::bar_and(kOwnBarrier + group, 128, softmax.reference[0] != -kInfinity && softmax.reference[1] != -kInfinity);
  }

  // How far the lane's first key of block `of` is from the keys that its rows are aligned with.
  __device__ __forceinline__ void distances(float (&distance)[2], int of) const {
    const int away = of * kBlockN + slope.first;
    distance[0] = static_cast<float>(away);
    distance[1] = static_cast<float>(away - 8);
  }
  // References are found or raised, of the scores of block `of`, and weights made.
  template <bool kFirst>
  __device__ __forceinline__ bool update(int of) {
    if constexpr (kStaged) {
      const bool moved = softmax.template update<kFirst>(s, factor, exponent_scale());
      seen = ptx::vote_all(softmax.reference[0] > kLowestLse && softmax.reference[1] > kLowestLse);
      return moved;
    } else if constexpr (kAlibi) {
      float distance[2];
      distances(distance, of);
      add_alibi<kNothingBehind>(s, scale, slope.value, distance);
      return softmax.template update<kFirst>(s, factor, 1.0f);
    } else {
      return softmax.template update<kFirst, !Spec::Score::kCapped>(s, factor, scale);
    }
  }

  // A block that some row does not see whole, or with ALiBi one that the diagonal crosses: hidden scores, and a maximum. kWhole: all rows see it
  // whole, but for words of a mask.
  template <bool kBehind = false, bool kWhole = false>
  __device__ __forceinline__ void masked_block(unsigned buffer) {
    visible.read(p, block - 1);
    issue_products(buffer);
    draw(row, block - 1);
    if constexpr (kStaged) {
      read_terms();
      terms.free(barriers, lane());
    }
    scores_done();
    free_k();
    if constexpr (kStaged) add_terms<true>();
    if constexpr (Mask::kUneven && !kWhole)
      hide(block - 1);
    else if constexpr (kBehind)
      if (block * kBlockN > keys.count(p.call)) hide(block - 1);
    hide_by_words();
    const bool moved = update<false>(block - 1);
    output_done();
    if constexpr (kWhole)
      rescale_if(moved);
    else if (moved)
      rescale();
    pack();
  }
  __device__ __forceinline__ void calm_down() {
    if (!Spec::Score::kCapped && wildness < kVeryWildBefore) wildness = max(wildness - 1, 0);
  }
  // After a maximum.
  __device__ __forceinline__ void rescale_if(bool moved) {
    if (!moved) return calm_down();
    if (!kStaged && !ptx::vote_all(factor[0] > 0 && factor[1] > 0)) wildness = kVeryWild;  // with a bias rows may see their first key
    rescale();
  }
  // Whether a tile, or the rest of one, is to take maxima: the warps of a warpgroup multiply together, so none goes another way alone.
  __device__ __forceinline__ bool group_is_wild() const { return !ptx::bar_and(kOwnBarrier + group, 128, wildness <= kWild); }

  // Any other: no maximum, unless weights dominate their rows, or capped scores leave their curve. Where that happens again and again in a tile a
  // maximum of every block costs less (`wildness`). kBegins: a block in which rows begin to see keys; those
  // that see some of them have seen others. kBehind: all its keys are behind the rows, and ALiBi's terms fall from key to key.
  template <bool kBegins, bool kBehind = false>
  __device__ __forceinline__ void whole_block(unsigned buffer) {
    constexpr int kSplit = kBlockN / 2 * Spec::kEarlyEighths / 8 / 8 * 8;
    // As long as scores are far from softcap. Where a warp's were not in one block of a tile, they become tanh itself from then on.
    constexpr bool kByCurve = Spec::Score::kCapped && !kBegins;
    visible.read(p, block - 1);
    issue_products(buffer);
    draw(row, block - 1);
    if constexpr (kStaged) read_terms();
    if constexpr (kByCurve)
      products_done();
    else
      scores_done();
    if constexpr (kBegins && !kStaged) hide_before(block - 1);
    const bool careful = Spec::kCareful && (wildness > kWild || (kStaged && !seen));
    if constexpr (kStaged) {
      if (careful) [[unlikely]]
        add_terms<true>();
      else
        add_terms<false>();
      if constexpr (kBegins) hide_before(block - 1);
    }
    hide_by_words();
    bool moved = false;
    int inside = -1;
    [[maybe_unused]] float rise = 0, line[2];  // of the terms, less the references
    if constexpr (kAlibi) {
      rise = kBehind ? -slope.value : slope.value;
      distances(line, block - 1);
#pragma unroll
      for (int r = 0; r < 2; ++r) line[r] = fmaf(rise, line[r], -softmax.reference[r]);
    }
    const auto weigh = [&](auto from, auto to) {
      if constexpr (kByCurve)
        softmax.template weigh<decltype(from)::value, decltype(to)::value>(s, curve, inside);
      else if constexpr (kAlibi)
        softmax.template weigh<decltype(from)::value, decltype(to)::value>(s, scale, rise, line);
      else
        softmax.template weigh<decltype(from)::value, decltype(to)::value>(s, exponent_scale());
    };
    const bool by_tanh = kByCurve && wildness > 0;
    if (careful) [[unlikely]] {
      if constexpr (kByCurve) Spec::Score::apply(s, p.call);
      moved = update<false>(block - 1);
    } else if (by_tanh) [[unlikely]] {
      Spec::Score::apply(s, p.call);
    } else {
      weigh(tile::Constant<0>{}, tile::Constant<kSplit>{});
    }
    output_done();
    if (careful) [[unlikely]] {
      rescale_if(moved);
      pack();
    } else {
      if (by_tanh) [[unlikely]]
        softmax.template weigh<0, kBlockN / 2>(s, scale);
      else
        weigh(tile::Constant<kSplit>{}, tile::Constant<kBlockN / 2>{});
      if constexpr (!kPacksLast) pack();
      const bool good = !kByCurve || inside < 0;
      if (softmax.add(s, good)) [[likely]] {
      } else if (kScalesDominant && softmax.add_dominant(s, factor, good)) {
        rescale();
        if constexpr (!kPacksLast) pack();
        if (!Spec::Score::kCapped || wildness > 0) wildness += 2;
      } else {
        if (!Spec::Score::kCapped || by_tanh)
          wildness = kVeryWild;
        else if (!ptx::vote_all(good))
          wildness = 1;
        scores_again<Spec>(s, q_tile(buffer) + static_cast<unsigned>(warp_row() * 128), k_tile(k.last()), lane());
        Spec::Score::apply(s, p.call);
        if constexpr (kStaged) {
          terms.read_again(p, shared, warp_row(), lane());
          add_terms<true>();
        }
        visible.read(p, block - 1);  // again, which is cheaper than to keep them
        hide_by_words();
        if constexpr (kBegins) hide_before(block - 1);
        update<false>(block - 1);
        rescale();
        if constexpr (!kPacksLast) pack();
      }
      if constexpr (kPacksLast) pack();
    }
    free_k();  // only now: the way back reads it
    if constexpr (kStaged) terms.free(barriers, lane());
  }

  // Blocks that all rows see whole (kBegins: to the left), down to block `to`. Where registers are few a warp has no way of its own through a block:
  // the warpgroup finds out at the first of them, and once more some blocks later, whether it takes maxima.
  template <bool kBegins, bool kBehind = false>
  __device__ __forceinline__ void whole_blocks(unsigned buffer, int to) {
    if constexpr (Spec::kCareful || kBegins) {
#pragma unroll 1
      for (; block > to; --block) whole_block<kBegins, kBehind>(buffer);
    } else {
      int look = block, again = block - kWild;
#pragma unroll 1
      for (; block > to; --block) {
        if (block == look) {
          if (group_is_wild()) break;
          look = again;
          again = 0;
        }
        whole_block<kBegins, kBehind>(buffer);
      }
#pragma unroll 1
      for (; block > to; --block) masked_block<kBehind, true>(buffer);
    }
  }

  // --- tiles ---

  // Where the CTA's tile `nth` is, found again rather than kept in registers all the way.
  __device__ __forceinline__ auto place_at(int nth, int number) const { return tile_place<Spec>(p, shared, nth, number); }
  __device__ __forceinline__ int number_of(int nth) const { return tile_number<Spec>(p, shared, nth); }
  __device__ __forceinline__ auto place_again(int nth) const {
    const int again = ptx::opaque(nth);
    return place_at(again, number_of(again));
  }

  // Blocks of a tile that this warpgroup computes, from the last to the first: those that one of its rows sees, or all.
  __device__ __forceinline__ int own_blocks(int first_row, Keys of) const {
    if constexpr (Spec::kSkip && Mask::kUneven)
      return block_end<Mask, kBlockN>(p.call, of, first_row + group * 64, 64);
    else
      return block_end<Mask, kBlockN>(p.call, of, first_row, Shape::kBlockM);
  }
  __device__ __forceinline__ int first_of(int first_row, Keys of) const {
    return kFromDiagonal<Spec> ? first_block<Spec, Shape::kBlockM>(p.call, of, first_row) : own_blocks(first_row, of) - 1;
  }
  __device__ __forceinline__ int all_blocks(int first_row, Keys of) const { return block_end<Mask, kBlockN>(p.call, of, first_row, Shape::kBlockM); }
  __device__ __forceinline__ int own_begin(int first_row, Keys of) const {
    return block_begin<Mask, kBlockN>(p.call, of, Shape::kSkipsBefore ? first_row + group * 64 : first_row);
  }

  // Under a mask of pairs: what a tile begins with. Nothing of the tile before is asked for any more.
  template <class Place>
  __device__ __forceinline__ void look_at_mask(const Place& place, Keys of) {
    if constexpr (kMaskRanges<Spec>) {
      const int begin = own_begin(place.row, of);
      visible.begin(p, place, group, begin);
      block = own_blocks(place.row, of) - 1 - begin;
    }
  }
  __device__ __forceinline__ void look_at_mask_again(int nth) {
    if constexpr (kPairOf<Spec>.mask) {
      const auto place = place_again(nth);
      look_at_mask(place, keys_of_warp<Spec>(p.call, place, group, lane()));
    }
  }
  // The block that a tile begins with, as `block` counts.
  __device__ __forceinline__ int beginning(int first_row, Keys of) const { return kMaskRanges<Spec> ? block : first_of(first_row, of); }

  // The weights of the block that a tile begins with, from its scores.
  __device__ __forceinline__ void first_softmax(int first_row, Keys of, Slope of_head) {
    if constexpr (Spec::Score::kCapped)
      wildness = 0;
    else  // scores are like those of the tile before
      wildness = wildness == kVeryWild ? kVeryWildBefore : wildness > kWild && wildness < kVeryWildBefore ? kWildBefore : 0;
    row = first_row;
    keys = of;
    slope = of_head;
    if constexpr (kAlibi) slope.first = lane() % 4 * 2 - aligned_key(p.call, of, first_row + own_row());
    block = beginning(first_row, of);
    if constexpr (kStaged) add_terms<true>();
    if (Mask::kUneven || (!kPairOf<Spec>.mask && (block + 1) * kBlockN > keys.count(p.call))) hide(block);
    hide_by_words();
    update<true>(block);
    if constexpr (Spec::Score::kCapped)  // a maximum that near says that others leave the curve
      wildness = ptx::vote_all(curve.reaches(fmaxf(softmax.reference[0], softmax.reference[1]) - Window<Element>::kHeadroom)) ? 0 : 1;
  }
  __device__ __forceinline__ void clear_output() {
#pragma unroll
    for (int i = 0; i < Spec::kHeaddimV / 2; ++i) o[i] = 0;
  }

  // Passes over the blocks that none of the warpgroup's rows sees. A stage is waited for before it is freed: arrivals count for the right phase then.
  __device__ __forceinline__ void skip_blocks(int first_row, Keys of) {
    pass_over(all_blocks(first_row, of) - own_blocks(first_row, of));
    k_is_there = false;
  }
  __device__ __forceinline__ void pass_over(int count) {
#pragma unroll 1
    for (int skip = count; skip > 0; --skip) {
      ptx::mbarrier_wait(barriers.k_full(k.stage), k.parity);
      wait_v();
      k.next();
      v.next();
      free_k();
      free_v();
    }
  }
  // The same of those before the warpgroup's first, which are the last of the tile; where the next tile is joined to it, its first scores come
  // between their keys and their values.
  __device__ __forceinline__ int blocks_before() const { return own_begin(row, keys) - block_begin<Mask, kBlockN>(p.call, keys, row); }
  __device__ __forceinline__ void pass_over_keys(int count) {
#pragma unroll 1
    for (int skip = count; skip > 0; --skip) {
      wait_k();
      k.next();
      free_k();
      k_is_there = false;
    }
  }
  __device__ __forceinline__ void pass_over_values(int count) {
#pragma unroll 1
    for (int skip = count; skip > 0; --skip) {
      wait_v();
      v.next();
      free_v();
    }
  }

  // The first block of a tile that is not joined to the one before.
  __device__ __forceinline__ void begin(int first_row, Keys of, Slope of_head, Buffer buffer) {
    ptx::mbarrier_wait(barriers.q_full(buffer.stage, static_cast<unsigned>(group)), buffer.parity);
    if constexpr (Spec::kSkip && Mask::kUneven) skip_blocks(first_row, of);
    visible.read(p, beginning(first_row, of));
    wait_k();
    ptx::wgmma_fence();
    issue_scores(buffer.stage);
    k.next();
    k_is_there = false;
    draw(first_row, first_of(first_row, of));
    if constexpr (kStaged) {
      read_terms();
      terms.free(barriers, lane());
    }
    ptx::wgmma_wait<0>();
    ptx::pin(s);
    Spec::Score::apply(s, p.call);
    free_k();
    first_softmax(first_row, of, of_head);
    clear_output();
    pack();
  }

  __device__ __forceinline__ int last_whole_key(int first_row) const {
    const int last = Mask::visible_end(p.call, keys, first_row) - 1;
    if constexpr (kAlibi && !kNothingBehind) return min(last, aligned_key(p.call, keys, first_row));
    return last;
  }
  // Where blocks without a maximum begin: before it, on the way down.
  __device__ __forceinline__ int last_masked_block() const {
    const int last = max(0, last_whole_key(row + group * 64)) / kBlockN - visible.first_block(p);
    if constexpr (kDocuments) return min(last, keys.one_end);
    return last;
  }
  // Of documents: down to the blocks that are of one, and on to those of others before it.
  __device__ __forceinline__ void blocks_of_documents(unsigned buffer) {
    int masked = last_masked_block(), whole = keys.one_begin;  // down to these
    if constexpr (Mask::kBegins) whole = max(whole, (Mask::visible_begin(p.call, keys, row + group * 64 + 63) + kBlockN - 1) / kBlockN);
    const auto first = [&] { return own_begin(kTightest && Mask::kBegins ? ptx::opaque(row) : row, keys); };  // of a window found again
    masked = max(masked, first());
    whole = max(whole, first());
#pragma unroll 1
    for (;;) {
#pragma unroll 1
      for (; block > masked; --block) masked_block(buffer);
      whole_blocks<false>(buffer, whole);
      masked = whole = first();
      if (block <= masked) break;
    }
  }
  // All blocks but the first; the product of the last is still to come.
  __device__ __forceinline__ void blocks(unsigned buffer) {
    if constexpr (kDocuments) return blocks_of_documents(buffer);
    if constexpr (kMaskAlone) {  // which hides whatever it likes, from the first blocks on
      const int whole = Mask::kUneven ? last_masked_block() : kMostBlocks;
#pragma unroll 1
      for (; block > 0 && (block > whole || !group_has_references()); --block) masked_block(buffer);
    } else if constexpr (Mask::kUneven || kAlibi) {
      // Down to the block of the first row's last key: by then every row has seen a key. With ALiBi also to the one that the row is aligned with:
      // keys behind it have terms that rise, and weights with them.
      const int whole = kPairOf<Spec>.mask ? max(0, last_masked_block()) : last_masked_block();
#pragma unroll 1
      for (; block > whole; --block) masked_block(buffer);
    }
    if constexpr (Mask::kBegins) {
      const int first = own_begin(row, keys);
      const int whole = max(first, (Mask::visible_begin(p.call, keys, row + group * 64 + 63) + kBlockN - 1) / kBlockN);
      whole_blocks<false>(buffer, whole);
      whole_blocks<true>(buffer, first);
    } else {
      whole_blocks<false>(buffer, 0);
    }
    if constexpr (kFromDiagonal<Spec>) {
      const int behind = first_block<Spec, Shape::kBlockM>(p.call, keys, row) + 1;
      block = all_blocks(row, keys);
      if (block > behind) {
        masked_block<true>(buffer);  // keys may end in it
        --block;
        whole_blocks<false, true>(buffer, behind);
      }
    }
  }

  // The last product of a tile that the next is not joined to; under way until output_done().
  __device__ __forceinline__ void issue_last_product() {
    wait_v();
    ptx::pin(o);
    ptx::pin(weights);
    ptx::wgmma_fence();
    issue_output();
    v.next();
  }

  // Closes the softmax of a tile: writes lse. The result is what o is still to be multiplied by; 0 for empty rows.
  struct Inverse {
    float of_row[2];
  };
  __device__ __forceinline__ Inverse close_rows(int nth) {
    const auto place = place_again(nth);
    const AttentionParams& call = p.call;
    Inverse inverse;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = softmax.sum[r] + ptx::shfl_xor(softmax.sum[r], 1);
      sum += ptx::shfl_xor(sum, 2);
      if constexpr (kPairOf<Spec>.lengths) sum += first_sum<kPairOf<Spec>>(call, place.batch);  // NaN if the length is out of range
      [[maybe_unused]] float sinked_lse;
      if constexpr (kPairOf<Spec>.sinks) {
        const SinkedRow<true> sinked(sink_of(pairs_of(call), place.head), -softmax.reference[r], sum, sum == 0);
        sum = sinked.sum;
        sinked_lse = sinked.lse;
      }
      inverse.of_row[r] = sum == 0 ? 0.0f : ptx::rcp(sum);
      if constexpr (kDropout) inverse.of_row[r] *= pairs_of(call).dropout_scale;
      const int at = place.row + own_row() + 8 * r;
      if (call.lse != nullptr && lane() % 4 == 0 && at < queries_of(call, place)) {
        constexpr float kLn2 = 0.693147180559945309f;
        call.lse[place.batch * call.lse_strides.batch + (place.first_query() + at) * call.lse_strides.row + place.head * call.lse_strides.head] =
            kPairOf<Spec>.sinks ? sinked_lse
            : sum == 0          ? -kInfinity
                                : (softmax.reference[r] + ptx::lg2(sum)) * kLn2;
      }
    }
    return inverse;
  }

  __device__ __forceinline__ void finish(const Inverse& inverse, int nth, unsigned buffer) {
    if (!ptx::vote_all(inverse.of_row[0] != 0 && inverse.of_row[1] != 0)) {  // empty rows, whatever 0 * v was
#pragma unroll
      for (int i = 0; i < Spec::kHeaddimV / 2; ++i)
        if (inverse.of_row[i >> 1 & 1] == 0) o[i] = 0;
    }
    if constexpr (Shape::kStoreFromRegisters)
      store_output(inverse, nth);
    else
      hand_output_over(inverse, nth, buffer);
  }

  // Stores o.
  __device__ __forceinline__ void store_output(const Inverse& inverse, int nth) {
    const auto place = place_again(nth);
    unsigned zero[2];
    for_each<0, 2>([&](auto r) {
      constexpr int kRow = decltype(r)::value;
      const int at = place.row + own_row() + 8 * kRow;
      zero[kRow] = store_row<Element, kRow, kTrustsValues<Spec>>(o, inverse.of_row[kRow], row_of_o(place, at),
                                                                 at < queries_of(p.call, place) ? p.work.columns_v : 0, lane());
    });
    look_for_nan(zero, inverse, nth);
  }

  // Leaves o to the warp that stores it, in the buffer of the queries.
  __device__ __forceinline__ void hand_output_over(const Inverse& inverse, int nth, unsigned buffer) {
    const float inverse0 = inverse.of_row[0], inverse1 = inverse.of_row[1];
    const unsigned line = q_tile(buffer) + static_cast<unsigned>((warp_row() + lane() % 16) * 128);
    ptx::bar_sync(kOwnBarrier + group, 128);  // every warp of the group is done with the queries
    unsigned zero[2] = {0, 0};                // or NaN, if there is a NaN in the lane's part of a row
#pragma unroll
    for (int i = 0; i < Spec::kHeaddimV / 8; i += 2) {
      const unsigned a[4] = {ptx::pack2<Element>(o[4 * i] * inverse0, o[4 * i + 1] * inverse0),
                             ptx::pack2<Element>(o[4 * i + 2] * inverse1, o[4 * i + 3] * inverse1),
                             ptx::pack2<Element>(o[4 * i + 4] * inverse0, o[4 * i + 5] * inverse0),
                             ptx::pack2<Element>(o[4 * i + 6] * inverse1, o[4 * i + 7] * inverse1)};
      ptx::stmatrix_x4(line + static_cast<unsigned>(i / 8 * Shape::TileO::kColumnBytes + ((i % 8 + lane() / 16) ^ (lane() % 8)) * 16), a);
      if constexpr (kTrustsValues<Spec>) {
#pragma unroll
        for (int e = 0; e < 4; ++e) zero[e % 2] = ptx::fma2<Element>(a[e], 0, zero[e % 2]);
      }
    }
    look_for_nan(zero, inverse, nth);
    ptx::async_proxy_fence();
    ptx::warp_sync();
    if (lane() == 0) ptx::mbarrier_arrive(barriers.o_full(buffer, static_cast<unsigned>(group)));
  }

  // NaN in a row whose sum is a number came from values, perhaps from hidden ones.
  __device__ __forceinline__ void look_for_nan(const unsigned (&zero)[2], const Inverse& inverse, int nth) const {
    if constexpr (kTrustsValues<Spec>) {
      const bool good = ((zero[0] & 0x7fff7fffu) == 0 || !(inverse.of_row[0] > 0)) && ((zero[1] & 0x7fff7fffu) == 0 || !(inverse.of_row[1] > 0));
      if (!ptx::vote_all(good)) [[unlikely]]
        if (lane() == 0 && !SpoiltNotes<Spec>{shared}.looked_through(nth)) SpoiltNotes<Spec>{shared}.compute_again(nth);
    }
  }

  template <class Place>
  static __device__ __forceinline__ int queries_of(const AttentionParams& call, const Place& place) {
    return keys_of<Spec>(call, place).queries(call);
  }
  template <class Place>
  __device__ __forceinline__ unsigned short* row_of_o(const Place& place, int row_of_q) const {
    if constexpr (kPairOf<Spec>.packed) row_of_q += place.q_begin;
    const TensorStrides& strides = p.call.o_strides;
    return static_cast<unsigned short*>(p.call.o) + place.batch * strides.batch + row_of_q * strides.row + place.head * strides.head;
  }

  // Whether Inf and NaN were taken out of the tile's values: its end then needs the registers that joining it to the next one takes. All of its
  // blocks have been looked through by now, but for those that a warpgroup passes over.
  __device__ __forceinline__ bool has_spoilt_values(int nth) const {
    wait_v();
    const bool spoilt = SpoiltNotes<Spec>{shared}.kinds(nth) != 0;
    if constexpr (Shape::kSkipsBefore) return !ptx::bar_and(kOwnBarrier + group, 128, !spoilt);
    return spoilt;
  }

  // The last product of a tile beside the first scores of the next.
  template <class Place>
  __device__ __forceinline__ void join(int nth, Buffer buffer, Buffer next_buffer, const Place& next_place, Keys next_keys, Slope next_slope) {
    int others = 0;  // blocks between this warpgroup's last of the tile and its first of the next
    if constexpr (Shape::kSkipsBefore) {
      others = blocks_before();
      if constexpr (kJoinsPast) others += all_blocks(next_place.row, next_keys) - own_blocks(next_place.row, next_keys);
      pass_over_keys(others);  // whose places may be those of the keys that come before the queries
    }
    ptx::mbarrier_wait(barriers.q_full(next_buffer.stage), next_buffer.parity);
    issue_products(next_buffer.stage);
    visible.read(p, beginning(next_place.row, next_keys));
    const Inverse inverse = close_rows(nth);  // beside the products
    bits.begin(p, next_place);
    draw(next_place.row, first_of(next_place.row, next_keys));
    if constexpr (kStaged) {
      read_terms();
      terms.free(barriers, lane());
    }
    scores_done();
    free_k();
    first_softmax(next_place.row, next_keys, next_slope);
    output_done();
    if constexpr (kMaskAlone) pack();  // a place for its words
    if constexpr (Shape::kSkipsBefore) pass_over_values(others);
    finish(inverse, nth, buffer.stage);
    clear_output();
    if constexpr (!kMaskAlone) pack();
    look_at_mask_again(nth + 1);  // rather than to keep it in registers
  }

  __device__ __forceinline__ void run() {
    if (kTurns && group == 0) ptx::bar_arrive(1, 256);
    bool begun = false;
#pragma unroll 1
    for (int nth = 0;; ++nth) {
      const Buffer buffer(nth), next_buffer(nth + 1);
      if (!begun) {
        const int number = number_of(nth);
        if (number < 0) break;
        const auto place = place_at(nth, number);
        bits.begin(p, place);
        const Keys of = keys_of_warp<Spec>(p.call, place, group, lane());
        look_at_mask(place, of);
        begin(place.row, of, Slope::of(p.call, place), buffer);
      }
      blocks(buffer.stage);
      if constexpr (Shape::kStoreFromRegisters) free_queries(buffer.stage);

      const bool spoilt = kHidesPairs<Spec> && has_spoilt_values(nth);
      const int next = kTrustsValues<Spec> ? tile_in_turn<Spec>(p, nth + 1) : number_of(nth + 1);
      begun = kJoin && next >= 0 && !spoilt;
      const auto next_place = begun ? place_at(nth + 1, next) : decltype(place_at(nth, next)){};
      const int next_row = next_place.row;
      const Keys next_keys = begun ? keys_of_warp<Spec>(p.call, next_place, group, lane()) : Keys{};
      const Slope next_slope = begun ? Slope::of(p.call, next_place) : Slope{};
      // A warpgroup with blocks to pass over could do so here and join as well. That was slower: 320 instead of 341 TFLOP/s (one H200, headdim 128,
      // causal, seqlen 512).
      if constexpr (Spec::kSkip && Mask::kUneven && !kJoinsPast) begun = begun && own_blocks(next_row, next_keys) == all_blocks(next_row, next_keys);
      if (begun) {
        if constexpr (kMaskRanges<Spec>) look_at_mask(next_place, next_keys);  // before the products, while registers are free
        join(nth, buffer, next_buffer, next_place, next_keys, next_slope);
      } else {
        issue_last_product();
        const Inverse inverse = close_rows(nth);
        output_done();
        if constexpr (kHidesPairs<Spec>)
          if (SpoiltNotes<Spec>{shared}.kinds(nth) != 0) [[unlikely]]
            add_spoilt_values<Spec>(o, p, place_again(nth), warp_row(), ptx::opaque(nth), SpoiltNotes<Spec>{shared}, lane());
        finish(inverse, nth, buffer.stage);
        if constexpr (Shape::kSkipsBefore) pass_over(blocks_before());
        if constexpr (kTrustsValues<Spec>)
          if (next < 0 && tile_in_turn<Spec>(p, nth) >= 0) {
            ptx::warp_sync();
            if (lane() == 0) SpoiltNotes<Spec>{shared}.all_done(nth + 1);
          }
      }
    }
  }
};

}  // namespace fattn::v3
