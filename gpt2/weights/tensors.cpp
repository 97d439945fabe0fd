// Names and layouts are Hugging Face's. Sizes are small enough (check in config.cpp) that no product overflows.
#include "gpt2/weights/tensors.h"

namespace fattn::gpt2 {

int64_t TensorSpec::size() const {
  int64_t n = 1;
  for (const int64_t extent : shape) n *= extent;
  return n;
}

std::vector<TensorSpec> tensors_of(const Config& c) {
  std::vector<TensorSpec> all;
  const auto norm = [&](const std::string& name) {
    all.push_back({name + ".weight", {c.n_embd}, false, Start::kOne});
    all.push_back({name + ".bias", {c.n_embd}, false, Start::kZero});
  };
  const auto conv1d = [&](const std::string& name, int64_t in, int64_t out, Start start) {
    all.push_back({name + ".weight", {in, out}, true, start});
    all.push_back({name + ".bias", {out}, false, Start::kZero});
  };
  all.push_back({"wte.weight", {c.vocab_size, c.n_embd}});
  if (c.positions == Positions::kLearned) all.push_back({"wpe.weight", {c.n_positions, c.n_embd}});
  for (int64_t layer = 0; layer < c.n_layer; ++layer) {
    const std::string h = "h." + std::to_string(layer) + ".";
    norm(h + "ln_1");
    conv1d(h + "attn.c_attn", c.n_embd, c.qkv_width(), Start::kNormal);
    conv1d(h + "attn.c_proj", c.n_embd, c.n_embd, Start::kResidual);
    norm(h + "ln_2");
    conv1d(h + "mlp.c_fc", c.n_embd, c.n_inner, Start::kNormal);
    conv1d(h + "mlp.c_proj", c.n_inner, c.n_embd, Start::kResidual);
  }
  norm("ln_f");
  if (!c.tied_head) all.push_back({"lm_head.weight", {c.vocab_size, c.n_embd}});
  return all;
}

int64_t parameters_of(const Config& config) {
  int64_t n = 0;
  for (const TensorSpec& tensor : tensors_of(config)) n += tensor.size();
  return n;
}

bool is_mask_buffer(const std::string& name, const Config& config) {
  if (name.compare(0, 2, "h.") != 0) return false;
  const size_t dot = name.find('.', 2);
  if (dot == std::string::npos || dot == 2 || dot > 8) return false;
  int64_t layer = 0;
  for (size_t i = 2; i < dot; ++i) {
    if (name[i] < '0' || name[i] > '9') return false;
    layer = layer * 10 + (name[i] - '0');
  }
  const std::string rest = name.substr(dot);
  return layer < config.n_layer && (rest == ".attn.bias" || rest == ".attn.masked_bias");
}

}  // namespace fattn::gpt2
