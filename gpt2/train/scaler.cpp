// Powers of two alone: scaling and its inverse are exact.
#include "gpt2/train/scaler.h"

#include <algorithm>

namespace fattn::gpt2 {

void LossScaler::good() {
  if (!scales_ || ++state_.good_steps < kGrowth) return;
  state_.scale = std::min(state_.scale * 2, kMost);
  state_.good_steps = 0;
}

bool LossScaler::overflow() {
  if (!scales_ || state_.scale <= kLeast) return false;
  state_.scale /= 2;
  state_.good_steps = 0;
  ++state_.overflows;
  return true;
}

}  // namespace fattn::gpt2
