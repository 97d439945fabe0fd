// Attention forward in fp32 on the matrix instructions for fp16: the walk of v2/forward.h, with every operand split into two fp16 and every product
// made of three (tile/split_tile.h). Level 80.
//
// What comes from shared memory was scaled, block by block, by a power of two; scores and products with v are scaled back where they are used in fp32
// anyway. Products are summed over few keys by the matrix instructions, which round towards zero, and then added to o to nearest.
//
//   setup              load                     compute, block by block                                      finish
//   tile, blocks   ->  q and the last block ->  enter: it is there, is split, the next is loaded         ->  o, lse, rows again
//                      q split                  S = Q K^T, P = exp2(S - m), O += P V, each of three
//
// A specialisation is a struct with
//   kHeaddim, kHeaddimV            1 to 256
//   kCausal                        keys after the query are hidden
//   kWindow                        keys outside a window (FeatureParams) are hidden; kCausal is then false
//   kCapped                        softcap (kernels/score.h)
//   kAligned                       bases and strides are multiples of 16 bytes and headdims of 4
//   kWarps, kRowTiles              warps of a CTA, 16-row tiles of a warp
//   kBlockN, kStages               keys of a block, blocks in shared memory at once (1 or 2)
//   kStepN                         keys whose scores are in registers at once
//   kQueriesInRegisters            or read from shared memory for every step
//   kCtas                          CTAs that an SM is to hold
//   kPair                          features of pairs (kernels/pair.h); none if it is left out
//   kOwnBits                       batch_invariant, of which forward_f32_own.h is included, too; false if it is left out
#pragma once

#include "kernels/constants.h"
#include "kernels/pages.h"
#include "kernels/pair.h"
#include "kernels/ptx/async_copy.h"
#include "kernels/ptx/special_registers.h"
#include "kernels/score.h"
#include "kernels/sequence.h"
#include "kernels/tile/for_each.h"
#include "kernels/tile/fragment.h"
#include "kernels/tile/split_tile.h"
#include "kernels/v2/forward_f32_finish.h"
#include "kernels/v2/forward_f32_products.h"
#include "kernels/v2/forward_f32_state.h"
#include "kernels/v2/forward_f32_step.h"
#include "kernels/v2/greatest.h"
#include "kernels/v2/own_bits.h"
#include "kernels/v2/schedule.h"

namespace fattn::v2 {

// The queries, split. A scale that is negative or 0 goes into them: the maximum of the scores is then that of the logits.
template <class Spec>
__device__ __forceinline__ void ForwardF32<Spec>::split_queries(const Place& place, const KeyBlocks& blocks) {
  __syncthreads();  // for the notes
  if (blocks.end > 0)
    ptx::cp_async_wait<1>();
  else
    ptx::cp_async_wait<0>();
  const auto sign = [&] { return p.softmax_scale > 0 ? 1.0f : p.softmax_scale < 0 ? -1.0f : 0.0f; };
  float inverse_factor = 1;
  if constexpr (own_bits<Spec>()) {
    split_own_queries(sign());
  } else {
    const tile::SplitFactor query_factor(
        greatest_of_all<Spec::kWarps>(tile_q + Shape::kGreatestOffset, CopyQ::greatest_noting_infinity(tile_q, [&] { notes().doubt_scores(); }), 0)
            .x);
    CopyQ::split(tile_q, query_factor.factor * sign());
    inverse_factor = query_factor.inverse;
  }
  const float query_scale_log2 = [&] {
    if constexpr (Spec::kCapped)
      return features_of(p).score_factor;
    else
      return p.softmax_scale_log2;
  }();
  if (threadIdx.x == 0) {
    ptx::st_shared_f32(tile_q + Shape::kQueryScaleOffset, query_scale_log2 * inverse_factor);
    if constexpr (kPair.any() && kWide) {
      ptx::st_shared_4(tile_q + Shape::kPlaceOffset, static_cast<unsigned>(place.batch));
      ptx::st_shared_4(tile_q + Shape::kPlaceOffset + 4, static_cast<unsigned>(place.head));
      ptx::st_shared_4(tile_q + Shape::kPlaceOffset + 8, static_cast<unsigned>(place.row));
    }
    if constexpr (kPair.packed && !kPair.paged)
      ptx::st_shared_4(tile_q + Shape::kFirstKeyOffset, static_cast<unsigned>(given_sequence<kPair.lengths>(pairs_of(call()), place.batch).k.begin));
  }
  __syncthreads();
}

// What a warp begins with.
template <class Spec>
__device__ __forceinline__ void ForwardF32<Spec>::start([[maybe_unused]] int seqlen_k) {
  softmax.start();
  if constexpr (kPair.paged)
    if (seqlen_k < 0) softmax.spoil();
  if constexpr (kPair.dropout) kept_of = -1;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int n = 0; n < 2 * kDepthO; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o[i][n][e] = 0;
    }
  }
  {
    const auto [warp, lane] = ptx::thread_place();
    q_address = tile::fragment_address<TileQ>(tile_q, warp * Shape::kWarpRows, lane);
    k_address = tile::fragment_address_n<TileK>(tile_q + Shape::kQueryBytes, 0, lane);
    v_address = tile::fragment_address<TileV>(tile_q + Shape::kQueryBytes + Shape::kValueOffset, 0, lane);
  }
  if constexpr (Spec::kQueriesInRegisters) {
    for_each<0, kDepthQ>([&](auto d) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        const unsigned from = TileQ::template advance<2 * decltype(d)::value>(q_address) + i * 16 * TileQ::kRowBytes;
        ptx::ldmatrix_x4(q[decltype(d)::value][0][i], from);
        ptx::ldmatrix_x4(q[decltype(d)::value][1][i], from + TileQ::kBytes);
      }
    });
  }
}

template <class Spec>
__device__ __forceinline__ void ForwardF32<Spec>::run() {
  const Place place = place_of<Shape::kBlockM>(call(), static_cast<int>(blockIdx.x));
  const int seqlen_k = [&] {  // -1, of which a mask makes no keys, where a page or the length is out of range
    if constexpr (kPair.paged)
      return paged_keys<Shape::kThreads>(call(), place.batch);
    else
      return keys_of<kPair>(p, place.batch);
  }();
  const core::Mask32 mask = visible_mask(seqlen_k);
  const KeyBlocks blocks = blocks_of(place, mask, seqlen_k);
  // load: block j goes to stage j mod kStages.
  const auto load_block = [&](int j, [[maybe_unused]] bool is_first) {
    const unsigned stage = tile_q + Shape::kQueryBytes + static_cast<unsigned>(j % Spec::kStages) * Shape::kStageBytes;
    const long long key = static_cast<long long>(j) * Spec::kBlockN;
    const int keys = (kPair.lengths ? seqlen_k : p.seqlen_k) - j * Spec::kBlockN;
    // Found again rather than kept in registers all the way: the addresses, with wide outputs all that leads to them.
    const Place from = kWide ? place_of<Shape::kBlockM>(call(), ptx::opaque(static_cast<int>(blockIdx.x))) : place;
    const int batch = ptx::opaque(from.batch), head = ptx::opaque(from.head_k);
    const auto* k = static_cast<const float*>(p.k) + batch * p.k_strides.batch + head * p.k_strides.head;
    const auto* v = static_cast<const float*>(p.v) + batch * p.v_strides.batch + head * p.v_strides.head;
    if constexpr (kPair.packed && !kPair.paged)
      if (!is_first) {  // likewise, from where its sequence begins
        const int first = static_cast<int>(ptx::ld_shared_4(tile_q + Shape::kFirstKeyOffset));
        k = static_cast<const float*>(call().k) + first * p.k_strides.row + head * p.k_strides.head;
        v = static_cast<const float*>(call().v) + first * p.v_strides.row + head * p.v_strides.head;
      }
    if constexpr (kPair.paged) {
      const EntryPages pages(pages_of(call()), batch);
      const auto nth = [&](int row) { return static_cast<int>(key) + min(row, keys - 1); };
      CopyK::copy_rows(stage, keys, [&](int row) { return k + pages.of_key(nth(row), p.k_strides.row); });
      CopyV::copy_rows(stage + Shape::kValueOffset, keys, [&](int row) { return v + pages.of_value(nth(row), p.v_strides.row); });
    } else {
      CopyK::copy(stage, k + key * p.k_strides.row, p.k_strides.row, keys);
      CopyV::copy(stage + Shape::kValueOffset, v + key * p.v_strides.row, p.v_strides.row, keys);
    }
    ptx::cp_async_commit();
  };
  const auto* queries =
      static_cast<const float*>(p.q) + place.batch * p.q_strides.batch + place.head * p.q_strides.head + place.row * p.q_strides.row;
  if (threadIdx.x == 0) notes().clear();
  CopyQ::copy(tile_q, queries, p.q_strides.row, p.seqlen_q - place.row);
  ptx::cp_async_commit();
  if (blocks.end > 0) load_block(blocks.end - 1, true);

  split_queries(place, blocks);
  start(seqlen_k);

  // Makes block j visible to all, split, and loads the next one where no one reads any more. Returns what the splitting of k and v is undone with.
  const auto enter_block = [&](int j) {
    if constexpr (own_bits<Spec>()) {
      enter_own_block(j, kRanges ? blocks.begin : 0, blocks.end, load_block);
      return float2{1, 1};
    }
    if constexpr (Spec::kStages == 1) {
      if (j != blocks.end - 1) {
        __syncthreads();
        load_block(j, false);
      }
    }
    ptx::cp_async_wait<0>();
    const unsigned stage = tile_q + Shape::kQueryBytes + static_cast<unsigned>(j % Spec::kStages) * Shape::kStageBytes;
    const auto greatest_of_block = [&] {
      const unsigned values = stage + Shape::kValueOffset;
      if constexpr (kNotesOdd)
        return greatest_of_all<Spec::kWarps>(tile_q + Shape::kGreatestOffset, CopyK::greatest_noting_infinity(stage, [&] { notes().doubt_scores(); }),
                                             CopyV::template greatest_cleaned<tile::NonfiniteCleaned>(values, [&] { notes().spoil(j); }));
      else
        return greatest_of_all<Spec::kWarps>(tile_q + Shape::kGreatestOffset, CopyK::greatest(stage), CopyV::greatest(values));
    };
    const float2 greatest = greatest_of_block();
    if constexpr (Spec::kStages == 2) {
      if (j > (kRanges ? blocks.begin : 0)) load_block(j - 1, false);
    }
    const tile::SplitFactor key_factor(greatest.x), value_factor(greatest.y);
    CopyK::split(stage, key_factor.factor);
    CopyV::split(stage + Shape::kValueOffset, value_factor.factor);
    const bool trusted =
        !kNotesOdd || tile::is_trusted<Spec::kHeaddim>(query_scale() * key_factor.inverse, Spec::kCapped ? p.softmax_scale_log2 : 1.0f);
    if (!trusted) notes().doubt_scores();
    __syncthreads();
    return float2{trusted ? key_factor.inverse : kNan, value_factor.inverse};
  };

  // compute: first the blocks that not all rows see whole (or just the first one, to find the references), then the others.
  const auto compute_block = [&](auto exact, int j) {
    constexpr bool kExact = decltype(exact)::value != 0;
    const float2 inverse = enter_block(j);
    const unsigned stage = static_cast<unsigned>(j % Spec::kStages) * Shape::kStageBytes;
    if constexpr (own_bits<Spec>())
      if (place.row + ptx::thread_place().warp * Shape::kWarpRows >= p.seqlen_q) return;  // few queries leave warps without rows
#pragma unroll 1
    for (int nth = Spec::kBlockN / kStepN - 1; nth >= 0; --nth) {
      const int key = j * Spec::kBlockN + nth * kStepN;
      Visible visible;
      StepPairs at;
      if constexpr (kExact) {
        const auto [warp, lane] = ptx::thread_place();
        const Place here = kWide ? place_of<Shape::kBlockM>(call(), ptx::opaque(static_cast<int>(blockIdx.x))) : place;
        const int row = here.row + warp * Shape::kWarpRows;
        if (key >= mask.visible_end(row + Shape::kWarpRows - 1)) continue;  // hidden from all rows of the warp
        if (kWindow && key + kStepN <= mask.visible_begin(row)) continue;
        visible = visible_keys<kRowTiles, kWindow>(mask, row, key, lane / 4, lane % 4 * 2);
      }
      if constexpr (kTerms || kPair.dropout) {
        const auto [warp, lane] = ptx::thread_place();
        at.place = place_again(place);
        at.row = at.place.row + warp * Shape::kWarpRows + lane / 4;
        at.key = key + lane % 4 * 2;
        at.seqlen_k = seqlen_k;
      }
      step<kExact>(stage + static_cast<unsigned>(nth * kStepN * TileK::kRowBytes), stage + static_cast<unsigned>(nth * kStepN * TileV::kRowBytes),
                   query_scale() * inverse.x, inverse.y, visible, at);
    }
    if constexpr (kNotesOdd)
      if (notes().spoilt(j)) [[unlikely]]
        add_spoilt(j, seqlen_k);
  };
  int j = blocks.end - 1;
  if constexpr (own_bits<Spec>()) {
#pragma unroll 1
    for (; j >= (kRanges ? blocks.begin : 0); --j) compute_block(tile::Constant<1>{}, j);
  } else if constexpr (kRanges) {
    const int exact_from = min(blocks.whole_end, blocks.end - 1);
#pragma unroll 1
    for (; j >= blocks.begin; --j) {
      if (j >= exact_from || j < blocks.whole_begin)
        compute_block(tile::Constant<1>{}, j);
      else
        compute_block(tile::Constant<0>{}, j);
    }
  } else {
#pragma unroll 1
    for (; j >= min(blocks.whole_end, blocks.end - 1) && j >= 0; --j) compute_block(tile::Constant<1>{}, j);
#pragma unroll 1
    for (; j >= 0; --j) compute_block(tile::Constant<0>{}, j);
  }
  if constexpr (own_bits<Spec>()) add_zero(o);
  finish(mask);
}

template <class Spec>
__device__ __forceinline__ void forward_f32(const AttentionParams& p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  if constexpr (kPairOf<Spec>.packed) {
    const Place place = place_of<ForwardF32Shape<Spec>::kBlockM>(p, static_cast<int>(blockIdx.x));
    const typename OwnTypes<kPairOf<Spec>.paged>::WithCall own{entry_params<kPairOf<Spec>, float>(p, place.batch), p};
    if (place.row >= own.seqlen_q) return;
    ForwardF32<Spec>(own, ptx::shared_address(shared)).run();
  } else {
    ForwardF32<Spec>(p, ptx::shared_address(shared)).run();
  }
}

}  // namespace fattn::v2
