// The shared memory of a v3 backward CTA: tiles, stages and barriers, from its specialisation.
//
// A specialisation is a struct with
//   Element                     bf16 or f16
//   Mask, Score                 what a query sees (v3/mask.h), what becomes of a score (v3/score.h; a negative scale needs no score of its own)
//   kHeaddim, kHeaddimV         64, 96, 128, 192 or 256; smaller tensors are filled up with zeros by TMA
//   kByRole                     false: each of kGroups warpgroups computes dk and dv of 64 keys; true: of the CTA's 64 keys one warpgroup
//                               computes dv, the other dk (kGroups is 2), because the registers of one do not hold both
//   kGroups                     warpgroups that compute gradients of keys; another one computes dq
//   kStages                     blocks of queries in shared memory at once
//   kStagings                   1 or 2: parts of dq on their way to global memory; by role 0: they go there from registers
//   kOwnLoader                  loads are issued by a warpgroup of its own, otherwise by a thread of that of dq
//   kDeterministic              dq is added up in the order of the keys
//   kMainRegisters, kDqRegisters, kLoaderRegisters   of a thread
//   kPair                       kernels/pair.h; none if it is left out
#pragma once

#include "device_abi/v3_backward_work.h"
#include "kernels/pair.h"
#include "kernels/ptx/mbarrier.h"
#include "kernels/v3/operand_tile.h"

namespace fattn::v3 {

inline constexpr int kTileBytes = 32, kPackedTileBytes = 80;  // of a TilePlace (v3/backward_schedule.h); the latter with limits
inline constexpr int kSlopeBytes = 16;
inline constexpr float kHiddenWeight = -0.0f;  // of a hidden pair: the sign says so, and dS is 0 whatever dP is
inline constexpr int kKeptBytes = 512;         // of 64 keys (v3/backward_dropout.h)

template <class Spec>
struct BackwardShape {
  static constexpr int kKeyGroups = Spec::kByRole ? 1 : Spec::kGroups;  // of 64 keys
  static constexpr bool kLengths = kPairOf<Spec>.lengths, kAlibi = kPairOf<Spec>.alibi, kDropout = kPairOf<Spec>.dropout;
  static constexpr bool kPacked = kPairOf<Spec>.packed, kDocuments = kPairOf<Spec>.documents;
  static constexpr bool kMask = kPairOf<Spec>.mask;
  static_assert(!kMask || !(kDocuments || kPacked), "words of a mask lie where documents and packed sequences have theirs in the workspace");
  static constexpr int kBias = kPairOf<Spec>.bias;
  static constexpr bool kDbias = kPairOf<Spec>.dbias;
  // A mask narrows a tile (v3/backward_masked.h). Not where CTAs count on which tiles meet a block, or every pair has a gradient to be written.
  static constexpr bool kMaskBlocks = kMask && !Spec::kDeterministic && !kDbias;
  static constexpr int kBlockM = kV3BackwardRows, kBlockN = 64 * kKeyGroups;
  static constexpr int kThreads = 128 * (Spec::kGroups + 1 + Spec::kOwnLoader);
  using TileK = OperandTile<kBlockN, Spec::kHeaddim>;
  using TileV = OperandTile<kBlockN, Spec::kHeaddimV>;
  using TileQ = OperandTile<kBlockM, Spec::kHeaddim>;
  using TileDout = OperandTile<kBlockM, Spec::kHeaddimV>;
  using TileDs = OperandTile<kBlockN, kBlockM>;  // a row is a key

  // dS leaves its warpgroup one block before dq is computed from it. A row of lse or of row sums is dead when dS of its block is there: two are
  // enough then. By role its place is given back with that of the queries (of dout).
  static constexpr int kStagesDs = 2;
  static constexpr int kRowSlots = Spec::kByRole ? Spec::kStages : kStagesDs;
  static constexpr int kRowBytes = 4 * kBlockM;
  static constexpr int kStagingBytes = 4 * kBlockM * 64;
  static constexpr int kPBytes = Spec::kByRole ? 4 * 64 * kBlockM : 0;  // in fp32, from one role to the other

  static constexpr int kOffsetV = TileK::kBytes;
  static constexpr int kOffsetQ = kOffsetV + TileV::kBytes;
  static constexpr int kOffsetDout = kOffsetQ + Spec::kStages * TileQ::kBytes;
  static constexpr int kOffsetDs = kOffsetDout + Spec::kStages * TileDout::kBytes;
  static constexpr int kOffsetP = kOffsetDs + kStagesDs * TileDs::kBytes;
  static constexpr int kOffsetStaging = kOffsetP + kPBytes;
  static constexpr int kOffsetLse = kOffsetStaging + Spec::kStagings * kStagingBytes;
  static constexpr int kOffsetRowSum = kOffsetLse + kRowSlots * kRowBytes;
  static constexpr int kOffsetBarriers = kOffsetRowSum + kRowSlots * kRowBytes;
  static constexpr int kBarriers = 6 + 4 * Spec::kStages + 2 * kStagesDs;
  static constexpr int kOffsetTile = kOffsetBarriers + 8 * kBarriers;
  static constexpr int kOffsetSlopes = kOffsetTile + (kPacked || kDocuments ? kPackedTileBytes : kTileBytes);  // of the heads whose lse there is
  static constexpr int kOffsetKept = kOffsetSlopes + (kAlibi ? kSlopeBytes : 0);
  static constexpr int kOffsetKeptBarriers = kOffsetKept + (kDropout ? kKeptBytes * kKeyGroups : 0);
  static constexpr int kSharedBytes = kOffsetKeptBarriers + (kDropout ? 16 * kKeyGroups : 0);
  static_assert(!kDropout || (kKeyGroups <= 3 && (Spec::kOwnLoader || !Spec::kByRole) && kOffsetKept % 16 == 0),
                "warps of the loader, or of dq, make the bits");
  static_assert(4 * kRowSlots <= kSlopeBytes);

  static_assert(Spec::kByRole || Spec::kStages == 3, "only then is a stage free when dS of the next block but one is there (v3/backward_load.h)");
  static_assert(!Spec::kByRole || (Spec::kGroups == 2 && Spec::kStagings == 0 && Spec::kOwnLoader));
};

// Addresses of the barriers. "full" is for who reads a buffer, "empty" for who fills it next.
template <class Spec>
struct BackwardBarriers {
  using Shape = BackwardShape<Spec>;
  static constexpr unsigned kStages = Spec::kStages, kStagesDs = Shape::kStagesDs;
  unsigned first;

  __device__ __forceinline__ unsigned at(unsigned index) const { return first + 8 * index; }
  __device__ __forceinline__ unsigned k_full() const { return at(0); }
  __device__ __forceinline__ unsigned v_full() const { return at(1); }
  // The last products that read keys (for dq), and values, are done: the tiles may take dk and dv.
  __device__ __forceinline__ unsigned k_done() const { return at(2); }
  __device__ __forceinline__ unsigned v_done() const { return at(3); }
  __device__ __forceinline__ unsigned p_full() const { return at(4); }
  __device__ __forceinline__ unsigned p_empty() const { return at(5); }
  __device__ __forceinline__ unsigned ds_full(unsigned stage) const { return at(6 + stage); }
  __device__ __forceinline__ unsigned ds_empty(unsigned stage) const { return at(6 + kStagesDs + stage); }
  __device__ __forceinline__ unsigned q_full(unsigned stage) const { return at(6 + 2 * kStagesDs + stage); }
  __device__ __forceinline__ unsigned dout_full(unsigned stage) const { return q_full(kStages + stage); }
  __device__ __forceinline__ unsigned q_empty(unsigned stage) const { return q_full(2 * kStages + stage); }
  __device__ __forceinline__ unsigned dout_empty(unsigned stage) const { return q_full(3 * kStages + stage); }

  // Of the bits for 64 keys.
  __device__ __forceinline__ unsigned kept_full(int group) const {
    return first + static_cast<unsigned>(Shape::kOffsetKeptBarriers - Shape::kOffsetBarriers + 16 * group);
  }
  __device__ __forceinline__ unsigned kept_empty(int group) const { return kept_full(group) + 8; }

  // By one thread. Warps arrive where a tile was read or written by them.
  __device__ __forceinline__ void init() const {
    constexpr int kWarps = 4, kAllWarps = 4 * Spec::kGroups, kDsWarps = Spec::kByRole ? kWarps : kAllWarps;
    ptx::mbarrier_init(k_full(), 1);
    ptx::mbarrier_init(v_full(), 1);
    ptx::mbarrier_init(k_done(), kWarps);
    ptx::mbarrier_init(v_done(), kWarps);
    ptx::mbarrier_init(p_full(), kWarps);
    ptx::mbarrier_init(p_empty(), kWarps);
    for (unsigned i = 0; i < kStagesDs; ++i) {
      ptx::mbarrier_init(ds_full(i), kDsWarps);
      ptx::mbarrier_init(ds_empty(i), kWarps);
    }
    for (unsigned i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(q_full(i), 1);
      ptx::mbarrier_init(dout_full(i), 1);
      ptx::mbarrier_init(q_empty(i), kAllWarps);
      ptx::mbarrier_init(dout_empty(i), kAllWarps);
    }
    if constexpr (Shape::kDropout)
      for (int group = 0; group < Shape::kKeyGroups; ++group) {
        ptx::mbarrier_init(kept_full(group), 1);
        ptx::mbarrier_init(kept_empty(group), kWarps);
      }
    ptx::mbarrier_init_fence();
  }
};

}  // namespace fattn::v3
