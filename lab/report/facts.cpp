#include "lab/report/facts.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <tuple>

namespace fattn::lab::report {
namespace {

std::string asked_algorithm(const MeasuredRecord& record) {
  for (size_t i = 0; i + 1 < record.flags.size(); ++i)
    if (record.flags[i] == "--algorithm" && record.flags[i + 1] != "auto") return record.flags[i + 1];
  return "";
}

// The library's contestant of a problem: "fattn" itself, or the fastest of the algorithms that were asked for by name.
const RowOfRecord* ours_of(const std::vector<const RowOfRecord*>& rows) {
  const RowOfRecord* best = nullptr;
  for (const RowOfRecord* row : rows) {
    if (!row->ours || !row->ok()) continue;
    if (row->provider == "fattn") return row;
    if (!best || row->time->median < best->time->median) best = row;
  }
  return best;
}

void finish(Versus& versus) {
  double mean = 0, low = 0, high = 0, memory = 0;
  size_t known = 0;
  for (const Duel& duel : versus.duels) {
    mean += std::log(duel.ratio), low += std::log(duel.low), high += std::log(duel.high);
    if (!versus.least || duel.ratio < versus.least->ratio) versus.least = &duel;
    if (!versus.most || duel.ratio > versus.most->ratio) versus.most = &duel;
    ++(duel.faster() ? versus.faster : duel.slower() ? versus.slower : versus.undecided);
    if (!duel.memory) continue;
    ++known;
    memory += std::log(*duel.memory);
    versus.memory_least = std::min(versus.memory_least.value_or(*duel.memory), *duel.memory);
    versus.memory_most = std::max(versus.memory_most.value_or(*duel.memory), *duel.memory);
  }
  const auto n = static_cast<double>(versus.duels.size());
  versus.mean = std::exp(mean / n), versus.low = std::exp(low / n), versus.high = std::exp(high / n);
  if (known == versus.duels.size()) versus.memory = std::exp(memory / n);
}

}  // namespace

std::optional<double> memory_of(const RowOfRecord& row) {
  const bool exact = row.extra_bytes && *row.extra_bytes > 0 && row.extra_bytes_method != "resident set";
  return exact ? row.extra_bytes : std::nullopt;
}

bool is_standard(const RowOfRecord& row) { return row.provider == "standard" || row.provider == "torch-standard" || row.algorithm == "standard"; }

std::string device_of(const MeasuredRecord& record, const RowOfRecord& row) {
  const JsonPart environment(record.environment, "environment");
  if (row.device.rfind("cuda", 0) == 0) {
    for (const JsonPart& gpu : environment.list("gpus"))
      if (gpu.text("device", "") == row.device || row.device == "cuda") return gpu.text("name", row.device);
    return row.device;
  }
  const JsonPart cpu = environment.object("cpu");
  double threads = row.threads > 0 ? row.threads : cpu.number("usable_threads", 0);
  for (const RowOfRecord& other : record.rows)  // a provider's threads are those of the library's plan
    if (other.ours && other.threads > 0) threads = std::max(threads, other.threads);
  const std::string model = cpu.text("model", "CPU");
  return threads > 0 ? fmt::format("{} ({:.0f})", model, threads) : model;
}

std::string name_of(const MeasuredRecord& record, const RowOfRecord& row) {
  const std::string algorithm = asked_algorithm(record);
  if (row.provider == "fattn" && !algorithm.empty() && algorithm.find(',') == std::string::npos) return "fattn (" + algorithm + ")";
  return row.label;
}

std::vector<Versus> versus_of(const std::vector<MeasuredRecord>& records) {
  std::map<std::tuple<std::string, std::string, std::string, std::string, std::string>, Versus> all;
  for (const MeasuredRecord& record : records) {
    std::map<std::string, std::vector<const RowOfRecord*>> problems;
    for (const RowOfRecord& row : record.rows) problems[row.problem() + "\n" + row.pass + "\n" + row.device].push_back(&row);
    for (const auto& [key, rows] : problems) {
      const RowOfRecord* ours = ours_of(rows);
      if (!ours) continue;
      const std::string name = ours->provider == "fattn" ? name_of(record, *ours) : "fattn";
      for (const RowOfRecord* other : rows) {
        if (other->ours || !other->ok()) continue;
        const TimeOfRow &a = *ours->time, &b = *other->time;
        Duel duel{&record, ours, other, b.median / a.median, b.low / a.high, b.high / a.low, std::nullopt};
        if (const auto a_bytes = memory_of(*ours), b_bytes = memory_of(*other); a_bytes && b_bytes) duel.memory = *a_bytes / *b_bytes;
        Versus& versus = all[{device_of(record, *ours), ours->dtype, ours->pass, other->label, name}];
        versus.device = device_of(record, *ours), versus.dtype = ours->dtype, versus.pass = ours->pass;
        versus.other = other->label, versus.ours = name;
        versus.duels.push_back(duel);
      }
    }
  }
  std::vector<Versus> list;
  for (auto& [key, versus] : all) list.push_back(std::move(versus));
  for (Versus& versus : list) finish(versus);
  // Standard attention first, then who was met in most problems; forward, backward, both.
  const auto rank = [](const Versus& v) {
    const int pass = v.pass == "fwd" ? 0 : v.pass == "bwd" ? 1 : 2;
    return std::make_tuple(v.device, is_standard(*v.duels[0].other) ? 0 : 1, v.dtype, v.other, pass);
  };
  std::stable_sort(list.begin(), list.end(), [&](const Versus& a, const Versus& b) { return rank(a) < rank(b); });
  return list;
}

std::string Family::key(const std::string& pass, const std::string& contestant, double value) {
  return fmt::format("{}\n{}\n{:.0f}", pass, contestant, value);
}
const RowOfRecord* Family::row(const std::string& pass, const std::string& contestant, double value) const {
  const auto at = rows.find(key(pass, contestant, value));
  return at == rows.end() ? nullptr : at->second;
}

double Family::weight() const {
  double sum = 0;
  for (const std::string& pass : passes)
    for (const double n : values) {
      const auto ok = std::count_if(contestants.begin(), contestants.end(), [&](const std::string& name) {
        const RowOfRecord* one = row(pass, name, n);
        return one && one->ok();
      });
      sum += static_cast<double>(ok > 1 ? 10 * ok : ok);
    }
  return sum;
}

namespace {

template <typename List, typename Value>
void add_once(List& list, const Value& value) {
  if (std::find(list.begin(), list.end(), value) == list.end()) list.push_back(value);
}

// A sweep of something else than seqlen, whose rows the lengths do not tell apart.
void add_sweep(const MeasuredRecord& record, std::map<std::string, Family>& all) {
  if (record.over.empty() || record.over == "seqlen" || record.over == "causal") return;
  for (const RowOfRecord& row : record.rows) {
    if (!row.value || row.status == "unavailable" || row.status == "unsupported") continue;
    const std::string device = device_of(record, row);
    Family& family = all[fmt::format("{}\n{}\n{}\n{}\n{}", device, row.dtype, record.over, row.causal, record.file)];
    family.over = record.over;
    family.device = device, family.dtype = row.dtype, family.causal = row.causal;
    family.size = row.batch, family.seqlen = row.seqlen_q, family.nheads = row.nheads, family.nheads_k = row.nheads_k, family.headdim = row.headdim;
    const std::string name = name_of(record, row);
    family.rows[Family::key(row.pass, name, *row.value)] = &row;
    add_once(family.values, *row.value);
    add_once(family.passes, row.pass);
    add_once(family.contestants, name);
    add_once(family.records, &record);
  }
}

}  // namespace

std::vector<Family> families_of(const std::vector<MeasuredRecord>& records) {
  std::map<std::string, Family> all;
  for (const MeasuredRecord& record : records)
    for (const RowOfRecord& row : record.rows) {
      if (row.seqlen_q != row.seqlen_k || !row.options.empty() || row.headdim != row.headdim_v) continue;
      if (row.status == "unavailable" || row.status == "unsupported") continue;
      const std::string device = device_of(record, row);
      for (const bool tokens : {false, true}) {
        const double size = tokens ? row.batch * row.seqlen_q : row.batch;
        Family& family = all[fmt::format("{}\n{}\n{}\n{}\n{:.0f} {:.0f} {:.0f} {:.0f}", device, row.dtype, tokens, row.causal, size, row.nheads,
                                         row.nheads_k, row.headdim)];
        family.device = device, family.dtype = row.dtype, family.constant_tokens = tokens, family.size = size;
        family.nheads = row.nheads, family.nheads_k = row.nheads_k, family.headdim = row.headdim, family.causal = row.causal;
        const std::string name = name_of(record, row);
        // A later record of the same problem takes an earlier one's place.
        const RowOfRecord*& place = family.rows[Family::key(row.pass, name, row.seqlen_q)];
        if (place && place->ok() && !row.ok()) continue;
        place = &row;
        add_once(family.values, row.seqlen_q);
        add_once(family.passes, row.pass);
        add_once(family.contestants, name);
        add_once(family.records, &record);
      }
    }
  for (const MeasuredRecord& record : records) add_sweep(record, all);
  std::vector<Family> list;
  for (auto& [key, family] : all) {
    if (family.values.size() < 3) continue;
    std::sort(family.values.begin(), family.values.end());
    std::sort(family.passes.begin(), family.passes.end(), [](const std::string& a, const std::string& b) {
      const auto rank = [](const std::string& p) { return p == "fwd" ? 0 : p == "bwd" ? 1 : 2; };
      return rank(a) < rank(b);
    });
    list.push_back(std::move(family));
  }
  std::stable_sort(list.begin(), list.end(), [](const Family& a, const Family& b) { return a.weight() > b.weight(); });
  return list;
}

std::vector<Missing> missing_of(const std::vector<MeasuredRecord>& records) {
  std::vector<Missing> all;
  for (const MeasuredRecord& record : records)
    for (const RowOfRecord& row : record.rows) {
      if (row.ok()) continue;
      const auto known = std::find_if(all.begin(), all.end(),
                                      [&](const Missing& m) { return m.who == row.label && m.status == row.status && m.reason == row.reason; });
      if (known != all.end())
        ++known->rows;
      else
        all.push_back({row.label, row.status, row.reason, row.problem() + " " + row.pass, 1});
    }
  return all;
}

}  // namespace fattn::lab::report
