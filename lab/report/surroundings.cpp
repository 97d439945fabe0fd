// The machines, the method, and what was not measured.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "lab/report/sections.h"

namespace fattn::lab::report {
namespace {

std::string peaks_of(const Words& words, const MeasuredRecord& record) {
  const JsonPart peaks(record.peaks, "peaks"), before = peaks.object("before"), after = peaks.object("after");
  std::vector<std::string> all;
  const auto add = [&](const char* name, const char* rate) {
    const double a = before.number(rate, 0), b = after.number(rate, 0);
    if (a > 0 && b > 0) all.push_back(words(Text::kPeakPair, {clean(before.text(name, "")), rate_text(a), rate_text(b)}));
  };
  add("fma_instruction", "fma_flops_per_s");
  add("bf16_instruction", "bf16_flops_per_s");
  if (const double read = before.number("read_bytes_per_s", 0); read > 0) all.push_back(words(Text::kReadRate, {bandwidth_text(read)}));
  std::string text;
  for (const std::string& one : all) text += (text.empty() ? "" : "; ") + one;
  return text;
}

std::string machine_of(const MeasuredRecord& record) {
  const JsonPart environment(record.environment, "environment"), cpu = environment.object("cpu");
  std::string text = fmt::format("{}, {:.0f} CPUs", cpu.text("model", "?"), cpu.number("usable_threads", cpu.number("logical_cpus", 0)));
  for (const JsonPart& gpu : environment.list("gpus")) {
    text += ", " + gpu.text("name", "GPU");
    if (const auto limit = gpu.maybe("power_limit_w")) text += fmt::format(" ({:.0f} W)", *limit);
  }
  return clean(text);
}

}  // namespace

Section environment(const Material& m) {
  const Words& words = m.words;
  Section section{"environment", words(Text::kEnvironment), {}};
  if (m.records.empty()) return section;
  section.blocks.push_back(Block::paragraph(words(Text::kMethod)));
  PageTable table;
  table.caption = words(Text::kEnvironmentTable);
  for (const Text head :
       {Text::kHeadRecord, Text::kHeadDate, Text::kHeadRows, Text::kHeadMachine, Text::kHeadSystem, Text::kHeadVersion, Text::kHeadPeaks})
    table.heads.push_back(words(head));
  table.numeric = {false, false, true, false, false, false, false};
  for (const MeasuredRecord& record : m.records) {
    const JsonPart environment(record.environment, "environment");
    std::string version = environment.text("library_version", "?");
    if (environment.has("commit")) version += " (" + environment.text("commit").substr(0, 10) + ")";
    table.rows.push_back({clean(base_name(record.file)), clean(environment.text("date", "?")), std::to_string(record.rows.size()), machine_of(record),
                          clean(environment.text("os", "") + ", " + environment.text("kernel", "")), clean(version), peaks_of(words, record)});
  }
  section.blocks.push_back(Block::of(std::move(table)));
  return section;
}

Section not_measured(const Material& m) {
  const Words& words = m.words;
  Section section{"not-measured", words(Text::kMissing), {}};
  std::vector<std::string> lines;
  std::set<std::string> devices;
  for (const MeasuredRecord& record : m.records) {
    const std::string name = clean(base_name(record.file));
    for (const RowOfRecord& row : record.rows)
      if (row.ours) devices.insert(device_of(record, row));
    if (!record.complete) lines.push_back(words(Text::kIncomplete, {name}));
    if (const std::string warning = JsonPart(record.disturbance, "disturbance").text("warning", ""); !warning.empty())
      lines.push_back(words(Text::kDisturbed, {name, clean(warning)}));
    // Warnings that differ in their numbers alone are one.
    std::map<std::string, std::pair<int, std::string>> warnings;
    for (const RowOfRecord& row : record.rows)
      for (const std::string& warning : row.warnings) {
        std::string kind;
        for (const char c : warning)
          if ((c < '0' || c > '9') && c != '.') kind += c;
        auto& [rows, example] = warnings[kind];
        if (rows++ == 0) example = warning;
      }
    for (const auto& [kind, found] : warnings) lines.push_back(words(Text::kWarned, {name, std::to_string(found.first), clean(found.second)}));
  }
  const std::vector<Missing> missing = missing_of(m.records);
  if (missing.empty() && !m.records.empty()) section.blocks.push_back(Block::paragraph(words(Text::kMissingNone)));
  std::vector<std::string> absent;
  if (m.memory.empty()) absent.emplace_back("fattn memory");
  if (m.predict.empty()) absent.emplace_back("fattn predict");
  if (m.when.empty()) absent.emplace_back("fattn advise --when");
  if (m.calibration.empty()) absent.emplace_back("fattn calibrate");
  if (m.accuracy.empty()) absent.emplace_back("fattn check --accuracy");
  if (m.values.empty()) absent.emplace_back("fattn check --values");
  if (m.regress.empty()) absent.emplace_back("fattn regress");
  if (!absent.empty()) lines.push_back(words(Text::kAbsentKinds, {words.list(absent)}));
  if (devices.size() == 1) lines.push_back(words(Text::kOneDevice, {words.device(*devices.begin())}));
  std::vector<std::string> not_read;
  for (const std::string& file : m.not_read) not_read.push_back(clean(base_name(file)));
  if (!not_read.empty()) lines.push_back(words(Text::kNotRead, {words.list(not_read)}));
  if (!missing.empty()) {
    PageTable table;
    table.caption = words(Text::kMissingTable);
    for (const Text head : {Text::kHeadContestant, Text::kHeadStatus, Text::kHeadRows, Text::kHeadReason, Text::kHeadExample})
      table.heads.push_back(words(head));
    table.numeric = {false, false, true, false, false};
    for (const Missing& one : missing)
      table.rows.push_back({words.contestant(one.who), clean(one.status), std::to_string(one.rows), clean(one.reason), clean(one.example)});
    section.blocks.push_back(Block::of(std::move(table)));
  }
  if (!lines.empty()) section.blocks.push_back(Block::bullets(std::move(lines)));
  return section;
}

}  // namespace fattn::lab::report
