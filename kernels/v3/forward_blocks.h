// A block of a consumer (v3/forward_consumer.h): P = exp2(S scale - m) beside the product of the block before.
#pragma once

#include "device_abi/lowest.h"
#include "kernels/tile/for_each.h"
#include "kernels/v3/forward_consumer.h"
#include "kernels/v3/scores_again.h"

namespace fattn::v3 {

// What features of pairs do of block `of` while the tensor cores multiply: dropout draws which weights stay, a bias is read. kBiasAgain: once more
// perhaps, so that its place is not given back yet.
template <class Spec>
template <bool kBiasAgain>
__device__ __forceinline__ void Consumer<Spec>::while_multiplying(int first_row, int of) {
  bits.draw(p.call, first_row + group * 64, of);
  if constexpr (kStaged) {
    terms.read(p, shared, barriers, warp_row(), lane());
    if constexpr (!kBiasAgain) terms.free(barriers, lane());
  }
}

// The bias of the block, if there is one, which scores have the scale of from then on: exponent_scale(). Theirs until then is the same number as in
// the backward pass: log2(e) and back would move scores in the thousands by a thousandth, which dv sees.
template <class Spec>
template <bool kExact>
__device__ __forceinline__ void Consumer<Spec>::add_terms() {
  const float natural = __uint_as_float(__float_as_uint(p.call.softmax_scale) + ptx::zero_of_lane());
  terms.template apply<kExact>(s, fabsf(natural));
}

// m found or raised, of the scores of block `of`, and P = exp2(S scale - m). The result: O has to be multiplied by `factor`.
template <class Spec>
template <bool kFirst>
__device__ __forceinline__ bool Consumer<Spec>::update(int of) {
  if constexpr (kStaged) {
    const bool moved = softmax.template update<kFirst>(s, factor, exponent_scale());
    seen = ptx::vote_all(softmax.reference[0] > kLowestLse && softmax.reference[1] > kLowestLse);
    return moved;
  } else if constexpr (kAlibi) {
    float distance[2];
    slope.distances(distance, of * kBlockN);
    add_alibi<kNothingBehind>(s, scale, slope.value, distance);
    return softmax.template update<kFirst>(s, factor, 1.0f);
  } else {
    return softmax.template update<kFirst, !Spec::Score::kCapped>(s, factor, scale);
  }
}

// P in the type of v, the operand of its product, without what dropout drops.
template <class Spec>
__device__ __forceinline__ void Consumer<Spec>::pack() {
#pragma unroll
  for (int i = 0; i < kBlockN / 4; ++i) weights[i / 4][i % 4] = ptx::pack2<Element>(s[2 * i], s[2 * i + 1]);
  bits.drop(weights);
}

// O under new references.
template <class Spec>
__device__ __forceinline__ void Consumer<Spec>::rescale() {
#pragma unroll
  for (int i = 0; i < Spec::kHeaddimV / 2; ++i) o[i] *= factor[i >> 1 & 1];
}

// After a maximum.
template <class Spec>
__device__ __forceinline__ void Consumer<Spec>::rescale_if(bool moved) {
  if (!moved) return wildness.calm_down();
  if (!kStaged && !ptx::vote_all(factor[0] > 0 && factor[1] > 0)) wildness.beyond_bounds();  // with a bias rows may see their first key
  rescale();
}

// Whether a tile, or the rest of one, is to take maxima: the warps of a warpgroup multiply together, so none goes another way alone.
template <class Spec>
__device__ __forceinline__ bool Consumer<Spec>::group_is_wild() const {
  return !ptx::bar_and(kOwnBarrier + group, 128, !wildness.takes_maxima());
}

// A block that some row does not see whole, or with ALiBi one that the diagonal crosses: hidden scores, and a maximum. kWhole: all rows see it
// whole, but for words of a mask.
template <class Spec>
template <bool kBehind, bool kWhole>
__device__ __forceinline__ void Consumer<Spec>::masked_block(unsigned buffer) {
  visible.read(p, block - 1);
  issue_products(buffer);
  while_multiplying(row, block - 1);
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

// Any other: no maximum, unless weights dominate their rows, or capped scores leave their curve. Where that happens again and again in a tile a
// maximum of every block costs less (`wildness`). kBegins: a block in which rows begin to see keys; those that see some of them have seen others.
// kBehind: all its keys are behind the rows, and ALiBi's terms fall from key to key.
//   S(j), O += P(i) V(i) issued | S(j) awaited | P(j) begun [O] | O awaited | P(j) ended | P(j) kept, brought into its window, or made again
template <class Spec>
template <bool kBegins, bool kBehind>
__device__ __forceinline__ void Consumer<Spec>::whole_block(unsigned buffer) {
  constexpr int kSplit = kBlockN / 2 * Spec::kEarlyEighths / 8 / 8 * 8;
  // As long as scores are far from softcap. Where a warp's were not in one block of a tile, they become tanh itself from then on.
  constexpr bool kByCurve = Spec::Score::kCapped && !kBegins;
  const bool careful = scores_of_whole_block<kBegins, kByCurve>(buffer);
  bool moved = false;
  int inside = -1;
  LineOfTerms<kAlibi> line;
  line.begin(kBehind, slope, (block - 1) * kBlockN, softmax.reference);
  const auto weigh = [&](auto from, auto to) {
    if constexpr (kByCurve)
      softmax.template weigh<decltype(from)::value, decltype(to)::value>(s, curve, inside);
    else if constexpr (kAlibi)
      softmax.template weigh<decltype(from)::value, decltype(to)::value>(s, scale, line.rise, line.first);
    else
      softmax.template weigh<decltype(from)::value, decltype(to)::value>(s, exponent_scale());
  };
  const bool by_tanh = kByCurve && wildness.by_tanh();
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
    keep_weights<kBegins>(buffer, by_tanh, !kByCurve || inside < 0);
  }
  free_k();  // only now: the way back reads it
  if constexpr (kStaged) terms.free(barriers, lane());
}

// Its scores, with what is hidden. The result: whether it takes a maximum after all.
template <class Spec>
template <bool kBegins, bool kByCurve>
__device__ __forceinline__ bool Consumer<Spec>::scores_of_whole_block(unsigned buffer) {
  visible.read(p, block - 1);
  issue_products(buffer);
  while_multiplying<true>(row, block - 1);
  if constexpr (kByCurve)
    products_done();
  else
    scores_done();
  if constexpr (kBegins && !kStaged) hide_before(block - 1);
  const bool careful = Spec::kCareful && (wildness.takes_maxima() || (kStaged && !seen));
  if constexpr (kStaged) {
    if (careful) [[unlikely]]
      add_terms<true>();
    else
      add_terms<false>();
    if constexpr (kBegins) hide_before(block - 1);
  }
  hide_by_words();
  return careful;
}

// Its weights, which trusted the references, are packed and summed up; `good`: they are those of the scores. Where they dominate rows the references
// rise to them; where they are out of all bounds they are made again.
template <class Spec>
template <bool kBegins>
__device__ __forceinline__ void Consumer<Spec>::keep_weights(unsigned buffer, bool by_tanh, bool good) {
  if constexpr (!kPacksLast) pack();
  if (softmax.add(s, good)) [[likely]] {
  } else if (kScalesDominant && softmax.add_dominant(s, factor, good)) {
    rescale();
    if constexpr (!kPacksLast) pack();
    wildness.dominated();
  } else {
    if (!Spec::Score::kCapped || by_tanh)
      wildness.beyond_bounds();
    else if (!ptx::vote_all(good))
      wildness.leave_curve();
    weigh_again<kBegins>(buffer);
    if constexpr (!kPacksLast) pack();
  }
  if constexpr (kPacksLast) pack();
}

// The way back: the scores once more, which weights have overwritten, and a maximum.
template <class Spec>
template <bool kBegins>
__device__ __forceinline__ void Consumer<Spec>::weigh_again(unsigned buffer) {
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
}

// Blocks that all rows see whole (kBegins: to the left), down to block `to`. Where registers are few a warp has no way of its own through a block:
// the warpgroup finds out at the first of them, and once more some blocks later, whether it takes maxima.
template <class Spec>
template <bool kBegins, bool kBehind>
__device__ __forceinline__ void Consumer<Spec>::whole_blocks(unsigned buffer, int to) {
  if constexpr (Spec::kCareful || kBegins) {
#pragma unroll 1
    for (; block > to; --block) whole_block<kBegins, kBehind>(buffer);
  } else {
    int look = block, again = block - wildness.kCalm;
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

}  // namespace fattn::v3
