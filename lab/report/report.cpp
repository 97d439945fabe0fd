// From files to files: reads the records, has the sections written, and draws the figures.
#include "lab/report/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <set>
#include <system_error>

#include "lab/report/sections.h"

namespace fattn::lab::report {
namespace {

namespace fs = std::filesystem;

constexpr std::array kKinds = {"fattn_record",  "fattn_sweep",   "fattn_memory", "fattn_calibration",
                               "fattn_predict", "fattn_regress", "accuracy",     "values"};
// Of advice what was measured: settings are no measurement.
bool is_when(const Json& json) { return kind_of(json) == "fattn_advice" && json.value("what", Json()) == "when"; }
bool known(const Json& json) { return is_when(json) || std::find(kKinds.begin(), kKinds.end(), kind_of(json)) != kKinds.end(); }

// Machines of one name that are not one are told apart by their caches.
void tell_machines_apart(std::vector<MeasuredRecord>& records) {
  constexpr std::array kCaches = {std::pair{"l1d_bytes", "L1d"}, std::pair{"l2_bytes", "L2"}, std::pair{"l3_bytes", "L3"}};
  std::map<std::string, std::map<std::string, std::set<double>>> sizes;  // by model and cache
  const auto cpu_of = [](const MeasuredRecord& record) { return JsonPart(record.environment, "environment").object("cpu"); };
  for (const MeasuredRecord& record : records)
    for (const auto& [key, name] : kCaches) sizes[cpu_of(record).text("model", "")][key].insert(cpu_of(record).number(key, 0));
  for (MeasuredRecord& record : records) {
    const std::string model = cpu_of(record).text("model", "");
    std::string told = model;
    for (const auto& [key, name] : kCaches)
      if (sizes[model][key].size() > 1) told += fmt::format(", {:.0f} KiB {}", cpu_of(record).number(key, 0) / 1024, name);
    if (told != model) record.environment["cpu"]["model"] = told;
  }
}

Material material_of(const Inputs& inputs, Language language) {
  Material m{Words(language), {}, {}, {}, {}, {}, {}, {}, {}, inputs.not_read, {}, {}};
  for (const Input& input : inputs.records) {
    const std::string kind = kind_of(input.json);
    if (kind == "accuracy")
      m.accuracy.push_back(input);
    else if (kind == "values")
      m.values.push_back(input);
    else if (kind == "fattn_regress")
      m.regress.push_back(input);
    else if (kind == "fattn_memory")
      m.memory.push_back(input);
    else if (kind == "fattn_calibration")
      m.calibration.push_back(input);
    else if (kind == "fattn_predict")
      m.predict.push_back(input);
    else if (is_when(input.json))
      m.when.push_back(input);
    else
      m.records.push_back(measured_record(input.json, input.file));
  }
  // In the order of time, so that a later record of a problem takes an earlier one's place.
  std::stable_sort(m.records.begin(), m.records.end(), [](const MeasuredRecord& a, const MeasuredRecord& b) {
    return JsonPart(a.environment, "environment").text("date", "") < JsonPart(b.environment, "environment").text("date", "");
  });
  tell_machines_apart(m.records);
  m.versus = versus_of(m.records);
  m.families = families_of(m.records);
  return m;
}

Page page_of(const Material& m) {
  const Words& words = m.words;
  std::vector<std::string> machines, versions;
  std::string first, last;
  for (const MeasuredRecord& record : m.records) {
    const JsonPart environment(record.environment, "environment");
    for (const RowOfRecord& row : record.rows)
      if (row.ours || record.rows.size() == 1) add_once(machines, words.device(device_of(record, row)));
    add_once(versions, clean(environment.text("library_version", "")));
    const std::string date = environment.text("date", "").substr(0, 10);
    if (first.empty() || date < first) first = date;
    last = std::max(last, date);
  }
  for (const std::vector<Input>* list : {&m.accuracy, &m.values})
    for (const Input& input : *list)
      for (const JsonPart& row : rows_of(input)) add_once(machines, clean(row.text("device", "")));
  const bool nothing_raced = machines.empty();
  for (const std::vector<Input>* list : {&m.when, &m.predict, &m.memory, &m.calibration})
    for (const Input& input : *list) {
      const JsonPart whole(input.json, "'" + input.file + "'"), environment = whole.object("environment"), machine = whole.object("machine");
      if (nothing_raced) add_once(machines, clean(machine.text("GPU", machine.text("name", device_named(whole)))));
      add_once(versions, clean(environment.text("library_version", "")));
      const std::string date = environment.text("date", "").substr(0, 10);
      if (!date.empty() && (first.empty() || date < first)) first = date;
      last = std::max(last, date);
    }
  Page page;
  page.language = tag_of(words.language());
  std::string all_machines;
  for (const std::string& one : machines) all_machines += (all_machines.empty() ? "" : words(Text::kListDot)) + one;
  page.title = words(Text::kTitle, {all_machines});
  const size_t records = m.records.size() + m.accuracy.size() + m.values.size() + m.regress.size() + m.memory.size() + m.calibration.size() +
                         m.predict.size() + m.when.size();
  page.subtitle = words(Text::kSubtitle, {std::to_string(records), versions.empty() ? "?" : words.list(versions),
                                          first == last ? clean(first) : words(Text::kDateRange, {clean(first), clean(last)})});
  page.contents = words(Text::kContents), page.skip = words(Text::kSkip), page.open_table = words(Text::kTable);
  for (const auto& section : {summary, beside_standard, by_seqlen, beside_others, crossings, prices, memory_model, predictions, ceilings, accuracy,
                              comparisons, environment, not_measured})
    if (Section made = section(m); !made.blocks.empty()) page.sections.push_back(std::move(made));
  // Names of files are unique, whatever devices are called.
  std::set<std::string> taken;
  for (Section& section : page.sections)
    for (Block& block : section.blocks)
      if (block.kind == Block::Kind::kFigure) {
        const std::string name = block.figure.name;
        for (int i = 2; !taken.insert(block.figure.name).second; ++i) block.figure.name = fmt::format("{}-{}", name, i);
      }
  return page;
}

}  // namespace

void add_once(std::vector<std::string>& all, const std::string& one) {
  if (!one.empty() && std::find(all.begin(), all.end(), one) == all.end()) all.push_back(one);
}

std::string base_name(const std::string& path) { return path.substr(path.rfind('/') == std::string::npos ? 0 : path.rfind('/') + 1); }

std::string device_named(const JsonPart& whole) {
  const JsonPart environment = whole.object("environment");
  const std::vector<JsonPart> gpus = environment.list("gpus");
  const std::vector<std::string> flags = whole.has("flags") ? whole.texts("flags") : std::vector<std::string>();
  const bool on_gpu = std::any_of(flags.begin(), flags.end(), [](const std::string& flag) { return flag.rfind("cuda", 0) == 0; });
  return on_gpu && !gpus.empty() ? gpus[0].text("name", "GPU") : environment.object("cpu").text("model", "CPU");
}

std::string file_name(const std::string& text) {
  std::string name;
  for (const char c : text) {
    const bool letter = (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9'), capital = c >= 'A' && c <= 'Z';
    if (letter || capital)
      name += capital ? static_cast<char>(c - 'A' + 'a') : c;
    else if (!name.empty() && name.back() != '-')
      name += '-';
  }
  while (!name.empty() && name.back() == '-') name.pop_back();
  return name.substr(0, 100);
}

std::string speed_text(const RowOfRecord& row, const RowOfRecord& base) {
  const bool overlap = &row != &base && row.time->low <= base.time->high && base.time->low <= row.time->high;
  return times_text(base.time->median / row.time->median) + (overlap ? " ?" : "");
}

int look_for(const std::string& contestant, const std::vector<std::string>& all) {
  const auto has = [&](const char* name) { return std::find(all.begin(), all.end(), name) != all.end(); };
  if (contestant.rfind("fattn", 0) == 0 || (contestant == "v3" && !has("fattn"))) return 0;
  if (contestant == "standard" || (contestant.rfind("torch-standard", 0) == 0 && !has("standard"))) return 1;
  if (contestant == "v2") return 2;
  if (contestant == "v1") return 3;
  if (contestant.rfind("torch-standard", 0) == 0) return 7;
  int look = 4;  // the others in their order
  for (const std::string& name : all) {
    if (name == contestant) return look;
    if (name.find(':') != std::string::npos && name.rfind("torch-standard", 0) != 0) ++look;
  }
  return look;
}

Block repeating(const Words& words, const std::vector<const MeasuredRecord*>& records) {
  std::vector<std::string> lines;
  for (const MeasuredRecord* record : records) {
    std::string line = command_line(record->command, record->flags) + " --json " + base_name(record->file);
    if (std::find(lines.begin(), lines.end(), line) == lines.end()) lines.push_back(std::move(line));
  }
  return Block::commands(words(Text::kRepeat), std::move(lines));
}

Inputs read_inputs(const std::vector<std::string>& paths) {
  Inputs inputs;
  for (const std::string& path : paths) {
    std::error_code error;
    if (!fs::is_directory(path, error)) {
      Json json = read_json(path);
      if (!known(json))
        throw RecordError(
            "'" + path +
            "' is no record that reports know; give what --json FILE of bench, compare, sweep, memory, calibrate, predict, advise --when, regress or "
            "check --accuracy and --values wrote");
      inputs.records.push_back({path, std::move(json)});
      continue;
    }
    std::vector<std::string> files;
    for (const fs::directory_entry& entry : fs::directory_iterator(path, error))
      if (entry.path().extension() == ".json" && entry.is_regular_file(error)) files.push_back(entry.path().string());
    if (error) throw RecordError("'" + path + "' cannot be read: " + error.message());
    std::sort(files.begin(), files.end());
    size_t found = 0;
    for (const std::string& file : files) {
      Json json = read_json(file);
      if (!known(json)) {
        inputs.not_read.push_back(file);
        continue;
      }
      ++found;
      inputs.records.push_back({file, std::move(json)});
    }
    if (found == 0) throw RecordError("'" + path + "' has no record among its *.json; give a folder with what --json FILE wrote");
  }
  return inputs;
}

std::vector<ReportFile> make_report(const Inputs& inputs, Language language) {
  const Material material = material_of(inputs, language);
  const Page page = page_of(material);
  std::vector<ReportFile> files = {{"index.html", to_html(page)}, {"report.md", to_markdown(page)}};
  for (const Section& section : page.sections)
    for (const Block& block : section.blocks)
      if (block.kind == Block::Kind::kFigure) {
        chart::Figure figure = block.figure.chart;
        figure.id = block.figure.name;
        figure.language = page.language;
        files.push_back({"figures/" + block.figure.name + ".svg", chart::to_svg(figure) + "\n"});
      }
  return files;
}

}  // namespace fattn::lab::report
