#include "cli/predict_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "cli/sanitize.h"
#include "cli/table.h"

namespace fattn::cli {
namespace {

using lab::Prediction;
using lab::Scored;
using measure::Pass;

std::string signed_percent(double share) { return fmt::format("{:+.1f} %", 100 * share); }
Cell share_cell(double share) { return {fmt::format("{:.1f} %", 100 * share), fmt::format("{}", share)}; }

// Which part of a call that is, for people.
std::string part_words(lab::Part part) {
  switch (part) {
    case lab::Part::kCall: return "fixed";
    case lab::Part::kCompute: return "computing";
    case lab::Part::kMemory: return "memory";
  }
  return "";
}

std::string bound_words(const Prediction& p) {
  if (p.work.amounts.empty()) return p.binds;
  const auto found = std::find_if(p.work.amounts.begin(), p.work.amounts.end(), [&](const lab::Amount& a) { return a.name == p.binds; });
  const auto at = static_cast<size_t>(found - p.work.amounts.begin());
  if (found == p.work.amounts.end() || !(p.breakdown.seconds > 0)) return p.binds;
  return fmt::format("{} ({})", p.binds, percent_text(std::min(1.0, p.breakdown.of_amounts[at] / p.breakdown.seconds)));
}

}  // namespace

void print_predictions(Output& out, const std::vector<Prediction>& predictions, const lab::Calibration* calibration) {
  Table table({Column::text("pass").as_key(), Column::number("predicted", "s"), Column::number("nine of ten calls").ranked(2),
               Column::number("GFLOP/s").ranked(1), Column::number("extra memory", "bytes"), Column::number("workspace", "bytes").ranked(3),
               Column::text("most of it").ranked(4)},
              "Before it runs");
  std::string unknown, plain;
  for (const Prediction& p : predictions) {
    const Cell memory = bytes_cell(static_cast<double>(p.extra_bytes)), workspace = bytes_cell(static_cast<double>(p.workspace_bytes));
    if (p.seconds) {
      table.add({name_of(p.pass), seconds_cell(*p.seconds), fmt::format("{} - {}", seconds_text(p.low), seconds_text(p.high)),
                 giga_cell(p.flops / *p.seconds), memory, workspace, bound_words(p)});
    } else {
      table.add({name_of(p.pass), Cell("not known").in(Mood::kUnsure), "", "", memory, workspace, ""});
      unknown = p.unknown;
      if (p.plain_seconds) plain += fmt::format("{}{} {}", plain.empty() ? "" : ", ", name_of(p.pass), seconds_text(*p.plain_seconds));
    }
  }
  out.print(table);
  if (!unknown.empty()) out.say("\nTime is not known: " + printable(unknown, 600) + ".");
  if (!plain.empty()) out.say(fmt::format("Without {} it takes {}.", lab::not_modelled(predictions.front().spec), plain));
  out.say(
      "\nextra memory: outputs and workspace, by the plan to the byte. nine of ten calls: as far as calls were off by which the constants were "
      "tested.");
  if (calibration && !predictions.empty() && predictions.front().seconds) {
    const Prediction& p = predictions.front();
    std::string words = "";
    if (p.breakdown.call > 0.5 * p.breakdown.seconds)
      words = "The forward call is so small that starting it is most of its time: a larger batch costs little more.";
    else if (p.breakdown.memory > p.breakdown.compute)
      words = "The forward pass waits for memory: fewer bytes (16 bits, fewer heads of keys) make it faster, faster arithmetic does not.";
    else
      words = "The forward pass is bound by computing: it moves its bytes in less time than it computes.";
    out.say("\n" + words);
  }
}

void print_amounts(Output& out, const Prediction& p, const lab::Calibration& calibration) {
  if (!p.seconds || p.work.amounts.empty()) return;
  out.say(fmt::format("\n{}: {}", name_of(p.pass), printable(p.kernel)), 5);
  out.say("     " + printable(p.why, 400), 0);
  const bool cuda = calibration.on_cuda();
  Table table({Column::text("what").as_key(), Column::text("is").ranked(2), Column::number("how many"), Column::number("each", "s"),
               Column::number("time", "s"), Column::number("of it")},
              "");
  for (size_t i = 0; i < p.work.amounts.size(); ++i) {
    const lab::Amount& a = p.work.amounts[i];
    const double seconds = p.breakdown.of_amounts[i];
    if (!(a.count > 0)) continue;
    table.add({a.name, part_words(a.part), fmt::format("{:.4g}", a.count), short_cell(seconds / a.count), seconds_cell(seconds),
               percent_cell(seconds / p.breakdown.seconds)});
  }
  out.print(table);
  const double peak = calibration.of(cuda ? "matrix_flops_per_s" : "fma_flops_per_s_one_thread");
  const auto products = std::find_if(p.work.amounts.begin(), p.work.amounts.end(), [](const lab::Amount& a) { return a.name == "products"; });
  std::string words = fmt::format("How many: of the {} that has most to do. ", cuda ? "multiprocessor" : "thread");
  if (products != p.work.amounts.end() && products->count > 0 && peak > 0) {
    const double seconds = p.breakdown.of_amounts[static_cast<size_t>(products - p.work.amounts.begin())];
    const double unit = cuda ? peak / calibration.fact("multiprocessors") : peak;
    if (seconds > 0)
      words += fmt::format("Products alone run at {} of the {}'s peak. ", percent_text(2 * products->count / seconds / unit),
                           cuda ? "multiprocessor" : "thread");
  }
  if (p.work.overlap > 1)
    words += fmt::format("Computing ({}) and memory ({}) overlap: the longer counts, and a little of the other.", seconds_text(p.breakdown.compute),
                         seconds_text(p.breakdown.memory));
  out.say(words);
}

void print_scores(Output& out, const std::vector<Scored>& rows) {
  Table table({Column::text("pass").as_key(), Column::number("calls"), Column::number("mean error"), Column::number("95 % within"),
               Column::number("mean").ranked(3), Column::number("in interval").ranked(2), Column::number("worst").ranked(1),
               Column::text("its shape").wrapping(20)},
              "Predicted against measured");
  std::vector<std::pair<Pass, lab::Score>> scores;
  for (const Pass pass : {Pass::kForward, Pass::kBackward, Pass::kForwardBackward}) {
    const lab::Score s = lab::score_of(rows, pass);
    if (s.count == 0) continue;
    scores.emplace_back(pass, s);
    table.add({name_of(pass), count_cell(s.count), share_cell(s.mean_error), share_cell(s.error_95),
               Cell(signed_percent(s.bias), fmt::format("{}", s.bias)), percent_cell(s.covered),
               Cell(signed_percent(s.worst_error), fmt::format("{}", s.worst_error)), printable(s.worst)});
  }
  if (!table.rows().empty()) out.print(table);
  for (const auto& [pass, s] : scores)
    out.say_line(fmt::format("{}: predicted times are {:.1f} % off in the mean; 95 of 100 are no more than {:.1f} % off.", name_of(pass),
                             100 * s.mean_error, 100 * s.error_95));
  int memory = 0, exact = 0;
  for (const auto& [pass, s] : scores) memory += s.memory_count, exact += s.memory_exact;
  if (memory > 0) out.say_line(fmt::format("Memory: {} of {} predictions are right to the byte.", exact, memory));
  std::map<std::string, int> reasons;
  for (const Scored& row : rows)
    if (!row.counts()) ++reasons[!row.reason.empty() ? row.reason : row.prediction.unknown];
  for (const auto& [reason, count] : reasons) out.say_line(fmt::format("Not scored, {}: {}", count, printable(reason, 300)), 2);
  if (!scores.empty())
    out.say(
        "\nmean error: of |predicted / measured - 1|; mean: of the same with its sign, above 0 predicted too long. in interval: measured times "
        "within "
        "the predicted interval, which is made for nine of ten.");
}

}  // namespace fattn::cli
