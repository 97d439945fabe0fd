// What a session and its model say of themselves.
#include "gpt2/memory.h"

#include <algorithm>
#include <initializer_list>
#include <utility>

#include "gpt2/error.h"
#include "gpt2/model/decoding.h"
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

std::vector<MemoryUse> memory_of(const Config& c, DType dtype, const Compute& compute, const SessionOptions& options) {
  std::vector<MemoryUse> uses;
  const ops::Device device = device_of(compute);
  const SessionPlans plans(c, dtype, compute, device, options);
  const SessionMemory memory = plans.memory();
  const auto size = static_cast<int64_t>(size_of(dtype));
  const int64_t parameters = parameters_of(c), weights = product({parameters, size});
  uses.push_back({"weights", "parameters", std::to_string(parameters), weights});
  uses.push_back({"weights", "tied embedding and head, padding", "", static_cast<int64_t>(weight_bytes(c, dtype, device)) - weights});
  const SessionOptions& o = plans.options();
  uses.push_back(
      {"KV cache", "keys and values",
       o.page_size > 0 ? words({2, c.n_layer, o.pages(), o.page_size, c.kv_width()}) : words({2, c.n_layer, o.batch, o.context, c.kv_width()}),
       static_cast<int64_t>(memory.cache)});
  for (const SessionMemory::Use& use : memory.activations)
    if (use.bytes > 0) uses.push_back({"activations", use.what, words({use.rows, use.width}), static_cast<int64_t>(use.bytes)});
  uses.push_back({"workspace", "kernels' own, the largest", "", static_cast<int64_t>(memory.workspace)});
  if (compute.gpu)
    uses.push_back(
        {"activations", "steps of one token, choices", "", static_cast<int64_t>(Decoding::bytes(std::max(o.batch, o.logit_rows), o.context))});
  return uses;
}

}  // namespace fattn::gpt2
