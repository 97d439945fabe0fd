// Where each parameter lies in the flat arrays of a network: what weight decay is for comes first, so that the optimizer takes two pieces.
#pragma once

#include <cstdint>
#include <vector>

#include "gpt2/config.h"
#include "gpt2/train/network.h"

namespace fattn::gpt2 {

// Offsets of what belongs together.
struct PairAt {
  int64_t weight = 0, bias = 0;
};
struct LayerAt {
  PairAt ln_1, qkv, attn_proj, ln_2, fc, mlp_proj;
};

class ParameterLayout {
 public:
  explicit ParameterLayout(const Config& config);

  const std::vector<Parameter>& parameters() const { return parameters_; }  // in the order of tensors_of()
  int64_t size() const { return size_; }
  int64_t decaying() const { return decaying_; }  // numbers before this one decay, those from it on do not

  const LayerAt& layer(int64_t i) const { return layers_[static_cast<size_t>(i)]; }
  // The matrices of layers lie one behind the other, without anything between: where those of layer i begin; of n_layer: where the last ones end.
  int64_t matrices_begin(int64_t i) const { return matrices_[static_cast<size_t>(i)]; }
  const PairAt& last_norm() const { return last_norm_; }
  int64_t tokens() const { return tokens_; }
  int64_t positions() const { return positions_; }  // of learned ones
  int64_t head() const { return head_; }            // the token embedding, where they are tied

 private:
  std::vector<Parameter> parameters_;
  std::vector<LayerAt> layers_;
  std::vector<int64_t> matrices_;
  PairAt last_norm_;
  int64_t size_ = 0, decaying_ = 0, tokens_ = 0, positions_ = 0, head_ = 0;
};

}  // namespace fattn::gpt2
