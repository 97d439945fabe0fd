#include "cli/profile_folder.h"

#include <fmt/format.h>

#include <filesystem>
#include <list>
#include <stdexcept>
#include <system_error>

#include "cli/sanitize.h"
#include "cli/table.h"
#include "cli/whole_file.h"
#include "files/json_text.h"

namespace fattn::cli {
namespace {

namespace fs = std::filesystem;
using lab::profile::Counter;
using lab::profile::Operation;
using lab::profile::PassProfile;
using lab::profile::Profile;
using lab::profile::Side;
using Json = nlohmann::ordered_json;

std::string counters_csv(const Profile& profile) {
  std::string out = "side,pass,counter,unit,value,model,difference_fraction,source,reason\n";
  for (const Side& side : profile.sides)
    for (const PassProfile& pass : side.passes)
      for (const Counter& c : pass.counters) {
        const auto number = [](const std::optional<double>& value) { return value ? fmt::format("{:.9g}", *value) : std::string(); };
        out += lab::profile::csv_line(
            {side.name, pass.pass, c.name, c.unit, number(c.value), number(c.model), number(c.difference()), c.source, c.reason});
      }
  return out;
}

std::string memory_csv(const Profile& profile) {
  std::string out = "side,at_s,what,on,bytes,total_bytes\n";
  for (const Side& side : profile.sides) {
    const auto at = [&](int64_t ns) { return fmt::format("{:.9f}", static_cast<double>(ns - profile.begin_ns) * 1e-9); };
    for (const lab::profile::MemoryChange& c : side.memory.changes)
      out += lab::profile::csv_line({side.name, at(c.ns), c.what, c.device >= 0 ? fmt::format("cuda:{}", c.device) : "host",
                                     fmt::format("{:.0f}", c.bytes), fmt::format("{:.0f}", c.total)});
    for (const lab::profile::MemorySample& s : side.memory.samples)
      out += lab::profile::csv_line({side.name, at(s.ns), "resident set", "host", "", fmt::format("{:.0f}", s.bytes)});
  }
  return out;
}

}  // namespace

ProfileFolder::ProfileFolder(std::string path) : path_(std::move(path)) {
  const std::string shown = "the folder '" + printable(path_, 200) + "'";
  if (path_.empty()) throw std::runtime_error("--out is empty; give the folder for the profile");
  std::error_code error;
  const bool there = fs::exists(path_, error);
  if (there && !fs::is_directory(path_, error))
    throw std::runtime_error(shown + " cannot be made: a file has its name; give another name with --out");
  if (there && !fs::is_empty(path_, error) && !fs::exists(file("profile.json"), error))
    throw std::runtime_error(shown + " holds files that no profile left there; give another one with --out, or an empty one");
  fs::create_directories(file("figures"), error);
  if (error) throw std::runtime_error(shown + " cannot be made: " + error.message() + "; give one with --out that you may write");
  const WholeFile trial(file("profile.json"));  // refuses a folder that cannot be written
}

Json ProfileFolder::write(Profile profile, const NamedRecords& records) const {
  std::vector<std::pair<std::string, std::string>> files = {
      {"SUMMARY.md", "start here: what was found, as Markdown"},
      {"index.html", "the same as one page that loads nothing"},
      {"profile.json", "all of it (docs/profile.schema.json)"},
      {"timeline.json", "who did what when: open it at ui.perfetto.dev, or in chrome://tracing"},
      {"operations.csv", "every operation, to be sorted by any column"},
      {"counters.csv", "every counter: a number or the reason why there is none"},
      {"memory.csv", "allocations and the resident set over time"},
      {"machine.json", "processor, GPUs, memory, versions"}};
  for (const auto& [name, record] : records)
    files.emplace_back(
        name, name == "baseline.json" ? "standard attention's times, checked (docs/RECORD.md)" : "fattn beside it, checked (docs/RECORD.md)");
  for (const lab::profile::Tool& tool : profile.tools)
    for (const std::string& name : tool.files) files.emplace_back(name, "by " + tool.name);
  profile.verdict = verdict_of(profile);
  const lab::report::Page page = page_of(profile, files);
  std::vector<std::pair<std::string, std::string>> contents = {
      {"SUMMARY.md", to_markdown(page)},
      {"index.html", to_html(page)},
      {"timeline.json", timeline_json(profile).dump(-1, ' ', false, Json::error_handler_t::replace) + "\n"},
      {"operations.csv", operations_csv(profile)},
      {"counters.csv", counters_csv(profile)},
      {"memory.csv", memory_csv(profile)},
      {"machine.json", files::json_text({{"environment", profile.environment}, {"device", profile.device}, {"gpu", profile.gpu}})}};
  for (const auto& [name, record] : records) contents.emplace_back(name, files::json_text(record));
  for (const lab::report::Section& section : page.sections)
    for (const lab::report::Block& block : section.blocks)
      if (block.kind == lab::report::Block::Kind::kFigure) contents.emplace_back("figures/" + block.figure.name + ".svg", to_svg(block.figure.chart));
  std::vector<std::string> names;
  names.reserve(files.size());
  for (const auto& [name, words] : files) names.push_back(name);
  Json json = to_json(profile, names);
  contents.emplace_back("profile.json", files::json_text(json));
  std::list<WholeFile> whole;
  for (const auto& [name, content] : contents) whole.emplace_back(file(name)).write(content.data(), content.size());
  for (WholeFile& one : whole) one.publish();
  return json;
}

void print_profile(Output& out, const Profile& profile, const std::string& folder) {
  for (const Side& side : profile.sides)
    for (const PassProfile& pass : side.passes) {
      if (!pass.reason.empty()) {
        out.say(fmt::format("{}, {}: {}", side.name, pass.pass, printable(pass.reason, 600)), 2);
        continue;
      }
      std::vector<Operation> operations = pass.operations;
      sort_operations(operations, profile.sort);
      keep_first(operations, profile.top);
      Table table({Column::text("operation").as_key().wrapping(20), Column::text("kind").ranked(4), Column::number("times").ranked(3),
                   Column::number("self time", "s"), Column::number("share"), Column::number("wall time", "s").ranked(2),
                   Column::number("GFLOP/s").ranked(5).if_any(), Column::number("bytes", "bytes").ranked(6).if_any()},
                  fmt::format("{}, {}: {} call{} in {}", printable(side.name, 60), pass.pass, pass.calls, pass.calls == 1 ? "" : "s",
                              seconds_text(pass.seconds)));
      for (const Operation& o : operations) {
        table.add({printable(o.name, 60), name_of(o.kind), count_cell(o.times), seconds_cell(o.self_seconds), percent_cell(o.share),
                   seconds_cell(o.wall_seconds), o.flops_per_s() > 0 ? giga_cell(o.flops_per_s()) : Cell(""),
                   o.bytes > 0 ? bytes_cell(o.bytes) : Cell("")});
      }
      if (!table.rows().empty()) out.print(table);
    }
  out.say("\n");
  for (const lab::profile::Finding& finding : verdict_of(profile)) out.say(finding.topic + ": " + printable(finding.text, 600), 2);
  for (const std::string& note : profile.notes) out.say("note: " + printable(note, 600), 2);
  out.say(fmt::format("{}/SUMMARY.md says what is in the folder; timeline.json opens at ui.perfetto.dev", printable(folder, 200)), 2);
}

}  // namespace fattn::cli
