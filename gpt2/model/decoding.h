// Steps of one token on a GPU, captured once and replayed: ids, positions, places and choices are in the device's memory, and the graph goes on with
// the tokens that it has drawn, so that a token costs one launch and one small copy. The host keeps what the device has, and sends what differs.
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

  static size_t bytes(int64_t batch, int64_t context);  // of the device

  // For choices that stand alone: draws from rows of logits.
  void draw(const float* logits, std::span<const ops::Choice> choices, Token* tokens);

  // Each part has one token and wants logits, which are then in the row of its sequence.
  void step(std::span<const NewTokens> parts, std::span<const ops::Choice> choices, Token* tokens);
  void forget_graphs() { graphs_.clear(); }

 private:
  // Of each sequence; inactive ones have a negative slot.
  struct Rows {
    int32_t *ids, *position, *used, *token;
    int64_t* slot;
    ops::Choice* choice;
    int32_t* seen;
  };
  Rows rows_at(std::byte* begin, std::byte* seen) const;
  // What the parts need; whether the device has it.
  bool bring_up(std::span<const NewTokens> parts, std::span<const ops::Choice> choices, int64_t rows);
  void set_choice(int64_t row, const ops::Choice& choice);
  void execute(int64_t rows);
  const cuda::Graph& graph_of(int64_t rows);
  void read_tokens(int64_t rows);

  Session& session_;
  const int64_t batch_, seen_stride_;
  Inputs state_, seen_;
  Block tokens_;
  Rows host_, device_;
  size_t state_bytes_ = 0;
  std::map<int64_t, cuda::Graph> graphs_;
  std::vector<Span> spans_;
  std::vector<int32_t> drawn_;
  bool known_ = false;  // what the device has is what the host has
};

}  // namespace fattn::gpt2
