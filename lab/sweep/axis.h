// What is swept: the values of one size, and the problem at each of them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "measure/problem.h"

namespace fattn::lab {

enum class SweepAxis { kSeqlen, kBatch, kNheads, kHeaddim, kEmbed, kSeqlenK, kThreads, kCausal };
inline constexpr SweepAxis kAxes[] = {SweepAxis::kSeqlen, SweepAxis::kBatch,   SweepAxis::kNheads,  SweepAxis::kHeaddim,
                                      SweepAxis::kEmbed,  SweepAxis::kSeqlenK, SweepAxis::kThreads, SweepAxis::kCausal};

constexpr const char* name_of(SweepAxis axis) {
  switch (axis) {
    case SweepAxis::kSeqlen: return "seqlen";
    case SweepAxis::kBatch: return "batch";
    case SweepAxis::kNheads: return "nheads";
    case SweepAxis::kHeaddim: return "headdim";
    case SweepAxis::kEmbed: return "embed";
    case SweepAxis::kSeqlenK: return "seqlen-k";
    case SweepAxis::kThreads: return "threads";
    case SweepAxis::kCausal: return "causal";
  }
  return "unknown";
}
std::optional<SweepAxis> axis_named(const std::string& name);

// What may stay as it is while a size changes, the first unless another is asked for; empty where nothing is tied to it.
std::vector<std::string> fixes_of(SweepAxis axis);

inline constexpr size_t kMostValues = 64;

// From, from * factor, ... up to `to` (rounded, each once); and from, from + step, .... Throw std::invalid_argument, which says what is wrong.
std::vector<int64_t> values_by_factor(int64_t from, int64_t to, double factor);
std::vector<int64_t> values_by_step(int64_t from, int64_t to, int64_t step);
// "256,512,1024", in their order, each once. Throws std::invalid_argument.
std::vector<int64_t> values_in(const std::string& list);

struct Step {
  int64_t value = 0;
  measure::ProblemSpec spec;
  int threads = 0;  // kThreads: of the library and of providers
};

// `embed`: the embedding, nheads * headdim, of which nheads and headdim are parts where one of them is swept. `fix`: one of fixes_of(axis).
// Throws std::invalid_argument for a value that gives no problem, as a head size that is no whole number.
std::vector<Step> steps_of(SweepAxis axis, const std::vector<int64_t>& values, const measure::ProblemSpec& base, int64_t embed,
                           const std::string& fix);

// A value as people read it: "causal" for 1 of kCausal.
std::string text_of_value(SweepAxis axis, int64_t value);
// The problem without what is swept: "B4 H12 D64 fp32"; what follows from the value is left out, too.
std::string describe_without(SweepAxis axis, const std::string& fix, const measure::ProblemSpec& spec, int64_t embed);

}  // namespace fattn::lab
