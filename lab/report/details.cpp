// Prices of options, accuracy, times by values, comparisons with earlier records.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>

#include "lab/ratio_interval.h"
#include "lab/report/sections.h"

namespace fattn::lab::report {
namespace {

std::string signed_share(double fraction) { return fmt::format("{:+.1f} %", 100 * fraction); }

struct Price {
  std::string option, problem, pass;
  double price = 0, low = 0, high = 0;
};

std::vector<Price> prices_in(const MeasuredRecord& record) {
  std::vector<Price> all;
  if (!record.summary.is_array()) return all;
  const Json holder = {{"summary", record.summary}};
  for (const JsonPart& line : JsonPart(holder, "").list("summary")) {
    if (!line.has("option")) continue;
    all.push_back(
        {line.text("option"), line.text("problem"), line.text("pass"), line.number("price"), line.number("price_low"), line.number("price_high")});
  }
  return all;
}

std::string dtype_of(const MeasuredRecord& record, const Price& price) {
  for (const RowOfRecord& row : record.rows)
    if (price.problem.find(" " + row.dtype) != std::string::npos) return row.dtype;
  return "";
}

// A line for each option and problem, the passes beside each other.
PageTable table_of(const Words& words, const std::string& caption, const std::vector<const Price*>& list) {
  PageTable table;
  table.caption = caption;
  table.heads = {words(Text::kHeadOption), words(Text::kHeadProblem)};
  table.numeric = {false, false};
  std::vector<std::string> passes;
  for (const Price* p : list)
    if (std::find(passes.begin(), passes.end(), p->pass) == passes.end()) passes.push_back(p->pass);
  for (const std::string& pass : passes) {
    table.heads.push_back(words.pass(pass));
    table.heads.push_back(words(Text::kHeadRange));
    table.numeric.resize(table.heads.size(), true);
  }
  std::vector<std::pair<std::string, std::string>> order;
  for (const Price* p : list) {
    const std::pair<std::string, std::string> key{p->option, p->problem};
    auto at = std::find(order.begin(), order.end(), key);
    if (at == order.end()) {
      at = order.insert(order.end(), key);
      table.rows.push_back({clean(p->option), clean(p->problem)});
      table.rows.back().resize(table.heads.size());
    }
    std::vector<std::string>& row = table.rows[static_cast<size_t>(at - order.begin())];
    const auto column = static_cast<size_t>(2 + 2 * (std::find(passes.begin(), passes.end(), p->pass) - passes.begin()));
    row[column] = signed_share(p->price);
    row[column + 1] = signed_share(p->low) + " – " + signed_share(p->high);
  }
  return table;
}

// The folder's rows by what a list's lines have in common, with their ratios.
struct Ratios {
  std::vector<double> values;
  double mean() const {
    double sum = 0;
    for (const double v : values) sum += std::log(v);
    return std::exp(sum / static_cast<double>(values.size()));
  }
  double most() const { return *std::max_element(values.begin(), values.end()); }
};

std::vector<JsonPart> rows_of(const Input& input) {
  std::vector<JsonPart> rows;
  for (size_t i = 0; i < input.json.size(); ++i) rows.emplace_back(input.json[i], fmt::format("'{}': [{}]", input.file, i));
  return rows;
}

}  // namespace

Section prices(const Material& m) {
  const Words& words = m.words;
  Section section{"prices", words(Text::kPrices), {}};
  std::vector<std::string> sentences;
  std::vector<Block> blocks;
  for (const MeasuredRecord& record : m.records) {
    const std::vector<Price> all = prices_in(record);
    if (all.empty()) continue;
    const std::string device = words.device(device_of(record, record.rows.front()));
    std::map<std::string, std::vector<const Price*>> by_dtype;
    for (const Price& price : all) by_dtype[dtype_of(record, price)].push_back(&price);
    for (const auto& [dtype, list] : by_dtype) {
      const auto dearest = *std::max_element(list.begin(), list.end(), [](const Price* a, const Price* b) { return a->price < b->price; });
      sentences.push_back(
          words(Text::kPriceDearest, {device, clean(dtype), clean(dearest->option), signed_share(dearest->price), signed_share(dearest->low),
                                      signed_share(dearest->high), words.pass(dearest->pass), clean(dearest->problem)}));
      const auto free = std::count_if(list.begin(), list.end(), [](const Price* p) { return p->low <= 0 && p->high >= 0; });
      sentences.push_back(words(Text::kPriceFree, {device, clean(dtype), std::to_string(free), std::to_string(list.size())}));
      blocks.push_back(Block::of(table_of(words, words(Text::kPricesTable, {device, clean(dtype)}), list), true));
    }
    blocks.push_back(repeating(words, {&record}));
  }
  if (blocks.empty()) return section;
  section.blocks.push_back(Block::paragraph(words(Text::kPricesText)));
  section.blocks.push_back(Block::bullets(std::move(sentences)));
  section.blocks.insert(section.blocks.end(), blocks.begin(), blocks.end());
  return section;
}

Section accuracy(const Material& m) {
  const Words& words = m.words;
  Section section{"accuracy", words(Text::kAccuracy), {}};
  for (const Input& input : m.accuracy) {
    int met = 0, missed = 0;
    std::vector<std::string> devices;
    std::map<std::tuple<std::string, std::string, std::string>, Ratios> groups;
    const std::vector<JsonPart> rows = rows_of(input);
    for (const JsonPart& row : rows) {
      const std::string goal = row.text("goal", "none");
      met += goal == "met", missed += goal == "missed";
      add_once(devices, clean(row.text("device", "")));
      if (const auto ratio = row.maybe("rms_ratio"); ratio && *ratio > 0)
        groups[{row.text("dtype"), row.text("peer"), row.text("tensor")}].values.push_back(*ratio);
    }
    section.blocks.push_back(Block::paragraph(
        words(Text::kAccuracyText, {std::to_string(rows.size()), words.list(devices), std::to_string(met), std::to_string(missed)})));
    PageTable table;
    table.caption = words(Text::kAccuracyTable);
    for (const Text head : {Text::kHeadDtype, Text::kHeadPeer, Text::kHeadTensor, Text::kHeadRatios, Text::kMean, Text::kHeadLargest})
      table.heads.push_back(words(head));
    table.numeric = {false, false, false, true, true, true};
    for (const auto& [key, ratios] : groups)
      table.rows.push_back({clean(std::get<0>(key)), clean(std::get<1>(key)), clean(std::get<2>(key)), std::to_string(ratios.values.size()),
                            times_text(ratios.mean()), times_text(ratios.most())});
    section.blocks.push_back(Block::of(std::move(table), true));
    section.blocks.push_back(Block::commands(words(Text::kRepeat), {"fattn check --accuracy --json " + base_name(input.file)}));
  }
  for (const Input& input : m.values) {
    std::vector<double> ratios;
    std::string device, where;
    double most = 0;
    for (const JsonPart& row : rows_of(input)) {
      const auto ratio = row.maybe("ratio");
      device = row.text("device", device);
      if (!ratio || !(*ratio > 0)) continue;
      ratios.push_back(*ratio);
      if (*ratio <= most) continue;
      most = *ratio;
      where = fmt::format("{}, {} {}, {}, {}", row.text("values"), row.text("dtype", ""), row.text("pass", ""), row.text("option", ""),
                          row.text("where", ""));
    }
    if (ratios.empty()) throw RecordError("'" + input.file + "' has no ratios: nothing was measured");
    section.blocks.push_back(Block::paragraph(
        words(Text::kValuesText, {std::to_string(ratios.size()), clean(device), times_text(median_of(ratios)), times_text(most), clean(where)})));
    section.blocks.push_back(Block::commands(words(Text::kRepeat), {"fattn check --values --json " + base_name(input.file)}));
  }
  return section;
}

Section comparisons(const Material& m) {
  const Words& words = m.words;
  Section section{"regress", words(Text::kRegress), {}};
  for (const Input& input : m.regress) {
    const JsonPart whole(input.json, "'" + input.file + "'");
    if (whole.number("fattn_regress") != 1)
      throw RecordError(fmt::format("'{}' is a comparison of version {:g}; this program reads version 1", input.file, whole.number("fattn_regress")));
    const JsonPart counts = whole.object("counts");
    const auto count = [&](const char* verdict) { return count_text(counts.number(verdict, 0)); };
    const auto side = [&](const char* which) {
      const JsonPart head = whole.object(which);
      return clean(base_name(head.text("file", "")) + " (" + head.text("date", "") + ")");
    };
    section.blocks.push_back(Block::paragraph(
        words(Text::kRegressText, {side("current"), side("baseline"), share_text(whole.number("margin_fraction")), count("worse"), count("better"),
                                   count("same"), count("undecided"), count("failed"), count("vanished"), count("appeared")})));
    PageTable table;
    table.caption = words(Text::kRegressTable);
    for (const Text head :
         {Text::kHeadProblem, Text::kHeadPass, Text::kHeadContestant, Text::kHeadVerdict, Text::kHeadChange, Text::kHeadInterval, Text::kHeadReason})
      table.heads.push_back(words(head));
    table.numeric = {false, false, false, false, true, true, false};
    for (const JsonPart& row : whole.list("rows")) {
      const std::string verdict = row.text("verdict");
      if (verdict == "same" || verdict == "undecided" || verdict == "appeared") continue;
      const auto ratio = row.maybe("ratio");
      table.rows.push_back({clean(row.text("problem")), words.pass(row.text("pass")), words.contestant(row.text("provider")), clean(verdict),
                            ratio ? fmt::format("{:.3f}", *ratio) : "",
                            ratio ? fmt::format("{:.3f} – {:.3f}", row.number("ratio_low"), row.number("ratio_high")) : "",
                            clean(row.text("reason", ""))});
    }
    const bool folded = table.rows.size() > 12;
    if (!table.rows.empty()) section.blocks.push_back(Block::of(std::move(table), folded));
    section.blocks.push_back(Block::commands(
        words(Text::kRepeat),
        {command_line("regress", {"--baseline", whole.object("baseline").text("file", ""), "--current", whole.object("current").text("file", "")})}));
  }
  return section;
}

}  // namespace fattn::lab::report
