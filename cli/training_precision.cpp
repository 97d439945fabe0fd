#include "cli/training_precision.h"

#include <fmt/format.h>

#include <vector>

#include "cli/gpt2.h"
#include "cli/sanitize.h"
#include "cli/table.h"
#include "files/json.h"

namespace fattn::cli {
namespace {

using gpt2::Violation;

// What it is, and what helps.
struct Words {
  Violation kind;
  const char *what, *advice;
};
constexpr Words kWords[] = {
    {Violation::kOverflow, "overflow to Inf",
     "In fp16 the loss scale halves and the step is left out; if it does not end, train in bf16 or more slowly."},
    {Violation::kNaN, "NaN", "The first of them says where it began; lower the learning rate, or look at the data of that step."},
    {Violation::kUnderflow, "underflow",
     "These gradients are nearly 0 in their dtype: in fp16 the loss scale is too small for them, and bf16 has the range."},
    {Violation::kStatistics, "rows with a variance below LayerNorm's epsilon",
     "Such rows are scaled by epsilon, not by themselves; look at the embedding and at the initialisation."},
    {Violation::kLogits, "logits beyond what the dtype resolves",
     "Rounding moves them by more than 0.5; lower the learning rate, or raise the weight decay."},
};

}  // namespace

void say_precision(const Output& out, const gpt2::PrecisionTracker& tracker, const std::string& file) {
  const std::string looked =
      fmt::format("Precision: looked at {} tensors in {} steps", grouped_number(tracker.tensors()), grouped_number(tracker.steps()));
  const std::vector<gpt2::PrecisionTracker::Found> all = tracker.found();
  if (all.empty()) {
    out.say(looked + "; no violation.");
    return;
  }
  out.say(fmt::format("{}; violations are in {}:", looked, printable(file)));
  for (const Words& words : kWords) {
    const gpt2::PrecisionTracker::Found *worst = nullptr, *first = nullptr;
    int64_t tensors = 0;
    for (const auto& found : all) {
      if (found.kind != words.kind) continue;
      ++tensors;
      if (!worst || found.worst > worst->worst) worst = &found;
      if (!first || found.first_step < first->first_step) first = &found;
    }
    if (!worst) continue;
    const std::string value = words.kind == Violation::kLogits ? fmt::format("{:.3g}", worst->worst) : percent_text(worst->worst);
    out.say(fmt::format("  {}: {} tensor{}, first in step {}; the worst is '{}', {} in step {}. {}", words.what, tensors, tensors == 1 ? "" : "s",
                        first->first_step, printable(worst->tensor), value, worst->worst_step, words.advice),
            2);
  }
  if (tracker.lines_left_out() > 0)
    out.say(fmt::format("  {} lines were not written; they are counted here.", grouped_number(tracker.lines_left_out())));
}

nlohmann::ordered_json precision_json(const gpt2::PrecisionTracker& tracker) {
  nlohmann::ordered_json found = nlohmann::ordered_json::array();
  for (const auto& one : tracker.found())
    found.push_back({{"kind", gpt2::name_of(one.kind)},
                     {"tensor", one.tensor},
                     {"steps", one.steps},
                     {"first_step", one.first_step},
                     {"worst_step", one.worst_step},
                     {"worst", files::number_or_null(one.worst)}});
  return {{"steps", tracker.steps()}, {"tensors", tracker.tensors()}, {"violations", found}};
}

}  // namespace fattn::cli
