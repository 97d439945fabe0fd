// A model's weights in memory, as operations read them. Sessions share it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fattn/types.hpp"
#include "gpt2/config.h"
#include "gpt2/model/block.h"
#include "gpt2/weights/weights.h"
#include "ops/ops.h"

namespace fattn::gpt2 {

struct Compute {
  std::optional<DType> dtype = {};  // of weights, activations and cache; none: the weights' own
  bool reference = false;           // operations and attention with sums in float64, slow
  Isa isa = Isa::kAuto;
  int threads = 0;                           // 0: all that affinity and the control group allow
  const fattn_executor* executor = nullptr;  // the host's own threads; null: the library's pool
  std::optional<int> gpu = {};               // a CUDA device instead, by its index
};

ops::Device device_of(const Compute& compute);
MemorySpace space_of(const Compute& compute);  // each its own stream

struct NormWeights {
  const void *weight = nullptr, *bias = nullptr;
};
struct LinearWeights {
  const void *weight = nullptr, *bias = nullptr;  // packed
  const void* bias_single = nullptr;              // in fp32, of what adds to the residual stream on a GPU
};
struct LayerWeights {
  NormWeights ln_1, ln_2;
  LinearWeights qkv, attn_proj, fc, mlp_proj;
};

class Model {
 public:
  // Reads a folder. Throws Error, or fattn::Error of the operations.
  static Model load(const std::string& folder, const Compute& compute = {});
  // Converts and packs; on the host embeddings that are in the dtype already stay in the files, which this keeps mapped.
  Model(const Config& config, Weights weights, const Compute& compute);

  const Config& config() const { return config_; }
  DType dtype() const { return dtype_; }
  const Compute& compute() const { return compute_; }
  ops::Device device() const { return device_of(compute_); }

  const void* token_table() const { return token_table_; }
  const void* position_table() const { return position_table_; }  // null: rotary
  const LayerWeights& layer(int64_t i) const { return layers_[static_cast<size_t>(i)]; }
  const NormWeights& last_norm() const { return last_norm_; }
  const void* head() const { return head_; }  // packed, padded_vocab rows

  // What one token reads: every weight but the tables of embeddings, once.
  size_t bytes_read() const { return bytes_read_; }
  size_t bytes() const { return block_.size(); }

 private:
  Config config_;
  Weights weights_;
  Compute compute_;
  DType dtype_;
  Block block_;
  std::vector<LayerWeights> layers_;
  NormWeights last_norm_;
  const void *token_table_ = nullptr, *position_table_ = nullptr, *head_ = nullptr;
  size_t bytes_read_ = 0;
};

// The products of a layer and of the head, for at most `rows` rows.
struct Products {
  ops::Linear qkv, attn_proj, fc, mlp_proj, head;
};
Products products_of(const Config& config, DType dtype, int64_t rows, int64_t logit_rows);

// Bytes of the weights in memory, as Model has them, the mapped embeddings with them.
size_t weight_bytes(const Config& config, DType dtype, const ops::Device& device);

}  // namespace fattn::gpt2
