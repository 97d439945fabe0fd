// Steps of one token have the lengths of their sequences on a list, so that one plan serves them all, and so has every step of a cache in pages;
// longer ones have plans of their shapes.
#include "gpt2/model/attention.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "gpt2/error.h"

namespace fattn::gpt2 {
namespace {
constexpr size_t kMostPlans = 64;
}

Attention::Attention(const Config& config, DType dtype, const Compute& compute, const Options& options)
    : config_(config), dtype_(dtype), options_(options), gpu_(compute.gpu) {
  attention_.backend = compute.gpu ? Backend::kCuda : compute.reference ? Backend::kReference : Backend::kCpu;
  attention_.algorithm = compute.reference ? Algorithm::kAuto : options.algorithm;
  attention_.cpu_isa = compute.reference ? Isa::kAuto : compute.isa;
  attention_.num_threads = compute.threads;
  attention_.executor = compute.executor;
  attention_.causal = config.causal;
  const double scale = scale_of(0);
  const int64_t together = options.alone ? 1 : options.batch;
  attention_.softmax_scale = scale;
  const Support lengths = supported(describe(tensors({1, 1, 0, scale}, {}, nullptr, nullptr, nullptr, nullptr), attention_));
  takes_lengths_ = lengths.ok;
  if (options.page_size > 0 && !takes_lengths_) throw Error("attention of this kind has no cache in pages: " + lengths.reason);
  const bool paged = options.page_size > 0;
  // The largest of the shapes that steps will have.
  const auto reserve = [&](const Shape& shape) { workspace_bytes_ = std::max(workspace_bytes_, plan(shape).workspace_bytes()); };
  if (takes_lengths_) reserve({together, 1, 0, scale});
  reserve({1, std::min(options.rows, options.context), paged ? 0 : options.context, scale});
  const int64_t queries = std::min(options.context, options.rows / together);
  if (queries > 0) reserve({together, queries, paged ? 0 : queries, scale});
}

double Attention::scale_of(int64_t layer) const {
  const double scale = config_.scale_attn_weights ? 1 / std::sqrt(static_cast<double>(config_.headdim())) : 1.0;
  return config_.scale_attn_by_inverse_layer_idx ? scale / static_cast<double>(layer + 1) : scale;
}

ForwardTensors Attention::tensors(const Shape& s, const Lists& lists, const void* qkv, const void* k, const void* v, void* o) const {
  const int64_t width = config_.qkv_width(), heads = config_.n_head, kv_heads = config_.n_kv_head, d = config_.headdim();
  const int64_t keys = s.keys == 0 ? options_.context : s.keys;
  ForwardTensors t;
  t.q = Tensor(qkv, dtype_, {s.sequences, s.queries, heads, d}, {s.queries * width, width, d, 1});
  const bool paged = options_.page_size > 0;
  const int64_t entries = paged ? options_.pages : s.sequences, rows = paged ? options_.page_size : keys;
  const int64_t entry = (paged ? options_.page_size : options_.context) * kv_heads * d;
  t.k = Tensor(k, dtype_, {entries, rows, kv_heads, d}, {entry, kv_heads * d, d, 1});
  t.v = Tensor(v, dtype_, {entries, rows, kv_heads, d}, {entry, kv_heads * d, d, 1});
  t.o = Tensor(o, dtype_, {s.sequences, s.queries, heads, d});
  if (s.keys == 0) t.scores.seqused_k = Tensor(lists.used, DType::kI32, {s.sequences});
  if (paged) t.scores.block_table = Tensor(lists.table, DType::kI32, {s.sequences, options_.columns});
  if (!gpu_) return t;
  for (Tensor* tensor : {&t.q, &t.k, &t.v, &t.o}) *tensor = tensor->on(Device::kCuda, *gpu_, tensor->data());
  if (s.keys == 0) t.scores.seqused_k = t.scores.seqused_k.on(Device::kCuda, *gpu_, lists.used);
  if (paged) t.scores.block_table = t.scores.block_table.on(Device::kCuda, *gpu_, lists.table);
  return t;
}

const Plan& Attention::plan(const Shape& shape) {
  const auto found = plans_.find(shape.key());
  if (found != plans_.end()) return found->second;
  if (plans_.size() >= kMostPlans) plans_.clear();
  fattn::Options options = attention_;
  options.softmax_scale = shape.scale;
  return plans_.try_emplace(shape.key(), tensors(shape, {}, nullptr, nullptr, nullptr, nullptr), options).first->second;
}

void Attention::execute(int64_t layer, const std::vector<Span>& spans, const Lists& lists, const void* qkv, const void* k, const void* v, void* o,
                        std::byte* workspace, const MemorySpace& space) {
  const auto size = static_cast<int64_t>(size_of(dtype_));
  const auto at = [&](const void* base, int64_t element) { return static_cast<const std::byte*>(base) + element * size; };
  const double scale = scale_of(layer);
  const bool paged = options_.page_size > 0;
  int64_t row = 0;
  for (size_t i = 0; i < spans.size();) {
    const Span& first = spans[i];
    // Lengths on a list may differ; else those that are alike go together.
    const bool list = paged || (takes_lengths_ && first.count == 1);
    size_t end = i + 1;
    while (!options_.alone && end < spans.size() && spans[end].sequence == spans[end - 1].sequence + 1 && spans[end].count == first.count &&
           (list || spans[end].past == first.past))
      ++end;
    const auto sequences = static_cast<int64_t>(end - i);
    const Shape shape{sequences, first.count, list ? 0 : first.past + first.count, scale};
    const Plan& made = plan(shape);
    const size_t needed = made.workspace_bytes();
    if (needed > workspace_bytes_ && more_.size() < needed) more_ = Block(needed, "attention's workspace", space);
    std::byte* room = needed > workspace_bytes_ ? more_.at(0) : workspace;
    const int64_t cache = paged ? 0 : first.sequence * options_.context * config_.kv_width();
    const Lists from{lists.used + first.sequence, paged ? lists.table + first.sequence * options_.columns : nullptr};
    made.execute(
        tensors(shape, from, at(qkv, row * config_.qkv_width()), at(k, cache), at(v, cache), const_cast<std::byte*>(at(o, row * config_.n_embd))),
        room, needed, space.stream());
    row += sequences * first.count;
    i = end;
  }
}

}  // namespace fattn::gpt2
