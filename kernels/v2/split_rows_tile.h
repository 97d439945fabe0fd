// One half, high or low, of an operand of the fp32 kernels of the backward pass; the other follows it.
#pragma once

#include "kernels/v2/swizzled_tile.h"

namespace fattn::v2 {

template <int kRows_, int kWidth>
struct SplitRows : SwizzledTile<kWidth> {
  static constexpr int kRows = kRows_, kUnits = kWidth / 8, kBytes = kRows_ * SwizzledTile<kWidth>::kPitch;
};

}  // namespace fattn::v2
