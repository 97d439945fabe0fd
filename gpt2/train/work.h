// The arithmetic of training, for comparing its speed with a machine's peak.
#pragma once

#include <cstdint>

#include "gpt2/config.h"

namespace fattn::gpt2 {

// Floating-point operations of the forward and the backward pass for one token of sequences of this length: 6 for each weight of a matrix product,
// and those of attention, of which a causal mask leaves about half. What is computed a second time does not count.
double training_flops_per_token(const Config& config, int64_t seqlen);

}  // namespace fattn::gpt2
