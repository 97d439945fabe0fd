#include "gpt2/train/work.h"

namespace fattn::gpt2 {

double training_flops_per_token(const Config& c, int64_t seqlen) {
  const auto width = static_cast<double>(c.n_embd), layers = static_cast<double>(c.n_layer), n = static_cast<double>(seqlen);
  const double weights = layers * width * static_cast<double>(c.qkv_width() + c.n_embd + 2 * c.n_inner) + width * static_cast<double>(c.vocab_size);
  const double keys = c.causal ? (n + 1) / 2 : n;  // that a token sees
  return 6 * weights + 12 * layers * width * keys;
}

}  // namespace fattn::gpt2
