// The options of a ProblemSpec: how each is called as a flag, what the flag means, and which member it is. Flags and the command that repeats a run
// go over this list.
#pragma once

#include <variant>

#include "measure/problem.h"

namespace fattn::measure {

struct SpecOption {
  const char* flag;  // of commands that measure
  const char* text;  // what the flag means
  const char* type;  // of the flag's value, for help
  std::variant<bool ProblemSpec::*, int64_t ProblemSpec::*, double ProblemSpec::*, PairShape ProblemSpec::*> member;
  int64_t least = 0;  // of an int64_t
};

inline constexpr SpecOption kSpecOptions[] = {
    {"--window-left", "Keys that a query sees before its own position; -1: all", "N", &ProblemSpec::window_left, -1},
    {"--window-right", "The same behind it; with --causal there are none", "N", &ProblemSpec::window_right, -1},
    {"--softcap", "Scaled scores s become softcap * tanh(s / softcap); 0: they stay as they are", "X", &ProblemSpec::softcap},
    {"--dropout", "Weights become 0 with this probability, by random numbers from --seed; 0: none", "P", &ProblemSpec::p_dropout},
    {"--alibi", "ALiBi, with the slopes 2^(-8 h / nheads), h from 1", "", &ProblemSpec::alibi},
    {"--bias",
     "A bias of N(0, 1): for every batch entry and head (all), every head, every batch entry, one for all, or a row of keys for every batch entry",
     "SHAPE", &ProblemSpec::bias},
    {"--bias-fp32", "The bias is of fp32, whatever the others are", "", &ProblemSpec::bias_f32},
    {"--dbias", "The backward pass returns the gradient of the bias", "", &ProblemSpec::dbias},
    {"--mask", "A mask that shows three of four pairs, at random; its shapes are those of --bias", "SHAPE", &ProblemSpec::mask},
    {"--seqused-k", "Lengths of keys: N in the first batch entry (and the only one), as many as there are in the last; 0: none", "N",
     &ProblemSpec::least_seqused_k},
    {"--packed", "Packed sequences, --batch of them, of N rows, the first (and the only one), to --seqlen, the last; 0: a dense batch", "N",
     &ProblemSpec::least_packed},
    {"--documents", "As many documents of about one length in every batch entry, of which a query sees its own; 0: none", "N",
     &ProblemSpec::documents},
    {"--page-size", "Keys and values lie in pages of N keys, in random order, as in a paged cache; forward only; 0: side by side", "N",
     &ProblemSpec::page_size},
};

// Whether the spec has it; both ends of a window belong together.
inline bool has(const ProblemSpec& spec, const SpecOption& option) {
  const auto other_than_default = [&](auto member) { return spec.*member != ProblemSpec().*member; };
  const auto* end = std::get_if<int64_t ProblemSpec::*>(&option.member);
  if (end && option.least < 0) return spec.windowed();
  return std::visit(other_than_default, option.member);
}

}  // namespace fattn::measure
