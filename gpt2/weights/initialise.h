// Random weights, as transformers begins with them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpt2/config.h"
#include "gpt2/weights/tensors.h"

namespace fattn::gpt2 {

// Elements begin .. begin + count of the tensor's first values. They depend on the seed, the tensor's name and the place alone.
void initialise(const TensorSpec& tensor, const Config& config, uint64_t seed, int64_t begin, size_t count, float* to);

}  // namespace fattn::gpt2
