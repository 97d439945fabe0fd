// The suite of prices: plain attention and the same with one option, in turns, so that a drift of the machine hits both.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "cli/json_output.h"
#include "cli/kept.h"
#include "cli/progress.h"
#include "cli/report.h"
#include "cli/sanitize.h"
#include "cli/status_file.h"
#include "cli/suite.h"
#include "cli/suite_schedule.h"
#include "cli/table.h"

namespace fattn::cli {
namespace {

using namespace measure;

struct Pair {
  ProblemSpec plain, with;
};

struct PriceList {
  std::string title;
  std::vector<Pair> pairs;
};

ProblemSpec with(ProblemSpec spec, void (*change)(ProblemSpec&)) {
  change(spec);
  return spec;
}

// `window_length`: of the sequences of the window, whose rows see a sixteenth as many keys.
PriceList list_of(const ProblemSpec& plain, int64_t window_length) {
  PriceList all{describe(plain), {}};
  const auto add = [&](void (*change)(ProblemSpec&)) { all.pairs.push_back({plain, with(plain, change)}); };
  add([](ProblemSpec& s) { s.softcap = 30; });
  add([](ProblemSpec& s) { s.alibi = true; });
  add([](ProblemSpec& s) { s.p_dropout = 0.1; });
  add([](ProblemSpec& s) { s.mask = PairShape::kKeys; });
  add([](ProblemSpec& s) { s.mask = PairShape::kOne; });
  add([](ProblemSpec& s) { s.bias = PairShape::kHeads; });
  add([](ProblemSpec& s) { s.bias = PairShape::kOne; });
  if (plain.dtype != DType::kF32) add([](ProblemSpec& s) { s.bias = PairShape::kHeads, s.bias_f32 = true; });
  add([](ProblemSpec& s) { s.bias = PairShape::kHeads, s.dbias = true; });
  add([](ProblemSpec& s) { s.least_seqused_k = s.seqlen_k / 2; });
  add([](ProblemSpec& s) { s.documents = 4; });
  add([](ProblemSpec& s) { s.least_packed = s.seqlen_q / 4; });
  ProblemSpec dense = plain;  // a window is compared with all that a row sees without one
  dense.causal = true;
  dense.batch = std::max<int64_t>(1, plain.batch * plain.seqlen_q / window_length);
  dense.seqlen_q = dense.seqlen_k = window_length;
  all.pairs.push_back({dense, with(dense, [](ProblemSpec& s) { s.window_left = s.seqlen_k / 16 - 1; })});
  return all;
}

std::vector<PriceList> lists_of(const SuiteOptions& suite) {
  const bool on_cpu = suite.place.device == Device::kCpu;
  std::vector<PriceList> lists;
  const auto add = [&](DType dtype, int64_t headdim, bool causal) {
    ProblemSpec s;
    s.dtype = dtype;
    s.causal = causal;
    s.headdim = s.headdim_v = headdim;
    if (on_cpu) {
      s.batch = 2;
      s.nheads = s.nheads_k = 4;
      s.seqlen_q = s.seqlen_k = suite.quick ? 1024 : 2048;
    } else {
      s.batch = dtype == DType::kF32 ? 16 : 4;
      s.nheads = s.nheads_k = 2048 / headdim;
      s.seqlen_q = s.seqlen_k = dtype == DType::kF32 ? 1024 : 4096;
    }
    lists.push_back(list_of(s, on_cpu || dtype == DType::kF32 ? s.seqlen_k : 16384));
  };
  if (on_cpu) {
    for (const DType dtype : {DType::kF32, DType::kBF16})
      for (const int64_t headdim : {64, 128})
        if (!suite.quick || headdim == 64) add(dtype, headdim, false);
  } else {
    for (const int64_t headdim : {64, 128, 256})
      for (const bool causal : {false, true})
        if (!suite.quick || causal) add(DType::kBF16, headdim, causal);
    add(DType::kF32, 64, true);
  }
  return lists;
}

// More time for a visible pair, as a share of plain attention's: of each turn, and the median of the turns.
struct Price {
  double median = 0, low = 0, high = 0;
};

Price price_of(const Row& plain, const Row& option) {
  const std::vector<double>&base = plain.time->turn_medians, &more = option.time->turn_medians;
  const double pairs = plain.cost.flops / option.cost.flops;
  std::vector<double> prices;
  for (size_t turn = 0; turn < std::min(base.size(), more.size()); ++turn) prices.push_back(more[turn] / base[turn] * pairs - 1);
  const Statistics of_turns = summarize(prices);
  return {of_turns.median, of_turns.min, of_turns.max};
}

std::string signed_percent(double share) { return fmt::format("{:+.0f} %", 100 * share); }

// A row of the table for each pass; what the record's summary says of it goes behind `summary`.
void add_rows(Table& table, const std::vector<Row>& rows, nlohmann::ordered_json& summary) {
  for (size_t first = 0; first + 1 < rows.size(); first += 2) {
    const Row &plain = rows[first], &option = rows[first + 1];
    std::vector<Cell> cells = {describe_options(option.spec).substr(1), name_of(option.pass)};
    if (plain.ok() && option.ok() && plain.time && option.time) {
      const Price price = price_of(plain, option);
      cells.insert(cells.end(), {seconds_cell(plain.time->median), seconds_cell(option.time->median),
                                 Cell(signed_percent(price.median), fmt::format("{}", price.median)),
                                 signed_percent(price.low) + " to " + signed_percent(price.high), giga_cell(*option.flops_per_s)});
      summary.push_back({{"option", cells.front().text},
                         {"problem", describe(plain.spec)},
                         {"pass", name_of(option.pass)},
                         {"price", price.median},
                         {"price_low", price.low},
                         {"price_high", price.high}});
    } else {
      cells.insert(cells.end(), {plain.time ? seconds_cell(plain.time->median) : Cell(name_of(plain.status)).in(Mood::kBad),
                                 option.time ? seconds_cell(option.time->median) : Cell(name_of(option.status)).in(Mood::kBad), "", "", ""});
    }
    cells.push_back(worst_check(option));
    table.add(cells);
    for (const Row* row : {&plain, &option})
      if (!row->ok() && row->pass == rows.front().pass) table.note(printable(status_text(*row), 600));
  }
}

}  // namespace

int run_prices(const SuiteOptions& suite) {
  require_writable(suite.json);
  std::vector<PriceList> lists = lists_of(suite);
  keep_parts(lists, suite.only);
  RaceOptions options = race_options(suite);
  options.passes = options.grad ? std::vector<Pass>{Pass::kForward, Pass::kBackward} : std::vector<Pass>{Pass::kForward};
  options.sampling.repeats = suite.quick ? 10 : 20;
  options.sampling.min_seconds = suite.quick ? 0.1 : 0.3;
  options.sampling.warmup_seconds = 0.3;

  const std::unique_ptr<Contestant> plain = make_library_contestant("fattn", suite.library, suite.place),
                                    option = make_library_contestant("fattn", suite.library, suite.place);
  std::vector<PlannedRace> races;
  for (const PriceList& list : lists)
    for (const Pair& pair : list.pairs) races.push_back({pair.plain, options.grad, options.passes, options.sampling, 2});
  estimate_races(races, *plain, options);
  refuse_if_too_long(races, "the suite prices", suite.patience);
  Output out(suite.output, suite.json);
  Record record{"suite", repeating_flags(suite), {}, {}, {}, nlohmann::ordered_json::array()};
  record.complete = false;
  Disturbance disturbance;
  Kept kept(suite.json);
  Progress progress("prices");
  announce(races, progress);
  const auto status = std::make_shared<StatusFile>(suite.status, "bench", static_cast<int64_t>(races.size()), seconds_of(races));
  kept.before_end([status] { status->end("interrupted"); });
  auto planned = races.begin();
  for (const PriceList& list : lists) {
    Table table({Column::text("option").as_key(), Column::text("pass").as_key(), Column::number("plain", "s"), Column::number("with it", "s"),
                 Column::number("price"), Column::number("of turns").ranked(1), Column::number("GFLOP/s").ranked(2),
                 Column::text("worst error and its bound").ranked(3)},
                list.title);
    for (const Pair& pair : list.pairs) {
      status->now(list.title + ": " + describe(pair.with));
      const RaceResult result = race({{plain.get(), pair.plain}, {option.get(), pair.with}}, options);
      if (record.peaks_before.fma.rate == 0) record.peaks_before = result.before;
      record.peaks_after = result.after;
      disturbance.add(result.disturbance);
      add_rows(table, result.rows, record.summary);
      record.rows.insert(record.rows.end(), result.rows.begin(), result.rows.end());
      status->step(planned->seconds);
      progress.step(planned++->seconds);
      record.disturbance = to_json(disturbance, record.rows);
      kept.keep(record, fmt::format("{} of {} problems", planned - races.begin(), races.size()));
    }
    progress.wipe();
    out.print(table);
    // A file has what was measured so far, should the program be killed.
    if (!suite.json.empty() && suite.json != "-") write_json(to_json(record), suite.json);
  }
  out.say(
      "\nprice: more time for a visible pair than plain attention takes, in the median of the turns, least and most of them behind it. Masks and "
      "biases hide no pair here. A window is compared with causal rows of its length.");
  print_peaks(out, record.peaks_before, record.peaks_after);
  print_warnings(out, record.rows);
  print_disturbance(out, disturbance, record.rows);
  record.complete = true;
  if (!suite.json.empty()) write_json(to_json(record), suite.json);
  status->end("done");
  return exit_code_of(record.rows);
}

}  // namespace fattn::cli
