// The tensors of a GPT-2, by name: what a file of weights must hold.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gpt2/config.h"

namespace fattn::gpt2 {

// What random weights begin with: N(0, initializer_range); the same by 1 / sqrt(2 n_layer), of what adds to the residual stream; 1; 0.
enum class Start { kNormal, kResidual, kOne, kZero };

struct TensorSpec {
  std::string name;            // without "transformer."
  std::vector<int64_t> shape;  // as in the file
  bool conv1d = false;         // a matrix kept as (in, out), which transformers calls Conv1D; else (out, in)
  Start start = Start::kNormal;

  int64_t size() const;  // elements
};

// In the order of computation. A head of its own ("lm_head.weight") is there only if it is not tied.
std::vector<TensorSpec> tensors_of(const Config& config);

// 124,439,808 for gpt2: what is tied counts once.
int64_t parameters_of(const Config& config);

// "h.3.attn.bias": masks that older files hold beside the weights; nothing is read from them.
bool is_mask_buffer(const std::string& name, const Config& config);

}  // namespace fattn::gpt2
