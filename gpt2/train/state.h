// Where a training run stands: what, beside weights and moments, the next step depends on.
#pragma once

#include <cstdint>

#include "gpt2/data/loader.h"
#include "gpt2/train/scaler.h"

namespace fattn::gpt2 {

struct TrainState {
  int64_t step = 0;     // that are done
  int64_t updates = 0;  // of the weights; fewer than steps where fp16 overflowed
  uint64_t draws = 0;   // passes that are done: dropout counts them
  LoaderPosition position;
  ScalerState scaler;
};

}  // namespace fattn::gpt2
