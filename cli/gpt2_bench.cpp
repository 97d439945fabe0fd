// `fattn gpt2 bench`: prefill and decode, against what the machine can do.
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "cli/gpt2.h"
#include "cli/gpt2_model.h"
#include "cli/json_output.h"
#include "cli/kept.h"
#include "cli/output.h"
#include "cli/progress.h"
#include "cli/usage_error.h"
#include "cli/values.h"
#include "fattn/device.hpp"
#include "fattn/fattn.hpp"
#include "gpt2/error.h"
#include "gpt2/memory.h"
#include "measure/environment.h"
#include "measure/peaks.h"
#include "measure/statistics.h"

namespace fattn::cli {
namespace {

using gpt2::Token;
using Json = nlohmann::ordered_json;

struct Gpt2BenchFlags {
  Gpt2ModelFlags model;
  std::vector<int64_t> batches{1, 4}, contexts;
  double seconds = 1;
  int64_t page_size = 0;  // of the cache; 0: no pages
  std::string json;
  OutputFlags output;
};

struct Gpt2Limits {
  double read = 0;  // bytes a second
  double flops = 0;
};

constexpr int64_t kDecodeSteps = 32;  // that are timed together, one token behind the other

struct Gpt2Timing {
  bool decode = false;
  int64_t batch = 0, context = 0;
  measure::Statistics time;
  double limit = 0;  // seconds that the step takes at least
  int64_t tokens() const { return decode ? batch : batch * context; }
};

// The call again and again: 3 times at least, then until its seconds are over; the time of one of its steps.
template <class Call>
measure::Statistics time_of(double seconds, const Call& call, double steps = 1) {
  call();
  call();  // on a GPU the first one makes a graph
  std::vector<double> all;
  double sum = 0;
  while (all.size() < 3 || (sum < seconds && all.size() < 500)) {
    const auto begin = std::chrono::steady_clock::now();
    call();
    all.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    sum += all.back();
    all.back() /= steps;
  }
  return measure::summarize(all);
}

// Weights are read once a step, and the cache of each sequence.
double decode_limit(const gpt2::Model& model, int64_t batch, double context, const Gpt2Limits& limits) {
  const double cache = static_cast<double>(gpt2::kv_bytes_per_token(model.config(), model.dtype())) * static_cast<double>(batch) * context;
  return (static_cast<double>(model.bytes_read()) + cache) / limits.read;
}
// Products with the weights of the layers for each token, and the visible pairs of attention; logits are of the last tokens alone.
double prefill_limit(const gpt2::Model& model, int64_t batch, int64_t context, const Gpt2Limits& limits) {
  const gpt2::Config& c = model.config();
  const auto tokens = static_cast<double>(batch * context);
  const auto weights = static_cast<double>(c.n_layer * c.n_embd * (c.qkv_width() + c.n_embd + 2 * c.n_inner));
  const double pairs = static_cast<double>(c.n_layer * c.n_embd) * tokens * static_cast<double>(context + 1) / (c.causal ? 2 : 1);
  return (2 * weights * tokens + 4 * pairs + 2.0 * static_cast<double>(batch * c.n_embd * c.vocab_size)) / limits.flops;
}

gpt2::SessionOptions session_options(const Gpt2BenchFlags& flags, const gpt2::Model& model, int64_t batch, int64_t context) {
  gpt2::SessionOptions options;
  options.batch = batch;
  options.context = context;
  options.algorithm = flags.model.attention();
  options.page_size = flags.page_size;
  if (!model.config().causal) options.rows = batch * context;
  return options;
}

Gpt2Timing prefill(const Gpt2BenchFlags& flags, const gpt2::Model& model, int64_t batch, int64_t context, const Gpt2Limits& limits) {
  gpt2::Session session(model, session_options(flags, model, batch, context));
  std::vector<Token> ids;
  for (int64_t i = 0; i < batch * context; ++i) ids.push_back(static_cast<Token>(i * 7919 % model.config().vocab_size));
  std::vector<gpt2::NewTokens> parts;
  for (int64_t i = 0; i < batch; ++i) parts.push_back({i, std::span(ids).subspan(static_cast<size_t>(i * context), static_cast<size_t>(context))});
  const auto call = [&] {
    for (int64_t i = 0; i < batch; ++i) session.truncate(i, 0);
    session.prefill(parts);
    session.wait();
  };
  return {false, batch, context, time_of(flags.seconds, call), prefill_limit(model, batch, context, limits)};
}

Gpt2Timing decode(const Gpt2BenchFlags& flags, const gpt2::Model& model, int64_t batch, int64_t context, const Gpt2Limits& limits) {
  gpt2::Session session(model, session_options(flags, model, batch, context));
  // Sequences that grow together take pages in turns.
  for (int64_t tokens = flags.page_size; tokens > 0 && tokens < context; tokens += std::min(flags.page_size, context - tokens))
    for (int64_t i = 0; i < batch; ++i) session.reserve(i, tokens);
  std::vector<Token> ids(static_cast<size_t>(batch), 1);
  const std::vector<ops::Choice> choices(ids.size());  // the most likely token
  std::vector<gpt2::NewTokens> parts;
  for (int64_t i = 0; i < batch; ++i) {
    session.pretend(i, context - 1);
    parts.push_back({i, std::span(ids).subspan(static_cast<size_t>(i), 1)});
  }
  // The last steps before the context is full; what they see is as long on average.
  const int64_t steps = std::min(kDecodeSteps, context), first = context - steps;
  const auto call = [&] {
    for (int64_t i = 0; i < batch; ++i) session.truncate(i, first);
    for (int64_t step = 0; step < steps; ++step) session.step_and_draw(parts, choices, ids.data(), step + 1 < steps);
  };
  const double seen = static_cast<double>(context) - static_cast<double>(steps - 1) / 2;
  return {true, batch, context, time_of(flags.seconds, call, static_cast<double>(steps)), decode_limit(model, batch, seen, limits)};
}

Json record_of(const Gpt2BenchFlags& flags, const gpt2::Model& model, const Gpt2Limits& limits, const std::vector<Gpt2Timing>& timings) {
  Json record = gpt2_record("bench");
  record.update(gpt2_compute_json(model, flags.model.model));
  record["environment"] = measure::environment();
  record["read_bytes_per_s"] = limits.read;
  record["flops_per_s"] = limits.flops;
  record["weight_bytes"] = model.bytes_read();
  record["page_size"] = flags.page_size;
  record["timings"] = Json::array();
  for (const Gpt2Timing& t : timings)
    record["timings"].push_back(
        {{"pass", t.decode ? "decode" : "prefill"},
         {"batch", t.batch},
         {"context", t.context},
         {"seconds", {{"median", t.time.median}, {"low", t.time.ci_low}, {"high", t.time.ci_high}, {"samples", t.time.samples}}},
         {"tokens_per_s", static_cast<double>(t.tokens()) / t.time.median},
         {"limit_seconds", t.limit},
         {"of_limit", t.limit / t.time.median}});
  return record;
}

int bench_gpt2(Gpt2BenchFlags flags) {
  require_writable(flags.json);
  Kept kept(flags.json);
  const gpt2::Model model = flags.model.load();
  if (flags.contexts.empty()) flags.contexts = lengths_within({128, 512}, model.config());
  for (const int64_t context : flags.contexts)
    if (context > model.config().n_positions)
      throw CLI::ValidationError("--context", fmt::format("{} is more than the model's {} positions", context, model.config().n_positions));
  // Refuses what no size has before anything is measured.
  gpt2::Session(model, session_options(flags, model, flags.batches.front(), flags.contexts.front()));
  Output out(flags.output, flags.json);
  const int threads = flags.model.threads > 0 ? flags.model.threads : cpu_info().usable_threads;
  Gpt2Limits limits;
  if (const auto& gpu = model.compute().gpu) {
    limits.read = cuda::peak(*gpu, FATTN_PEAK_COPY);
    limits.flops = measure::measure_cuda_peaks(*gpu).of(model.dtype()).rate;
  } else {
    limits.read = measure::measure_read_bandwidth(threads);
    limits.flops = measure::measure_peaks(Isa::kAuto, threads).of(model.dtype()).rate;
  }
  std::vector<Gpt2Timing> timings;
  {
    Progress progress("prefill and decode", static_cast<int64_t>(2 * flags.batches.size() * flags.contexts.size()));
    for (const bool decodes : {false, true})
      for (const int64_t batch : flags.batches)
        for (const int64_t context : flags.contexts) {
          if (!decodes || model.config().causal)
            timings.push_back(decodes ? decode(flags, model, batch, context, limits) : prefill(flags, model, batch, context, limits));
          progress.step();
          kept.keep([record = record_of(flags, model, limits, timings)] { return record; }, fmt::format("{} timings", timings.size()));
        }
  }
  out.say(fmt::format("{}: {} of weights a step; the machine reads {} GB/s and computes {} GFLOP/s.", gpt2_compute_words(model),
                      bytes_text(static_cast<double>(model.bytes_read())), giga_text(limits.read), giga_text(limits.flops)));
  Table table({Column::text("pass").as_key(), Column::number("batch").as_key(), Column::number("context").as_key(), Column::number("time"),
               Column::number("spread").ranked(2), Column::number("tokens/s"), Column::number("limit").ranked(1), Column::number("of limit")});
  for (const Gpt2Timing& t : timings)
    table.add({t.decode ? "decode" : "prefill", std::to_string(t.batch), std::to_string(t.context), seconds_cell(t.time.median),
               percent_cell(t.time.spread()), fmt::format("{:.1f}", static_cast<double>(t.tokens()) / t.time.median), seconds_cell(t.limit),
               percent_cell(t.limit / t.time.median)});
  out.print(table);
  out.say(fmt::format(
      "\nThe limit of prefill is its arithmetic at the peak of the dtype, that of decode the weights and the cache read once at the rate measured "
      "just now{}.",
      model.compute().gpu ? " (of a copy on the device)" : ""));
  if (!flags.json.empty()) write_json(record_of(flags, model, limits, timings), flags.json);
  return kExitFine;
}

}  // namespace

void add_gpt2_bench(CLI::App& gpt2, int& exit_code) {
  CLI::App* command = gpt2.add_subcommand("bench", "Time of prefill and decode by batch and context, beside the machine's limits");
  auto flags = std::make_shared<Gpt2BenchFlags>();
  flags->model.add_to(*command);
  command->option_defaults()->group("What");
  command->add_option("--batch", flags->batches, "Sequences, one number or several")
      ->check(whole_number(1, 1 << 20))
      ->delimiter(',')
      ->type_name("N,...")
      ->capture_default_str();
  command
      ->add_option("--context", flags->contexts,
                   "Tokens of a prompt, or behind which one is decoded [128 and 512, as far as the model has so many positions]")
      ->check(whole_number(1))
      ->delimiter(',')
      ->type_name("N,...");
  command->add_option("--page-size", flags->page_size, "Tokens of a page of the cache, which sequences take in turns; 0: no pages")
      ->check(whole_number(0, 1 << 20))
      ->type_name("N")
      ->capture_default_str();
  command->option_defaults()->group("How");
  command->add_option("--seconds", flags->seconds, "For each row of the table, 3 passes at least")
      ->check(number(0, 3600))
      ->type_name("S")
      ->capture_default_str();
  command->option_defaults()->group("Options");
  add_gpt2_json(*command, flags->json);
  flags->output.add_to(*command);
  command->footer("For example:\n  fattn gpt2 bench MODEL\n  fattn gpt2 bench MODEL --dtype bf16 --batch 1,2,4,8 --context 512,1024");
  command->callback([flags, &exit_code] { exit_code = bench_gpt2(*flags); });
}

}  // namespace fattn::cli
