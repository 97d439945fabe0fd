// What the model of memory says, and the ceilings that a machine was measured to have.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "lab/report/sections.h"

namespace fattn::lab::report {
namespace {

void require_version(const JsonPart& whole, const char* kind, const std::string& file) {
  if (const double version = whole.number(kind); version != 1)
    throw RecordError(fmt::format("'{}' is a {} of version {:g}; this program reads version 1", file, kind, version));
}

std::string problem_of(const JsonPart& p) {
  const auto pair = [](const char* name, double first, double second) {
    return first == second ? fmt::format("{}{:.0f}", name, first) : fmt::format("{}{:.0f}/{:.0f}", name, first, second);
  };
  return fmt::format("B{:.0f} {} {} {} {}{}", p.number("batch"), pair("S", p.number("seqlen_q"), p.number("seqlen_k")),
                     pair("H", p.number("nheads"), p.number("nheads_k")), pair("D", p.number("headdim"), p.number("headdim_v")), p.text("dtype"),
                     p.flag("causal", false) ? " causal" : "");
}

std::vector<std::string> flags_of(const JsonPart& p, const std::string& device, bool grad) {
  std::vector<std::string> flags;
  for (const auto& [flag, key] : {std::pair{"--batch", "batch"},
                                  {"--seqlen", "seqlen_q"},
                                  {"--seqlen-k", "seqlen_k"},
                                  {"--nheads", "nheads"},
                                  {"--nheads-k", "nheads_k"},
                                  {"--headdim", "headdim"},
                                  {"--headdim-v", "headdim_v"}})
    flags.insert(flags.end(), {flag, count_text(p.number(key))});
  flags.insert(flags.end(), {"--dtype", p.text("dtype"), "--device", device});
  if (p.flag("causal", false)) flags.emplace_back("--causal");
  if (!grad) flags.emplace_back("--no-grad");
  return flags;
}

// By the end of its key: "dram_read_bytes_per_s", "exp_per_s", "launch_s".
std::string quantity_text(const std::string& key, double value) {
  const auto has = [&](const char* part) { return key.find(part) != std::string::npos; };
  if (has("flops_per_s")) return rate_text(value);
  if (has("bytes_per_s")) return bandwidth_text(value);
  return has("_per_s") ? fmt::format("{:.4g} G/s", value / 1e9) : seconds_text(value);
}

}  // namespace

Section memory_model(const Material& m) {
  const Words& words = m.words;
  Section section{"memory", words(Text::kMemoryModel), {}};
  std::vector<std::string> sentences;
  std::vector<Block> blocks;
  std::vector<std::string> commands;
  for (const Input& input : m.memory) {
    const JsonPart whole(input.json, "'" + input.file + "'");
    require_version(whole, "fattn_memory", input.file);
    const std::string device = clean(whole.object("machine").text("name")), problem = clean(problem_of(whole.object("problem")));
    commands.push_back(command_line("memory", flags_of(whole.object("problem"), whole.object("machine").text("device"), whole.flag("grad", true))));
    for (const JsonPart& pass : whole.list("passes")) {
      PageTable table;
      table.caption = words(Text::kMemoryModelTable, {device, words.list({problem, words.pass(pass.text("pass"))})});
      for (const Text head : {Text::kHeadAlgorithm, Text::kHeadMoved, Text::kHeadDram, Text::kHeadIntensity, Text::kHeadBinds, Text::kHeadBound})
        table.heads.push_back(words(head));
      table.numeric = {false, true, true, true, false, true};
      double standard = 0;
      std::vector<std::string> others;
      for (const JsonPart& one : pass.list("algorithms")) {
        const std::string name = one.text("algorithm");
        if (one.has("reason")) {
          table.rows.push_back({words.contestant(name), "", "", "", clean(one.text("reason"))});
          continue;
        }
        const double moved = one.number("moved_bytes");
        if (name == "standard")
          standard = moved;
        else
          others.push_back(clean(name) + " " + bytes_text(moved));
        const auto bound = one.maybe("bound_s");
        table.rows.push_back({words.contestant(name), bytes_text(moved), bytes_text(one.number("dram_bytes")),
                              fmt::format("{:.0f}", one.number("flops_per_byte_dram")), clean(one.text("binding", "")),
                              bound ? seconds_text(*bound) : ""});
      }
      if (standard > 0 && !others.empty())
        sentences.push_back(words(Text::kMovesLess, {device, problem, words.pass(pass.text("pass")), bytes_text(standard), words.list(others)}));
      blocks.push_back(Block::of(std::move(table)));
    }
  }
  if (blocks.empty()) return section;
  section.blocks.push_back(Block::paragraph(words(Text::kMemoryModelText)));
  if (!sentences.empty()) section.blocks.push_back(Block::bullets(std::move(sentences)));
  section.blocks.insert(section.blocks.end(), blocks.begin(), blocks.end());
  section.blocks.push_back(Block::commands(words(Text::kRepeat), std::move(commands)));
  return section;
}

Section predictions(const Material& m) {
  const Words& words = m.words;
  Section section{"predictions", words(Text::kPredictions), {}};
  for (const Input& input : m.predict) {
    const JsonPart whole(input.json, "'" + input.file + "'");
    require_version(whole, "fattn_predict", input.file);
    const std::string device = device_named(whole);
    const std::vector<std::string> flags = whole.texts("flags");
    std::vector<std::string> sentences;
    const JsonPart scores = whole.object("scores");
    for (const char* pass : {"fwd", "bwd", "fwdbwd"}) {
      const JsonPart score = scores.object(pass);
      if (!score.has("mean_absolute_error_fraction")) continue;
      std::string sentence =
          words(Text::kPredictionsText, {clean(device), words.pass(pass), count_text(score.number("count")),
                                         share_text(score.number("mean_absolute_error_fraction")), share_text(score.number("error_95_fraction")),
                                         share_text(std::abs(score.number("worst_error_fraction"))), clean(score.text("worst"))});
      if (const double memory = score.number("memory_count"); memory > 0)
        sentence = words.then(sentence, words(Text::kPredictionsMemory, {count_text(score.number("memory_exact")), count_text(memory)}));
      sentences.push_back(std::move(sentence));
    }
    chart::Panel panel{words(Text::kScatterPanel)};
    panel.x = {words(Text::kMeasuredAxis), chart::ScaleKind::kLog10, chart::Unit::kTime};
    panel.y = {words(Text::kPredictedAxis), chart::ScaleKind::kLog10, chart::Unit::kTime};
    panel.references.push_back({chart::Reference::Kind::kPower, words(Text::kExactLine), 1, 1});
    PageTable table;
    table.caption = words(Text::kPredictionsOne);
    for (const Text head : {Text::kHeadProblem, Text::kHeadPass, Text::kHeadPredicted, Text::kHeadMeasured}) table.heads.push_back(words(head));
    table.numeric = {false, false, true, true};
    int look = 0;
    std::map<std::string, int> unknown;  // why, and how often
    for (const char* pass : {"fwd", "bwd", "fwdbwd"}) {
      chart::Line line{words.pass(pass), look++};
      line.connected = false;
      for (const JsonPart& row : whole.list("rows")) {
        if (row.text("pass") != pass) continue;
        const auto predicted = row.maybe("predicted_s"), measured = row.maybe("measured_s");
        if (!predicted) ++unknown[row.text("unknown", "")];
        if (predicted && measured) line.points.push_back({*measured, *predicted});
        table.rows.push_back(
            {clean(problem_of(row)), words.pass(pass), predicted ? seconds_text(*predicted) : "-", measured ? seconds_text(*measured) : ""});
      }
      if (!line.points.empty()) panel.lines.push_back(std::move(line));
    }
    for (const auto& [reason, rows] : unknown) sentences.push_back(words(Text::kNotPredicted, {std::to_string(rows), clean(reason)}));
    if (!sentences.empty()) section.blocks.push_back(Block::bullets(std::move(sentences)));
    if (!panel.lines.empty()) {
      PageFigure figure;
      figure.name = file_name("predicted " + device);
      figure.caption = words(Text::kScatterCaption, {clean(device)});
      figure.chart.title = figure.caption;
      figure.chart.panels = {panel};
      section.blocks.push_back(Block::of(std::move(figure)));
    }
    if (!table.rows.empty()) section.blocks.push_back(Block::of(std::move(table), true));
    section.blocks.push_back(Block::commands(words(Text::kRepeat), {command_line("predict", flags)}));
  }
  return section;
}

Section ceilings(const Material& m) {
  const Words& words = m.words;
  Section section{"ceilings", words(Text::kCeilings), {}};
  std::vector<std::string> commands;
  for (const Input& input : m.calibration) {
    const JsonPart whole(input.json, "'" + input.file + "'");
    require_version(whole, "fattn_calibration", input.file);
    const std::string command = std::string("fattn calibrate --force") + (whole.text("device", "cpu") == "cuda" ? " --device cuda" : "");
    if (std::find(commands.begin(), commands.end(), command) == commands.end()) commands.push_back(command);
    const JsonPart machine = whole.object("machine");
    PageTable table;
    table.caption = clean(machine.text("GPU", machine.text("processor", "")));
    for (const Text head : {Text::kHeadQuantity, Text::kHeadValue, Text::kHeadInterval}) table.heads.push_back(words(head));
    table.numeric = {false, true, true};
    const JsonPart measured = whole.object("measured");
    for (const auto& [key, json] : measured.json().items()) {
      const JsonPart one(json, measured.name() + "." + key);
      std::string name = key;
      std::replace(name.begin(), name.end(), '_', ' ');
      if (one.has("value"))
        table.rows.push_back({clean(name), quantity_text(key, one.number("value")),
                              quantity_text(key, one.number("low")) + " – " + quantity_text(key, one.number("high"))});
      else
        table.rows.push_back({clean(name), "", clean(one.text("reason", ""))});
    }
    if (table.rows.empty()) throw RecordError("'" + input.file + "' has nothing measured");
    section.blocks.push_back(Block::of(std::move(table), true));
  }
  if (section.blocks.empty()) return section;
  section.blocks.insert(section.blocks.begin(), Block::paragraph(words(Text::kCeilingsText)));
  section.blocks.push_back(Block::commands(words(Text::kRepeat), std::move(commands)));
  return section;
}

}  // namespace fattn::lab::report
