// From which length on which algorithm is faster: what `fattn advise --when` measured. All that is said is counted from the record's times.
#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "lab/report/sections.h"

namespace fattn::lab::report {
namespace {

struct TimeAt {
  double median = 0, low = 0, high = 0;
};

struct DuelAt {
  double length = 0;
  std::optional<TimeAt> a, b;
  std::string reason;

  bool both() const { return a && b; }
  bool b_faster() const { return both() && b->high < a->low; }
  bool a_faster() const { return both() && a->high < b->low; }
};

std::optional<TimeAt> time_in_duel(const JsonPart& duel, const char* which) {
  if (!duel.has(which)) return std::nullopt;
  const JsonPart time = duel.object(which);
  const TimeAt at{time.number("median_s"), time.number("ci_low_s"), time.number("ci_high_s")};
  if (!(at.low > 0 && at.low <= at.median && at.median <= at.high)) time.fail("median_s", "a time inside of its interval");
  return at;
}

std::vector<DuelAt> duels_of(const JsonPart& rule) {
  std::vector<DuelAt> duels;
  for (const JsonPart& duel : rule.list("duels"))
    duels.push_back({duel.number("seqlen"), time_in_duel(duel, "a"), time_in_duel(duel, "b"), duel.text("reason", "")});
  std::sort(duels.begin(), duels.end(), [](const DuelAt& x, const DuelAt& y) { return x.length < y.length; });
  return duels;
}

// Of one rule.
struct Search {
  std::string what, a, b;  // as people read them
  bool decode = false, ended = true;
  std::vector<DuelAt> duels;
};

std::string crossing_sentence(const Words& words, const std::string& device, const Search& s) {
  if (!s.ended) return words(Text::kWhenStopped, {device, s.what, s.b, s.a});
  std::vector<DuelAt> timed;
  for (const DuelAt& duel : s.duels)
    if (duel.both()) timed.push_back(duel);
  if (timed.empty()) return words(Text::kWhenNone, {device, s.what, s.b, s.a});
  const std::string longest = count_text(timed.back().length), lengths = words(s.decode ? Text::kWhenKeys : Text::kWhenTokens);
  size_t from = timed.size();  // from here on b is faster wherever it was measured
  while (from > 0 && timed[from - 1].b_faster()) --from;
  const std::string ratio = times_text(timed.back().a->median / timed.back().b->median);
  if (from == timed.size()) {
    const bool slower = std::any_of(timed.begin(), timed.end(), [](const DuelAt& duel) { return duel.a_faster(); });
    return words(slower ? Text::kWhenNeverSlower : Text::kWhenNever, {device, s.what, s.b, s.a, longest, lengths, ratio});
  }
  const std::string first = count_text(timed[from].length);
  if (from == 0) return words(Text::kWhenAlways, {device, s.what, s.b, s.a, first, longest, lengths, ratio});
  return words(Text::kWhenFrom, {device, s.what, s.b, s.a, first, count_text(timed[from - 1].length), longest, lengths, ratio});
}

chart::Panel duel_panel(const Words& words, const Search& s) {
  chart::Panel panel{s.what};
  panel.x = {words(s.decode ? Text::kSeqlenKAxis : Text::kSeqlenAxis), chart::ScaleKind::kLog2};
  panel.y = {words(Text::kTimeAxis), chart::ScaleKind::kLog10, chart::Unit::kTime};
  for (const bool of_b : {false, true}) {
    const std::string& name = of_b ? s.b : s.a;
    chart::Line line{name, of_b ? 0 : name == "v2" ? 2 : 1};
    for (const DuelAt& duel : s.duels)
      if (const std::optional<TimeAt>& time = of_b ? duel.b : duel.a) line.points.push_back({duel.length, time->median, time->low, time->high});
    if (!line.points.empty()) panel.lines.push_back(std::move(line));
  }
  return panel;
}

// All of a record.
struct Searches {
  std::string device;
  std::vector<std::string> flags;
  std::vector<Search> all;
};

Searches searches_of(const Words& words, const Input& input) {
  const JsonPart whole(input.json, "'" + input.file + "'");
  if (const double version = whole.number("fattn_advice"); version != 1)
    throw RecordError(fmt::format("'{}' is a fattn_advice of version {:g}; this program reads version 1", input.file, version));
  Searches searches{clean(device_named(whole)), whole.texts("flags"), {}};
  const bool complete = whole.flag("complete", true);
  const std::vector<JsonPart> rules = whole.list("rules");
  if (rules.empty()) throw RecordError("'" + input.file + "' has nothing measured");
  for (size_t r = 0; r < rules.size(); ++r) {
    Search s;
    s.decode = rules[r].flag("decode", false);
    s.ended = complete || r + 1 < rules.size();
    s.what = s.decode ? words(Text::kWhenDecode) : words.pass(rules[r].text("pass"));
    s.a = words.contestant(rules[r].text("a")), s.b = words.contestant(rules[r].text("b"));
    s.duels = duels_of(rules[r]);
    searches.all.push_back(std::move(s));
  }
  return searches;
}

PageFigure figure_of(const Words& words, const Searches& searches) {
  PageFigure figure;
  figure.name = file_name("when " + searches.device);
  figure.caption = words(Text::kWhenFigure, {searches.device});
  figure.chart.title = figure.caption;
  figure.chart.note = words(Text::kBandNote);
  for (const Search& s : searches.all)
    if (chart::Panel panel = duel_panel(words, s); !panel.lines.empty()) figure.chart.panels.push_back(std::move(panel));
  return figure;
}

PageTable table_of(const Words& words, const Searches& searches) {
  PageTable table;
  table.caption = words(Text::kWhenFigure, {searches.device});
  for (const Text head :
       {Text::kHeadPass, Text::kHeadLength, Text::kHeadContestant, Text::kHeadTime, Text::kHeadOther, Text::kHeadTime, Text::kHeadTimes})
    table.heads.push_back(words(head));
  table.numeric = {false, true, false, true, false, true, true};
  for (const Search& s : searches.all)
    for (const DuelAt& duel : s.duels) {
      const auto time = [&](const std::optional<TimeAt>& at) { return at ? seconds_text(at->median) : clean(duel.reason); };
      const bool undecided = duel.both() && !duel.a_faster() && !duel.b_faster();
      table.rows.push_back({s.what, count_text(duel.length), s.b, time(duel.b), s.a, time(duel.a),
                            duel.both() ? times_text(duel.a->median / duel.b->median) + (undecided ? " ?" : "") : ""});
    }
  return table;
}

}  // namespace

std::vector<std::string> crossing_sentences(const Material& m) {
  std::vector<std::string> sentences;
  for (const Input& input : m.when) {
    const Searches searches = searches_of(m.words, input);
    for (const Search& s : searches.all) sentences.push_back(crossing_sentence(m.words, searches.device, s));
  }
  return sentences;
}

Section crossings(const Material& m) {
  const Words& words = m.words;
  Section section{"when", words(Text::kWhen), {}};
  if (m.when.empty()) return section;
  section.blocks.push_back(Block::paragraph(words(Text::kWhenText)));
  section.blocks.push_back(Block::bullets(crossing_sentences(m)));
  std::vector<std::string> commands;
  for (const Input& input : m.when) {
    const Searches searches = searches_of(words, input);
    if (PageFigure figure = figure_of(words, searches); !figure.chart.panels.empty()) section.blocks.push_back(Block::of(std::move(figure)));
    if (PageTable table = table_of(words, searches); !table.rows.empty()) section.blocks.push_back(Block::of(std::move(table), true));
    commands.push_back(command_line("advise", searches.flags));
  }
  section.blocks.push_back(Block::paragraph(words(Text::kOverlapNote)));
  section.blocks.push_back(Block::commands(words(Text::kRepeat), std::move(commands)));
  return section;
}

}  // namespace fattn::lab::report
