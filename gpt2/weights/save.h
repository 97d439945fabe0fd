// Writes a model's folder: all of its files, or none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "fattn/types.hpp"
#include "gpt2/weights/tensors.h"
#include "gpt2/weights/weights.h"

namespace fattn::gpt2 {

struct SaveOptions {
  DType dtype = DType::kF32;
  bool prefix = true;                           // names begin with "transformer.", as a model with a head has them
  uint64_t most_bytes = 0;                      // of a file; 0: one file
  std::function<void(uint64_t)> progress = {};  // bytes that were written
};

// The sum of bytes that progress will be told.
uint64_t saved_bytes(const std::vector<TensorSpec>& tensors, DType dtype);

// Fills `to` with elements begin .. begin + count of a tensor in the options' dtype; throws Error.
using Fill = std::function<void(const TensorSpec& tensor, int64_t begin, size_t count, void* to)>;

// `texts`: names and contents of the other files, config.json among them. Throws Error if the folder is not new or empty, or there would be more than
// 100 files of weights; std::runtime_error if it cannot be written.
void save_model(const std::string& folder, const std::vector<TensorSpec>& tensors, const Fill& fill,
                const std::vector<std::pair<std::string, std::string>>& texts, const SaveOptions& options);

// The two that fill: random numbers; weights from elsewhere, in another dtype.
Fill fill_at_random(const Config& config, DType dtype, uint64_t seed);
Fill fill_from(const Weights& weights, DType dtype);

}  // namespace fattn::gpt2
