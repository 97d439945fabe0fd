// `fattn gpt2 train`: a model that learns, with checkpoints from which it goes on as if nothing had been between.
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <csignal>
#include <memory>
#include <optional>
#include <string>

#include "cli/gpt2.h"
#include "cli/gpt2_model.h"
#include "cli/json_output.h"
#include "cli/progress.h"
#include "cli/sanitize.h"
#include "cli/status_file.h"
#include "cli/stop_request.h"
#include "cli/streams.h"
#include "cli/training_flags.h"
#include "cli/training_group.h"
#include "cli/training_precision.h"
#include "cli/training_report.h"
#include "cli/training_setup.h"
#include "cli/usage_error.h"
#include "fattn/device.hpp"
#include "files/checksum.h"
#include "gpt2/train/checkpoint_files.h"
#include "gpt2/train/event_file.h"
#include "gpt2/train/tracker.h"
#include "gpt2/train/trainer.h"
#include "gpt2/train/work.h"
#include "measure/memory.h"
#include "measure/peaks.h"

namespace fattn::cli {
namespace {

using gpt2::LogLine;

// Throws Error in words, with the table printed, where a run would take more than it may.
void check_memory(Output& out, const TrainingSetup& setup, const std::vector<gpt2::TrainingMemory>& memory, uint64_t limit) {
  const auto gpu = setup.gpu();
  const uint64_t free = gpu ? cuda::memory(*gpu).free_bytes : cpu_info().memory_available_bytes;
  const uint64_t allowed = limit > 0 ? limit : free, needed = bytes_of(memory);
  if (allowed == 0 || needed <= allowed) return;
  print_training_memory(out, setup, memory);
  throw gpt2::Error(fmt::format(
      "out of memory: training would take {} {}, {} more than the {} {}; use a smaller --batch with --accumulate, --checkpoint-activations, "
      "--dtype bf16, or more processes with --context-parallel",
      bytes_text(static_cast<double>(needed)), gpu ? fmt::format("of cuda:{}", *gpu) : "of memory", bytes_text(static_cast<double>(needed - allowed)),
      bytes_text(static_cast<double>(allowed)), limit > 0 ? "allowed by --memory-limit" : "available"));
}

// What a run has taken since before its network was made: of a GPU, or what the process grew by at most.
class TakenMemory {
 public:
  explicit TakenMemory(std::optional<int> gpu) : gpu_(gpu), free_before_(gpu ? cuda::memory(*gpu).free_bytes : 0) {}
  // After a step. A GPU, which takes its time to say, is asked until all graphs are there.
  int64_t bytes_after(int64_t steps) {
    constexpr int64_t kGrows = 4;
    if (!gpu_)
      taken_ = resident_.bytes_added();
    else if (steps <= kGrows)
      taken_ = static_cast<int64_t>(free_before_) - static_cast<int64_t>(cuda::memory(*gpu_).free_bytes);
    return taken_;
  }

 private:
  const std::optional<int> gpu_;
  const size_t free_before_;
  const measure::ResidentPeak resident_;
  int64_t taken_ = 0;
};

// Of all processes together, as if each had what this one has.
double peak_of(const TrainingSetup& setup, int threads) {
  const DType dtype = setup.run.options.dtype;
  const double processes = setup.launch.ranks;
  if (const auto gpu = setup.gpu()) return processes * measure::measure_cuda_peaks(*gpu).of(dtype).rate;
  constexpr int64_t kFewSteps = 100;  // the peak shall not take most of the time of a short run
  const auto pains = setup.run.options.schedule.steps < kFewSteps ? measure::PeakPains::kBrief : measure::PeakPains::kUsual;
  return processes * measure::measure_peaks(Isa::kAuto, threads > 0 ? threads : cpu_info().usable_threads, pains).of(dtype).rate;
}

// The part of a run that the process has which writes its folder.
class RunRecord {
 public:
  RunRecord(const TrainingFlags& flags, const TrainingSetup& setup, int64_t step)
      : log(setup.folder->file("log.jsonl"), step),
        status(flags.status.empty() ? setup.folder->file("status.json") : flags.status, "gpt2 train", setup.run.options.schedule.steps - step, 0) {
    if (!flags.tensorboard.empty()) events_.emplace(flags.tensorboard, step);
  }

  void tell(const LogLine& line, const TrainingPace& pace, int64_t memory) {
    log.add(line);
    status.step_of_many(fmt::format("step {}: loss {:.4f}, {:.0f} tokens/s", line.step, line.loss, pace.tokens_per_s()));
    if (events_) {
      events_->scalar("loss/training", line.step, line.loss);
      if (line.validated) events_->scalar("loss/validation", line.step, line.validation_loss);
      events_->scalar("learning_rate", line.step, line.learning_rate);
      events_->scalar("gradient_norm", line.step, line.gradient_norm);
      events_->scalar("logit_scale", line.step, line.logit_scale);
      events_->scalar("loss_scale", line.step, line.loss_scale);
      events_->scalar("tokens_per_s", line.step, static_cast<double>(line.tokens) / line.seconds);
      events_->flush();
    }
    progress->note(progress_notes(line, pace, memory));
    progress->step();
  }

  gpt2::TrainingLog log;
  StatusFile status;
  std::optional<Progress> progress;  // while there are steps

 private:
  std::optional<gpt2::EventFile> events_;
};

class TrainingRun {
 public:
  TrainingRun(const TrainingFlags& flags, TrainingSetup& setup, gpt2::Network& network, const Output& out, const StopRequest& stop,
              gpt2::Group* group)
      : flags_(flags),
        setup_(setup),
        out_(out),
        stop_(stop),
        network_(network),
        group_(group),
        arrays_{&network_.parameters(), network_.flat_size(), [this](gpt2::Flat which) { return network_.flat(which); }},
        trainer_(network_, *setup.loader, setup.run.options, setup.from ? setup.from->state : gpt2::TrainState{}, group,
                 [&stop] { return stop.signal() != 0; }) {
    if (setup.leads()) record_.emplace(flags, setup, trainer_.state().step);
    if (setup.from) restore_arrays(*setup.from, arrays_, [this](gpt2::Flat which, const float* numbers) { network_.restore(which, numbers); });
    if (setup.leads() && !flags.track.empty())
      trainer_.track(&tracker_.emplace(flags.track, trainer_.state().step, setup.run.options.dtype, setup.run.config.layer_norm_epsilon));
    result_.from = trainer_.state().step;
    if (setup.from) result_.checkpoint = setup.from->path;
    result_.pace.flops_per_token = gpt2::training_flops_per_token(setup.run.config, setup.run.options.seqlen);
  }

  void run(TakenMemory& memory) {
    try {
      agree_on_weights();
      if (record_) result_.pace.peak = peak_of(setup_, flags_.threads);
      steps(memory);
      if (record_) draw();
    } catch (const gpt2::NotANumber& e) {
      say_track();
      throw gpt2::NotANumber(e.what() + last_good());
    } catch (const std::runtime_error& e) {
      throw gpt2::Error(fmt::format("training stopped after step {}: {}{}", trainer_.state().step, e.what(), last_good()));
    }
    result_.interrupted = stops();
    if (record_) record_->status.end(result_.interrupted ? "interrupted" : "done");
  }

  const TrainingResult& result() const { return result_; }
  // Of the process that leads.
  const std::vector<LogLine>& lines() const { return record_->log.lines(); }
  void say_track() const {
    if (tracker_) say_precision(out_, *tracker_, flags_.track);
  }
  const gpt2::PrecisionTracker* tracker() const { return tracker_ ? &*tracker_ : nullptr; }

 private:
  std::string last_good() const {
    if (result_.checkpoint.empty()) return ". There is no checkpoint yet";
    return ". The last good checkpoint is '" + printable(result_.checkpoint) + "'; go on from it with --resume";
  }

  // Several processes end after the same step.
  bool stops() const { return trainer_.stops() || (!group_ && stop_.signal() != 0); }

  // What has gone wrong unseen, in a memory or on a way between GPUs, is in no checkpoint.
  void agree_on_weights() {
    if (!group_) return;
    group_->control().doing(gpt2::Doing::kKeeping, trainer_.state().step);
    const float* weights = network_.flat(gpt2::Flat::kMaster);
    const uint64_t sum = files::xxh64(weights, static_cast<size_t>(network_.flat_size()) * sizeof(float));
    group_->agree({{fmt::format("weights at step {} of checksum", trainer_.state().step), gpt2::hex_word(sum)}});
  }

  void steps(TakenMemory& memory) {
    const int64_t last = setup_.run.options.schedule.steps, eval_every = flags_.eval_every > 0 ? flags_.eval_every : flags_.every;
    if (record_) record_->progress.emplace("step", std::max<int64_t>(last - trainer_.state().step, 1));
    while (trainer_.state().step < last) {
      LogLine line = trainer_.step();
      result_.pace.seconds += line.seconds;
      result_.pace.tokens += line.tokens;
      ++result_.pace.steps;
      const bool ends = line.step == last || stops();
      if (!setup_.run.validation.empty() && (line.step % eval_every == 0 || line.step == last)) validate(line);
      result_.measured_memory = memory.bytes_after(result_.pace.steps);
      if (record_) record_->tell(line, result_.pace, result_.measured_memory);
      const bool kept = line.step % flags_.every == 0 || ends;
      if (kept) agree_on_weights();
      if (kept && record_) keep();
      if ((kept || line.validated) && record_) {
        record_->progress->wipe();
        out_.say_line(step_in_words(line, result_.pace));
      }
      if (ends) break;
    }
    if (record_) record_->progress.reset();
    result_.steps = trainer_.state().step;
    result_.why_no_graph = network_.why_no_graph();
  }

  void validate(LogLine& line) {
    if (record_) record_->status.now(fmt::format("validation at step {}", line.step));
    if (group_) group_->control().doing(gpt2::Doing::kKeeping, line.step);
    line.validated = true;
    line.validation_loss = gpt2::validate(network_, setup_.run.validation, setup_.loading(), flags_.eval_batches, group_).loss;
  }

  void keep() {
    record_->status.now(fmt::format("checkpoint of step {}", trainer_.state().step));
    gpt2::Checkpoint checkpoint;
    checkpoint.config = setup_.run.config;
    checkpoint.options = setup_.run.options;
    checkpoint.state = trainer_.state();
    checkpoint.data = setup_.run.fingerprint;
    result_.checkpoint = write_checkpoint(setup_.folder->path(), checkpoint, arrays_, setup_.texts);
    gpt2::remove_old(setup_.folder->path(), flags_.keep);
  }

  void draw() {
    draw_training(setup_.folder->file("loss.svg"), lines());
    if (!flags_.figure.empty()) draw_training(flags_.figure, lines());
  }

  const TrainingFlags& flags_;
  TrainingSetup& setup_;
  const Output& out_;
  const StopRequest& stop_;
  gpt2::Network& network_;
  gpt2::Group* const group_;
  const gpt2::Arrays arrays_;
  gpt2::Trainer trainer_;
  std::optional<RunRecord> record_;                // of the process that leads
  std::optional<gpt2::PrecisionTracker> tracker_;  // of the process that leads
  TrainingResult result_;
};

// The process that leads looks at the run's folder first; what it finds, the others read.
TrainingSetup set_up(const TrainingFlags& flags, const gpt2::Launch& launch, gpt2::Group* group) {
  if (group && !group->leads()) group->control().exchange("");
  TrainingSetup setup = set_up_training(flags, launch);
  if (group && group->leads()) group->control().exchange("");
  if (group) group->agree(facts_of(flags, setup));
  if (group) group->share(setup.share);
  return setup;
}

int train(const TrainingFlags& flags, const gpt2::Launch& launch, gpt2::Group* group) {
  const bool leads = launch.rank == 0;
  if (leads) require_writable(flags.json);
  for (const std::string& file : {flags.figure, flags.track})
    if (leads && !file.empty()) require_writable(file);
  TrainingSetup setup = set_up(flags, launch, group);
  Output out(flags.output, flags.json);
  const StopRequest stop;  // before plans are made, which open OpenBLAS, whose threads take signals otherwise
  const std::vector<gpt2::TrainingMemory> memory = gpt2::Network::memory(setup.run.config, setup.network(), setup.compute(flags.threads));
  if (flags.memory) {
    if (!leads) return kExitFine;
    print_training_memory(out, setup, memory);
    if (!flags.json.empty()) write_json(training_record(setup, memory, std::nullopt, {}), flags.json);
    return kExitFine;
  }
  check_memory(out, setup, memory, flags.memory_limit);
  outlive_readers();  // of its lines: checkpoints are what it is for
  if (leads) say_beginning(out, setup);
  TakenMemory taken(setup.gpu());
  gpt2::NetworkOptions options = setup.network();
  if (group) options.context.transport = &group->context();
  gpt2::Network network(setup.run.config, setup.weights(), options, setup.compute(flags.threads));
  if (group) group->connect(setup.compute(flags.threads), static_cast<int64_t>(flags.group.bucket));
  if (leads && (!setup.folder->before() || !setup.changed.empty())) setup.folder->describe(setup.run);
  try {
    TrainingRun run(flags, setup, network, out, stop, group);
    run.run(taken);
    run.say_track();
    if (leads) say_end(out, setup, memory, run.result(), run.lines());
    if (leads && !flags.json.empty()) write_json(training_record(setup, memory, run.result(), run.lines(), run.tracker()), flags.json);
    if (stop.signal() == 0 && run.result().interrupted) return 128 + SIGTERM;  // another process was asked to
  } catch (const gpt2::NotANumber& e) {
    if (leads) print_error(printable(e.what()));
    return kExitCheckFailed;
  }
  return stop.signal() != 0 ? 128 + stop.signal() : kExitFine;
}

// Of several processes each says its rank with what went wrong, and the others are told.
int train_in_group(const TrainingFlags& flags) {
  const gpt2::Launch launch = gpt2::launch_from_environment(flags.group.rendezvous);
  const std::unique_ptr<gpt2::Group> group = flags.memory ? nullptr : join_group(flags.group, launch);
  if (!group) return train(flags, launch, nullptr);
  try {
    const int code = train(flags, launch, group.get());
    group->control().finish();
    return code;
  } catch (const CLI::Error& e) {
    group->control().fail(e.what());
    throw;
  } catch (const std::exception& e) {
    group->control().fail(e.what());
    throw gpt2::Error(fmt::format("rank {}: {}", launch.rank, e.what()));
  }
}

}  // namespace

void add_gpt2_train(CLI::App& gpt2, int& exit_code) {
  CLI::App* command = gpt2.add_subcommand("train", "Train a model, from nothing or from its weights, with checkpoints to go on from");
  auto flags = std::make_shared<TrainingFlags>();
  flags->add_to(*command);
  command->footer(
      "A checkpoint is a model's folder: generate, eval and train take it. --resume goes on from the last one as if nothing had been between, bit "
      "for "
      "bit, also after kill -9; at most --every steps are computed again. Ctrl-C ends after a step, with a checkpoint.\n\nFor example:\n"
      "  fattn gpt2 tokenize TOKENIZER book.txt --out tokens --validation 0.05\n"
      "  fattn gpt2 train --n-layer 4 --n-head 4 --n-embd 256 --seqlen 256 --data tokens --out run\n"
      "  fattn gpt2 train --out run --resume\n"
      "  fattn gpt2 train gpt2 --data tokens --seqlen 512 --learning-rate 5e-5 --out tuned\n"
      "  fattn gpt2 train --preset gpt2 --dtype bf16 --memory\n"
      "  torchrun --no-python --nproc-per-node 2 fattn gpt2 train --preset gpt2 --data tokens --device cuda --out run");
  command->callback([flags, &exit_code] { exit_code = train_in_group(*flags); });
}

}  // namespace fattn::cli
