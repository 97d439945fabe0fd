// Products of sizes are checked: batch and seqlen come from the user.
#include "gpt2/memory.h"

#include <initializer_list>
#include <utility>

#include "gpt2/error.h"
#include "gpt2/weights/tensors.h"

namespace fattn::gpt2 {
namespace {

int64_t product(std::initializer_list<int64_t> factors) {
  int64_t n = 1;
  for (const int64_t factor : factors)
    if (__builtin_mul_overflow(n, factor, &n)) throw Error("batch times seqlen needs more bytes than 64-bit numbers count; use smaller ones");
  return n;
}

std::string words(std::initializer_list<int64_t> shape) {
  std::string text;
  for (const int64_t n : shape) text += (text.empty() ? "" : " x ") + std::to_string(n);
  return text;
}

}  // namespace

int64_t kv_bytes_per_token(const Config& c, DType dtype) { return product({2, c.n_layer, c.kv_width(), static_cast<int64_t>(size_of(dtype))}); }

std::vector<MemoryUse> memory_of(const Config& c, DType dtype, int64_t batch, int64_t seqlen) {
  const auto size = static_cast<int64_t>(size_of(dtype));
  std::vector<MemoryUse> uses;
  const int64_t parameters = parameters_of(c);
  uses.push_back({"weights", "parameters", std::to_string(parameters), product({parameters, size})});
  const int64_t rows = (c.padded_vocab() - c.vocab_size) * (c.tied_head ? 1 : 2);
  if (rows > 0) uses.push_back({"weights", "padded vocabulary", words({rows, c.n_embd}), product({rows, c.n_embd, size})});
  uses.push_back(
      {"KV cache", "keys and values", words({2, c.n_layer, batch, seqlen, c.kv_width()}), product({kv_bytes_per_token(c, dtype), batch, seqlen})});
  const auto activation = [&](const char* what, int64_t width) {
    uses.push_back({"activations", what, words({batch, seqlen, width}), product({batch, seqlen, width, size})});
  };
  activation("residual stream", c.n_embd);
  activation("normalised", c.n_embd);
  activation("q, k and v", c.qkv_width());
  activation("attention output", c.n_embd);
  activation("inside the MLP", c.n_inner);
  uses.push_back({"activations", "lse (fp32)", words({batch, c.n_head, seqlen}), product({batch, c.n_head, seqlen, 4})});
  uses.push_back({"activations", "last logits (fp32)", words({batch, c.padded_vocab()}), product({batch, c.padded_vocab(), 4})});
  return uses;
}

}  // namespace fattn::gpt2
