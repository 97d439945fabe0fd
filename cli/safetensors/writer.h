// Writes a safetensors file, whole.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "cli/whole_file.h"

namespace fattn::cli::safetensors {

struct TensorData {
  std::string name;
  std::string dtype;           // a name from dtype.h
  std::vector<int64_t> shape;  // row-major, contiguous
  const void* data = nullptr;
};

// Writes into `file` and publishes it. Every tensor is aligned to its element size in the file. Throws std::invalid_argument
// for tensors that the format cannot hold (a name twice, an unknown dtype), std::runtime_error if the file cannot be written.
void write(WholeFile& file, std::vector<TensorData> tensors, const std::map<std::string, std::string>& metadata);

}  // namespace fattn::cli::safetensors
