// Plans of a session, and what it will take.
#include <algorithm>

#include "gpt2/error.h"
#include "gpt2/model/session.h"

namespace fattn::gpt2 {
namespace {

SessionOptions filled(SessionOptions o, const Config& c, int64_t chunk) {
  if (o.context == 0) o.context = c.n_positions;
  if (o.batch < 1) throw Error("batch is " + std::to_string(o.batch) + "; allowed: 1 and above");
  if (o.context < 1 || o.context > c.n_positions)
    throw Error("context is " + std::to_string(o.context) + "; the model has positions for 1 to " + std::to_string(c.n_positions) + " tokens");
  constexpr int64_t kMost = int64_t{1} << 31, kPage = 64;
  if (o.batch >= kMost / o.context) throw Error("batch times context exceeds 2^31 - 1 tokens; use smaller ones");
  if (o.page_size < 0 || o.page_size >= kMost) throw Error("page_size is " + std::to_string(o.page_size) + "; allowed: 0 (no pages) to 2^31 - 1");
  if (o.cache_tokens < 0 || o.cache_tokens >= kMost)
    throw Error("cache_tokens is " + std::to_string(o.cache_tokens) + "; allowed: 0 (batch times context) to 2^31 - 1");
  if (o.cache_tokens > 0 && o.page_size == 0) o.page_size = std::min(kPage, o.cache_tokens);
  if (o.page_size > 0) {
    const int64_t pages = o.cache_tokens > 0 ? Pages::pages_of(o.cache_tokens, o.page_size) : o.batch * Pages::pages_of(o.context, o.page_size);
    if (pages > (kMost - 1) / o.page_size) throw Error("the cache would have 2^31 tokens or more; use smaller or fewer pages");
    o.cache_tokens = pages * o.page_size;
  }
  if (o.rows == 0) o.rows = std::max(std::min<int64_t>(chunk, o.batch * o.context), o.batch);
  if (o.logit_rows == 0) o.logit_rows = o.batch;
  if (o.rows < o.batch)
    throw Error("a step of " + std::to_string(o.rows) + " tokens is less than one for each of " + std::to_string(o.batch) + " sequences");
  return o;
}

Attention::Options attention_options(const SessionOptions& o) {
  return {o.batch, o.context, o.rows, o.algorithm, o.batch_invariant, o.page_size, o.pages(), o.columns()};
}

}  // namespace

int64_t default_chunk(const ops::Device& device) { return device.place == ops::Place::kCuda ? 8192 : 256; }

SessionPlans::SessionPlans(const Config& c, DType dtype, const Compute& compute, const ops::Device& device, const SessionOptions& options)
    : options_(filled(options, c, default_chunk(device))), config_(c), dtype_(dtype), attention_(c, dtype, compute, attention_options(options_)) {
  const int64_t rows = options_.rows, logit_rows = options_.logit_rows;
  const bool rotary = c.positions == Positions::kRotary;
  const auto note = [&](const auto& plan) { workspace_ = std::max(workspace_, plan.workspace_bytes()); };
  embedding_ = {ops::Embedding{rows, c.n_embd, c.vocab_size, rotary ? 0 : c.n_positions, dtype}, device};
  norm_ = {ops::LayerNorm{rows, c.n_embd, c.layer_norm_epsilon, dtype}, device};
  const Products p = products_of(c, dtype, rows, logit_rows);
  qkv_ = {ops::NormLinear{p.qkv, c.layer_norm_epsilon, c.n_head, c.n_kv_head, c.headdim(), rotary, c.rope_theta}, device};
  attn_proj_ = {p.attn_proj, device};
  fc_ = {ops::NormLinear{p.fc, c.layer_norm_epsilon}, device};
  mlp_proj_ = {p.mlp_proj, device};
  head_ = {ops::NormLinear{p.head, c.layer_norm_epsilon}, device};
  for (const auto* plan : {&qkv_, &fc_, &head_}) note(*plan);
  for (const auto* plan : {&attn_proj_, &mlp_proj_}) note(*plan);
  alike_ = rows;
  if (options_.batch_invariant)
    for (const ops::Linear* linear : {&p.qkv, &p.attn_proj, &p.fc, &p.mlp_proj, &p.head}) alike_ = std::min(alike_, ops::rows_alike(*linear, device));
  note(embedding_);
  note(norm_);
  if (options_.hidden) {
    // Of the vocabulary, not of its padding: its rows of 0 have no share.
    cross_entropy_ = {ops::CrossEntropy{rows, c.n_embd, c.vocab_size, dtype}, device};
    note(cross_entropy_);
  }
  workspace_ = std::max(workspace_, attention_.workspace_bytes());
}

SessionMemory SessionPlans::memory() const {
  const Config& c = config_;
  const size_t size = size_of(dtype_);
  SessionMemory m;
  const auto add = [&](const char* what, int64_t rows, int64_t width, size_t element, bool input = false) {
    size_t bytes = 0;
    if (__builtin_mul_overflow(static_cast<size_t>(rows), static_cast<size_t>(width), &bytes) || __builtin_mul_overflow(bytes, element, &bytes))
      throw Error("batch times context needs more bytes than 64-bit numbers count; use smaller ones");
    m.activations.push_back({what, rows, width, element, bytes, input});
  };
  const int64_t rows = options_.rows, logit_rows = options_.logit_rows;
  add("residual stream (fp32)", rows, c.n_embd, 4);
  add("normalised", rows, c.n_embd, size);
  add("q, k and v", rows, c.qkv_width(), size);
  add("attention output", rows, c.n_embd, size);
  add("inside the MLP", rows, c.n_inner, size);
  add("rows of logits, normalised", logit_rows, c.n_embd, size);
  add("logits (fp32)", logit_rows, c.padded_vocab(), 4);
  add("lse and losses (fp32)", options_.hidden ? rows : 0, 2, 4);
  add("ids", rows, 1, 4, true);
  add("positions", rows, 1, 4, true);
  add("which rows have logits", logit_rows, 1, 4, true);
  add("places in the cache", rows, 1, 8, true);
  add("lengths", options_.batch, 1, 4, true);
  add("targets", options_.hidden ? rows : 0, 1, 4, true);
  add("pages of sequences", options_.batch, options_.columns(), 4, true);
  m.workspace = workspace_;
  const int64_t tokens = options_.page_size > 0 ? options_.cache_tokens : options_.batch * options_.context;
  BlockLayout cache;
  for (int64_t i = 0; i < 2 * c.n_layer; ++i) {
    size_t bytes = 0;
    if (__builtin_mul_overflow(static_cast<size_t>(tokens), static_cast<size_t>(c.kv_width()) * size, &bytes))
      throw Error("the cache needs more bytes than 64-bit numbers count; use a smaller batch, context or cache");
    cache.add(bytes);
  }
  m.cache = cache.total();
  return m;
}

size_t SessionMemory::arena() const {
  BlockLayout layout;
  for (const Use& use : activations)
    if (!use.input) layout.add(use.bytes);
  layout.add(workspace, BlockLayout::kWorkspace);
  return layout.total();
}

size_t SessionMemory::inputs() const {
  BlockLayout layout;
  for (const Use& use : activations)
    if (use.input) layout.add(use.bytes);
  return layout.total();
}

}  // namespace fattn::gpt2
