// How wild the scores of a warp's rows are: whether its blocks take a maximum at once, because weights that trusted the references dominated their
// rows again and again in the tile, or were beyond all bounds (v3/softmax.h).
#pragma once

namespace fattn::v3 {

// kCapped: with softcap it says besides that capped scores are tanh itself: from the first that left the curve to the tile's end. Until then it is 0.
template <bool kCapped>
struct Wildness {
  static constexpr int kCalm = 4;             // above it every block takes a maximum, which then costs less than to find weights that dominate
  static constexpr int kBefore = 12;          // of a tile behind one that was above
  static constexpr int kBeyondBounds = 1000;  // stays to the end of the tile: weights are beyond all bounds in many blocks
  static constexpr int kBeyondBefore = 999;   // of a tile behind such a one; stays likewise
  int value = 0;

  __device__ __forceinline__ bool takes_maxima() const { return value > kCalm; }
  __device__ __forceinline__ bool by_tanh() const { return value > 0; }

  // Scores are like those of the tile before. With softcap the tile's first block says what they are: leaves_curve().
  __device__ __forceinline__ void begin_tile() {
    if constexpr (kCapped)
      value = 0;
    else
      value = value == kBeyondBounds ? kBeyondBefore : value > kCalm && value < kBeyondBefore ? kBefore : 0;
  }
  // A maximum changed nothing.
  __device__ __forceinline__ void calm_down() {
    if (!kCapped && value < kBeyondBefore) value = max(value - 1, 0);
  }
  // Weights dominated their rows.
  __device__ __forceinline__ void dominated() {
    if (!kCapped || value > 0) value += 2;
  }
  __device__ __forceinline__ void beyond_bounds() { value = kBeyondBounds; }
  __device__ __forceinline__ void leave_curve() { value = 1; }
};

}  // namespace fattn::v3
