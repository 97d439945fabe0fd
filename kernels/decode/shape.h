// What decode kernels are made of, from their specialisation.
//
// The rows of a CTA are the queries of all query heads that share a key head, so that keys and values are read once. Teams of warps take steps of
// keys in turn, each with a ring of stages in shared memory of its own: no team waits for another before the end, where they add up.
//
// A specialisation is a struct with
//   Element                 bf16 or f16
//   kHeaddim, kHeaddimV     multiples of 8 up to 256; bases and strides are multiples of 16 bytes
//   kRowTiles, kRowWarps    16-row tiles of a warp, warps of a team: rows of a CTA
//   kTeams, kBlockN         teams, keys of a step of one
//   kStages                 steps in shared memory at once
//   kQueriesInRegisters     or read from shared memory for every step
//   kDependent              sm_90 and later: kernels come up while the one before ends
//   kShares                 if there: sequences are shared by their lengths (shares.h)
#pragma once

#include "kernels/tile/global_load.h"
#include "kernels/tile/shared_tile.h"

namespace fattn::decode {

template <class Spec>
struct Shape {
  static constexpr int kTeamThreads = Spec::kRowWarps * 32;
  static constexpr int kThreads = Spec::kTeams * kTeamThreads;
  static constexpr int kWarpRows = Spec::kRowTiles * 16;
  static constexpr int kRows = Spec::kRowWarps * kWarpRows;
  static constexpr int kDepthQ = (Spec::kHeaddim + 15) / 16;   // steps of 16 along headdim
  static constexpr int kDepthO = (Spec::kHeaddimV + 15) / 16;  // pairs of output tiles of 8 columns

  using TileQ = tile::SharedTile<kRows, tile::round_up(Spec::kHeaddim, 32)>;
  using TileK = tile::SharedTile<Spec::kBlockN, tile::round_up(Spec::kHeaddim, 32)>;
  using TileV = tile::SharedTile<Spec::kBlockN, tile::round_up(Spec::kHeaddimV, 32)>;
  using CopyK = tile::TileCopy<TileK, kTeamThreads, Spec::kHeaddim, tile::CopyBy::kAsync, Spec::kTeams>;
  using CopyV = tile::TileCopy<TileV, kTeamThreads, Spec::kHeaddimV, tile::CopyBy::kAsync, Spec::kTeams>;

  // Shared memory: the queries, then the rings.
  static constexpr int kStageBytes = TileK::kBytes + TileV::kBytes;
  static constexpr int kRingBytes = Spec::kStages * kStageBytes;

  // In place of both, in the end: for each team and row sums in fp32, and then shift and sum of weights.
  static constexpr int kPartPitch = (16 * kDepthO + 8) * 4;  // bytes of a row: rows 8 banks apart, so that fragments are stored without conflict
  static constexpr int kPartBytes = kRows * kPartPitch;
  static constexpr int kStatsBytes = kRows * 8;

  // Behind all, where sequences are shared by their lengths: where each warp is on its way.
  static constexpr int kRingsEnd = TileQ::kBytes + Spec::kTeams * kRingBytes, kPartsEnd = Spec::kTeams * (kPartBytes + kStatsBytes);
  static constexpr int kWalksAt = kRingsEnd > kPartsEnd ? kRingsEnd : kPartsEnd;

  static_assert(Spec::kHeaddim % 8 == 0 && Spec::kHeaddimV % 8 == 0 && Spec::kBlockN % 16 == 0);
  static_assert(Spec::kTeams < 16);  // named barriers
};

}  // namespace fattn::decode
