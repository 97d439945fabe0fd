// A parameter begins at a line of the cache, and tables of tokens have the rows of a padded vocabulary; what lies between two is 0 and stays so.
#include "gpt2/train/parameters.h"

#include <algorithm>
#include <string>

#include "gpt2/weights/tensors.h"

namespace fattn::gpt2 {
namespace {
constexpr int64_t kLine = 16;  // fp32 numbers of 64 bytes
}

ParameterLayout::ParameterLayout(const Config& config) {
  for (const TensorSpec& tensor : tensors_of(config)) parameters_.push_back({tensor.name, tensor.shape, 0, tensor.size(), tensor.shape.size() > 1});
  for (const bool decays : {true, false}) {
    for (Parameter& parameter : parameters_) {
      if (parameter.decays != decays) continue;
      parameter.offset = size_;
      const bool of_tokens = parameter.name == "wte.weight" || parameter.name == "lm_head.weight";  // read by products with its padding
      const int64_t room = of_tokens ? config.padded_vocab() * config.n_embd : parameter.size;
      size_ += (room + kLine - 1) / kLine * kLine;
    }
    if (decays) decaying_ = size_;
  }
  const auto at = [&](const std::string& name) {
    return std::find_if(parameters_.begin(), parameters_.end(), [&](const Parameter& p) { return p.name == name; })->offset;
  };
  const auto pair = [&](const std::string& name) { return PairAt{at(name + ".weight"), at(name + ".bias")}; };
  tokens_ = at("wte.weight");
  head_ = config.tied_head ? tokens_ : at("lm_head.weight");
  if (config.positions == Positions::kLearned) positions_ = at("wpe.weight");
  for (int64_t i = 0; i < config.n_layer; ++i) {
    const std::string h = "h." + std::to_string(i) + ".";
    layers_.push_back(
        {pair(h + "ln_1"), pair(h + "attn.c_attn"), pair(h + "attn.c_proj"), pair(h + "ln_2"), pair(h + "mlp.c_fc"), pair(h + "mlp.c_proj")});
    matrices_.push_back(layers_.back().qkv.weight);
  }
  matrices_.push_back(config.tied_head ? decaying_ : head_);
  last_norm_ = pair("ln_f");
}

}  // namespace fattn::gpt2
