#include "lab/sweep/axis.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <stdexcept>

namespace fattn::lab {
namespace {

using measure::ProblemSpec;

constexpr int64_t kMost = int64_t{1} << 40;  // far beyond what any machine holds

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument(why); }

void require_range(int64_t from, int64_t to) {
  if (from < 1) refuse(fmt::format("--from {} is no size; allowed: 1 or more", from));
  if (to < from) refuse(fmt::format("--to {} is less than --from {}", to, from));
  if (to > kMost) refuse(fmt::format("--to {} is more than any machine holds; allowed: up to {}", to, kMost));
}

void require_few(size_t count) {
  if (count > kMostValues) refuse(fmt::format("more than {} values; take a larger --factor or --step, or name them by --values", kMostValues));
}

int64_t part(int64_t whole, int64_t parts, const char* what, const char* of, const char* by) {
  if (parts < 1 || whole % parts != 0)
    refuse(
        fmt::format("{} = {} / {} is no whole number at {} {}: {} does not divide {}; leave that value out, or choose what stays as it is with --fix",
                    what, of, by, by, parts, parts, whole));
  return whole / parts;
}

// Groups of query heads that share keys and values stay as large as they are.
void set_heads(ProblemSpec& s, int64_t nheads) {
  const int64_t group = s.nheads_k > 0 && s.nheads % s.nheads_k == 0 ? s.nheads / s.nheads_k : 1;
  if (nheads % group != 0)
    refuse(fmt::format("nheads {} is no multiple of the {} query heads that share a head of keys and values; leave that value out", nheads, group));
  s.nheads = nheads;
  s.nheads_k = nheads / group;
}

void set_headdim(ProblemSpec& s, int64_t headdim) { s.headdim = s.headdim_v = headdim; }

Step step_of(SweepAxis axis, int64_t value, const ProblemSpec& base, int64_t embed, const std::string& fix) {
  Step step{value, base, 0};
  ProblemSpec& s = step.spec;
  switch (axis) {
    case SweepAxis::kSeqlen:
      if (fix == "tokens") s.batch = part(base.batch * base.seqlen_q, value, "batch", "tokens", "seqlen");
      s.seqlen_q = s.seqlen_k = value;
      break;
    case SweepAxis::kBatch:
      s.batch = value;
      if (fix == "tokens") s.seqlen_q = s.seqlen_k = part(base.batch * base.seqlen_q, value, "seqlen", "tokens", "batch");
      break;
    case SweepAxis::kNheads:
      set_heads(s, value);
      if (fix == "embed") set_headdim(s, part(embed, value, "headdim", "embed", "nheads"));
      break;
    case SweepAxis::kHeaddim:
      set_headdim(s, value);
      if (fix == "embed") set_heads(s, part(embed, value, "nheads", "embed", "headdim"));
      break;
    case SweepAxis::kEmbed:
      if (fix == "nheads")
        set_headdim(s, part(value, base.nheads, "headdim", "embed", "nheads"));
      else
        set_heads(s, part(value, base.headdim, "nheads", "embed", "headdim"));
      break;
    case SweepAxis::kSeqlenK: s.seqlen_k = value; break;
    case SweepAxis::kThreads:
      if (value > 1024) refuse(fmt::format("threads {} is out of range; allowed: from 1 to 1024", value));
      step.threads = static_cast<int>(value);
      break;
    case SweepAxis::kCausal:
      if (value > 1) refuse(fmt::format("causal {} is neither 0 (no mask) nor 1 (causal)", value));
      s.causal = value == 1;
      break;
  }
  return step;
}

}  // namespace

std::optional<SweepAxis> axis_named(const std::string& name) {
  for (const SweepAxis axis : kAxes)
    if (name == name_of(axis)) return axis;
  return std::nullopt;
}

std::vector<std::string> fixes_of(SweepAxis axis) {
  switch (axis) {
    case SweepAxis::kSeqlen: return {"batch", "tokens"};
    case SweepAxis::kBatch: return {"seqlen", "tokens"};
    case SweepAxis::kNheads: return {"embed", "headdim"};
    case SweepAxis::kHeaddim: return {"nheads", "embed"};
    case SweepAxis::kEmbed: return {"nheads", "headdim"};
    case SweepAxis::kSeqlenK:
    case SweepAxis::kThreads:
    case SweepAxis::kCausal: return {};
  }
  return {};
}

std::vector<int64_t> values_by_factor(int64_t from, int64_t to, double factor) {
  require_range(from, to);
  if (!(factor > 1) || !std::isfinite(factor)) refuse(fmt::format("--factor {} does not grow; allowed: more than 1", factor));
  std::vector<int64_t> values;
  for (double value = static_cast<double>(from); value < static_cast<double>(to) + 0.5; value *= factor) {
    const int64_t rounded = std::llround(value);
    if (rounded > to) break;
    if (values.empty() || rounded > values.back()) values.push_back(rounded);
    require_few(values.size());
  }
  return values;
}

std::vector<int64_t> values_by_step(int64_t from, int64_t to, int64_t step) {
  require_range(from, to);
  if (step < 1) refuse(fmt::format("--step {} does not grow; allowed: 1 or more", step));
  std::vector<int64_t> values;
  for (int64_t value = from; value <= to; value += step) {
    values.push_back(value);
    require_few(values.size());
  }
  return values;
}

std::vector<int64_t> values_in(const std::string& list) {
  std::vector<int64_t> values;
  for (size_t at = 0; at <= list.size();) {
    const size_t end = std::min(list.find(',', at), list.size());
    const std::string text = list.substr(at, end - at);
    int64_t value = 0;
    const std::from_chars_result read = std::from_chars(text.data(), text.data() + text.size(), value);
    if (text.empty() || read.ec != std::errc() || read.ptr != text.data() + text.size() || value < 0 || value > kMost)
      refuse(fmt::format("'{}' in --values is no whole number; allowed: numbers with commas between them, as 256,512,1024", text.substr(0, 40)));
    if (std::find(values.begin(), values.end(), value) != values.end()) refuse(fmt::format("{} is twice in --values", value));
    values.push_back(value);
    require_few(values.size());
    at = end + 1;
  }
  return values;
}

std::vector<Step> steps_of(SweepAxis axis, const std::vector<int64_t>& values, const ProblemSpec& base, int64_t embed, const std::string& fix) {
  std::vector<Step> steps;
  for (const int64_t value : values) {
    if (value < 1 && axis != SweepAxis::kCausal) refuse(fmt::format("{} {} is no size; allowed: 1 or more", name_of(axis), value));
    steps.push_back(step_of(axis, value, base, embed, fix));
  }
  return steps;
}

std::string text_of_value(SweepAxis axis, int64_t value) {
  if (axis == SweepAxis::kCausal) return value == 1 ? "causal" : "no mask";
  return std::to_string(value);
}

std::string describe_without(SweepAxis axis, const std::string& fix, const ProblemSpec& s, int64_t embed) {
  std::string text;
  const auto add = [&](const std::string& part) { text += (text.empty() ? "" : " ") + part; };
  const bool tokens = fix == "tokens";
  if (tokens) add(fmt::format("{} tokens", s.batch * s.seqlen_q));
  if (axis != SweepAxis::kBatch && !tokens) add(fmt::format("B{}", s.batch));
  if (axis != SweepAxis::kSeqlen && !tokens)
    add(s.seqlen_q == s.seqlen_k && axis != SweepAxis::kSeqlenK ? fmt::format("S{}", s.seqlen_q) : fmt::format("Q{}", s.seqlen_q));
  if (axis != SweepAxis::kSeqlen && axis != SweepAxis::kSeqlenK && s.seqlen_q != s.seqlen_k) add(fmt::format("K{}", s.seqlen_k));
  const bool fixed_embed = fix == "embed";
  if (fixed_embed) add(fmt::format("embed {}", embed));
  if (axis != SweepAxis::kNheads && !(fixed_embed && axis == SweepAxis::kHeaddim) && !(axis == SweepAxis::kEmbed && fix == "headdim")) {
    add(fmt::format("H{}", s.nheads));
    if (s.nheads_k != s.nheads) add(fmt::format("Hk{}", s.nheads_k));
  }
  if (axis != SweepAxis::kHeaddim && !(fixed_embed && axis == SweepAxis::kNheads) && !(axis == SweepAxis::kEmbed && fix == "nheads")) {
    add(fmt::format("D{}", s.headdim));
    if (s.headdim_v != s.headdim) add(fmt::format("Dv{}", s.headdim_v));
  }
  add(name_of(s.dtype));
  if (s.causal && axis != SweepAxis::kCausal) add("causal");
  return text + measure::describe_options(s);
}

}  // namespace fattn::lab
