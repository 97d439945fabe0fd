// Writes a safetensors file, whole.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "files/whole_file.h"

namespace fattn::files::safetensors {

struct TensorData {
  std::string name;
  std::string dtype;           // a name from dtype.h
  std::vector<int64_t> shape;  // row-major, contiguous
  const void* data = nullptr;
};

// A tensor whose bytes are made while they are written.
struct TensorSource {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  std::function<void(WholeFile&)> write;  // all of its bytes, in order
};

// As write(), but leaves publishing to the caller, who may have other files to finish first.
void write_unpublished(WholeFile& file, std::vector<TensorSource> tensors, const std::map<std::string, std::string>& metadata);

// Writes into `file` and publishes it. Every tensor is aligned to its element size in the file. Throws std::invalid_argument
// for tensors that the format cannot hold (a name twice, an unknown dtype), std::runtime_error if the file cannot be written.
void write(WholeFile& file, std::vector<TensorData> tensors, const std::map<std::string, std::string>& metadata);

}  // namespace fattn::files::safetensors
