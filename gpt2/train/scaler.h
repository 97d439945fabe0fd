// Losses are multiplied by a scale before the backward pass of fp16, so that small gradients do not vanish: as large as it can be without overflow.
#pragma once

#include <cstdint>

namespace fattn::gpt2 {

struct ScalerState {
  double scale = 1;
  int64_t good_steps = 0;  // without an overflow since the scale changed last
  int64_t overflows = 0;   // in all; their steps change no weight

  bool operator==(const ScalerState&) const = default;
};

class LossScaler {
 public:
  static constexpr double kFirst = 65536, kMost = 16777216, kLeast = 1;
  static constexpr int64_t kGrowth = 2000;  // steps without an overflow, after which the scale is doubled

  // `scales`: fp16; else the scale is always 1.
  explicit LossScaler(bool scales) : scales_(scales) { state_.scale = scales ? kFirst : 1; }
  LossScaler(bool scales, const ScalerState& state) : scales_(scales), state_(state) {}

  double scale() const { return state_.scale; }
  const ScalerState& state() const { return state_; }

  void good();
  // Halves the scale. Returns false where that is no remedy: there is no scale, or it is at its least.
  bool overflow();

 private:
  bool scales_;
  ScalerState state_;
};

}  // namespace fattn::gpt2
