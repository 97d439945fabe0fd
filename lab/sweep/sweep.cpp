#include "lab/sweep/sweep.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <stdexcept>
#include <utility>

namespace fattn::lab {
namespace {

using nlohmann::ordered_json;

std::optional<double> number(const ordered_json& row, const char* key) {
  const auto found = row.find(key);
  if (found == row.end() || !found->is_number()) return std::nullopt;
  const double value = found->get<double>();
  return std::isfinite(value) ? std::optional(value) : std::nullopt;
}

std::string text(const ordered_json& row, const char* key) {
  const auto found = row.find(key);
  return found != row.end() && found->is_string() ? found->get<std::string>() : std::string();
}

bool is_ok(const ordered_json& row) { return text(row, "status") == "ok" && number(row, "time_median_s"); }

// The one nearest to its bound, or farthest beyond it.
std::string worst_error(const ordered_json& row) {
  const auto checks = row.find("checks");
  if (checks == row.end()) return "";
  std::string worst;
  double share = -1;
  for (const ordered_json& check : *checks) {
    const std::optional<double> error = number(check, "error"), allowed = number(check, "allowed");
    const double here = error && allowed ? (*error <= 0 ? 0 : *error / *allowed) : std::numeric_limits<double>::infinity();
    if (!(here > share)) continue;
    share = here;
    const auto digits = [](const std::optional<double>& value) { return value ? fmt::format("{:.1e}", *value) : std::string("no number"); };
    worst = fmt::format("{} {} of {}", text(check, "tensor"), digits(error), digits(allowed));
  }
  return worst;
}

std::string problem_of(const ordered_json& row) {
  const auto integer = [&](const char* key) { return static_cast<int64_t>(number(row, key).value_or(0)); };
  std::string problem = fmt::format("B{} S{}", integer("batch"), integer("seqlen_q"));
  if (integer("seqlen_k") != integer("seqlen_q")) problem += fmt::format(" K{}", integer("seqlen_k"));
  problem += fmt::format(" H{}", integer("nheads"));
  if (integer("nheads_k") != integer("nheads")) problem += fmt::format(" Hk{}", integer("nheads_k"));
  problem += fmt::format(" D{} {}", integer("headdim"), text(row, "dtype"));
  return problem + (row.value("causal", false) ? " causal" : "");
}

Cell cell_of(const ordered_json& row) {
  Cell cell;
  cell.value = row.at("value").get<int64_t>();
  cell.contestant = row.at("contestant").get<std::string>();
  cell.pass = row.at("pass").get<std::string>();
  cell.status = row.at("status").get<std::string>();
  cell.reason = text(row, "reason");
  cell.problem = problem_of(row);
  cell.error = worst_error(row);
  if (!is_ok(row)) return cell;
  cell.seconds = number(row, "time_median_s");
  cell.seconds_low = number(row, "time_ci_low_s");
  cell.seconds_high = number(row, "time_ci_high_s");
  cell.flops_per_s = number(row, "flops_per_s");
  cell.tokens_per_s = number(row, "tokens_per_s");
  cell.extra_bytes = number(row, "extra_bytes");
  cell.peak_flops_per_s = number(row, "peak_flops_per_s");
  cell.peak = text(row, "peak");
  if (const auto ceiling = row.find("ceiling"); ceiling != row.end() && ceiling->is_object()) {
    cell.ceiling_fraction = number(*ceiling, "fraction");
    cell.rating = text(*ceiling, "rating");
  }
  cell.speedup = number(row, "speedup_over_baseline");
  cell.memory_share = number(row, "memory_share_of_baseline");
  cell.undecided = row.value("speedup_undecided", false);
  return cell;
}

}  // namespace

const Cell* Sweep::cell(int64_t value, const std::string& contestant, const std::string& pass) const {
  for (const Cell& one : cells)
    if (one.value == value && one.contestant == contestant && one.pass == pass) return &one;
  return nullptr;
}

void add_comparisons(ordered_json& rows, const std::string& baseline) {
  std::map<std::pair<int64_t, std::string>, const ordered_json*> bases;
  for (const ordered_json& row : rows)
    if (row.at("contestant") == baseline && is_ok(row)) bases[{row.at("value").get<int64_t>(), row.at("pass").get<std::string>()}] = &row;
  for (ordered_json& row : rows) {
    const std::optional<double> seconds = number(row, "time_median_s");
    row["tokens_per_s"] = nullptr;
    row["speedup_over_baseline"] = nullptr;
    row["speedup_undecided"] = false;
    row["memory_share_of_baseline"] = nullptr;
    if (!is_ok(row)) continue;
    row["tokens_per_s"] = row.at("batch").get<double>() * row.at("seqlen_q").get<double>() / *seconds;
    const auto base = bases.find({row.at("value").get<int64_t>(), row.at("pass").get<std::string>()});
    if (base == bases.end()) continue;
    const ordered_json& other = *base->second;
    row["speedup_over_baseline"] = *number(other, "time_median_s") / *seconds;
    const auto low = [](const ordered_json& r) { return number(r, "time_ci_low_s").value_or(0); };
    const auto high = [](const ordered_json& r) { return number(r, "time_ci_high_s").value_or(std::numeric_limits<double>::infinity()); };
    row["speedup_undecided"] = &row != &other && !(high(row) < low(other) || high(other) < low(row));
    const std::optional<double> mine = number(row, "extra_bytes"), theirs = number(other, "extra_bytes");
    if (mine && theirs && *theirs > 0) row["memory_share_of_baseline"] = *mine / *theirs;
  }
}

Sweep read_sweep(const ordered_json& record) {
  if (!record.is_object() || record.empty()) throw std::runtime_error("it is no record");
  const auto version = record.find("fattn_sweep");
  if (version == record.end()) {
    const std::string first = record.begin().key();
    throw std::runtime_error(first.rfind("fattn_", 0) == 0 ? "it is a record of another command: '" + first + "', not 'fattn_sweep'"
                                                           : "it is no record of fattn sweep: 'fattn_sweep' is missing");
  }
  if (!version->is_number_integer() || version->get<int64_t>() != kSweepVersion)
    throw std::runtime_error(fmt::format("it is a sweep of version {}; this program reads version {}", version->dump(), kSweepVersion));
  Sweep sweep;
  try {
    const ordered_json& swept = record.at("sweep");
    const std::string over = swept.at("over").get<std::string>();
    const std::optional<SweepAxis> axis = axis_named(over);
    if (!axis) throw std::runtime_error("'" + over.substr(0, 40) + "' is nothing that can be swept");
    sweep.axis = *axis;
    sweep.values = swept.at("values").get<std::vector<int64_t>>();
    sweep.passes = swept.at("passes").get<std::vector<std::string>>();
    sweep.contestants = swept.at("contestants").get<std::vector<std::string>>();
    sweep.baseline = text(swept, "baseline");
    sweep.preset = text(swept, "preset");
    sweep.problem = swept.at("problem").get<std::string>();
    sweep.device = swept.at("device").get<std::string>();
    sweep.fix = text(swept, "fix");
    sweep.complete = record.at("complete").get<bool>();
    for (const ordered_json& row : record.at("rows")) sweep.cells.push_back(cell_of(row));
  } catch (const nlohmann::json::exception& e) {
    throw std::runtime_error("its content is not that of a sweep: " + without_code(e.what()));
  }
  return sweep;
}

double expected_exponent(const Sweep& sweep) { return sweep.fix == "tokens" ? 1 : 2; }

std::vector<Growth> growth_of(const Sweep& sweep) {
  std::vector<Growth> all;
  if (sweep.axis != SweepAxis::kSeqlen) return all;
  for (const std::string& pass : sweep.passes)
    for (const std::string& contestant : sweep.contestants) {
      std::vector<std::pair<double, double>> points;
      for (const int64_t value : sweep.values)
        if (const Cell* cell = sweep.cell(value, contestant, pass); cell && cell->ok())
          points.emplace_back(static_cast<double>(value), *cell->seconds);
      Growth growth{contestant, pass, fit_power_law(points), ""};
      if (!growth.law)
        growth.reason = fmt::format("{} length{} measured; {} are needed", points.size(), points.size() == 1 ? " was" : "s were", kFewestPoints);
      all.push_back(std::move(growth));
    }
  return all;
}

ordered_json to_json(const std::vector<Growth>& growth) {
  ordered_json all = ordered_json::array();
  for (const Growth& one : growth) {
    const auto value = [&](double PowerLaw::*member) { return one.law ? ordered_json((*one.law).*member) : ordered_json(nullptr); };
    all.push_back({{"contestant", one.contestant},
                   {"pass", one.pass},
                   {"points", one.law ? ordered_json(one.law->points) : ordered_json(nullptr)},
                   {"factor", value(&PowerLaw::factor)},
                   {"exponent", value(&PowerLaw::exponent)},
                   {"exponent_low", value(&PowerLaw::low)},
                   {"exponent_high", value(&PowerLaw::high)},
                   {"reason", one.reason.empty() ? ordered_json(nullptr) : ordered_json(one.reason)}});
  }
  return all;
}

std::string without_code(const std::string& said) {
  const size_t end = said.find("] ");
  return end == std::string::npos ? said : said.substr(end + 2);
}

std::string words_for_pass(const std::string& pass) {
  return pass == "fwd" ? "forward pass" : pass == "bwd" ? "backward pass" : "forward and backward pass";
}

}  // namespace fattn::lab
