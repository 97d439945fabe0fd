// The weights of a model as they lie in its files: by name, with dtype, shape and place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "fattn/types.hpp"
#include "files/safetensors/mapped.h"
#include "gpt2/config.h"

namespace fattn::gpt2 {

struct Weight {
  std::string name;  // without "transformer."
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  bool conv1d = false;         // (in, out) instead of (out, in)
  const void* data = nullptr;  // row-major, aligned to its elements at least
  uint64_t bytes = 0;

  int64_t size() const;  // elements
};

class Weights {
 public:
  // From a folder with model.safetensors, or model.safetensors.index.json and its shards; or from one of these files. All of the tensors of `config`
  // must be there, in their shapes, in fp32, fp16 or bf16, and no others: else Error, with their names.
  static Weights open(const std::string& path, const Config& config);

  // Random ones in fp32, as initialise() makes them, in memory.
  static Weights at_random(const Config& config, uint64_t seed);

  const std::vector<Weight>& tensors() const { return tensors_; }  // in the order of tensors_of()
  // By its name; "lm_head.weight" is the token embedding where they are tied. Throws std::out_of_range.
  const Weight& at(std::string_view name) const;

  bool has_prefix() const { return prefixed_; }  // names in the files begin with "transformer."
  size_t files() const { return files_.size(); }
  uint64_t bytes() const;  // of all tensors, what is tied once

 private:
  friend class WeightsReader;
  using Bytes = files::safetensors::Bytes;

  std::vector<Weight> tensors_;
  std::unordered_map<std::string, size_t> by_name_;
  std::vector<std::unique_ptr<files::safetensors::MappedFile>> files_;
  std::vector<Bytes> copies_;  // of tensors that are not aligned in their file
  bool prefixed_ = false;
};

// A matrix turned: of (rows, columns) its (columns, rows). `tensor` has two dimensions.
files::safetensors::Bytes transposed(const Weight& tensor);
// The tensor with rows of zeros behind its own, `rows` in all: the vocabulary padded to Config::padded_vocab().
files::safetensors::Bytes with_rows(const Weight& tensor, int64_t rows);

}  // namespace fattn::gpt2
