// Groups are by dtype and by what is least plain about a case, in the order in which the table has them.
#include "cli/check_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "cli/sanitize.h"
#include "cli/table.h"
#include "cli/verdicts.h"

namespace fattn::cli {

using testing::Case;
using testing::CaseResult;

Outcome outcome_of(const CaseResult& result) {
  if (!result.skipped.empty()) return Outcome::kSkipped;
  return result.passed() ? Outcome::kPassed : Outcome::kFailed;
}

const char* word_for(Outcome outcome) { return outcome == Outcome::kPassed ? "passed" : outcome == Outcome::kFailed ? "failed" : "skipped"; }

std::string subject_of(const Case& c) {
  if (c.inputs != testing::Inputs::kNormal) return "NaN, Inf, huge, tiny values";
  if (c.varlen || c.key_lengths || c.documents != testing::Documents::kNone) return "lengths, packed, documents";
  if (c.bias != testing::Pairs::kNone || c.mask != testing::Pairs::kNone) return "biases and masks";
  if (c.has_scores() || c.softcap > 0) return "ALiBi, softcap, dropout";
  if (c.window_left >= 0 || c.window_right >= 0) return "windows";
  if (c.layout != testing::Layout::kBshd) return "layouts in memory";
  return c.causal ? "causal masks" : "sizes";
}

CheckReport::Group& CheckReport::group_of(const Case& c) {
  const std::string dtype = name_of(c.dtype), subject = random_ ? "random combinations" : subject_of(c);
  for (Group& group : groups_)
    if (group.dtype == dtype && group.subject == subject) return group;
  Group& group = groups_.emplace_back();
  group.dtype = dtype;
  group.subject = subject;
  return group;
}

void CheckReport::add(const Case& c, const CaseResult& result) {
  const Outcome outcome = outcome_of(result);
  Group& group = group_of(c);
  ++(outcome == Outcome::kPassed ? passed_ : outcome == Outcome::kFailed ? failed_ : skipped_);
  ++(outcome == Outcome::kPassed ? group.passed : outcome == Outcome::kFailed ? group.failed : group.skipped);
  if (outcome == Outcome::kSkipped && group.reason.empty()) group.reason = printable(result.skipped);
  if (outcome == Outcome::kSkipped && first_reason_.empty()) first_reason_ = group.reason;
  for (const testing::TensorVerdict& verdict : result.tensors)
    if (verdict.error > 0) group.nearest = std::max(group.nearest, verdict.error / verdict.allowed);
  if (!prints(result)) return;
  const std::string word = outcome == Outcome::kFailed ? out_.in(Mood::kBad, "FAILED") + "  " : fmt::format("{:<8}", word_for(outcome));
  out_.say(word + c.name + (outcome == Outcome::kSkipped ? ": " + printable(result.skipped) : ""), 8);
  for (const testing::TensorVerdict& verdict : result.tensors) out_.say("          " + as_text(verdict), 6);
  if (!result.failure.empty()) out_.say("          " + printable(result.failure), 6);
}

void CheckReport::finish(double seconds) {
  Table table({Column::text("dtype").as_key(), Column::text("what the cases are about").as_key().wrapping(20), Column::number("cases"),
               Column::number("passed"), Column::number("failed"), Column::number("skipped"), Column::number("worst error, of its bound")},
              verbose_ ? "By dtype and subject" : "");
  std::set<std::string> told;
  for (const Group& group : groups_) {
    table.add({group.dtype, group.subject, count_cell(group.passed + group.failed + group.skipped),
               group.passed > 0 ? count_cell(group.passed).in(Mood::kGood) : count_cell(0),
               group.failed > 0 ? count_cell(group.failed).in(Mood::kBad) : count_cell(0),
               group.skipped > 0 ? count_cell(group.skipped).in(Mood::kUnsure) : count_cell(0),
               group.nearest > 0 ? percent_cell(group.nearest) : ""});
    if (group.skipped > 0 && told.insert(group.reason).second) table.note("skipped, the first: " + group.reason);
  }
  out_.print(table);

  std::string verdict;
  if (failed_ > 0)
    verdict = out_.in(Mood::kBad, fmt::format("{} of {} cases FAILED", failed_, passed_ + failed_)) +
              ": what is wrong is above, and with --json in the record. `fattn check --filter NAME --verbose` runs one alone.";
  else if (passed_ > 0)
    verdict = out_.in(Mood::kGood, passed_ == 1 ? "The case passed" : fmt::format("All {} cases passed", passed_)) +
              ": every output is within its error bound of attention in float64.";
  if (passed_ + failed_ > 0 && skipped_ > 0)
    verdict += fmt::format(" {} {} skipped, because this backend does not compute {}.", skipped_, skipped_ == 1 ? "case was" : "cases were",
                           skipped_ == 1 ? "it" : "them");
  out_.say((verdict.empty() ? "" : "\n" + verdict) +
           fmt::format("\nIn {:.{}f} s: {} passed, {} failed, {} skipped", seconds, seconds < 10 ? 1 : 0, passed_, failed_, skipped_));
}

}  // namespace fattn::cli
