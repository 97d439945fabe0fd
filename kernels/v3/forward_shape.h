// The shared memory of a v3 forward CTA: tiles, stages and barriers, from its specialisation.
//
// A specialisation is a struct with
//   Element                                bf16 or f16
//   Mask, Score                            what a query sees (v3/mask.h), what becomes of a score (v3/score.h)
//   kHeaddim, kHeaddimV                    multiples of 16 up to 256; smaller tensors are filled up with zeros by TMA
//   kGroups                                consumer warpgroups, of 64 query rows each
//   kBlockN                                keys of a block
//   kStagesK, kStagesV                     blocks of keys and of values in shared memory at once
//   kQueryBuffers                          1, or 2: a tile then begins while the one before ends
//   kPingPong                              warpgroups take turns at the tensor cores
//   kSkip                                  a warpgroup passes over blocks that none of its rows sees; not with kPingPong
//   kEarlyEighths                          share of a block's exponentials that is computed before waiting for the product with v before it
//   kCareful                               a warp with wild scores takes maxima by itself; otherwise its warpgroup does together
//   kProducerRegisters, kConsumerRegisters of a thread
//   kPair                                  features of pairs (kernels/pair.h): lengths or packed, alibi, dropout, documents, bias, mask; none if
//                                          it is left out
//   kStagesTerms                           with bias: blocks of it in shared memory at once
#pragma once

#include "device_abi/term_tile.h"
#include "device_abi/v3_forward_work.h"
#include "kernels/pair.h"
#include "kernels/ptx/mbarrier.h"
#include "kernels/v3/operand_tile.h"
#include "kernels/v3/ring.h"

namespace fattn::v3 {

// Whether there is a bias or a mask of pairs.
template <class Spec>
inline constexpr bool kPairTerms = kPairOf<Spec>.bias != 0 || kPairOf<Spec>.mask;
// A bias: blocks of it in shared memory, and the threads that copy them there (v3/forward_terms.h).
template <class Spec>
inline constexpr bool kStagedTerms = kPairOf<Spec>.bias != 0;
template <class Spec>
constexpr int stages_of_terms() {
  if constexpr (kStagedTerms<Spec>) return Spec::kStagesTerms;
  return 0;
}
inline constexpr int kTermThreads = 64;
// Whether pairs may be hidden: values then wait until Inf and NaN are out of the way (v3/forward_values.h).
template <class Spec>
inline constexpr bool kHidesPairs = Spec::Mask::kUneven || kPairTerms<Spec>;
// Whether values are taken for numbers until there was NaN in o: any block may hide something, and to look through all of them costs too much
// (v3/spoilt_notes.h).
template <class Spec>
inline constexpr bool kTrustsValues = kPairTerms<Spec>;
// Whether CTAs take tiles when they are free (v3/tiles_of_cta.h).
template <class Spec>
inline constexpr bool kTakesTiles = kPairOf<Spec>.packed;

template <class Spec>
struct ForwardShape {
  static constexpr int kGroups = Spec::kGroups;
  static constexpr int kThreads = 128 * (kGroups + 1);
  static constexpr int kBlockM = 64 * kGroups;
  static constexpr int kBlockN = Spec::kBlockN;
  static constexpr int kDepth = Spec::kHeaddim / 16;  // steps of q k^T
  using TileQ = OperandTile<kBlockM, Spec::kHeaddim>;
  using TileK = OperandTile<kBlockN, Spec::kHeaddim>;
  using TileV = OperandTile<kBlockN, Spec::kHeaddimV>;
  using TileO = OperandTile<kBlockM, Spec::kHeaddimV>;  // takes the place of the queries on its way out

  // With one buffer of queries, those of the next tile would wait for o to leave it: consumers then store o from their registers. In fp32 there is no
  // room for it.
  static constexpr bool kStoreFromRegisters = Spec::kQueryBuffers == 1 || kPairOf<Spec>.fp32_out;
  static constexpr int kQueryBytes = TileQ::kBytes > TileO::kBytes ? TileQ::kBytes : TileO::kBytes;
  static constexpr int kOffsetK = Spec::kQueryBuffers * kQueryBytes;
  static constexpr int kOffsetV = kOffsetK + Spec::kStagesK * TileK::kBytes;
  static constexpr int kOffsetBarriers = kOffsetV + Spec::kStagesV * TileV::kBytes;
  static constexpr int kQueryBarriers = v3_query_barriers(kGroups, Spec::kQueryBuffers, Spec::kSkip);
  static constexpr int kStagesTerms = stages_of_terms<Spec>();
  static constexpr int kBarriers = kQueryBarriers + 2 * (Spec::kStagesK + Spec::kStagesV + kStagesTerms) + Spec::kStagesV;
  static constexpr int kOffsetNotes = kOffsetBarriers + 8 * kBarriers, kEndNotes = kOffsetNotes + kV3NoteBytes;
  static constexpr int kOffsetTiles = v3_slots_offset(kEndNotes);
  static constexpr TermTile kTermTile = {kBlockM, kBlockN, kPairOf<Spec>.bias == 0 ? 0 : kPairOf<Spec>.bias == 2 ? 4 : 2, false, false};
  static constexpr int kOffsetTerms = v3_terms_offset(v3_slots_end(kEndNotes, kTakesTiles<Spec>), kStagesTerms);
  static constexpr int kSharedBytes = kOffsetTerms + kStagesTerms * kTermTile.bytes();

  // Rows of a warpgroup may begin to see keys behind the tile's first block.
  static constexpr bool kSkipsBefore = Spec::kSkip && Spec::Mask::kBegins && !kPairOf<Spec>.documents;
  // Keys of the next tile come before its queries, which wait for room longer.
  static constexpr bool kKeysFirst = Spec::Mask::kBegins;
  // With one buffer, a warpgroup that passes over a tile's last blocks gets its queries of the next while others still read their own.
  static constexpr bool kQueriesByGroup = kSkipsBefore && Spec::kQueryBuffers == 1;

  static_assert(Spec::kHeaddim % 16 == 0 && Spec::kHeaddimV % 16 == 0 && kBlockN % 16 == 0);
  static_assert(Spec::kQueryBuffers == 1 || Spec::kQueryBuffers == 2);
  static_assert(!(Spec::kPingPong && Spec::kSkip), "turns need the same number of blocks from every warpgroup");
  static_assert(!Spec::Score::kCapped || Spec::kCareful, "scores near softcap would take the way back in every block");
  static_assert(!kStagedTerms<Spec> || (Spec::kCareful && !Spec::kSkip && !Spec::Score::kCapped), "blocks without a visible key would take it too");
  static_assert(!kSkipsBefore || 64 * (kGroups - 1) <= (Spec::kStagesV - 1) * kBlockN,
                "a warpgroup waits for the keys of the next tile while it holds the values of its own last block and of those passed over");
};

// Addresses of the barriers. "full" is for who reads a buffer, "empty" for who fills it next.
template <class Spec>
struct Barriers {
  using Shape = ForwardShape<Spec>;
  static constexpr int kBuffers = Spec::kQueryBuffers;
  unsigned first;

  __device__ __forceinline__ unsigned at(unsigned index) const { return first + 8 * index; }
  // Of all queries of a tile, or of each warpgroup's: where nobody waits for o_full.
  __device__ __forceinline__ unsigned q_full(unsigned buffer, unsigned group = 0) const { return at(Shape::kQueriesByGroup ? group : buffer); }
  __device__ __forceinline__ unsigned q_empty(unsigned buffer, unsigned group = 0) const {
    return at(Shape::kQueriesByGroup ? Shape::kGroups + group : kBuffers + buffer);
  }
  __device__ __forceinline__ unsigned o_full(unsigned buffer, unsigned group) const { return at(2 * kBuffers + buffer * Shape::kGroups + group); }
  __device__ __forceinline__ unsigned k_full(unsigned stage) const { return at(Shape::kQueryBarriers + stage); }
  __device__ __forceinline__ unsigned k_empty(unsigned stage) const { return k_full(Spec::kStagesK + stage); }
  __device__ __forceinline__ unsigned v_full(unsigned stage) const { return k_empty(Spec::kStagesK + stage); }
  __device__ __forceinline__ unsigned v_empty(unsigned stage) const { return v_full(Spec::kStagesV + stage); }

  // Of a bias.
  __device__ __forceinline__ unsigned terms_full(unsigned stage) const { return v_empty(Spec::kStagesV + stage); }
  __device__ __forceinline__ unsigned terms_empty(unsigned stage) const { return terms_full(Shape::kStagesTerms + stage); }

  // Of values that have been looked through.
  __device__ __forceinline__ unsigned v_good(unsigned stage) const { return terms_empty(Shape::kStagesTerms + stage); }

  // By one thread.
  __device__ __forceinline__ void init() const {
    constexpr int kConsumerWarps = 4 * Shape::kGroups;
    if constexpr (Shape::kQueriesByGroup)
      for (unsigned group = 0; group < Shape::kGroups; ++group) {
        ptx::mbarrier_init(q_full(0, group), 1);
        ptx::mbarrier_init(q_empty(0, group), 4);
      }
    for (unsigned i = 0; i < kBuffers && !Shape::kQueriesByGroup; ++i) {
      ptx::mbarrier_init(q_full(i), 1);
      ptx::mbarrier_init(q_empty(i), Shape::kStoreFromRegisters ? kConsumerWarps : 1);
      for (unsigned group = 0; group < Shape::kGroups; ++group) ptx::mbarrier_init(o_full(i, group), 4);
    }
    for (unsigned i = 0; i < Spec::kStagesK; ++i) {
      ptx::mbarrier_init(k_full(i), 1);
      ptx::mbarrier_init(k_empty(i), kConsumerWarps);
    }
    for (unsigned i = 0; i < Spec::kStagesV; ++i) {
      ptx::mbarrier_init(v_full(i), 1);
      ptx::mbarrier_init(v_empty(i), kConsumerWarps);
      ptx::mbarrier_init(v_good(i), kV3NoteWarps);
    }
    for (unsigned i = 0; i < Shape::kStagesTerms; ++i) {
      ptx::mbarrier_init(terms_full(i), 2 * kTermThreads);  // each twice
      ptx::mbarrier_init(terms_empty(i), kConsumerWarps);
    }
    ptx::mbarrier_init_fence();
  }
};

// A Ring (v3/ring.h) from the number of a tile: the buffer of its queries.
template <int kSize>
struct QueryBuffer {
  unsigned stage, parity;
  __device__ __forceinline__ explicit QueryBuffer(unsigned number)
      : stage(kSize == 2 ? number & 1 : 0), parity(kSize == 2 ? number >> 1 & 1 : number & 1) {}
};

}  // namespace fattn::v3
