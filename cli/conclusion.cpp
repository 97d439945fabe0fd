// Claims what rows show and no more: a difference that the intervals leave open is called that.
#include "cli/conclusion.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>

#include "cli/sanitize.h"
#include "cli/table.h"
#include "cli/words.h"
#include "measure/process_state.h"

namespace fattn::cli {
namespace {

using namespace measure;

const Row* row_of(const std::vector<Row>& rows, const std::string& provider, Pass pass) {
  for (const Row& row : rows)
    if (row.who.provider == provider && row.pass == pass) return &row;
  return nullptr;
}

const char* words_for(Pass pass) {
  return pass == Pass::kForward ? "forward pass" : pass == Pass::kBackward ? "backward pass" : "forward and backward pass";
}

// The pass that says most: both, else the one that was measured.
const Row* main_row(const std::vector<Row>& rows) {
  for (const Pass pass : {Pass::kForwardBackward, Pass::kForward, Pass::kBackward})
    if (const Row* row = row_of(rows, "fattn", pass)) return row;
  return nullptr;
}

// As a person types it: "fattn", "build/cli/fattn".
std::string called() {
  const std::vector<std::string> words = measure::command_line_of(getpid());
  const std::string name = words.empty() ? "" : words.front();
  return name.empty() || name.size() > 60 ? "fattn" : printable(name);
}

std::string times_text(double ratio) { return fmt::format("{:.{}f}", ratio, ratio < 10 ? 1 : 0); }

std::string answer(const Output& out, const std::vector<Row>& rows) {
  std::vector<std::string> names, wrong;
  const TensorCheck* nearest = nullptr;
  double difference = 0;
  for (const Row& row : rows) {
    if (row.who.provider != "fattn") continue;
    difference = std::max(difference, row.max_difference_to_standard.value_or(0));
    for (const TensorCheck& check : row.checks) {
      if (std::find(names.begin(), names.end(), check.tensor) != names.end()) continue;
      names.push_back(check.tensor);
      if (!check.pass) wrong.push_back(check.tensor);
      if (check.error > 0 && (!nearest || !(check.error / check.allowed <= nearest->error / nearest->allowed))) nearest = &check;
    }
  }
  if (!wrong.empty()) return out.in(Mood::kBad, "Wrong answer") + ": beyond their error bound are " + any_of(wrong, "and") + " of fattn.";
  if (names.empty()) return "";
  std::string text = out.in(Mood::kGood, "Same answer") + ": " + any_of(names, "and") + " are within the error bound of attention in float64";
  if (nearest) text += fmt::format(" ({} is nearest to it: {:.0f} % of what is allowed)", nearest->tensor, 100 * nearest->error / nearest->allowed);
  if (difference > 0) text += ", and differ from standard attention's by " + short_text(difference) + " at most";
  return text + ".";
}

std::string speed(const Output& out, const Row& own, const Row& standard) {
  const double ratio = standard.time->median / own.time->median;
  const std::string times = fmt::format(": the {} takes {}, standard attention {}.", words_for(own.pass), unbroken(seconds_text(own.time->median)),
                                        unbroken(seconds_text(standard.time->median)));
  if (undecided(*own.time, *standard.time)) return out.in(Mood::kUnsure, "As fast, within what can be measured") + times;
  if (ratio >= 1) return out.in(Mood::kGood, times_text(ratio) + " times as fast") + times;
  return out.in(Mood::kBad, times_text(1 / ratio) + " times slower") + times;
}

std::string memory(const Output& out, const Row& own, const Row& standard) {
  const auto mine = static_cast<double>(own.memory->extra_bytes), theirs = static_cast<double>(standard.memory->extra_bytes);
  if (mine <= 0 || theirs <= 0) return "";
  if (theirs >= 1.05 * mine)
    return out.in(Mood::kGood, times_text(theirs / mine) + " times less memory") +
           fmt::format(": {} beside the inputs; standard attention, which keeps the score of every query with every key, takes {}.",
                       unbroken(bytes_text(mine)), unbroken(bytes_text(theirs)));
  return fmt::format("Memory: {} beside the inputs, standard attention {}.", unbroken(bytes_text(mine)), unbroken(bytes_text(theirs)));
}

}  // namespace

void print_conclusion(const Output& out, const std::vector<Row>& rows) {
  const Row* const own = main_row(rows);
  if (!own) return;
  const Row* const standard = row_of(rows, "standard", own->pass);
  std::vector<std::string> lines = {answer(out, rows)};
  if (standard && own->ok() && standard->ok() && own->time && standard->time) {
    lines.push_back(speed(out, *own, *standard));
    if (own->memory && standard->memory) lines.push_back(memory(out, *own, *standard));
  } else if (!standard) {
    return;
  }
  out.say("\n" + out.in(Mood::kTitle, "In short"));
  for (const std::string& line : lines)
    if (!line.empty()) out.say("  " + line, 2);
  const std::string fattn = called();
  out.say("\n" + out.in(Mood::kTitle, "Next"));
  const bool cuda = own->who.backend == name_of(Backend::kCuda);
  out.say("  your sizes: " + fattn + " compare --seqlen 4096 --causal --dtype bf16" + (cuda ? " --device cuda" : ""), 2);
  out.say("  all sizes:  " + fattn + " bench --suite " + (cuda ? "cuda" : "cpu"), 2);
  out.say("  the rest:   " + fattn + " --help, and README.md for Python and C++", 2);
}

}  // namespace fattn::cli
