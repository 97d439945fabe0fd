// Attention forward, FlashAttention-2's algorithm: a CTA holds a tile of queries and walks over blocks of keys from the last to the first; a
// warp owns whole rows, so scores, weights and output never leave its registers. Level 80: cp.async and mma of depth 16; level 75: without.
//
//   setup                 load                        compute, block by block                               finish
//   tile, keys, mask  ->  q, the first blocks     ->  enter: it is there, the next is loaded            ->  o, lse
//   (forward_keys.h)      (tile/global_load.h)        S = Q K^T, P = exp2(S - m), O += P V                  (forward_finish.h)
//                                                     (forward_step.h; registers: forward_state.h)
//
// A specialisation is a struct with
//   Element                        bf16 or f16
//   kLevel                         75 or 80
//   kHeaddim, kHeaddimV            1 to 256
//   kCausal                        keys after the query are hidden
//   kWindow                        keys outside a window (FeatureParams) are hidden; kCausal is then false
//   kCapped                        softcap (kernels/score.h)
//   kAligned                       bases and strides are multiples of 16 bytes and headdims of 8
//   kWarps, kRowTiles              warps of a CTA, 16-row tiles of a warp
//   kBlockN, kStages               keys of a block, blocks in shared memory at once
//   kStaged                        bias and mask of pairs come through shared memory (kernels/v2/term_tile.h); false if it is left out
//   kStepN, kExactN                keys whose scores are in registers at once; the same in blocks that are masked
//   kQueriesInRegisters            or read from shared memory for every step
//   kCtas                          CTAs that an SM is to hold
//   kPair                          features of pairs (kernels/pair.h); none if it is left out
//   kOwnBits                       batch_invariant; false if it is left out
//
// With kOwnBits every step is of kExactN keys, and its reference is the maximum of a row's own scores, whether the tile sees the block whole or not:
// keys of other steps, blocks and pages change nothing, and a step without a key that the row sees is none to it. So its bits follow from kExactN
// and, where values are not finite, from kBlockN.
#pragma once

#include "device_abi/attention_params.h"
#include "kernels/constants.h"
#include "kernels/mask.h"
#include "kernels/pages.h"
#include "kernels/pair.h"
#include "kernels/ptx/async_copy.h"
#include "kernels/ptx/barrier.h"
#include "kernels/ptx/ldmatrix.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/ptx/special_registers.h"
#include "kernels/ptx/warp.h"
#include "kernels/sequence.h"
#include "kernels/tile/for_each.h"
#include "kernels/tile/fragment.h"
#include "kernels/tile/global_load.h"
#include "kernels/v2/forward_finish.h"
#include "kernels/v2/forward_keys.h"
#include "kernels/v2/forward_shape.h"
#include "kernels/v2/forward_state.h"
#include "kernels/v2/forward_step.h"
#include "kernels/v2/nonfinite.h"
#include "kernels/v2/own_bits.h"
#include "kernels/v2/schedule.h"
#include "kernels/v2/seen_nonfinite.h"
#include "kernels/v2/term_tile.h"

namespace fattn::v2 {

// In one piece, its phases as lambdas: as members of a type they gave windows, ALiBi, documents and level 75 above headdim 192 other machine code.
template <class Spec>
__device__ __forceinline__ void forward(const AttentionParams& call) {
  using Shape = ForwardShape<Spec>;
  using State = WarpState<Spec>;
  using CopyQ = tile::TileCopy<typename Shape::TileQ, Shape::kThreads, Spec::kHeaddim, Shape::kCopyBy>;
  using CopyK = tile::TileCopy<typename Shape::TileK, Shape::kThreads, Spec::kHeaddim, Shape::kCopyBy>;
  using CopyV = tile::TileCopy<typename Shape::TileV, Shape::kThreads, Spec::kHeaddimV, Shape::kCopyBy>;
  static_assert(Spec::kBlockN % Spec::kStepN == 0 && Spec::kStepN % 16 == 0 && Spec::kBlockN % Spec::kExactN == 0 && Spec::kStages >= 1);

  // --- setup ---
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned tile_q = ptx::shared_address(shared);
  const unsigned stages = tile_q + Shape::kQueryBytes;
  const Place place = place_of<Shape::kBlockM, Shape::kEntriesTogether>(call, static_cast<int>(blockIdx.x));
  const auto& p = entry_params<kPairOf<Spec>>(call, place.batch);
  if (kPairOf<Spec>.packed && place.row >= p.seqlen_q) return;
  const int given_keys = given_keys_of<Spec>(call, p, place.batch), seqlen_k = kPairOf<Spec>.paged ? max(given_keys, 0) : given_keys;
  const core::Mask32 mask = forward_mask<Spec>(p, seqlen_k);
  TileDocument document;
  const KeyBlocks blocks = forward_key_blocks<Spec>(p, place, mask, seqlen_k, shared, document);

  // --- load ---
  const auto* q =
      static_cast<const unsigned short*>(p.q) + place.batch * p.q_strides.batch + place.head * p.q_strides.head + place.row * p.q_strides.row;
  // Where a sequence begins is read from memory, and would take each lane's registers.
  const auto of_all = [](const unsigned short* x) {
    if constexpr (kPairOf<Spec>.packed && Spec::kLevel >= 80)
      return ptx::uniform(x);
    else
      return x;
  };
  const auto* k = of_all(static_cast<const unsigned short*>(p.k) + place.batch * p.k_strides.batch + place.head_k * p.k_strides.head);
  const auto* v = of_all(static_cast<const unsigned short*>(p.v) + place.batch * p.v_strides.batch + place.head_k * p.v_strides.head);

  [[maybe_unused]] const Terms<kPairOf<Spec>, typename Spec::Element> terms(p, place.batch, place.head, seqlen_k);
  [[maybe_unused]] const unsigned term_tiles = tile_q + Shape::kSharedBytes;

  // Terms are copied asynchronously even where keys are not.
  const auto commit = [] {
    if constexpr (Shape::kStaged)
      ptx::cp_async_commit();
    else
      CopyK::commit();
  };

  // Block j goes to stage j mod kStages. Only the last block of a sequence can lack keys, and it is among the first loads.
  const auto load_block = [&](auto bounded, int j) {
    constexpr bool kBounded = decltype(bounded)::value != 0;
    const unsigned stage = stages + static_cast<unsigned>(j % Spec::kStages) * Shape::kStageBytes;
    const long long key = static_cast<long long>(j) * Spec::kBlockN;
    const int keys = (kPairOf<Spec>.lengths ? seqlen_k : p.seqlen_k) - j * Spec::kBlockN;
    if constexpr (kPairOf<Spec>.paged) {
      const EntryPages pages(pages_of(call), place.batch);
      const int first = static_cast<int>(key);
      CopyK::template copy_rows<kBounded>(stage, keys, [&](int row) { return k + pages.of_key(first + row, p.k_strides.row); });
      CopyV::template copy_rows<kBounded>(stage + Shape::TileK::kBytes, keys,
                                          [&](int row) { return v + pages.of_value(first + row, p.v_strides.row); });
    } else {
      CopyK::template copy<kBounded>(stage, k + key * p.k_strides.row, p.k_strides.row, keys);
      CopyV::template copy<kBounded>(stage + Shape::TileK::kBytes, v + key * p.v_strides.row, p.v_strides.row, keys);
    }
    if constexpr (Shape::kStaged)
      copy_terms<kPairOf<Spec>, Shape::kTerms, Shape::kThreads>(term_tiles + static_cast<unsigned>(j % Spec::kStages * Shape::kTerms.bytes()), terms,
                                                                place.row, p.seqlen_q - place.row, static_cast<int>(key), seqlen_k,
                                                                ptx::opaque(static_cast<int>(threadIdx.x)));
  };
  CopyQ::template copy<true>(tile_q, q, p.q_strides.row, p.seqlen_q - place.row);
#pragma unroll
  for (int ahead = 0; ahead < (Spec::kStages > 1 ? Spec::kStages - 1 : 1); ++ahead) {
    if (blocks.end - 1 - ahead >= blocks.begin) load_block(Constant<1>{}, blocks.end - 1 - ahead);
    commit();
  }
  // Makes block j visible to all, frees the stage of block j + 1 and loads the next block into it. Tells whether there is Inf or NaN in its values,
  // if asked to look.
  const auto enter_block = [&](int j, bool look_for_nonfinite) {
    constexpr int kPending = Spec::kStages > 1 ? Spec::kStages - 2 : 0;
    bool nonfinite = false;
    if constexpr (Spec::kStages == 1) {
      if (j != blocks.end - 1) {
        __syncthreads();
        load_block(Constant<0>{}, j);
        commit();
      }
    }
    if constexpr (Shape::kStaged)
      ptx::cp_async_wait<kPending>();
    else
      CopyK::template wait<kPending>();
    if (look_for_nonfinite) {
      const unsigned tile_v = stages + static_cast<unsigned>(j % Spec::kStages) * Shape::kStageBytes + Shape::TileK::kBytes;
      nonfinite = ptx::bar_or(copied_nonfinite<CopyV, typename Shape::TileV, typename Spec::Element>(tile_v));
    } else {
      __syncthreads();
    }
    if constexpr (Spec::kStages > 1) {
      if (j - (Spec::kStages - 1) >= blocks.begin) load_block(Constant<0>{}, j - (Spec::kStages - 1));
      commit();
    }
    return nonfinite;
  };

  if (blocks.end == 0) {  // no block, whose barrier would come after the queries' arrival: they must not overwrite o
    CopyQ::template wait<0>();
    __syncthreads();
  }

  // --- compute ---
  State w;
  w.start(p);
  if constexpr (kPairOf<Spec>.paged)
    if (given_keys < 0) w.softmax.spoil();
  [[maybe_unused]] const Dropout<kPairOf<Spec>> dropout(p, place.batch, place.head);
  const auto [warp, lane] = ptx::thread_place();
  w.q_address = tile::fragment_address<typename Shape::TileQ>(tile_q, warp * Shape::kWarpRows, lane);
  w.k_address = tile::fragment_address_n<typename Shape::TileK>(stages, 0, lane);
  w.v_address = tile::fragment_address<typename Shape::TileV>(stages + Shape::TileK::kBytes, 0, lane);

  [[maybe_unused]] const TermReader<kPairOf<Spec>, typename Spec::Element, Shape::kTerms> reader(term_tiles, terms, warp * Shape::kWarpRows, lane);

  // A scale that is negative or 0 goes into q: the maximum of the scores is then that of the logits.
  if (!(p.softmax_scale > 0)) {
    CopyQ::template wait<0>();
    scale_copied<CopyQ, typename Shape::TileQ, typename Spec::Element>(tile_q, p.softmax_scale < 0 ? -1.0f : 0.0f);
  }
  if constexpr (Spec::kQueriesInRegisters) {
    CopyQ::template wait<0>();
    __syncthreads();
    for_each<0, State::kDepthQ>([&](auto d) {
#pragma unroll
      for (int i = 0; i < Spec::kRowTiles; ++i) {
        ptx::ldmatrix_x4(w.q[decltype(d)::value][i],
                         Shape::TileQ::template advance<2 * decltype(d)::value>(w.q_address) + i * 16 * Shape::TileQ::kRowBytes);
      }
    });
  }

  // Of block j, for ALiBi alone: -1 if none of its keys is behind a query of the tile, 1 if none is before one, otherwise 0.
  const auto ahead = [&](int j) {
    if constexpr (kPairOf<Spec>.alibi) {
      if (Spec::kCausal || place.row + terms.shift >= (j + 1) * Spec::kBlockN - 1) return -1.0f;
      if (place.row + Shape::kBlockM - 1 + terms.shift <= j * Spec::kBlockN) return 1.0f;
    }
    return 0.0f;
  };

  // First the blocks that not all rows see whole (or just the first one, to find the references), then the others.
  constexpr int kWhole = 2;  // exact, of a block that all rows see whole
  const auto compute_block = [&](auto exact, auto with_terms, int j) {
    constexpr bool kExact = decltype(exact)::value != 0, kTerms = decltype(with_terms)::value != 0, kHides = decltype(exact)::value == 1;
    constexpr int kStepN = kExact ? Spec::kExactN : Spec::kStepN;
    const unsigned stage = static_cast<unsigned>(j % Spec::kStages) * Shape::kStageBytes;
    if constexpr (own_bits<Spec>())
      if (place.row + ptx::thread_place().warp * Shape::kWarpRows >= p.seqlen_q) return;  // few queries leave warps without rows
#pragma unroll 1
    for (int step = Spec::kBlockN / kStepN - 1; step >= 0; --step) {
      const unsigned k_address = w.k_address + stage + static_cast<unsigned>(step * kStepN * Shape::TileK::kRowBytes);
      const unsigned v_address = w.v_address + stage + static_cast<unsigned>(step * kStepN * Shape::TileV::kRowBytes);
      const int key = j * Spec::kBlockN + step * kStepN;
      typename AllKeysOr<decltype(exact)::value == kWhole, VisibleKeys<Spec::kRowTiles, Spec::kWindow>>::Type visible;
      if constexpr (kHides) {
        const auto [warp, lane] = ptx::thread_place();
        const int row = place.row + warp * Shape::kWarpRows;
        if (key >= mask.visible_end(row + Shape::kWarpRows - 1)) continue;  // hidden from all rows of the warp
        if (Spec::kWindow && key + kStepN <= mask.visible_begin(row)) continue;
        visible = visible_keys<Spec::kRowTiles, Spec::kWindow>(mask, row, key, lane / 4, lane % 4 * 2);
      }
      if constexpr (kPairOf<Spec>.any()) {
        const auto [warp, lane] = ptx::thread_place();
        const int row = place.row + warp * Shape::kWarpRows + lane / 4;
        const auto read = [&] {
          if constexpr (Shape::kStaged)
            return reader.at(static_cast<unsigned>(j % Spec::kStages * Shape::kTerms.bytes()), step * kStepN);
          else
            return reader;
        }();
        forward_step<Spec, kStepN, kExact, kTerms>(w, k_address, v_address, visible,
                                                   {terms, dropout, read, row, key + lane % 4 * 2, p.seqlen_q, seqlen_k, ahead(j)});
      } else {
        forward_step<Spec, kStepN, kExact, kTerms>(w, k_address, v_address, visible, {});
      }
    }
  };
  // Hidden keys have weight 0, but 0 * inf is NaN: what is not finite in v goes to the rows that see it, and is cleared.
  const auto add_what_is_not_finite = [&](int j) {
    const unsigned stage = static_cast<unsigned>(j % Spec::kStages) * Shape::kStageBytes;
    const auto sees = [&](float(&term)[2][4], int i, int chunk) {  // -Inf where it does not; nothing of it is kept in registers
      const auto [warp, lane] = ptx::thread_place();
      const int row = place.row + warp * Shape::kWarpRows, key = j * Spec::kBlockN;
      const auto visible = visible_keys<Spec::kRowTiles, Spec::kWindow>(mask, row, key, lane / 4, lane % 4 * 2);
      if constexpr (kPairOf<Spec>.hides()) {
        const auto read = [&] {
          if constexpr (Shape::kStaged)
            return reader.at(static_cast<unsigned>(j % Spec::kStages * Shape::kTerms.bytes()), 0);
          else
            return reader;
        }();
        const StepPairs<Spec> pairs{terms, dropout, read, row + lane / 4, key + lane % 4 * 2, p.seqlen_q, seqlen_k, 0.0f};
        pairs.template read<true>(term, i, chunk);
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (!kPairOf<Spec>.hides()) term[n][e] = 0;
          if (!visible(i, e / 2, 2 * chunk + n, e % 2)) term[n][e] = -kInfinity;
        }
      }
    };
    const unsigned tile_v = stages + stage + Shape::TileK::kBytes;
    add_seen_nonfinite<typename Shape::TileV, typename Spec::Element, Spec::kLevel>(w.o, tile_v, w.v_address + stage, sees);
    __syncthreads();
    clear_copied_nonfinite<CopyV, typename Shape::TileV, typename Spec::Element>(tile_v);
    __syncthreads();
  };
  constexpr Constant<kPairOf<Spec>.terms()> kTerms{};
  const auto masked_block = [&](int j) {
    if (enter_block(j, Spec::kCausal || Spec::kWindow || kPairOf<Spec>.hides())) [[unlikely]]
      add_what_is_not_finite(j);
    compute_block(Constant<1>{}, kTerms, j);
  };
  constexpr bool kByDocument = kPairOf<Spec>.documents && !kPairOf<Spec>.with_documents(false).terms();
  // Whether all queries of the tile and all keys of a block that exists whole are of one document: no pair is hidden then. The same in all warps.
  [[maybe_unused]] const auto of_one_document = [&](int j) {
    if constexpr (kByDocument) {
      const PairParams& pairs = pairs_of(p);
      const int* const ids = pairs.document_k + place.batch * pairs.document_k_stride + j * Spec::kBlockN;
      bool same = document.is_one;
#pragma unroll
      for (int key = 0; key < Spec::kBlockN; key += 32) same = same && ids[key + static_cast<int>(threadIdx.x) % 32] == document.id;
      return ptx::vote_all(same);
    }
    return false;
  };
  const auto whole_block = [&](int j) {
    if constexpr (kByDocument)
      if (of_one_document(j)) {
        enter_block(j, false);
        return compute_block(Constant<0>{}, Constant<0>{}, j);
      }
    if constexpr (kPairOf<Spec>.alibi && !kPairOf<Spec>.hides() && !Spec::kCausal)
      if (ahead(j) == 0) return masked_block(j);  // distances are absolute values there
    const bool nonfinite = enter_block(j, kPairOf<Spec>.hides());
    if constexpr (kPairOf<Spec>.hides())
      if (nonfinite) [[unlikely]]
        add_what_is_not_finite(j);
    compute_block(Constant<0>{}, kTerms, j);
  };
  const int exact_from = min(blocks.whole_end, blocks.end - 1);
  int j = blocks.end - 1;
  if constexpr (own_bits<Spec>()) {
#pragma unroll 1
    for (; j >= blocks.begin; --j) {
      if (enter_block(j, true)) [[unlikely]]
        add_what_is_not_finite(j);
      if (j >= blocks.whole_end || j < blocks.whole_begin)
        compute_block(Constant<1>{}, kTerms, j);
      else
        compute_block(Constant<kWhole>{}, kTerms, j);
    }
  } else if constexpr (Spec::kWindow) {
#pragma unroll 1
    for (; j >= blocks.begin; --j) {
      if (j >= exact_from || j < blocks.whole_begin)
        masked_block(j);
      else
        whole_block(j);
    }
  } else {
#pragma unroll 1
    for (; j >= exact_from && j >= (kPairOf<Spec>.documents ? blocks.begin : 0); --j) masked_block(j);
#pragma unroll 1
    for (; j >= (kPairOf<Spec>.documents ? blocks.begin : 0); --j) whole_block(j);
  }

  // --- finish ---
  // o takes the place of the queries. Each warp writes over its own rows of them, unless rows of o are longer.
  if constexpr (Shape::TileO::kRowBytes > Shape::TileQ::kRowBytes) __syncthreads();
  finish<Spec>(w, call, tile_q);
}

}  // namespace fattn::v2
