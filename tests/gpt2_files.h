// Small models with random weights, and how far their logits are apart.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "gpt2/model/session.h"
#include "gpt2/weights/save.h"
#include "gpt2/weights/tensors.h"
#include "temporary_folder.h"
#include "thrown.h"

namespace fattn::gpt2 {

using test::thrown_by;

inline Config small() {
  Config c;
  c.vocab_size = 131;
  c.n_positions = 64;
  c.n_embd = 48;
  c.n_layer = 3;
  c.n_head = c.n_kv_head = 4;
  c.n_inner = 100;
  c.initializer_range = 0.2;
  return c;
}

inline Config variant(const std::string& name) {
  Config c = small();
  if (name == "rotary") c.positions = Positions::kRotary;
  if (name == "gqa") c.n_kv_head = 2;
  if (name == "scales") c.scale_attn_by_inverse_layer_idx = true;
  if (name == "two_sided") c.causal = false;
  if (name == "own_head") c.tied_head = false;
  return c;
}

class Files {
 public:
  explicit Files(const Config& config) : path_((folder_.path() / "model").string()) {
    save_model(path_, tensors_of(config), fill_at_random(config, DType::kF32, 7), {{"config.json", to_json(config, DType::kF32)}}, {});
  }
  Model load(const Compute& compute = {}) const { return Model::load(path_, compute); }

 private:
  test::TemporaryFolder folder_;
  std::string path_;
};

inline std::vector<Token> text(int64_t n, int first) {
  std::vector<Token> ids;
  for (int64_t i = 0; i < n; ++i) ids.push_back(static_cast<Token>((first + i * i * 7 + i * 3) % 131));
  return ids;
}

inline std::vector<float> all_logits(const Model& model, const std::vector<Token>& ids) {
  const auto n = static_cast<int64_t>(ids.size());
  SessionOptions options;
  options.rows = options.logit_rows = n;
  Session session(model, options);
  session.step({{0, ids, WantLogits::kAll}});
  return {session.logits(0), session.logits(n)};
}

inline double scale_of(const std::vector<float>& v) {
  double largest = 0;
  for (const float x : v) largest = std::max(largest, std::fabs(static_cast<double>(x)));
  return largest;
}
inline double error_of(const float* a, const float* b, size_t n) {
  double largest = 0;
  for (size_t i = 0; i < n; ++i) {
    const double e = std::fabs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
    if (!(e <= largest)) largest = std::isnan(e) ? HUGE_VAL : e;
  }
  return largest;
}

}  // namespace fattn::gpt2
