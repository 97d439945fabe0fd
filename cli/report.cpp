// Lines that the measuring commands share.
#include "cli/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cli/sanitize.h"
#include "cli/table.h"

namespace fattn::cli {

using namespace measure;

std::string label_of(const Row& row) {
  const bool library = row.who.provider == "fattn" || row.who.provider == row.who.algorithm;  // "standard", "v2"
  return library || row.who.algorithm.empty() ? row.who.provider : row.who.provider + ":" + row.who.algorithm;
}

std::string status_text(const Row& row) { return row.ok() ? "ok" : std::string(name_of(row.status)) + ": " + printable(row.reason, 600); }

Cell interval_cell(const Statistics& time) {
  return {seconds_text(time.ci_low) + " - " + seconds_text(time.ci_high), fmt::format("{} - {}", time.ci_low, time.ci_high)};
}

std::string worst_check(const Row& row) {
  const TensorCheck* worst = nullptr;
  // A bound of 0 met by an error of 0 is a share of 0.
  auto share = [](const TensorCheck& c) { return c.error <= 0 ? 0 : c.error / c.allowed; };
  for (const TensorCheck& c : row.checks)
    if (!worst || (!c.pass && worst->pass) || (c.pass == worst->pass && share(c) > share(*worst))) worst = &c;
  return worst ? fmt::format("{} {} of {}", worst->tensor, short_text(worst->error), short_text(worst->allowed)) : "";
}

Cell rating_cell(const std::string& rating) {
  const Cell cell(printable(rating, 20));
  return rating == "good" ? cell.in(Mood::kGood) : rating == "poor" ? cell.in(Mood::kBad) : cell;
}

void print_ceiling(const Output& out, const lab::CeilingRates& rates, const std::vector<Row>& rows) {
  if (std::none_of(rows.begin(), rows.end(), [](const Row& row) { return row.ceiling.has_value(); })) return;
  out.say(printable(lab::rating_words(rates), 900));
}

void print_peaks(const Output& out, const Peaks& before, const Peaks& after) {
  auto line = [&](const Peak& a, const Peak& b) {
    const auto rate = [](const Peak& peak) { return peak.rate > 0 ? giga_text(peak.rate) + " GFLOP/s" : std::string("not known"); };
    if (a.rate > 0 || b.rate > 0) out.say(fmt::format("  {:<28} {} before, {} after", a.rate > 0 ? a.name : b.name, rate(a), rate(b)), 2);
  };
  if (before.fma.rate <= 0 && after.fma.rate <= 0 && before.problem.empty()) return;  // nothing was run, so nothing was measured
  if (before.device == "cpu")
    out.say(fmt::format("Peak of this machine, {} thread{}, {}, measured in this run:", before.threads, before.threads == 1 ? "" : "s",
                        name_of(before.isa)));
  else
    out.say(fmt::format("Peak of {}, measured in this run:", before.device));
  line(before.fma, after.fma);
  line(before.bf16, after.bf16);
  if (before.read_bytes_per_s > 0) out.say(fmt::format("  {:<28} {} GB/s", "memory read", giga_text(before.read_bytes_per_s)));
  if (!before.problem.empty()) out.say("  not known: " + printable(before.problem, 600), 2);
}

void print_warnings(const Output& out, const std::vector<Row>& rows) {
  std::vector<std::string> seen;
  for (const Row& row : rows)
    for (const std::string& warning : row.warnings) {
      const std::string text = warning.find("peak changed") != std::string::npos ? warning : label_of(row) + " " + name_of(row.pass) + ": " + warning;
      if (std::find(seen.begin(), seen.end(), text) != seen.end()) continue;
      seen.push_back(text);
      out.say(out.in(Mood::kUnsure, "warning:") + " " + printable(text), 2);
    }
}

void print_disturbance(const Output& out, const Disturbance& disturbance, const std::vector<Row>& rows) {
  if (const std::string warning = warning_of(disturbance, rows); !warning.empty()) out.say(out.in(Mood::kUnsure, printable(warning)), 2);
}

std::string absent_line(const std::vector<Row>& rows) {
  std::vector<std::pair<std::string, std::vector<std::string>>> reasons;  // and who is not here for it, in their order
  for (const Row& row : rows) {
    if (row.absent.empty()) continue;
    auto reason = std::find_if(reasons.begin(), reasons.end(), [&](const auto& known) { return known.first == row.absent; });
    if (reason == reasons.end()) reason = reasons.insert(reasons.end(), {row.absent, {}});
    const std::string name = label_of(row);
    if (std::find(reason->second.begin(), reason->second.end(), name) == reason->second.end()) reason->second.push_back(name);
  }
  std::string line;
  for (const auto& [reason, names] : reasons) {
    line += line.empty() ? "Not here: " : "; ";
    line += fmt::format("{} ({})", fmt::join(names, ", "), reason);
  }
  return line;
}

nlohmann::ordered_json winners_json(const std::vector<measure::Row>& rows) {
  const auto as_json = [&](const measure::Winner& winner) {
    nlohmann::ordered_json json = {{"name", nullptr}, {"undecided_with", nlohmann::ordered_json::array()}};
    if (winner.index >= 0) json["name"] = label_of(rows[static_cast<size_t>(winner.index)]);
    for (int other : winner.undecided_with) json["undecided_with"].push_back(label_of(rows[static_cast<size_t>(other)]));
    return json;
  };
  return {{"pass", name_of(rows.front().pass)}, {"fastest", as_json(fastest(rows))}, {"leanest", as_json(leanest(rows))}};
}

}  // namespace fattn::cli
