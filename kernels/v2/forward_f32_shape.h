// The shared memory of a CTA of the forward pass in fp32 (kernels/v2/forward_f32.h), and bounds of its numbers.
#pragma once

#include "kernels/tile/for_each.h"
#include "kernels/tile/fragment.h"
#include "kernels/tile/split_tile.h"
#include "kernels/v2/own_bits.h"

namespace fattn::v2 {

using tile::for_each;
using tile::round_up;
using tile::SharedTile;

template <class Spec>
constexpr int parts_of_number() {
  return own_bits<Spec>() ? 3 : 2;
}

// Shared memory of a CTA: the queries, then kStages pairs of keys and values, then the greatest numbers that each warp found, the scale of the
// queries, the place of the tile, and where its sequence begins.
template <class Spec>
struct ForwardF32Shape {
  static constexpr int kThreads = Spec::kWarps * 32;
  static constexpr int kWarpRows = Spec::kRowTiles * 16;
  static constexpr int kBlockM = Spec::kWarps * kWarpRows;
  using TileQ = SharedTile<kBlockM, round_up(Spec::kHeaddim, 32)>;
  using TileK = SharedTile<Spec::kBlockN, round_up(Spec::kHeaddim, 32)>;
  using TileV = SharedTile<Spec::kBlockN, round_up(Spec::kHeaddimV, 32)>;
  static constexpr int kQueryBytes = parts_of_number<Spec>() * TileQ::kBytes;
  static constexpr int kValueOffset = parts_of_number<Spec>() * TileK::kBytes;  // in a stage
  static constexpr int kStageBytes = kValueOffset + parts_of_number<Spec>() * TileV::kBytes;
  static constexpr int kGreatestOffset = kQueryBytes + Spec::kStages * kStageBytes;
  static constexpr int kQueryScaleOffset = kGreatestOffset + 8 * Spec::kWarps;
  static constexpr int kPlaceOffset = kQueryScaleOffset + 4;  // three numbers
  static constexpr int kNotesOffset = kPlaceOffset + 12;      // OddNotes
  static constexpr int kFirstKeyOffset = kNotesOffset + 12;   // of packed sequences alone
};

// A weight enters the product with v as weight * 2^12: at its usual size, 1 or less, it is far from the least of fp16, and up to 15 it is below the
// greatest. Above that the reference is renewed.
inline constexpr float kWeightFactor = 4096.0f, kGreatestWeight = 15.0f;

// Beyond this reference the rounding of score * scale makes an odd number of the greatest weight, and the product of a row that has hardly another
// one is then off by what split products leave out. Such rows are computed again in specialisations with features, but for terms: those may be as
// large on purpose, to hide.
inline constexpr float kGreatestReference = 2048.0f;

}  // namespace fattn::v2
