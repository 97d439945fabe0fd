// Matrix operands of wgmma in shared memory.
#pragma once

namespace fattn::v3 {

// Rows of kRows in columns of 64 elements (128 bytes), column after column, each swizzled as TMA does it.
template <int kRows_, int kWidth>
struct OperandTile {
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = (kWidth + 63) / 64;
  static constexpr int kColumnBytes = kRows * 128;
  static constexpr int kBytes = kColumns * kColumnBytes;
  static_assert(kRows % 8 == 0);

  // What the lower half of a descriptor grows by from one step of 16 elements along the width to step kStep.
  static constexpr unsigned step(int index) { return static_cast<unsigned>(index / 4 * (kColumnBytes / 16) + index % 4 * 2); }
};

}  // namespace fattn::v3
