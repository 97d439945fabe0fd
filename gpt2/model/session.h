// A model at work: sequences with their cache of keys and values, one arena of activations, plans made once.
//
//   const Model model = Model::load("model");
//   Session session(model, {.batch = 2, .context = 256});
//   session.step({{0, prompt0}, {1, prompt1}});     // of any lengths: there is no padding
//   session.logits(1);                              // of the token behind the last of prompt1
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gpt2/model/attention.h"
#include "gpt2/model/model.h"
#include "gpt2/model/pages.h"
#include "gpt2/tokenizer/vocabulary.h"

namespace fattn::gpt2 {

class Decoding;

struct SessionOptions {
  int64_t batch = 1, context = 0;          // sequences, and tokens of each that the cache holds; 0: the model's positions
  int64_t rows = 0;                        // tokens of a step at most; 0: 256 (on a GPU 8192), or the batch if that is more
  int64_t logit_rows = 0;                  // of a step at most; 0: the batch
  bool hidden = false;                     // hidden() and losses() are asked for
  Algorithm algorithm = Algorithm::kAuto;  // of attention
  bool batch_invariant = false;            // no sequence changes another's result by a bit
  bool graph = true;                       // on a GPU steps of one token are captured once and replayed
  // Sequences share a cache of so many tokens, rounded up to pages, which they take as they grow; 0: none shares, each has room for its context. One
  // of the two alone stands for the other: 64 tokens a page, and as many tokens as batch times context.
  int64_t page_size = 0, cache_tokens = 0;
  // Of the numbers that a session has: pages of the cache, and at most of a sequence; 0: there are none.
  int64_t pages() const { return page_size > 0 ? cache_tokens / page_size : 0; }
  int64_t columns() const { return page_size > 0 ? Pages::pages_of(context, page_size) : 0; }

  bool operator==(const SessionOptions&) const = default;
};

enum class WantLogits { kNone, kLast, kAll };

// Tokens that a sequence goes on with.
struct NewTokens {
  int64_t sequence = 0;
  std::span<const Token> tokens;
  WantLogits logits = WantLogits::kLast;
};

// What a session takes, known before there is one.
struct SessionMemory {
  struct Use {
    const char* what;
    int64_t rows, width;
    size_t element, bytes;
    bool input;  // the host writes it
  };
  std::vector<Use> activations;
  size_t workspace = 0, cache = 0;
  size_t arena() const;   // activations but inputs, and the workspace
  size_t inputs() const;  // on a GPU there are as many bytes of the host's besides
};

// Where the numbers of a step's rows are, for operations to read.
struct StepRows {
  const int32_t *ids = nullptr, *positions = nullptr, *select = nullptr, *used = nullptr, *table = nullptr;
  const int64_t* slots = nullptr;
};

// Tokens of a step where SessionOptions::rows is 0.
int64_t default_chunk(const ops::Device& device);

class SessionPlans {
 public:
  // Throws Error for what the model does not have, a context beyond its positions, and for pages where attention has none.
  SessionPlans(const Config& config, DType dtype, const Compute& compute, const ops::Device& device, const SessionOptions& options);
  SessionMemory memory() const;
  const SessionOptions& options() const { return options_; }  // with the numbers that 0 stands for

 private:
  friend class Session;
  SessionOptions options_;
  const Config& config_;
  DType dtype_;
  ops::Plan<ops::Embedding> embedding_;
  ops::Plan<ops::LayerNorm> norm_;
  ops::Plan<ops::NormLinear> qkv_, fc_, head_;
  ops::Plan<ops::Linear> attn_proj_, mlp_proj_;
  ops::Plan<ops::CrossEntropy> cross_entropy_;
  Attention attention_;
  size_t workspace_ = 0;
  int64_t alike_ = 0;  // rows of a product that change nothing in each other
};

class Session {
 public:
  // The model must outlive it.
  Session(const Model& model, const SessionOptions& options);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  const SessionOptions& options() const { return plans_.options_; }
  int64_t length(int64_t sequence) const { return lengths_[static_cast<size_t>(sequence)]; }
  // Forgets what is behind `length`.
  void truncate(int64_t sequence, int64_t length);

  // Room for a sequence of so many tokens from now on, until it is truncated. False: other sequences have the pages. Throws Error where the session
  // never has so many.
  bool reserve(int64_t sequence, int64_t tokens);

  // For measurements: as if a sequence had so many tokens, whose keys and values are 0.
  void pretend(int64_t sequence, int64_t length);

  // Each sequence once, in ascending order. After an Error nothing has changed; pages that it took stay the sequence's until it is truncated. On a
  // GPU it returns while the work is under way.
  void step(std::span<const NewTokens> parts);
  void step(std::initializer_list<NewTokens> parts) { step(std::span<const NewTokens>(parts.begin(), parts.size())); }
  // The same for prompts of any length, in chunks of at most options().rows tokens; logits are those of each prompt's last token, in the order of
  // `parts`, of which there are at most logit_rows.
  void prefill(std::span<const NewTokens> parts);
  // Until what was asked for is done.
  void wait() const { space_.wait(); }

  // Of the last step or prefill: vocab_size numbers, behind them zeros up to padded_vocab. `row` counts what was asked for.
  const float* logits(int64_t row) const;
  int64_t logit_count() const { return logit_count_; }
  // Behind the last LayerNorm, (rows of the last step, n_embd) in the model's dtype.
  const void* hidden() const;
  // -log(probability) of each row's target; -1: none, 0. To `loss`, of as many as the last step had rows.
  void losses(std::span<const int32_t> targets, float* loss);

  // Only the first tokens of the vocabulary are drawn from; without this call all. Allocates what drawing needs.
  void draw_from(int64_t vocab);
  // The token behind each of the logits of the last step or prefill, of which there are as many as choices. Error if one is NaN.
  void draw(std::span<const ops::Choice> choices, Token* tokens);
  // step() of one token each, and draw(): on a GPU one graph, which goes on with the tokens that it has drawn.
  // `more`: these logits are not asked for, and the next call will likely go on with all of it; its step may begin before it comes.
  void step_and_draw(std::span<const NewTokens> parts, std::span<const ops::Choice> choices, Token* tokens, bool more = false);

 private:
  friend class Decoding;
  void check(std::span<const NewTokens> parts, bool in_chunks) const;
  // Logits go to rows from first_logit on.
  void run(std::span<const NewTokens> parts, int64_t first_logit);
  void layers(const StepRows& in, const std::vector<Span>& spans, int64_t rows, int64_t logit_rows, int64_t first_logit);
  void take_pages(std::span<const NewTokens> parts);
  void send_table();
  int64_t place(int64_t sequence, int64_t token) const;  // its row in the cache

  const Model& model_;
  MemorySpace space_;
  SessionPlans plans_;
  Block arena_, cache_;
  Inputs inputs_;
  std::vector<int64_t> lengths_;
  Pages pages_;
  bool table_changed_ = true;
  std::vector<Span> spans_;
  std::vector<int64_t> logit_at_;  // where each of the logits is
  int64_t rows_ = 0, logit_count_ = 0;
  float *x_ = nullptr, *logits_ = nullptr, *lse_ = nullptr;
  std::byte *h_ = nullptr, *qkv_ = nullptr, *o_ = nullptr, *inner_ = nullptr, *picked_ = nullptr, *workspace_ = nullptr;
  size_t ids_ = 0, positions_ = 0, select_ = 0, slots_ = 0, used_ = 0, targets_ = 0, table_ = 0;  // in inputs_

  mutable Block host_logits_, host_hidden_;  // of a GPU, when they are asked for
  mutable bool logits_on_host_ = false;
  ops::Plan<ops::Sampling> sampling_;
  int64_t vocab_ = 0;
  Block sampling_workspace_;
  std::unique_ptr<Decoding> decoding_;
};

}  // namespace fattn::gpt2
