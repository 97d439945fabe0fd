// A tile of a consumer (v3/forward_consumer.h): the blocks that it has, how it begins, and how the next one is joined to it.
#pragma once

#include "kernels/ptx/wgmma.h"
#include "kernels/v3/block_order.h"
#include "kernels/v3/forward_consumer.h"

namespace fattn::v3 {

// --- which blocks ---

// Blocks of a tile that this warpgroup computes, from the last to the first: those that one of its rows sees, or all. Behind the last of them.
template <class Spec>
__device__ __forceinline__ int Consumer<Spec>::own_blocks(int first_row, Keys of) const {
  if constexpr (Spec::kSkip && Mask::kUneven)
    return block_end<Mask, kBlockN>(p.call, of, first_row + group * 64, 64);
  else
    return block_end<Mask, kBlockN>(p.call, of, first_row, Shape::kBlockM);
}

// The same of all warpgroups.
template <class Spec>
__device__ __forceinline__ int Consumer<Spec>::all_blocks(int first_row, Keys of) const {
  return block_end<Mask, kBlockN>(p.call, of, first_row, Shape::kBlockM);
}

// The one that it meets first (v3/block_order.h).
template <class Spec>
__device__ __forceinline__ int Consumer<Spec>::first_of(int first_row, Keys of) const {
  return kFromDiagonal<Spec> ? first_block<Spec, Shape::kBlockM>(p.call, of, first_row) : own_blocks(first_row, of) - 1;
}

// The last that it meets.
template <class Spec>
__device__ __forceinline__ int Consumer<Spec>::own_begin(int first_row, Keys of) const {
  return block_begin<Mask, kBlockN>(p.call, of, Shape::kSkipsBefore ? first_row + group * 64 : first_row);
}

// Under a mask of pairs: what a tile begins with. Nothing of the tile before is asked for any more.
template <class Spec>
template <class Place>
__device__ __forceinline__ void Consumer<Spec>::look_at_mask(const Place& place, Keys of) {
  if constexpr (kMaskRanges<Spec>) {
    const int begin = own_begin(place.row, of);
    visible.begin(p, place, group, begin);
    block = own_blocks(place.row, of) - 1 - begin;
  }
}

// Of the tile that was joined: rather than to keep it in registers.
template <class Spec>
__device__ __forceinline__ void Consumer<Spec>::look_at_mask_again(int nth) {
  if constexpr (kPairOf<Spec>.mask) {
    const auto place = place_again(nth);
    look_at_mask(place, keys_of_warp<Spec>(p.call, place, group, lane()));
  }
}

// The block that a tile begins with, as `block` counts.
template <class Spec>
__device__ __forceinline__ int Consumer<Spec>::beginning(int first_row, Keys of) const {
  return kMaskRanges<Spec> ? block : first_of(first_row, of);
}

// Whether each of the warpgroup's rows has seen a key: its warps multiply together, so none goes another way alone.
template <class Spec>
__device__ __forceinline__ bool Consumer<Spec>::group_has_references() const {
  return ptx::bar_and(kOwnBarrier + group, 128, softmax.reference[0] != -kInfinity && softmax.reference[1] != -kInfinity);
}

// The last key that all of the warpgroup's rows see, on the way down; with ALiBi the last that is not behind one of them.
template <class Spec>
__device__ __forceinline__ int Consumer<Spec>::last_whole_key(int first_row) const {
  const int last = Mask::visible_end(p.call, keys, first_row) - 1;
  if constexpr (kAlibi && !kNothingBehind) return min(last, aligned_key(p.call, keys, first_row));
  return last;
}

// Where blocks without a maximum begin: before it, on the way down.
template <class Spec>
__device__ __forceinline__ int Consumer<Spec>::last_masked_block() const {
  const int last = max(0, last_whole_key(row + group * 64)) / kBlockN - visible.first_block(p);
  if constexpr (kDocuments) return min(last, keys.one_end);
  return last;
}

// --- all blocks but the first ---

// On return the product of the last is still to come.
template <class Spec>
__device__ __forceinline__ void Consumer<Spec>::blocks(unsigned buffer) {
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

// Of documents: down to the blocks that are of one, and on to those of others before it.
template <class Spec>
__device__ __forceinline__ void Consumer<Spec>::blocks_of_documents(unsigned buffer) {
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

// --- blocks that are passed over, as none of the warpgroup's rows sees them ---

// A stage is waited for before it is freed: arrivals count for the right phase then.
template <class Spec>
__device__ __forceinline__ void Consumer<Spec>::pass_over(int count) {
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

// Those behind the warpgroup's first.
template <class Spec>
__device__ __forceinline__ void Consumer<Spec>::skip_blocks(int first_row, Keys of) {
  pass_over(all_blocks(first_row, of) - own_blocks(first_row, of));
  k_is_there = false;
}

// How many there are before its last, which come at the tile's end. Where the next tile is joined to it, its first scores come between their keys and
// their values.
template <class Spec>
__device__ __forceinline__ int Consumer<Spec>::blocks_before() const {
  return own_begin(row, keys) - block_begin<Mask, kBlockN>(p.call, keys, row);
}

template <class Spec>
__device__ __forceinline__ void Consumer<Spec>::pass_over_keys(int count) {
#pragma unroll 1
  for (int skip = count; skip > 0; --skip) {
    wait_k();
    k.next();
    free_k();
    k_is_there = false;
  }
}

template <class Spec>
__device__ __forceinline__ void Consumer<Spec>::pass_over_values(int count) {
#pragma unroll 1
  for (int skip = count; skip > 0; --skip) {
    wait_v();
    v.next();
    free_v();
  }
}

// --- how a tile begins ---

// The weights of the block that it begins with, from its scores.
template <class Spec>
__device__ __forceinline__ void Consumer<Spec>::first_softmax(int first_row, Keys of, Slope of_head) {
  wildness.begin_tile();
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
    if (!ptx::vote_all(curve.reaches(fmaxf(softmax.reference[0], softmax.reference[1]) - Window<Element>::kHeadroom))) wildness.leave_curve();
}

template <class Spec>
__device__ __forceinline__ void Consumer<Spec>::clear_output() {
#pragma unroll
  for (int i = 0; i < Spec::kHeaddimV / 2; ++i) o[i] = 0;
}

// Its first block, if it is not joined to the tile before.
template <class Spec>
__device__ __forceinline__ void Consumer<Spec>::begin(int first_row, Keys of, Slope of_head, Buffer buffer) {
  ptx::mbarrier_wait(barriers.q_full(buffer.stage, static_cast<unsigned>(group)), buffer.parity);
  if constexpr (Spec::kSkip && Mask::kUneven) skip_blocks(first_row, of);
  visible.read(p, beginning(first_row, of));
  wait_k();
  ptx::wgmma_fence();
  issue_scores(buffer.stage);
  k.next();
  k_is_there = false;
  while_multiplying(first_row, first_of(first_row, of));
  ptx::wgmma_wait<0>();
  ptx::pin(s);
  Spec::Score::apply(s, p.call);
  free_k();
  first_softmax(first_row, of, of_head);
  clear_output();
  pack();
}

// --- how a tile ends ---

// The last product of a tile beside the first scores of the next.
template <class Spec>
template <class Place>
__device__ __forceinline__ void Consumer<Spec>::join(int nth, Buffer buffer, Buffer next_buffer, const Place& next_place, Keys next_keys,
                                                     Slope next_slope) {
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
  while_multiplying(next_place.row, first_of(next_place.row, next_keys));
  scores_done();
  free_k();
  first_softmax(next_place.row, next_keys, next_slope);
  output_done();
  if constexpr (kMaskAlone) pack();  // a place for its words
  if constexpr (Shape::kSkipsBefore) pass_over_values(others);
  finish(inverse, nth, buffer.stage);
  clear_output();
  if constexpr (!kMaskAlone) pack();
  look_at_mask_again(nth + 1);
}

}  // namespace fattn::v3
