// How many bytes a model takes, counted before anything is allocated.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gpt2/config.h"

namespace fattn::gpt2 {

struct MemoryUse {
  const char* kind;  // "weights", "KV cache", "activations"
  std::string what;
  std::string shape;  // in words
  int64_t bytes = 0;
};

// Of a forward pass over batch x seqlen tokens in one dtype. Activations are the tensors between operations, which every layer uses again; workspaces
// of kernels are not among them. Throws Error if a number does not fit 64 bits.
std::vector<MemoryUse> memory_of(const Config& config, DType dtype, int64_t batch, int64_t seqlen);

// Keys and values of one token in all layers.
int64_t kv_bytes_per_token(const Config& config, DType dtype);

}  // namespace fattn::gpt2
