// The suites of speed: what is raced, in which sections. cpu: speed by dtype, head size, length and mask; decode; small shapes; memory of
// long sequences. cuda: the table that the field prints, 16384 tokens and a width of 2048.
#include "cli/suite.h"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <array>
#include <cmath>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "cli/json_output.h"
#include "cli/kept.h"
#include "cli/progress.h"
#include "cli/race.h"
#include "cli/report.h"
#include "cli/sanitize.h"
#include "cli/status_file.h"
#include "cli/suite_schedule.h"
#include "cli/table.h"
#include "fattn/system.hpp"

namespace fattn::cli {
namespace {

using namespace measure;

constexpr double kSuiteOracleFlops = 5e7;  // a problem; there are dozens

struct Item {
  ProblemSpec spec;
  bool grad = true;
  bool race = true;  // false: the library alone
};

struct Section {
  std::string title, note;
  std::vector<Item> items;
  bool bandwidth = false;  // the share that matters is of the memory's read rate
  bool once = false;       // one sample: the section is about memory
};

ProblemSpec problem(DType dtype, int64_t batch, int64_t seqlen_q, int64_t seqlen_k, int64_t nheads, int64_t nheads_k, int64_t headdim, bool causal) {
  ProblemSpec s;
  s.dtype = dtype;
  s.batch = batch;
  s.seqlen_q = seqlen_q;
  s.seqlen_k = seqlen_k;
  s.nheads = nheads;
  s.nheads_k = nheads_k;
  s.headdim = s.headdim_v = headdim;
  s.causal = causal;
  return s;
}

std::vector<Section> cpu_suite(bool quick) {
  const DType dtypes[] = {DType::kF32, DType::kBF16, DType::kF16};
  const std::vector<int64_t> lengths = quick ? std::vector<int64_t>{512, 2048} : std::vector<int64_t>{128, 512, 1024, 2048, 4096};
  std::vector<Section> sections;
  for (DType dtype : dtypes) {
    Section speed{std::string("Speed, ") + name_of(dtype), "", {}};
    for (int64_t headdim : {64, 128})
      for (int64_t n : lengths)
        for (bool causal : {false, true}) speed.items.push_back({problem(dtype, 1, n, n, n >= 4096 ? 4 : 8, n >= 4096 ? 4 : 8, headdim, causal)});
    sections.push_back(speed);
  }
  Section decode{"Decode: one query, 8192 keys, 32 heads of 8 key heads", "", {}, true};
  for (DType dtype : dtypes) decode.items.push_back({problem(dtype, 1, 1, 8192, 32, 8, 128, true), false});
  sections.push_back(decode);
  Section small{"Small: 64 queries and keys, 1 head", "", {}};
  for (DType dtype : {DType::kF32, DType::kBF16}) small.items.push_back({problem(dtype, 1, 64, 64, 1, 1, 64, false)});
  sections.push_back(small);
  Section memory{"Memory of long sequences: 1 head", "standard attention would hold seqlen^2 scores: 16384 MiB in fp32 at 65536", {}, false, true};
  for (int64_t n : {8192, 16384}) memory.items.push_back({problem(DType::kF32, 1, n, n, 1, 1, 64, false), true, false});
  if (!quick) memory.items.push_back({problem(DType::kF32, 1, 65536, 65536, 1, 1, 64, false), false, false});
  sections.push_back(memory);
  return sections;
}

std::vector<Section> cuda_suite(bool quick) {
  constexpr int64_t kTokens = 16384, kWidth = 2048;
  const std::vector<int64_t> lengths = quick ? std::vector<int64_t>{512, 4096} : std::vector<int64_t>{512, 1024, 2048, 4096, 8192, 16384};
  std::vector<Section> sections;
  for (DType dtype : {DType::kBF16, DType::kF16})
    for (int64_t headdim : {64, 128, 256}) {
      Section speed{fmt::format("Speed, {}, headdim {}", name_of(dtype), headdim), "", {}};
      const int64_t heads = kWidth / headdim;
      for (bool causal : {false, true})
        for (int64_t n : lengths) {
          // fp16 runs at the speed of bf16; one length shows it.
          if (dtype == DType::kF16 && n != 4096) continue;
          speed.items.push_back({problem(dtype, kTokens / n, n, n, heads, heads, headdim, causal)});
        }
      sections.push_back(speed);
    }
  Section decode{"Decode: one query, 32 heads, headdim 128, bf16", "", {}, true};
  for (const auto& [batch, seqlen_k, nheads_k] : {std::array<int64_t, 3>{1, 8192, 8}, {1, 8192, 32}, {1, 65536, 8}, {16, 8192, 8}}) {
    if (quick && seqlen_k > 8192) continue;
    decode.items.push_back({problem(DType::kBF16, batch, 1, seqlen_k, 32, nheads_k, 128, false), false});
  }
  sections.push_back(decode);
  return sections;
}

PlannedRace plan_of(const Section& section, const Item& item, const SuiteOptions& suite, size_t contestants) {
  PlannedRace race;
  race.spec = item.spec;
  race.grad = item.grad && suite.grad;
  race.passes = race.grad ? std::vector<Pass>{Pass::kForward, Pass::kBackward} : std::vector<Pass>{Pass::kForward};
  race.sampling.repeats = section.once ? 1 : suite.quick ? 6 : 10;
  race.sampling.min_seconds = section.once ? 0 : suite.quick ? 0.05 : 0.1;
  race.sampling.warmup_seconds = 0.3;
  if (section.once) race.sampling.warmup = 0;
  race.contestants = contestants;
  return race;
}

// Times of the library and of one provider in the same cell.
struct Ratios {
  double log_sum = 0;
  int cells = 0, lost = 0, undecided = 0;
};

// `told` holds the reasons of providers that were given already.
void add_rows(Table& table, const Section& section, const std::vector<Row>& rows, size_t contestants, std::map<std::string, Ratios>& ratios,
              std::set<std::string>& told) {
  for (size_t first = 0; first < rows.size(); first += contestants) {
    const Row& own = rows[first];
    std::vector<Cell> cells = {describe(own.spec), name_of(own.pass)};
    if (own.ok() && own.time) {
      const auto& share = section.bandwidth ? own.bandwidth_fraction : own.peak_fraction;
      cells.insert(cells.end(), {seconds_cell(own.time->median), giga_cell(*own.flops_per_s), share ? percent_cell(*share) : "",
                                 bytes_cell(static_cast<double>(own.memory->extra_bytes)), worst_check(own)});
    } else {
      cells.insert(cells.end(), {Cell(name_of(own.status)).in(Mood::kBad), "", "", "", worst_check(own)});
    }
    std::vector<std::string> notes;
    if (!own.ok()) notes.push_back(status_text(own));
    for (size_t c = 1; c < contestants; ++c) {
      const Row& other = rows[first + c];
      if (!other.ok() || !other.time) {
        cells.insert(cells.end(), {Cell(name_of(other.status)).in(Mood::kUnsure), ""});
        std::string note = label_of(other) + " " + status_text(other);
        if (told.insert(note).second) notes.push_back(std::move(note));
        continue;
      }
      cells.push_back(seconds_cell(other.time->median));
      if (!own.ok() || !own.time) {
        cells.emplace_back();
        continue;
      }
      const double ratio = other.time->median / own.time->median;
      const bool open = undecided(*own.time, *other.time);
      Ratios& sum = ratios[label_of(other) + ", " + name_of(own.spec.dtype) + " " + name_of(own.pass)];
      sum.log_sum += std::log(ratio);
      ++sum.cells;
      if (open) ++sum.undecided;
      if (!open && ratio < 1) ++sum.lost;
      cells.push_back(times_cell(ratio, open));
    }
    table.add(cells);
    for (const std::string& note : notes) table.note(printable(note, 600));
  }
}

nlohmann::ordered_json summary_of(const std::map<std::string, Ratios>& ratios) {
  nlohmann::ordered_json summary = nlohmann::ordered_json::array();
  for (const auto& [name, sum] : ratios)
    summary.push_back({{"against", name},
                       {"geometric_mean_ratio", std::exp(sum.log_sum / sum.cells)},
                       {"problems", sum.cells},
                       {"slower", sum.lost},
                       {"undecided", sum.undecided}});
  return summary;
}

}  // namespace

void throw_no_part(const std::string& only, const std::string& titles) {
  throw CLI::ValidationError("--only", "no part of the suite has '" + printable(only) + "' in its title; the titles are " + titles);
}

RaceOptions race_options(const SuiteOptions& suite) {
  RaceOptions options;
  options.library = suite.library;
  options.memory_limit = suite.memory_limit;
  options.oracle_flops = kSuiteOracleFlops;
  options.place = suite.place;
  options.grad = suite.grad;
  options.part_of_suite = true;
  const int threads = suite.library.num_threads > 0 ? suite.library.num_threads : cpu_info().usable_threads;
  if (suite.place.device == Device::kCpu) options.read_bytes_per_s = measure_read_bandwidth(threads);
  return options;
}

std::vector<std::string> repeating_flags(const SuiteOptions& suite) {
  std::vector<std::string> flags = {"--suite", suite.name};
  if (suite.quick) flags.emplace_back("--quick");
  if (!suite.grad) flags.emplace_back("--no-grad");
  if (!suite.only.empty()) flags.insert(flags.end(), {"--only", printable(suite.only)});
  flags.insert(flags.end(), suite.flags.begin(), suite.flags.end());
  return flags;
}

int run_suite(const SuiteOptions& suite, const ProviderFlags& providers) {
  require_writable(suite.json);
  const bool on_cpu = suite.place.device == Device::kCpu;
  std::vector<Section> sections = on_cpu ? cpu_suite(suite.quick) : cuda_suite(suite.quick);
  keep_parts(sections, suite.only);
  const std::unique_ptr<Contestant> library = make_library_contestant("fattn", suite.library, suite.place);
  std::vector<std::unique_ptr<Contestant>> peers;
  for (const ProviderProgram& provider : providers.found()) {
    const bool torch = provider.name == "torch-sdpa";
    // The one compiles anew for each problem, for longer than is measured, the other holds matrices that the largest ones have no memory for.
    if (provider.name == "flex-attention" || provider.name == "torch-standard") continue;
    if (!torch && !providers.why_unavailable(provider.name, suite.library.num_threads, suite.place).empty()) continue;
    for (const char* variant : on_cpu || !torch ? std::vector<const char*>{""} : std::vector<const char*>{":flash", ":cudnn"})
      peers.push_back(providers.make(provider.name + variant, suite.library.num_threads, suite.place));
  }

  Output out(suite.output, suite.json);
  RaceOptions options = race_options(suite);

  std::vector<PlannedRace> races;
  for (const Section& section : sections)
    for (const Item& item : section.items) races.push_back(plan_of(section, item, suite, section.once ? 1 : 1 + peers.size()));
  estimate_races(races, *library, options);
  refuse_if_too_long(races, "the suite " + suite.name, suite.patience);
  std::vector<Row> all;
  std::map<std::string, Ratios> ratios;
  std::set<std::string> told;
  Peaks first, last;
  Disturbance disturbance;
  std::vector<std::string> flags = repeating_flags(suite);
  for (const std::string& flag : providers.repeating_flags()) flags.push_back(printable(flag));
  const auto record_of = [&](bool complete) {
    Record record{"suite", flags, first, last, all, summary_of(ratios)};
    record.complete = complete;
    record.disturbance = to_json(disturbance, all);
    return record;
  };
  Kept kept(suite.json);
  Progress progress("suite");
  announce(races, progress);
  const auto status = std::make_shared<StatusFile>(suite.status, "bench", static_cast<int64_t>(races.size()), seconds_of(races));
  kept.before_end([status] { status->end("interrupted"); });
  auto planned = races.begin();
  for (const Section& section : sections) {
    std::vector<Contestant*> contestants = {library.get()};
    std::vector<Column> columns = {Column::text("problem").as_key(),
                                   Column::text("pass").as_key(),
                                   Column::number("fattn", "s"),
                                   Column::number("GFLOP/s").ranked(1),
                                   Column::number(section.bandwidth ? "of read rate" : "of peak"),
                                   Column::number("extra memory", "bytes").ranked(3),
                                   Column::text("worst error and its bound").ranked(4)};
    if (!section.once)
      for (const auto& peer : peers) {
        contestants.push_back(peer.get());
        const Identity who = peer->identity();
        const std::string name = on_cpu || who.algorithm.empty() ? who.provider : who.provider + ":" + who.algorithm;
        columns.insert(columns.end(), {Column::number(name, "s").ranked(2), Column::number("ratio to " + name)});
      }
    Table table(columns, section.title + (section.note.empty() ? "" : ": " + section.note));
    for (const Item& item : section.items) {
      options.grad = planned->grad;
      options.passes = planned->passes;
      options.sampling = planned->sampling;
      status->now(section.title + ": " + describe(item.spec));
      const RaceResult result = race(item.spec, contestants, options);
      if (first.fma.rate == 0) first = result.before;
      if (result.after.fma.rate > 0 || last.fma.rate == 0) last = result.after;
      disturbance.add(result.disturbance);
      add_rows(table, section, result.rows, contestants.size(), ratios, told);
      all.insert(all.end(), result.rows.begin(), result.rows.end());
      status->step(planned->seconds);
      progress.step(planned++->seconds);
      kept.keep(record_of(false), fmt::format("{} of {} problems", planned - races.begin(), races.size()));
    }
    progress.wipe();
    out.print(table);
    // A file has what was measured so far, should the program be killed.
    if (!suite.json.empty() && suite.json != "-") write_json(to_json(record_of(false)), suite.json);
  }

  out.say("\n");
  for (const auto& [name, sum] : ratios)
    out.say(fmt::format("against {}: geometric mean {:.2f}x over {} problems, slower in {}, undecided in {}", printable(name),
                        std::exp(sum.log_sum / sum.cells), sum.cells, sum.lost, sum.undecided),
            2);
  out.say("\nratio: the provider's time over fattn's. of peak: FLOP/s of visible pairs over the peak of the instructions in use.");
  print_peaks(out, first, last);
  print_warnings(out, all);
  print_disturbance(out, disturbance, all);
  if (!suite.json.empty()) write_json(to_json(record_of(true)), suite.json);
  status->end("done");
  return exit_code_of(all);
}

}  // namespace fattn::cli
