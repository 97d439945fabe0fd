// A step: what is asked is checked whole before anything is written.
#include "gpt2/model/session.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "gpt2/error.h"
#include "gpt2/model/decoding.h"

namespace fattn::gpt2 {

Session::Session(const Model& model, const SessionOptions& options)
    : model_(model),
      space_(space_of(model.compute())),
      plans_(model.config(), model.dtype(), model.compute(), model.device(), options),
      lengths_(static_cast<size_t>(options.batch), 0) {
  const SessionMemory memory = plans_.memory();
  arena_ = Block(memory.arena(), "activations", space_);
  cache_ = Block(memory.cache, "the cache of keys and values", space_);
  inputs_ = Inputs(memory.inputs(), "inputs", space_);
  BlockLayout layout, inputs;  // as SessionMemory adds them up
  std::vector<size_t> places;
  for (const SessionMemory::Use& use : memory.activations) places.push_back((use.input ? inputs : layout).add(use.bytes));
  workspace_ = arena_.at(layout.add(memory.workspace, BlockLayout::kWorkspace));
  size_t i = 0;
  const auto take = [&](auto*& to) { to = reinterpret_cast<std::remove_reference_t<decltype(to)>>(arena_.at(places[i++])); };
  take(x_);
  take(h_);
  take(qkv_);
  take(o_);
  take(inner_);
  take(picked_);
  take(logits_);
  take(lse_);
  for (size_t* to : {&ids_, &positions_, &select_, &slots_, &used_, &targets_, &table_}) *to = places[i++];
  if (const SessionOptions& o = plans_.options_; o.page_size > 0)
    pages_ = Pages(o.page_size, o.pages(), o.batch, o.columns(), reinterpret_cast<int32_t*>(inputs_.host(table_)));
  spans_.reserve(static_cast<size_t>(options.batch));
  logit_at_.reserve(static_cast<size_t>(plans_.options_.logit_rows));
  if (space_.on_gpu()) decoding_ = std::make_unique<Decoding>(*this);
}
Session::~Session() = default;

void Session::truncate(int64_t sequence, int64_t length) {
  if (sequence < 0 || sequence >= options().batch) throw Error("there is no sequence " + std::to_string(sequence));
  int64_t& now = lengths_[static_cast<size_t>(sequence)];
  if (length < 0 || length > now)
    throw Error("sequence " + std::to_string(sequence) + " has " + std::to_string(now) + " tokens, not " + std::to_string(length));
  now = length;
  if (options().page_size > 0) {
    pages_.give_back(sequence, length);
    table_changed_ = true;
  }
}

bool Session::reserve(int64_t sequence, int64_t tokens) {
  const SessionOptions& o = options();
  if (sequence < 0 || sequence >= o.batch) throw Error("there is no sequence " + std::to_string(sequence));
  const int64_t most = o.page_size > 0 ? std::min(o.context, o.cache_tokens) : o.context;
  if (tokens < 0 || tokens > most)
    throw Error("a sequence of " + std::to_string(tokens) + " tokens; the cache holds " + std::to_string(most) + " of one: use a larger one");
  if (o.page_size == 0) return true;
  if (pages_.missing(sequence, tokens) > pages_.free()) return false;
  pages_.take(sequence, tokens);
  table_changed_ = true;
  return true;
}

void Session::take_pages(std::span<const NewTokens> parts) {
  if (options().page_size == 0) return;
  for (const NewTokens& part : parts) {
    const int64_t tokens = length(part.sequence) + static_cast<int64_t>(part.tokens.size());
    if (pages_.missing(part.sequence, tokens) == 0) continue;
    pages_.take(part.sequence, tokens);
    table_changed_ = true;
  }
}

void Session::send_table() {
  if (!table_changed_) return;
  if (options().page_size > 0) inputs_.send(table_, static_cast<size_t>(options().batch * options().columns()) * sizeof(int32_t));
  table_changed_ = false;
}

int64_t Session::place(int64_t sequence, int64_t token) const {
  return options().page_size > 0 ? pages_.row(sequence, token) : sequence * options().context + token;
}

void Session::pretend(int64_t sequence, int64_t length) {
  const Config& c = model_.config();
  if (sequence < 0 || sequence >= options().batch || length < 0 || length > options().context)
    throw Error("sequence " + std::to_string(sequence) + " of " + std::to_string(length) + " tokens; the cache is " +
                std::to_string(options().batch) + " x " + std::to_string(options().context));
  truncate(sequence, 0);
  if (!reserve(sequence, length)) throw Error("the cache has no room for a sequence of " + std::to_string(length) + " tokens");
  const size_t row = static_cast<size_t>(c.kv_width()) * size_of(model_.dtype()), tensor = cache_.size() / 2 / static_cast<size_t>(c.n_layer);
  const int64_t together = options().page_size > 0 ? options().page_size : std::max<int64_t>(length, 1);
  for (size_t i = 0; i < 2 * static_cast<size_t>(c.n_layer); ++i)
    for (int64_t token = 0; token < length; token += together)
      space_.zero(cache_.at(i * tensor + static_cast<size_t>(place(sequence, token)) * row),
                  static_cast<size_t>(std::min(together, length - token)) * row);
  lengths_[static_cast<size_t>(sequence)] = length;
}

void Session::check(std::span<const NewTokens> parts, bool in_chunks) const {
  int64_t before = -1, rows = 0, logits = 0, pages = 0;
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
    if (options().page_size > 0) pages += pages_.missing(part.sequence, past + count);
    logits += part.logits == WantLogits::kAll ? count : part.logits == WantLogits::kLast ? 1 : 0;
  }
  if (!in_chunks && rows > options().rows)
    throw Error("a step of " + std::to_string(rows) + " tokens; this session takes " + std::to_string(options().rows) + ": use prefill()");
  if (options().page_size > 0 && pages > pages_.free())
    throw Error("this step needs " + std::to_string(pages) + (pages == 1 ? " more page of " : " more pages of ") +
                std::to_string(options().page_size) + " tokens; the cache has " + std::to_string(pages_.free()) +
                " left: use a larger cache, or fewer sequences at once");
  if (logits > options().logit_rows)
    throw Error("logits of " + std::to_string(logits) + " tokens; this session has room for " + std::to_string(options().logit_rows));
}

void Session::step(std::span<const NewTokens> parts) {
  check(parts, false);
  logit_at_.clear();
  logit_count_ = 0;
  run(parts, 0);
}

void Session::run(std::span<const NewTokens> parts, int64_t first_logit) {
  auto* ids = reinterpret_cast<int32_t*>(inputs_.host(ids_));
  auto* positions = reinterpret_cast<int32_t*>(inputs_.host(positions_));
  auto* select = reinterpret_cast<int32_t*>(inputs_.host(select_));
  auto* used = reinterpret_cast<int32_t*>(inputs_.host(used_));
  auto* slots = reinterpret_cast<int64_t*>(inputs_.host(slots_));
  take_pages(parts);
  send_table();
  spans_.clear();
  rows_ = 0;
  int64_t logit_rows = 0;
  for (const NewTokens& part : parts) {
    const int64_t past = length(part.sequence), count = static_cast<int64_t>(part.tokens.size());
    spans_.push_back({part.sequence, past, count});
    used[part.sequence] = static_cast<int32_t>(past + count);
    for (int64_t i = 0; i < count; ++i, ++rows_) {
      ids[rows_] = part.tokens[static_cast<size_t>(i)];
      positions[rows_] = static_cast<int32_t>(past + i);
      slots[rows_] = place(part.sequence, past + i);
      if (part.logits == WantLogits::kAll || (part.logits == WantLogits::kLast && i == count - 1)) {
        select[logit_rows] = static_cast<int32_t>(rows_);
        logit_at_.push_back(first_logit + logit_rows++);
      }
    }
  }
  if (rows_ == 0) return;
  const auto send = [&](size_t offset, int64_t count, size_t size) { inputs_.send(offset, static_cast<size_t>(count) * size); };
  send(ids_, rows_, sizeof *ids);
  send(positions_, rows_, sizeof *positions);
  send(select_, logit_rows, sizeof *select);
  send(slots_, rows_, sizeof *slots);
  send(used_, options().batch, sizeof *used);
  const auto at = [&](size_t offset) { return reinterpret_cast<const int32_t*>(inputs_.at(offset)); };
  const StepRows in{at(ids_), at(positions_), at(select_), at(used_), at(table_), reinterpret_cast<const int64_t*>(inputs_.at(slots_))};
  logits_on_host_ = false;
  if (decoding_) decoding_->forget_ahead();
  layers(in, spans_, rows_, logit_rows, first_logit);
  logit_count_ = first_logit + logit_rows;
  for (const Span& span : spans_) lengths_[static_cast<size_t>(span.sequence)] += span.count;
}

void Session::layers(const StepRows& in, const std::vector<Span>& spans, int64_t rows, int64_t logit_rows, int64_t first_logit) {
  const Config& c = model_.config();
  void* const stream = space_.stream();
  const auto size = static_cast<int64_t>(size_of(model_.dtype()));
  // Products of few rows are alike however many there are; where that counts, so many are computed together.
  const bool single = std::all_of(spans.begin(), spans.end(), [](const Span& s) { return s.count == 1; });
  const int64_t together = options().batch_invariant && single ? plans_.alike_ : rows;
  const auto in_groups = [&](int64_t all, const auto& body) {
    for (int64_t first = 0; first < all; first += together) body(first, std::min(together, all - first));
  };
  const auto at = [&](std::byte* base, int64_t row, int64_t width) { return base + row * width * size; };
  plans_.embedding_.execute({rows, in.ids, in.positions, model_.token_table(), model_.position_table(), x_}, workspace_, stream);
  const size_t layer_bytes = cache_.size() / 2 / static_cast<size_t>(c.n_layer);
  for (int64_t i = 0; i < c.n_layer; ++i) {
    const LayerWeights& w = model_.layer(i);
    std::byte* k = cache_.at(static_cast<size_t>(2 * i) * layer_bytes);
    std::byte* v = cache_.at(static_cast<size_t>(2 * i + 1) * layer_bytes);
    in_groups(rows, [&](int64_t r, int64_t n) {
      plans_.qkv_.execute({n, x_ + r * c.n_embd, nullptr, w.ln_1.weight, w.ln_1.bias, at(h_, r, c.n_embd), w.qkv.weight, w.qkv.bias,
                           at(qkv_, r, c.qkv_width()), in.positions + r, in.slots + r, k, v},
                          workspace_, stream);
    });
    plans_.attention_.execute(i, spans, {in.used, in.table}, qkv_, k, v, o_, workspace_, space_);
    in_groups(rows, [&](int64_t r, int64_t n) {
      plans_.attn_proj_.execute(
          {n, at(o_, r, c.n_embd), w.attn_proj.weight, w.attn_proj.bias, x_ + r * c.n_embd, static_cast<const float*>(w.attn_proj.bias_single)},
          workspace_, stream);
    });
    in_groups(rows, [&](int64_t r, int64_t n) {
      plans_.fc_.execute(
          {n, x_ + r * c.n_embd, nullptr, w.ln_2.weight, w.ln_2.bias, at(h_, r, c.n_embd), w.fc.weight, w.fc.bias, at(inner_, r, c.n_inner)},
          workspace_, stream);
    });
    in_groups(rows, [&](int64_t r, int64_t n) {
      plans_.mlp_proj_.execute(
          {n, at(inner_, r, c.n_inner), w.mlp_proj.weight, w.mlp_proj.bias, x_ + r * c.n_embd, static_cast<const float*>(w.mlp_proj.bias_single)},
          workspace_, stream);
    });
  }
  const NormWeights& last = model_.last_norm();
  if (options().hidden) plans_.norm_.execute({rows, x_, nullptr, nullptr, last.weight, last.bias, h_}, workspace_, stream);
  in_groups(logit_rows, [&](int64_t r, int64_t n) {
    const float* x = in.select ? x_ : x_ + r * c.n_embd;
    plans_.head_.execute({n, x, in.select ? in.select + r : nullptr, last.weight, last.bias, at(picked_, r, c.n_embd), model_.head(), nullptr,
                          logits_ + (first_logit + r) * c.padded_vocab()},
                         workspace_, stream);
  });
}

void Session::prefill(std::span<const NewTokens> parts) {
  check(parts, true);
  logit_at_.clear();
  logit_count_ = 0;
  std::vector<NewTokens> chunk;
  size_t i = 0, offset = 0;
  const bool alone = options().batch_invariant;
  while (i < parts.size()) {
    chunk.clear();
    int64_t room = options().rows;
    while (i < parts.size() && room > 0) {
      const NewTokens& part = parts[i];
      const auto left = static_cast<int64_t>(part.tokens.size() - offset), take = std::min(left, room);
      // A model that is not causal has all of a prompt in one step.
      if (!model_.config().causal && take < left) break;
      const WantLogits at_end = offset == 0 || part.logits == WantLogits::kNone ? part.logits : WantLogits::kLast;
      chunk.push_back({part.sequence, part.tokens.subspan(offset, static_cast<size_t>(take)), take == left ? at_end : WantLogits::kNone});
      room -= take;
      offset = take == left ? 0 : offset + static_cast<size_t>(take);
      if (take == left) ++i;
      if (alone) break;
    }
    run(chunk, logit_count_);
  }
}

const float* Session::logits(int64_t row) const {
  const int64_t padded = model_.config().padded_vocab();
  if (!space_.on_gpu()) return logits_ + row * padded;
  if (!logits_on_host_) {
    const auto bytes = static_cast<size_t>(padded) * sizeof(float);
    if (host_logits_.size() == 0) host_logits_ = Block(static_cast<size_t>(options().logit_rows) * bytes, "logits on the host");
    for (size_t i = 0; i < logit_at_.size(); ++i) space_.download(host_logits_.at(i * bytes), logits_ + logit_at_[i] * padded, bytes);
    logits_on_host_ = true;
  }
  return reinterpret_cast<const float*>(host_logits_.at(0)) + row * padded;
}

const void* Session::hidden() const {
  if (!space_.on_gpu()) return h_;
  const size_t bytes = static_cast<size_t>(model_.config().n_embd) * size_of(model_.dtype());
  if (host_hidden_.size() == 0) host_hidden_ = Block(static_cast<size_t>(options().rows) * bytes, "hidden rows on the host");
  space_.download(host_hidden_.at(0), h_, static_cast<size_t>(rows_) * bytes);
  return host_hidden_.at(0);
}

void Session::losses(std::span<const int32_t> targets, float* loss) {
  if (!options().hidden) throw Error("losses are of sessions that were made with `hidden`");
  if (static_cast<int64_t>(targets.size()) != rows_)
    throw Error(std::to_string(targets.size()) + " targets; the last step had " + std::to_string(rows_) + " tokens");
  for (const int32_t target : targets)
    if (target < -1 || target >= model_.config().vocab_size)
      throw Error("target " + std::to_string(target) + " is not in the model's vocabulary; allowed: -1 (none), 0 to " +
                  std::to_string(model_.config().vocab_size - 1));
  std::memcpy(inputs_.host(targets_), targets.data(), targets.size_bytes());
  inputs_.send(targets_, targets.size_bytes());
  float* losses = lse_ + rows_;
  plans_.cross_entropy_.execute({rows_, h_, model_.head(), reinterpret_cast<const int32_t*>(inputs_.at(targets_)), losses, lse_}, workspace_,
                                space_.stream());
  space_.download(loss, losses, targets.size() * sizeof(float));
}

void Session::draw_from(int64_t vocab) {
  if (vocab < 1 || vocab > model_.config().vocab_size)
    throw Error("tokens are drawn from " + std::to_string(vocab) + "; the model's vocabulary has " + std::to_string(model_.config().vocab_size));
  if (vocab_ == vocab) return;
  const int64_t rows = std::max(options().batch, options().logit_rows);
  sampling_ = {ops::Sampling{rows, vocab, model_.config().padded_vocab()}, model_.device()};
  sampling_workspace_ = Block(sampling_.workspace_bytes(), "sampling", space_);
  vocab_ = vocab;
  if (decoding_) decoding_->forget_graphs();
}

void Session::draw(std::span<const ops::Choice> choices, Token* tokens) {
  if (static_cast<int64_t>(choices.size()) != logit_count_)
    throw Error(std::to_string(choices.size()) + " choices; the last step has logits of " + std::to_string(logit_count_) + " tokens");
  if (vocab_ == 0) draw_from(model_.config().vocab_size);
  if (choices.empty()) return;
  if (decoding_) return decoding_->draw(logits_, choices, tokens);
  sampling_.execute({static_cast<int64_t>(choices.size()), logits_, choices.data(), tokens}, sampling_workspace_.at(0));
}

void Session::step_and_draw(std::span<const NewTokens> parts, std::span<const ops::Choice> choices, Token* tokens, bool more) {
  check(parts, false);
  const bool single =
      std::all_of(parts.begin(), parts.end(), [](const NewTokens& p) { return p.tokens.size() == 1 && p.logits == WantLogits::kLast; });
  const bool graph = decoding_ && options().graph && single && plans_.attention_.takes_lengths() && options().logit_rows >= options().batch &&
                     model_.config().causal;
  if (!graph || parts.size() != choices.size() || parts.empty()) {
    step(parts);
    return draw(choices, tokens);
  }
  if (vocab_ == 0) draw_from(model_.config().vocab_size);
  logits_on_host_ = false;
  logit_at_.clear();
  logit_count_ = 0;
  take_pages(parts);
  decoding_->step(parts, choices, tokens, more);
  rows_ = logit_count_ = static_cast<int64_t>(parts.size());
  for (const NewTokens& part : parts) {
    logit_at_.push_back(part.sequence);
    ++lengths_[static_cast<size_t>(part.sequence)];
  }
}

}  // namespace fattn::gpt2
