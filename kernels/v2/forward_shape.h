// The shared memory of a CTA of v2's forward pass (kernels/v2/forward.h) and the shapes of its tiles.
#pragma once

#include "kernels/pair.h"
#include "kernels/tile/for_each.h"
#include "kernels/tile/fragment.h"
#include "kernels/tile/global_load.h"
#include "kernels/v2/own_bits.h"
#include "kernels/v2/term_tile.h"

namespace fattn::v2 {

using tile::Constant;
using tile::for_each;
using tile::round_up;
using tile::SharedTile;

// Shared memory of a CTA: the queries (in the end the output), then kStages pairs of keys and values.
template <class Spec>
struct ForwardShape {
  static constexpr int kThreads = Spec::kWarps * 32;
  static constexpr int kWarpRows = Spec::kRowTiles * 16;
  static constexpr int kBlockM = Spec::kWarps * kWarpRows;
  using TileQ = SharedTile<kBlockM, round_up(Spec::kHeaddim, 32)>;
  using TileK = SharedTile<Spec::kBlockN, round_up(Spec::kHeaddim, 32)>;
  using TileV = SharedTile<Spec::kBlockN, round_up(Spec::kHeaddimV, 32)>;
  using TileO = SharedTile<kBlockM, round_up(Spec::kHeaddimV, 32)>;
  static constexpr int kQueryBytes = TileQ::kBytes > TileO::kBytes ? TileQ::kBytes : TileO::kBytes;
  static constexpr int kStageBytes = TileK::kBytes + TileV::kBytes;
  static constexpr int kSharedBytes = kQueryBytes + Spec::kStages * kStageBytes;  // behind it kStages tiles of terms
  static constexpr bool kStaged = is_staged<Spec>();
  static constexpr TermTile kTerms = term_tile<kPairOf<Spec>>(kBlockM, Spec::kBlockN, false);
  static constexpr bool kEntriesTogether = kPairOf<Spec>.bias != 0 || kPairOf<Spec>.mask;
  static constexpr auto kCopyBy = !Spec::kAligned ? tile::CopyBy::kElements : Spec::kLevel < 80 ? tile::CopyBy::kRegisters : tile::CopyBy::kAsync;
};
}  // namespace fattn::v2
