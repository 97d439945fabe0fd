// Steps of one token on a GPU, captured once and replayed: ids, positions, places and choices are in the device's memory, and the graph goes on with
// the tokens that it has drawn, so that a token costs one launch and one small copy. The host keeps what the device has, and sends what differs.
// Where more is to come, and this step was what the one before had made ready, the next one is on its way while the host reads a token; if another is
// asked for, its work is forgotten.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "gpt2/model/session.h"

namespace fattn::gpt2 {

class Decoding {
 public:
  explicit Decoding(Session& session);
  ~Decoding();
  Decoding(const Decoding&) = delete;
  Decoding& operator=(const Decoding&) = delete;

  static size_t bytes(int64_t batch, int64_t context);  // of the device

  // For choices that stand alone: draws from rows of logits.
  void draw(const float* logits, std::span<const ops::Choice> choices, Token* tokens);

  // Each part has one token and wants logits, which are then in the row of its sequence.
  // `more`: the next call will likely go on with the same sequences, and nobody asks for these logits.
  void step(std::span<const NewTokens> parts, std::span<const ops::Choice> choices, Token* tokens, bool more);
  void forget_graphs();
  void forget_ahead() { ahead_ = 0; }

 private:
  // Of each sequence; inactive ones have a negative slot.
  struct Rows {
    int32_t *ids, *position, *used;
    int64_t* slot;
    ops::Choice* choice;
    int32_t* seen;
  };
  Rows rows_at(std::byte* begin, std::byte* seen) const;
  // What the parts need; whether the device has it.
  bool bring_up(std::span<const NewTokens> parts, std::span<const ops::Choice> choices, int64_t rows);
  void set_choice(int64_t row, const ops::Choice& choice);
  void execute(int64_t rows, int turn);
  const cuda::Graph* graphs_of(int64_t rows);  // one a turn
  void launch(const cuda::Graph* graphs);      // of the turn
  bool fits_once_more(std::span<const NewTokens> parts) const;
  int32_t* tokens_of(int turn) const { return reinterpret_cast<int32_t*>(tokens_.at(0)) + turn * batch_; }

  Session& session_;
  const int64_t batch_, seen_stride_;
  Inputs state_, seen_;
  Block tokens_;
  Rows host_, device_;
  size_t state_bytes_ = 0;
  std::map<int64_t, std::vector<cuda::Graph>> graphs_;
  std::vector<Span> spans_;
  std::vector<int32_t> drawn_;
  bool known_ = false;  // what the device has (or had, before the step ahead) is what the host has
  // Steps take turns with two places for their tokens.
  int turn_ = 0;
  int64_t ahead_ = 0;  // rows of a step that is on its way already; 0: none
  std::vector<cuda::Event> done_;
  MemorySpace reading_;  // a stream that does not wait for the next step
};

}  // namespace fattn::gpt2
