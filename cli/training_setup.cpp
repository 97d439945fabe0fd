#include "cli/training_setup.h"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <system_error>

#include "cli/gpt2.h"
#include "cli/gpt2_model.h"
#include "cli/gpt2_texts.h"
#include "cli/sanitize.h"
#include "fattn/device.hpp"
#include "fattn/options.hpp"
#include "gpt2/data/token_writer.h"
#include "gpt2/error.h"
#include "gpt2/train/context.h"
#include "gpt2/train/trainer.h"

namespace fattn::cli {
namespace {

namespace fs = std::filesystem;
using gpt2::Config;
using gpt2::Error;
using gpt2::TrainOptions;
using Json = nlohmann::ordered_json;

bool is_folder(const std::string& path) {
  std::error_code ignored;
  return fs::is_directory(path, ignored);
}

// A run may go on from another folder than it began in.
std::vector<std::string> absolute(std::vector<std::string> paths) {
  std::error_code ignored;
  for (std::string& path : paths)
    if (const fs::path whole = fs::absolute(path, ignored); !whole.empty()) path = whole.lexically_normal().string();
  return paths;
}

// Of flags without a model: a preset, sizes, or a preset with other sizes.
Config config_of_sizes(const TrainingFlags& f, const gpt2::TokenSet* data) {
  const bool sized = f.n_layer > 0 && f.n_head > 0 && f.n_embd > 0;
  if (f.preset.empty() && !sized)
    throw CLI::ValidationError("fattn gpt2 train", "say what is trained: MODEL, --preset, or --n-layer, --n-head and --n-embd");
  Config c = gpt2::preset(f.preset.empty() ? "gpt2" : f.preset);
  if (f.n_layer > 0) c.n_layer = f.n_layer;
  if (f.n_head > 0) c.n_head = f.n_head;
  if (f.n_embd > 0) c.n_embd = f.n_embd;
  c.n_kv_head = f.n_kv_head > 0 ? f.n_kv_head : c.n_head;
  c.n_inner = 4 * c.n_embd;
  c.n_positions = f.n_positions > 0 ? f.n_positions : f.preset.empty() ? f.options.seqlen : std::max(c.n_positions, f.options.seqlen);
  c.positions = f.positions == "rotary" ? gpt2::Positions::kRotary : gpt2::Positions::kLearned;
  if (data) {
    c.vocab_size = data->vocab_size();
    c.bos_token_id = c.eos_token_id = data->end_of_text();
  }
  return c;
}

Config config_of(const TrainingFlags& f, const gpt2::TokenSet* data) {
  Config config;
  if (f.model.empty()) {
    config = config_of_sizes(f, data);
  } else {
    for (const char* flag : {"--preset", "--n-layer", "--n-head", "--n-embd", "--n-kv-head", "--n-positions", "--positions"})
      if (f.given(flag)) throw CLI::ValidationError(flag, "the model has its sizes; leave MODEL out to train one of other sizes from nothing");
    config = is_folder(f.model) ? gpt2::read_config(f.model) : gpt2::parse_config(gpt2_read_text(f.model));
  }
  config.embd_pdrop = config.attn_pdrop = config.resid_pdrop = f.options.dropout;
  gpt2::check(config);
  return config;
}

void check_fits(const Config& config, const TrainOptions& options, const gpt2::TokenSet* data) {
  if (options.seqlen > config.n_positions)
    throw Error(
        fmt::format("--seqlen {} is more than the model's {} positions; give at most {}", options.seqlen, config.n_positions, config.n_positions));
  if (data && data->vocab_size() > config.vocab_size)
    throw Error(
        fmt::format("the data was made with a tokenizer of {} tokens, the model has a vocabulary of {}; make token files with the model's tokenizer",
                    data->vocab_size(), config.vocab_size));
}

// The tokenizer that checkpoints get: the one that was named, the model's, or the one beside the data; it must be the one of the data.
gpt2::FileTexts tokenizer_of(const TrainingFlags& f, const gpt2::RunDescription& run, const gpt2::TokenSet& data) {
  std::vector<std::string> places;
  if (!f.tokenizer.empty()) {
    places.push_back(f.tokenizer);
  } else {
    if (!run.model.empty()) places.push_back(run.model);
    for (const std::string& path : run.data) places.push_back((fs::path(path) / "tokenizer").string());
  }
  for (const std::string& place : places) {
    if (f.tokenizer.empty() && !is_folder(place)) continue;
    const std::optional<gpt2::Tokenizer> tokenizer = f.tokenizer.empty() ? gpt2_tokenizer("", place) : gpt2::Tokenizer::load(place);
    if (!tokenizer) continue;
    if (gpt2::fingerprint_of(tokenizer->vocabulary()) != data.vocabulary())
      throw Error("the data was made with another tokenizer than '" + printable(place) +
                  "'; make token files with this one, or name theirs by --tokenizer");
    gpt2::FileTexts texts = gpt2_tokenizer_texts(place);
    std::error_code ignored;
    if (const fs::path more = fs::path(place) / "generation_config.json"; fs::exists(more, ignored))
      texts.emplace_back(more.filename().string(), gpt2_read_text(more.string()));
    return texts;
  }
  return {};
}

// As the run's files keep it: "auto" is what there is here. Several processes have GPUs of their own, which files name "cuda".
void find_device(const TrainingFlags& f, TrainingSetup& setup) {
  std::string& device = setup.run.options.device;
  const auto gpu = gpt2_gpu(device);
  if (gpu && setup.launch.several() && f.given("--device") && device.find(':') != std::string::npos) setup.named_gpu = gpu;
  device = !gpu ? "cpu" : setup.launch.several() ? "cuda" : "cuda:" + std::to_string(*gpu);
}

// Options of the run that is gone on with, and those that are given now.
TrainOptions merged(const TrainingFlags& f, const TrainOptions& before) {
  const Json now = to_json(f.chosen(1));
  Json all = to_json(before);
  for (const auto& [key, value] : now.items()) {
    if (key != "steps" && f.given(gpt2::flag_of(key))) all[key] = value;
  }
  return gpt2::options_from(all);
}

// Sizes that are given and are not the model's.
std::vector<gpt2::Difference> other_sizes(const TrainingFlags& f, const Config& was) {
  Config is = f.preset.empty() ? was : gpt2::preset(f.preset);
  if (f.n_layer > 0) is.n_layer = f.n_layer;
  if (f.n_head > 0) is.n_head = f.n_head;
  if (f.n_embd > 0) is.n_embd = f.n_embd;
  is.n_kv_head = f.n_kv_head > 0 ? f.n_kv_head : was.n_kv_head;
  is.n_positions = f.n_positions > 0 ? f.n_positions : was.n_positions;
  std::vector<gpt2::Difference> all;
  const auto compare = [&](const char* flag, int64_t a, int64_t b) {
    if (a != b) all.push_back({flag, std::to_string(a), std::to_string(b)});
  };
  compare("--n-layer", was.n_layer, is.n_layer);
  compare("--n-head", was.n_head, is.n_head);
  compare("--n-embd", was.n_embd, is.n_embd);
  compare("--n-kv-head", was.n_kv_head, is.n_kv_head);
  compare("--n-positions", was.n_positions, is.n_positions);
  const std::string positions = was.positions == gpt2::Positions::kRotary ? "rotary" : "learned";
  if (f.given("--positions") && f.positions != positions) all.push_back({"--positions", positions, f.positions});
  return all;
}

// What would change the numbers of a run that is gone on with is an error that names all of it.
void refuse_changes(const TrainingFlags& f, const gpt2::RunDescription& before, const TrainOptions& now) {
  std::vector<std::string> changed;
  for (const gpt2::Difference& d : gpt2::differences(before.options, now))
    if (d.flag != "--device") changed.push_back(fmt::format("{} was {}, is {}", d.flag, d.was, d.is));
  for (const gpt2::Difference& d : other_sizes(f, before.config)) changed.push_back(fmt::format("{} was {}, is {}", d.flag, d.was, d.is));
  if (const std::string model = is_folder(f.model) ? absolute({f.model}).front() : before.model; model != before.model)
    changed.push_back(fmt::format("the model was {}, is {}", before.model.empty() ? "made of random numbers" : "'" + printable(before.model) + "'",
                                  "'" + printable(model) + "'"));
  if (changed.empty()) return;
  std::string all;
  for (const std::string& change : changed) all += (all.empty() ? "" : "; ") + change;
  throw Error("--resume goes on with the options of the run: " + all + ". Leave them out; or begin a new run with the checkpoint's folder as MODEL");
}

// A step has the same batches however many processes share it.
void check_shares(const Config& config, const TrainOptions& options, const gpt2::Share& share) {
  const gpt2::ContextRows rows(config, options.seqlen, {share.context_rank, share.context_ranks});
  if (options.accumulate % share.data_ranks == 0) return;
  const bool whole = share.context_ranks == 1;
  const std::string sharers = whole ? fmt::format("{} processes", share.data_ranks)
                                    : fmt::format("{} groups of {} processes (--context-parallel)", share.data_ranks, share.context_ranks);
  throw Error(fmt::format(
      "a step of {} batch{} (--accumulate) cannot be shared by {}; start a number of {} that divides {}, or begin a run with a multiple "
      "of {}",
      options.accumulate, options.accumulate == 1 ? "" : "es", sharers, whole ? "processes" : "groups", options.accumulate, share.data_ranks));
}

// Of processes that share sequences the first one with the most rows.
int fullest_rank(const Config& config, const TrainOptions& options, int ranks) {
  int fullest = 0;
  int64_t most = 0;
  for (int rank = 0; rank < ranks; ++rank)
    if (const int64_t rows = gpt2::ContextRows(config, options.seqlen, {rank, ranks}).count(); rows > most) {
      fullest = rank;
      most = rows;
    }
  return fullest;
}

int64_t steps_of(const TrainingFlags& f, const gpt2::Loader& loader, int64_t accumulate) {
  if (f.steps > 0) return f.steps;
  return std::max<int64_t>(1, std::llround(f.epochs * static_cast<double>(gpt2::steps_an_epoch(loader, accumulate))));
}

void resume(const TrainingFlags& f, TrainingSetup& setup) {
  const gpt2::RunDescription& before = *setup.folder->before();
  gpt2::RunDescription& run = setup.run;
  run = before;
  run.options = merged(f, before.options);
  find_device(f, setup);
  refuse_changes(f, before, run.options);
  check_shares(run.config, run.options, setup.share);
  if (!f.data.empty()) run.data = absolute(f.data);
  if (!f.validation.empty()) run.validation = absolute(f.validation);
  if (const auto found = gpt2::find_checkpoints(setup.folder->path()); !found.empty()) setup.from = gpt2::read_checkpoint(found.back().path);
  setup.loader = std::make_unique<gpt2::Loader>(run.data, setup.loading(), setup.from ? setup.from->state.position : gpt2::LoaderPosition{});
  if (setup.loader->fingerprint() != before.fingerprint)
    throw Error("the data is not what the run began with: its names, sizes or checksums differ; give the same token files by --data");
  if ((run.options.device == "cpu") != (before.options.device == "cpu"))
    setup.changed =
        fmt::format("the run goes on on {}, not {}: numbers agree within rounding, not bit for bit", run.options.device, before.options.device);
  if (f.given("--steps") || f.given("--epochs")) {
    run.options.schedule.steps = steps_of(f, *setup.loader, run.options.accumulate);
    if (run.options.schedule.steps != before.options.schedule.steps)
      setup.changed += (setup.changed.empty() ? "" : "; ") + fmt::format("the run ends at step {}, not {}, and the learning rate falls accordingly",
                                                                         run.options.schedule.steps, before.options.schedule.steps);
  }
  if (setup.from && setup.from->state.step > run.options.schedule.steps)
    throw Error(fmt::format("the run has {} steps already, more than the {} that are asked for; give more by --steps", setup.from->state.step,
                            run.options.schedule.steps));
  setup.texts = tokenizer_of(f, run, setup.loader->data());
}

std::unique_ptr<gpt2::RunFolder> folder_of(const TrainingFlags& f, const gpt2::Launch& launch) {
  return launch.rank == 0 ? std::make_unique<gpt2::RunFolder>(f.out, f.resume) : gpt2::RunFolder::for_reading(f.out, f.resume);
}

void begin(const TrainingFlags& f, TrainingSetup& setup, const gpt2::TokenSet& data) {
  gpt2::RunDescription& run = setup.run;
  find_device(f, setup);
  run.data = absolute(f.data);
  run.validation = absolute(f.validation);
  if (run.validation.empty())
    for (const std::string& path : run.data)
      for (const std::string& file : gpt2::validation_files_of(path)) run.validation.push_back(file);
  run.model = is_folder(f.model) ? absolute({f.model}).front() : "";
  setup.texts = tokenizer_of(f, run, data);
  setup.loader = std::make_unique<gpt2::Loader>(run.data, setup.loading());
  run.fingerprint = setup.loader->fingerprint();
  gpt2::Schedule& schedule = run.options.schedule;
  schedule.steps = steps_of(f, *setup.loader, run.options.accumulate);
  if (!f.given("--warmup")) schedule.warmup = std::min<int64_t>(schedule.steps / 20, 2000);
  if (schedule.warmup > schedule.steps) throw Error(fmt::format("--warmup {} is more than the {} steps of the run", schedule.warmup, schedule.steps));
}

}  // namespace

gpt2::Compute TrainingSetup::compute(int threads) const {
  gpt2::Compute compute;
  compute.dtype = run.options.dtype;
  compute.threads = threads;
  compute.gpu = gpu();
  return compute;
}

std::optional<int> TrainingSetup::gpu() const {
  const std::optional<int> first = gpt2_gpu(run.options.device);
  if (!launch.several() || !first) return first;
  if (named_gpu) return named_gpu;
  const int count = cuda::count();
  if (count == 1) return 0;  // each process was given its own
  if (launch.local_rank < count) return launch.local_rank;
  throw Error(fmt::format("rank {} is number {} on its machine, which has {} GPUs; start at most as many processes as there are GPUs", launch.rank,
                          launch.local_rank, count));
}

gpt2::NetworkOptions TrainingSetup::network() const {
  const TrainOptions& o = run.options;
  gpt2::NetworkOptions options;
  options.dtype = o.dtype;
  options.sequences = o.sequences;
  options.seqlen = o.seqlen;
  options.algorithm = gpt2_algorithm(o.algorithm);
  options.checkpoint_activations = o.checkpoint_activations;
  options.dropout = o.dropout;
  options.seed = o.seed;
  options.deterministic = o.deterministic || !gpu();
  options.context.rank = share.context_rank;
  options.context.ranks = share.context_ranks;
  return options;
}

gpt2::LoaderOptions TrainingSetup::loading() const {
  gpt2::LoaderOptions options;
  options.sequences = run.options.sequences;
  options.seqlen = run.options.seqlen;
  options.shuffle = run.options.shuffle;
  options.seed = run.options.seed;
  options.vocab_size = run.config.vocab_size;
  options.rank = share.data_rank;
  options.ranks = share.data_ranks;
  return options;
}

gpt2::Weights TrainingSetup::weights() const {
  if (from) return gpt2::Weights::open(from->path, run.config);
  if (!run.model.empty()) return gpt2::Weights::open(run.model, run.config);
  return gpt2::Weights::at_random(run.config, run.options.seed);
}

TrainingSetup set_up_training(const TrainingFlags& f, const gpt2::Launch& launch) {
  TrainingSetup setup;
  setup.launch = launch;
  const int64_t context = f.group.context_parallel;
  if (f.memory && !launch.several())  // of one of the processes that there will be
    setup.share.context_ranks = static_cast<int>(context);
  else
    setup.share = gpt2::share_of(launch, context);
  if (f.memory) {
    const std::optional<gpt2::TokenSet> data = f.data.empty() ? std::nullopt : std::make_optional<gpt2::TokenSet>(f.data);
    setup.run.options = f.chosen(setup.share.data_ranks);
    setup.run.config = config_of(f, data ? &*data : nullptr);
    check_fits(setup.run.config, setup.run.options, data ? &*data : nullptr);
    if (!launch.several()) setup.share.context_rank = fullest_rank(setup.run.config, setup.run.options, setup.share.context_ranks);
    return setup;
  }
  if (f.out.empty()) throw CLI::ValidationError("--out", "give the folder of the run: a new or empty one, or with --resume that of a run");
  if (f.resume) {
    if (f.data.empty() && !is_folder(f.out))
      throw Error("there is no folder '" + printable(f.out) + "' to go on in; to begin, give --data and a model");
    setup.folder = folder_of(f, launch);
    if (setup.folder->before()) {
      resume(f, setup);
      return setup;
    }
  }
  if (f.data.empty()) throw CLI::ValidationError("--data", "give the token files to train on; `fattn gpt2 tokenize` makes them");
  {
    const gpt2::TokenSet data(f.data);
    setup.run.options = f.chosen(setup.share.data_ranks);
    setup.run.config = config_of(f, &data);
    check_fits(setup.run.config, setup.run.options, &data);
    check_shares(setup.run.config, setup.run.options, setup.share);
    begin(f, setup, data);
  }
  if (!setup.folder) setup.folder = folder_of(f, launch);
  return setup;
}

}  // namespace fattn::cli
