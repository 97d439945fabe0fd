// What tells the kernels of one family from another's in a kernel key: its first member.
#pragma once

#include <cstdint>

namespace fattn::core::cuda {

enum class KernelKind : uint32_t {
  kV2Forward = 1,
  kV2Backward = 2,
  kV2BackwardPrepare = 3,
  kV2BackwardFinish = 4,
  kPeak = 5,
  kV3Forward = 6,
  kV3Backward = 7,
  kV3BackwardPrepare = 8,
  kV3BackwardFinish = 9,
  kV2DbiasZero = 12,
  kV2DbiasFinish = 13,
  kSequenceRest = 14,
  kV3PackedTiles = 15,
  kV3PackedKeyTiles = 16,
  kV3DocumentRanges = 17,
  kV3MaskWords = 18,
  kV3BackwardDbias = 19,
  kListStatus = 50,
  kSinksGradient = 51,
  kSinksGradientSum = 52,
  kV3ForwardF32 = 40,
  kV3ForwardF32Split = 41,
  kV2BackwardF32Split = 42,
  kDecode = 10,
  kDecodeCombine = 11,
  kStandardSoftmax = 20,
  kStandardGradient = 21,
  kStandardFinish = 22,
  kStandardClean = 23,
  kV1Forward = 30,
  kMerge = 60,
  kMergeBackward = 61,
  kRotary = 62,
  kAppend = 63
};

}  // namespace fattn::core::cuda
