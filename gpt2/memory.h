// How many bytes a model takes, counted before anything is allocated.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gpt2/config.h"
#include "gpt2/model/session.h"

namespace fattn::gpt2 {

struct MemoryUse {
  const char* kind;  // "weights", "KV cache", "activations", "workspace"
  std::string what;
  std::string shape;  // in words
  int64_t bytes = 0;
};

// Of a model and a session, before there is either: plans are made, nothing else. Throws Error if a number does not fit 64 bits.
std::vector<MemoryUse> memory_of(const Config& config, DType dtype, const Compute& compute, const SessionOptions& options);

// Keys and values of one token in all layers.
int64_t kv_bytes_per_token(const Config& config, DType dtype);

}  // namespace fattn::gpt2
