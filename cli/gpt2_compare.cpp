// `fattn gpt2 compare`: the same weights with each algorithm of attention: time, memory, and whether the output is the same.
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "cli/gpt2.h"
#include "cli/gpt2_model.h"
#include "cli/json_output.h"
#include "cli/kept.h"
#include "cli/output.h"
#include "cli/progress.h"
#include "cli/sanitize.h"
#include "cli/usage_error.h"
#include "cli/values.h"
#include "cli/whole_file.h"
#include "fattn/device.hpp"
#include "files/json.h"
#include "gpt2/compare/output_error.h"
#include "gpt2/error.h"
#include "gpt2/weights/convert.h"
#include "lab/chart/chart.h"
#include "measure/environment.h"
#include "measure/memory.h"
#include "measure/statistics.h"

namespace fattn::cli {
namespace {

using gpt2::Token;
using Json = nlohmann::ordered_json;

struct Gpt2CompareFlags {
  Gpt2ModelFlags model;
  std::vector<std::string> dtypes, algorithms;
  std::vector<int64_t> seqlens;
  int64_t batch = 4, repeats = 5;
  uint64_t seed = 1;
  bool sweep = false;
  std::string json, figure;
  OutputFlags output;
};

struct Contender {
  std::string algorithm;
  std::string refused;  // why it is not there
  measure::Statistics time;
  int64_t memory = 0;  // what the resident set grew by at most; on a GPU what its session holds
  gpt2::OutputError error;
};

struct CompareCase {
  DType dtype;
  int64_t seqlen = 0;
  std::vector<Contender> contenders;  // the first is what the others are compared with
};

// A model with one algorithm, and the tokens that it computes: the documents' case, the last hidden state of all of them.
class Forward {
 public:
  Forward(const gpt2::Model& model, const std::string& algorithm, int64_t batch, int64_t seqlen, const std::vector<Token>& ids)
      : model_(model), session_(model, options(algorithm, batch, seqlen)) {
    for (int64_t i = 0; i < batch; ++i)
      parts_.push_back({i, std::span(ids).subspan(static_cast<size_t>(i * seqlen), static_cast<size_t>(seqlen)), gpt2::WantLogits::kNone});
  }
  double run() {
    for (const gpt2::NewTokens& part : parts_) session_.truncate(part.sequence, 0);
    const auto begin = std::chrono::steady_clock::now();
    session_.step(parts_);
    session_.wait();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
  std::vector<float> output() const {
    std::vector<float> all(static_cast<size_t>(session_.options().rows * model_.config().n_embd));
    gpt2::convert(session_.hidden(), model_.dtype(), all.data(), DType::kF32, all.size());
    return all;
  }

 private:
  static gpt2::SessionOptions options(const std::string& algorithm, int64_t batch, int64_t seqlen) {
    gpt2::SessionOptions o;
    o.batch = batch;
    o.context = seqlen;
    o.rows = batch * seqlen;
    o.logit_rows = 1;
    o.hidden = true;
    o.algorithm = gpt2_algorithm(algorithm);
    return o;
  }
  const gpt2::Model& model_;
  gpt2::Session session_;
  std::vector<gpt2::NewTokens> parts_;
};

// Random ids that depend on the seed alone.
std::vector<Token> random_ids(uint64_t seed, int64_t count, int64_t vocab) {
  std::vector<Token> ids;
  for (int64_t i = 0; i < count; ++i)
    ids.push_back(static_cast<Token>(ops::uniform_number(seed, 0, static_cast<uint64_t>(i)) * static_cast<double>(vocab)));
  return ids;
}

CompareCase compare_case(const Gpt2CompareFlags& flags, const gpt2::Model& model, int64_t seqlen, Progress& progress) {
  CompareCase found{model.dtype(), seqlen, {}};
  const std::vector<Token> ids = random_ids(flags.seed, flags.batch * seqlen, model.config().vocab_size);
  const double deviation = gpt2::rounding_deviation(model.config(), model.dtype(), seqlen);
  std::vector<float> first;
  // Memory and output, one after the other: nothing of another is there.
  for (const std::string& algorithm : flags.algorithms) {
    Contender& c = found.contenders.emplace_back();
    c.algorithm = algorithm;
    try {
      const measure::ResidentPeak peak;
      const std::optional<int> gpu = model.compute().gpu;
      const size_t free_before = gpu ? cuda::memory(*gpu).free_bytes : 0;
      Forward forward(model, algorithm, flags.batch, seqlen, ids);
      forward.run();
      c.memory = gpu ? static_cast<int64_t>(free_before) - static_cast<int64_t>(cuda::memory(*gpu).free_bytes) : peak.bytes_added();
      std::vector<float> output = forward.output();
      if (first.empty()) first = output;
      c.error = gpt2::compare_outputs(first, output, deviation);
    } catch (const fattn::Error& error) {
      if (error.code() != ErrorCode::kUnsupported) throw;
      c.refused = error.what();
      if (found.contenders.size() == 1) throw;  // what all are compared with
    }
    progress.step(static_cast<double>(seqlen));
  }
  // Time, in turns: a drift of the machine hits all of them.
  std::vector<std::unique_ptr<Forward>> all;
  std::vector<std::vector<double>> seconds(found.contenders.size());
  for (const Contender& c : found.contenders)
    all.push_back(c.refused.empty() ? std::make_unique<Forward>(model, c.algorithm, flags.batch, seqlen, ids) : nullptr);
  for (int64_t turn = 0; turn < flags.repeats; ++turn)
    for (size_t i = 0; i < all.size(); ++i) {
      if (all[i]) seconds[i].push_back(all[i]->run());
      progress.step(static_cast<double>(seqlen));
    }
  for (size_t i = 0; i < all.size(); ++i)
    if (all[i]) found.contenders[i].time = measure::summarize(seconds[i]);
  return found;
}

bool passed(const CompareCase& c) {
  return std::all_of(c.contenders.begin(), c.contenders.end(), [](const Contender& o) { return !o.refused.empty() || o.error.passed; });
}

Json compare_record(const Gpt2CompareFlags& flags, const std::vector<CompareCase>& cases) {
  Json record = gpt2_record("compare");
  record["model"] = printable(flags.model.model);
  record["batch"] = flags.batch;
  record["seed"] = flags.seed;
  record["threads"] = flags.model.threads;
  const std::optional<int> gpu = gpt2_gpu(flags.model.device);
  record["device"] = gpu ? fmt::format("cuda:{}", *gpu) : "cpu";
  record["environment"] = measure::environment();
  record["cases"] = Json::array();
  bool all = true;
  for (const CompareCase& one : cases) {
    Json c = {{"dtype", name_of(one.dtype)}, {"seqlen", one.seqlen}, {"algorithms", Json::array()}};
    const Contender& base = one.contenders[0];
    for (const Contender& o : one.contenders) {
      if (!o.refused.empty()) {
        c["algorithms"].push_back({{"algorithm", o.algorithm}, {"unsupported", printable(o.refused, 400)}});
        continue;
      }
      c["algorithms"].push_back(
          {{"algorithm", o.algorithm},
           {"seconds",
            {{"median", o.time.median},
             {"mean", o.time.mean},
             {"stddev", o.time.stddev},
             {"low", o.time.ci_low},
             {"high", o.time.ci_high},
             {"samples", o.time.samples}}},
           {"speedup", base.time.median / o.time.median},
           {"memory_bytes", o.memory},
           {"memory_change", base.memory > 0 ? Json(static_cast<double>(o.memory) / static_cast<double>(base.memory) - 1) : Json()},
           {"max_abs_error", files::number_or_null(o.error.max_abs)},
           {"mean_abs_error", files::number_or_null(o.error.mean_abs)},
           {"scale", files::number_or_null(o.error.scale)},
           {"relative_error", files::number_or_null(o.error.relative)},
           {"allowed_abs_error", files::number_or_null(o.error.allowed_abs)},
           {"error_of_allowed", files::number_or_null(o.error.of_allowed)},
           {"passed", o.error.passed}});
    }
    c["passed"] = passed(one);
    all = all && passed(one);
    record["cases"].push_back(c);
  }
  record["passed"] = all;
  return record;
}

void print_case(Output& out, const Gpt2CompareFlags& flags, const CompareCase& one) {
  Table table({Column::text("attention").as_key(), Column::number("time"), Column::number("spread").ranked(3), Column::number("speed"),
               Column::number("memory").ranked(2), Column::number("max error").ranked(1), Column::number("mean error").ranked(4),
               Column::number("of scale").ranked(2), Column::number("of allowed"), Column::text("verdict")},
              fmt::format("{}, batch {}, seqlen {}", name_of(one.dtype), flags.batch, one.seqlen));
  const Contender& base = one.contenders[0];
  for (const Contender& o : one.contenders) {
    if (!o.refused.empty()) {
      table.add({o.algorithm, "-"});
      table.note(printable(o.refused, 400));
      continue;
    }
    const bool is_base = &o == &base;
    table.add(
        {o.algorithm, seconds_cell(o.time.median), percent_cell(o.time.spread()),
         is_base ? Cell("1.00x") : times_cell(base.time.median / o.time.median, measure::undecided(base.time, o.time)),
         bytes_cell(static_cast<double>(o.memory)), is_base ? Cell("-") : short_cell(o.error.max_abs),
         is_base ? Cell("-") : short_cell(o.error.mean_abs), is_base ? Cell("-") : short_cell(o.error.relative),
         is_base ? Cell("-") : short_cell(o.error.of_allowed),
         is_base && o.error.passed ? Cell("the base") : Cell(o.error.passed ? "passes" : "FAILS").in(o.error.passed ? Mood::kGood : Mood::kBad)});
  }
  out.print(table);
}

void write_figure(const Gpt2CompareFlags& flags, const std::vector<CompareCase>& cases) {
  using namespace lab::chart;
  Figure figure;
  figure.title = fmt::format("GPT-2 with each attention, batch {}", flags.batch);
  figure.description = "Time of a forward pass by length, and the largest error as a share of what rounding allows.";
  std::vector<DType> dtypes;
  for (const CompareCase& c : cases)
    if (std::find(dtypes.begin(), dtypes.end(), c.dtype) == dtypes.end()) dtypes.push_back(c.dtype);
  for (const DType dtype : dtypes) {
    Panel time{fmt::format("Forward pass, {}", name_of(dtype))}, error{fmt::format("Error of allowed, {}", name_of(dtype))};
    time.x = error.x = {"seqlen", ScaleKind::kLog2};
    time.y = {"time", ScaleKind::kLog10, Unit::kTime};
    error.y = {"largest error / allowed", ScaleKind::kLinear};
    error.references.push_back({Reference::Kind::kLevel, "allowed", 1});
    for (size_t a = 0; a < flags.algorithms.size(); ++a) {
      Line times{flags.algorithms[a], static_cast<int>(a)}, errors{flags.algorithms[a], static_cast<int>(a)};
      for (const CompareCase& c : cases) {
        const Contender& o = c.contenders[a];
        if (c.dtype != dtype || !o.refused.empty()) continue;
        times.points.push_back({static_cast<double>(c.seqlen), o.time.median, o.time.ci_low, o.time.ci_high});
        if (a > 0) errors.points.push_back({static_cast<double>(c.seqlen), o.error.of_allowed});
      }
      time.lines.push_back(times);
      error.lines.push_back(errors);
    }
    figure.panels.push_back(time);
    figure.panels.push_back(error);
  }
  const std::string svg = to_svg(figure) + "\n";
  WholeFile file(flags.figure);
  file.write(svg.data(), svg.size());
  file.publish();
}

int compare_gpt2(Gpt2CompareFlags flags) {
  require_writable(flags.json);
  if (!flags.figure.empty()) require_writable(flags.figure);
  Kept kept(flags.json);
  if (flags.algorithms.empty()) {
    flags.algorithms = {"standard", "v1", "v2", "auto"};
    if (gpt2_gpu(flags.model.device)) flags.algorithms.insert(flags.algorithms.end() - 1, "v3");
  }
  const gpt2::Config config = gpt2::read_config(flags.model.model);
  if (flags.sweep)
    flags.seqlens = lengths_within({128, 256, 512, 1024}, config);
  else if (flags.seqlens.empty())
    flags.seqlens = lengths_within({512}, config);
  for (const int64_t seqlen : flags.seqlens)
    if (seqlen > config.n_positions)
      throw CLI::ValidationError("--seqlen", fmt::format("{} is more than the model's {} positions", seqlen, config.n_positions));
  if (flags.dtypes.empty()) {
    const gpt2::Weights weights = gpt2::Weights::open(flags.model.model, config);
    flags.dtypes.push_back(name_of(weights.at("wte.weight").dtype));
  }
  Output out(flags.output, flags.json);
  std::vector<CompareCase> cases;
  double weight = 0;
  for (const int64_t seqlen : flags.seqlens) weight += static_cast<double>(seqlen);
  weight *= static_cast<double>(flags.dtypes.size() * flags.algorithms.size()) * static_cast<double>(1 + flags.repeats);
  {
    Progress progress("forward passes");
    progress.expect(weight, false);
    for (const std::string& dtype : flags.dtypes) {
      const gpt2::Model model = flags.model.load(gpt2_dtype(dtype));
      for (const int64_t seqlen : flags.seqlens) {
        cases.push_back(compare_case(flags, model, seqlen, progress));
        progress.wipe();
        print_case(out, flags, cases.back());
        kept.keep([record = compare_record(flags, cases)] { return record; },
                  fmt::format("{} of {} cases", cases.size(), flags.seqlens.size() * flags.dtypes.size()));
      }
    }
  }
  const bool all = std::all_of(cases.begin(), cases.end(), passed);
  out.say(all ? "\nThe output is the same with each attention, within what rounding allows."
              : "\nThe output is NOT the same with each attention: errors are beyond what rounding allows.");
  if (!flags.figure.empty()) write_figure(flags, cases);
  if (!flags.json.empty()) write_json(compare_record(flags, cases), flags.json);
  return all ? kExitFine : kExitCheckFailed;
}

}  // namespace

void add_gpt2_compare(CLI::App& gpt2, int& exit_code) {
  CLI::App* command = gpt2.add_subcommand("compare", "The same weights with each attention: time, memory, and whether the output is the same");
  auto flags = std::make_shared<Gpt2CompareFlags>();
  command->add_option("--model,MODEL", flags->model.model, "A model's folder")->type_name("DIR")->required();
  command->option_defaults()->group("What");
  command->add_option("--batch", flags->batch, "Sequences")->check(whole_number(1, 1 << 20))->type_name("N")->capture_default_str();
  command->add_option("--seqlen", flags->seqlens, "Tokens of each, one or several [512, or all positions of a model that has fewer]")
      ->check(whole_number(1))
      ->delimiter(',')
      ->type_name("N,...");
  command->add_flag("--sweep", flags->sweep, "Lengths 128, 256, 512 and 1024, as far as the model has so many positions");
  command->add_option("--dtype", flags->dtypes, "One or several [the weights' own]")
      ->transform(one_dtype_of({"fp32", "fp16", "bf16"}))
      ->delimiter(',')
      ->type_name("NAME,...");
  command->add_option("--algorithm", flags->algorithms, "Of attention; the first is what the others are compared with [all of the device]")
      ->transform(one_of({"standard", "v1", "v2", "v3", "auto"}))
      ->delimiter(',')
      ->type_name("NAME,...");
  command->add_option("--seed", flags->seed, "Of the random tokens")->type_name("N")->capture_default_str();
  command->option_defaults()->group("How");
  command->add_option("--repeats", flags->repeats, "Timed passes of each, in turns")
      ->check(whole_number(1, 1000))
      ->type_name("N")
      ->capture_default_str();
  flags->model.add_threads_to(*command);
  command->option_defaults()->group("Options");
  command->add_option("--figure", flags->figure, "Draw time and error by length as SVG")->check(svg_name())->type_name("FILE.svg")->group("Output");
  add_gpt2_json(*command, flags->json);
  flags->output.add_to(*command);
  command->footer(
      "What is compared is the last hidden state of all tokens. Exits 1 if one differs by more than rounding allows (docs/GPT2.md).\n\nFor example:\n"
      "  fattn gpt2 compare MODEL\n  fattn gpt2 compare MODEL --sweep --dtype fp32,bf16,fp16 --figure compare.svg");
  command->callback([flags, &exit_code] { exit_code = compare_gpt2(*flags); });
}

}  // namespace fattn::cli
