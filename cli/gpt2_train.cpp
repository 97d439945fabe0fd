// `fattn gpt2 train`: a model that learns, with checkpoints from which it goes on as if nothing had been between.
#include <fmt/format.h>

#include <algorithm>
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
#include "cli/training_flags.h"
#include "cli/training_precision.h"
#include "cli/training_report.h"
#include "cli/training_setup.h"
#include "cli/usage_error.h"
#include "fattn/device.hpp"
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
  const auto gpu = gpt2_gpu(setup.run.options.device);
  const uint64_t free = gpu ? cuda::memory(*gpu).free_bytes : cpu_info().memory_available_bytes;
  const uint64_t allowed = limit > 0 ? limit : free, needed = bytes_of(memory);
  if (allowed == 0 || needed <= allowed) return;
  print_training_memory(out, setup, memory);
  throw gpt2::Error(fmt::format(
      "out of memory: training would take {} {}, {} more than the {} {}; use a smaller --batch with --accumulate, --checkpoint-activations, or "
      "--dtype "
      "bf16",
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

double peak_of(const TrainingSetup& setup, int threads) {
  const DType dtype = setup.run.options.dtype;
  if (const auto gpu = gpt2_gpu(setup.run.options.device)) return measure::measure_cuda_peaks(*gpu).of(dtype).rate;
  return measure::measure_peaks(Isa::kAuto, threads > 0 ? threads : cpu_info().usable_threads).of(dtype).rate;
}

class TrainingRun {
 public:
  TrainingRun(const TrainingFlags& flags, TrainingSetup& setup, gpt2::Network& network, const Output& out, const StopRequest& stop)
      : flags_(flags),
        setup_(setup),
        out_(out),
        stop_(stop),
        network_(network),
        arrays_{&network_.parameters(), network_.flat_size(), [this](gpt2::Flat which) { return network_.flat(which); }},
        trainer_(network_, *setup.loader, setup.run.options, setup.from ? setup.from->state : gpt2::TrainState{}),
        log_(setup.folder->file("log.jsonl"), trainer_.state().step),
        status_(flags.status.empty() ? setup.folder->file("status.json") : flags.status, "gpt2 train",
                setup.run.options.schedule.steps - trainer_.state().step, 0) {
    if (setup.from) restore_arrays(*setup.from, arrays_, [this](gpt2::Flat which, const float* numbers) { network_.restore(which, numbers); });
    if (!flags.track.empty())
      trainer_.track(&tracker_.emplace(flags.track, trainer_.state().step, setup.run.options.dtype, setup.run.config.layer_norm_epsilon));
    if (!flags.tensorboard.empty()) events_.emplace(flags.tensorboard, trainer_.state().step);
    result_.from = trainer_.state().step;
    if (setup.from) result_.checkpoint = setup.from->path;
    result_.pace.flops_per_token = gpt2::training_flops_per_token(setup.run.config, setup.run.options.seqlen);
  }

  void run(TakenMemory& memory) {
    try {
      result_.pace.peak = peak_of(setup_, flags_.threads);
      steps(memory);
      draw();
    } catch (const gpt2::NotANumber& e) {
      say_track();
      throw gpt2::NotANumber(e.what() + last_good());
    } catch (const std::runtime_error& e) {
      throw gpt2::Error(fmt::format("training stopped after step {}: {}{}", trainer_.state().step, e.what(), last_good()));
    }
    result_.interrupted = stop_.signal() != 0;
    status_.end(result_.interrupted ? "interrupted" : "done");
  }

  const TrainingResult& result() const { return result_; }
  const std::vector<LogLine>& lines() const { return log_.lines(); }
  void say_track() const {
    if (tracker_) say_precision(out_, *tracker_, flags_.track);
  }
  const gpt2::PrecisionTracker* tracker() const { return tracker_ ? &*tracker_ : nullptr; }

 private:
  std::string last_good() const {
    if (result_.checkpoint.empty()) return ". There is no checkpoint yet";
    return ". The last good checkpoint is '" + printable(result_.checkpoint) + "'; go on from it with --resume";
  }

  void steps(TakenMemory& memory) {
    const int64_t last = setup_.run.options.schedule.steps, eval_every = flags_.eval_every > 0 ? flags_.eval_every : flags_.every;
    Progress progress("step", std::max<int64_t>(last - trainer_.state().step, 1));
    while (trainer_.state().step < last) {
      LogLine line = trainer_.step();
      result_.pace.seconds += line.seconds;
      result_.pace.tokens += line.tokens;
      ++result_.pace.steps;
      const bool ends = line.step == last || stop_.signal() != 0;
      if (!setup_.run.validation.empty() && (line.step % eval_every == 0 || line.step == last)) {
        status_.now(fmt::format("validation at step {}", line.step));
        line.validated = true;
        line.validation_loss = gpt2::validate(network_, setup_.run.validation, setup_.loading(), flags_.eval_batches).loss;
      }
      log_.add(line);
      tell(line);
      result_.measured_memory = memory.bytes_after(result_.pace.steps);
      progress.note(progress_notes(line, result_.pace, result_.measured_memory));
      progress.step();
      const bool kept = line.step % flags_.every == 0 || ends;
      if (kept) keep();
      if (kept || line.validated) {
        progress.wipe();
        out_.say_line(step_in_words(line, result_.pace));
      }
      if (ends) break;
    }
    result_.steps = trainer_.state().step;
    result_.why_no_graph = network_.why_no_graph();
  }

  void tell(const LogLine& line) {
    status_.step_of_many(fmt::format("step {}: loss {:.4f}, {:.0f} tokens/s", line.step, line.loss, result_.pace.tokens_per_s()));
    if (!events_) return;
    events_->scalar("loss/training", line.step, line.loss);
    if (line.validated) events_->scalar("loss/validation", line.step, line.validation_loss);
    events_->scalar("learning_rate", line.step, line.learning_rate);
    events_->scalar("gradient_norm", line.step, line.gradient_norm);
    events_->scalar("logit_scale", line.step, line.logit_scale);
    events_->scalar("loss_scale", line.step, line.loss_scale);
    events_->scalar("tokens_per_s", line.step, static_cast<double>(line.tokens) / line.seconds);
    events_->flush();
  }

  void keep() {
    status_.now(fmt::format("checkpoint of step {}", trainer_.state().step));
    gpt2::Checkpoint checkpoint;
    checkpoint.config = setup_.run.config;
    checkpoint.options = setup_.run.options;
    checkpoint.state = trainer_.state();
    checkpoint.data = setup_.run.fingerprint;
    result_.checkpoint = write_checkpoint(setup_.folder->path(), checkpoint, arrays_, setup_.texts);
    gpt2::remove_old(setup_.folder->path(), flags_.keep);
  }

  void draw() {
    draw_training(setup_.folder->file("loss.svg"), log_.lines());
    if (!flags_.figure.empty()) draw_training(flags_.figure, log_.lines());
  }

  const TrainingFlags& flags_;
  TrainingSetup& setup_;
  const Output& out_;
  const StopRequest& stop_;
  gpt2::Network& network_;
  const gpt2::Arrays arrays_;
  gpt2::Trainer trainer_;
  gpt2::TrainingLog log_;
  StatusFile status_;
  std::optional<gpt2::EventFile> events_;
  std::optional<gpt2::PrecisionTracker> tracker_;
  TrainingResult result_;
};

int train(const TrainingFlags& flags) {
  require_writable(flags.json);
  for (const std::string& file : {flags.figure, flags.track})
    if (!file.empty()) require_writable(file);
  TrainingSetup setup = set_up_training(flags);
  Output out(flags.output, flags.json);
  const StopRequest stop;  // before plans are made, which open OpenBLAS, whose threads take signals otherwise
  const std::vector<gpt2::TrainingMemory> memory = gpt2::Network::memory(setup.run.config, setup.network(), setup.compute(flags.threads));
  if (flags.memory) {
    print_training_memory(out, setup, memory);
    if (!flags.json.empty()) write_json(training_record(setup, memory, std::nullopt, {}), flags.json);
    return kExitFine;
  }
  check_memory(out, setup, memory, flags.memory_limit);
  say_beginning(out, setup);
  TakenMemory taken(gpt2_gpu(setup.run.options.device));
  gpt2::Network network(setup.run.config, setup.weights(), setup.network(), setup.compute(flags.threads));
  if (!setup.folder->before() || !setup.changed.empty()) setup.folder->describe(setup.run);
  try {
    TrainingRun run(flags, setup, network, out, stop);
    run.run(taken);
    run.say_track();
    say_end(out, setup, memory, run.result(), run.lines());
    if (!flags.json.empty()) write_json(training_record(setup, memory, run.result(), run.lines(), run.tracker()), flags.json);
  } catch (const gpt2::NotANumber& e) {
    print_error(printable(e.what()));
    return kExitCheckFailed;
  }
  return stop.signal() != 0 ? 128 + stop.signal() : kExitFine;
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
      "  fattn gpt2 train --preset gpt2 --dtype bf16 --memory");
  command->callback([flags, &exit_code] { exit_code = train(*flags); });
}

}  // namespace fattn::cli
