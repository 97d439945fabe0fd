// A step: what is asked is checked whole before anything is written.
#include "gpt2/model/session.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "gpt2/error.h"

namespace fattn::gpt2 {

Session::Session(const Model& model, const SessionOptions& options)
    : model_(model),
      plans_(model.config(), model.dtype(), model.compute(), model.device(), options),
      lengths_(static_cast<size_t>(options.batch), 0) {
  const SessionMemory memory = plans_.memory();
  arena_ = Block(memory.arena(), "activations");
  cache_ = Block(memory.cache, "the cache of keys and values");
  BlockLayout layout;  // as SessionMemory::arena() adds them up
  std::vector<std::byte*> places;
  for (const SessionMemory::Use& use : memory.activations) places.push_back(arena_.at(layout.add(use.bytes)));
  workspace_ = arena_.at(layout.total());
  size_t i = 0;
  const auto take = [&](auto*& to) { to = reinterpret_cast<std::remove_reference_t<decltype(to)>>(places[i++]); };
  take(x_);
  take(h_);
  take(qkv_);
  take(o_);
  take(inner_);
  take(picked_);
  take(logits_);
  take(ids_);
  take(positions_);
  take(select_);
  take(slots_);
  take(lse_);
  hidden_ = h_;
  spans_.reserve(static_cast<size_t>(options.batch));
}

void Session::truncate(int64_t sequence, int64_t length) {
  if (sequence < 0 || sequence >= options().batch) throw Error("there is no sequence " + std::to_string(sequence));
  int64_t& now = lengths_[static_cast<size_t>(sequence)];
  if (length < 0 || length > now)
    throw Error("sequence " + std::to_string(sequence) + " has " + std::to_string(now) + " tokens, not " + std::to_string(length));
  now = length;
}

void Session::pretend(int64_t sequence, int64_t length) {
  const Config& c = model_.config();
  if (sequence < 0 || sequence >= options().batch || length < 0 || length > options().context)
    throw Error("sequence " + std::to_string(sequence) + " of " + std::to_string(length) + " tokens; the cache is " +
                std::to_string(options().batch) + " x " + std::to_string(options().context));
  const size_t row = static_cast<size_t>(c.kv_width()) * size_of(model_.dtype()), tensor = cache_.size() / 2 / static_cast<size_t>(c.n_layer);
  for (size_t i = 0; i < 2 * static_cast<size_t>(c.n_layer); ++i)
    std::memset(cache_.at(i * tensor + static_cast<size_t>(sequence * options().context) * row), 0, static_cast<size_t>(length) * row);
  lengths_[static_cast<size_t>(sequence)] = length;
}

void Session::check(std::span<const NewTokens> parts, bool in_chunks) const {
  int64_t before = -1, rows = 0, logits = 0;
  for (const NewTokens& part : parts) {
    if (part.sequence <= before || part.sequence >= options().batch)
      throw Error("sequence " + std::to_string(part.sequence) + " behind " + std::to_string(before) + "; allowed: ascending, below the batch of " +
                  std::to_string(options().batch));
    before = part.sequence;
    const auto count = static_cast<int64_t>(part.tokens.size());
    const int64_t past = length(part.sequence);
    if (count == 0) throw Error("sequence " + std::to_string(part.sequence) + " goes on with no token; leave it out of the step");
    if (count > options().context - past)
      throw Error("sequence " + std::to_string(part.sequence) + " would have " + std::to_string(past + count) + " tokens; the cache holds " +
                  std::to_string(options().context) + ": make the session with a larger context");
    if (!model_.config().causal && past > 0) throw Error("a model that is not causal takes a sequence in one step: every token sees those behind it");
    for (const Token token : part.tokens)
      if (token < 0 || token >= model_.config().vocab_size)
        throw Error("token " + std::to_string(token) + " is not in the model's vocabulary; allowed: 0 to " +
                    std::to_string(model_.config().vocab_size - 1));
    if (in_chunks && !model_.config().causal && count > options().rows)
      throw Error("a prompt of " + std::to_string(count) + " tokens; a model that is not causal takes it in one step, of at most " +
                  std::to_string(options().rows) + ": use a larger chunk");
    rows += count;
    logits += part.logits == WantLogits::kAll ? count : part.logits == WantLogits::kLast ? 1 : 0;
  }
  if (!in_chunks && rows > options().rows)
    throw Error("a step of " + std::to_string(rows) + " tokens; this session takes " + std::to_string(options().rows) + ": use prefill()");
  if (logits > options().logit_rows)
    throw Error("logits of " + std::to_string(logits) + " tokens; this session has room for " + std::to_string(options().logit_rows));
}

void Session::step(std::span<const NewTokens> parts) {
  check(parts, false);
  spans_.clear();
  rows_ = 0;
  logit_count_ = 0;
  for (const NewTokens& part : parts) {
    const int64_t past = length(part.sequence), count = static_cast<int64_t>(part.tokens.size());
    spans_.push_back({part.sequence, past, count});
    for (int64_t i = 0; i < count; ++i, ++rows_) {
      ids_[rows_] = part.tokens[static_cast<size_t>(i)];
      positions_[rows_] = static_cast<int32_t>(past + i);
      slots_[rows_] = part.sequence * options().context + past + i;
      if (part.logits == WantLogits::kAll || (part.logits == WantLogits::kLast && i == count - 1))
        select_[logit_count_++] = static_cast<int32_t>(rows_);
    }
  }
  if (rows_ == 0) return;
  layers(rows_);
  for (const Span& span : spans_) lengths_[static_cast<size_t>(span.sequence)] += span.count;
}

void Session::layers(int64_t rows) {
  const Config& c = model_.config();
  plans_.embedding_.execute({rows, ids_, positions_, model_.token_table(), model_.position_table(), x_}, workspace_);
  const size_t layer_bytes = cache_.size() / 2 / static_cast<size_t>(c.n_layer);
  for (int64_t i = 0; i < c.n_layer; ++i) {
    const LayerWeights& w = model_.layer(i);
    std::byte* k = cache_.at(static_cast<size_t>(2 * i) * layer_bytes);
    std::byte* v = cache_.at(static_cast<size_t>(2 * i + 1) * layer_bytes);
    plans_.norm_.execute({rows, x_, nullptr, nullptr, w.ln_1.weight, w.ln_1.bias, h_}, workspace_);
    plans_.qkv_.execute({rows, h_, w.qkv.weight, w.qkv.bias, qkv_}, workspace_);
    plans_.keys_values_.execute({rows, qkv_, positions_, slots_, k, v}, workspace_);
    plans_.attention_.execute(i, spans_, qkv_, k, v, o_, workspace_);
    plans_.attn_proj_.execute({rows, o_, w.attn_proj.weight, w.attn_proj.bias, x_}, workspace_);
    plans_.norm_.execute({rows, x_, nullptr, nullptr, w.ln_2.weight, w.ln_2.bias, h_}, workspace_);
    plans_.fc_.execute({rows, h_, w.fc.weight, w.fc.bias, inner_}, workspace_);
    plans_.mlp_proj_.execute({rows, inner_, w.mlp_proj.weight, w.mlp_proj.bias, x_}, workspace_);
  }
  const NormWeights& last = model_.last_norm();
  if (options().hidden) plans_.norm_.execute({rows, x_, nullptr, nullptr, last.weight, last.bias, h_}, workspace_);
  if (logit_count_ == 0) return;
  plans_.norm_picked_.execute({logit_count_, x_, nullptr, select_, last.weight, last.bias, picked_}, workspace_);
  plans_.head_.execute({logit_count_, picked_, model_.head(), nullptr, logits_}, workspace_);
}

void Session::prefill(std::span<const NewTokens> parts) {
  const int64_t padded = model_.config().padded_vocab();
  check(parts, true);
  // Each chunk's logits are in the first rows, so those of prompts that ended before wait elsewhere.
  int64_t done = 0;
  std::vector<NewTokens> chunk;
  std::vector<float> kept;
  size_t i = 0, offset = 0;
  const bool alone = options().batch_invariant;
  const bool several = [&] {
    int64_t rows = 0;
    for (const NewTokens& part : parts) rows += static_cast<int64_t>(part.tokens.size());
    return rows > options().rows || alone;
  }();
  if (!several) return step(parts);
  kept.resize(parts.size() * static_cast<size_t>(padded));
  while (i < parts.size()) {
    chunk.clear();
    int64_t room = options().rows;
    while (i < parts.size() && room > 0) {
      const NewTokens& part = parts[i];
      const auto left = static_cast<int64_t>(part.tokens.size() - offset), take = std::min(left, room);
      // A model that is not causal has all of a prompt in one step.
      if (!model_.config().causal && take < left) break;
      chunk.push_back({part.sequence, part.tokens.subspan(offset, static_cast<size_t>(take)), take == left ? WantLogits::kLast : WantLogits::kNone});
      room -= take;
      offset = take == left ? 0 : offset + static_cast<size_t>(take);
      if (take == left) ++i;
      if (alone) break;
    }
    step(chunk);
    std::copy(logits(0), logits(logit_count_), kept.data() + done * padded);
    done += logit_count_;
  }
  std::copy(kept.begin(), kept.end(), logits_);
  logit_count_ = done;
}

void Session::losses(std::span<const int32_t> targets, float* loss) {
  if (!options().hidden) throw Error("losses are of sessions that were made with `hidden`");
  if (static_cast<int64_t>(targets.size()) != rows_)
    throw Error(std::to_string(targets.size()) + " targets; the last step had " + std::to_string(rows_) + " tokens");
  plans_.cross_entropy_.execute({rows_, hidden_, model_.head(), targets.data(), loss, lse_}, workspace_);
}

}  // namespace fattn::gpt2
