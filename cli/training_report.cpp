#include "cli/training_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "cli/gpt2.h"
#include "cli/gpt2_model.h"
#include "cli/sanitize.h"
#include "cli/training_precision.h"
#include "cli/whole_file.h"
#include "files/json.h"
#include "gpt2/train/checkpoint_files.h"
#include "gpt2/weights/tensors.h"
#include "lab/chart/chart.h"

namespace fattn::cli {
namespace {

using gpt2::LogLine;
using Json = nlohmann::ordered_json;

// Means over at most `most` parts of a run.
template <class Of>
lab::chart::Line means(const char* name, int look, const std::vector<LogLine>& lines, const Of& of) {
  constexpr size_t kMost = 300;
  lab::chart::Line line{name, look};
  line.marked = false;
  const size_t part = (lines.size() + kMost - 1) / kMost;
  for (size_t begin = 0; begin < lines.size(); begin += part) {
    double sum = 0, low = INFINITY, high = -INFINITY, n = 0;
    const size_t end = std::min(begin + part, lines.size());
    for (size_t i = begin; i < end; ++i) {
      const double x = of(lines[i]);
      if (!std::isfinite(x)) continue;
      sum += x;
      low = std::min(low, x);
      high = std::max(high, x);
      ++n;
    }
    const auto step = static_cast<double>(lines[begin].step + lines[end - 1].step) / 2;
    if (n > 1) line.points.push_back({step, sum / n, low, high});
    if (n == 1) line.points.push_back({step, sum});
  }
  return line;
}

// The mean loss of `count` steps from `begin` on that have one.
double mean_loss(const std::vector<LogLine>& lines, size_t begin, size_t count) {
  double sum = 0, n = 0;
  for (size_t i = begin; i < std::min(begin + count, lines.size()); ++i)
    if (std::isfinite(lines[i].loss)) {
      sum += lines[i].loss;
      ++n;
    }
  return sum / n;
}

struct Losses {
  double first = NAN, last = NAN;  // means of the first and last twentieth
  double first_validation = NAN, last_validation = NAN;
};
Losses losses_of(const std::vector<LogLine>& lines) {
  Losses losses;
  if (lines.empty()) return losses;
  const size_t part = std::max<size_t>(1, lines.size() / 20);
  losses.first = mean_loss(lines, 0, part);
  losses.last = mean_loss(lines, lines.size() - part, part);
  for (const LogLine& line : lines)
    if (line.validated) {
      if (std::isnan(losses.first_validation)) losses.first_validation = line.validation_loss;
      losses.last_validation = line.validation_loss;
    }
  return losses;
}

struct Stability {
  double largest_norm = 0, largest_logit = 0;
  int64_t clipped = 0, skipped = 0, overflows = 0;
};
Stability stability_of(const std::vector<LogLine>& lines, double clip) {
  Stability s;
  for (const LogLine& line : lines) {
    if (line.gradient_norm > s.largest_norm) s.largest_norm = line.gradient_norm;
    if (line.logit_scale > s.largest_logit) s.largest_logit = line.logit_scale;
    s.clipped += clip > 0 && line.gradient_norm > clip ? 1 : 0;
    s.skipped += line.skipped ? 1 : 0;
    s.overflows = line.overflows;
  }
  return s;
}

std::string rate_text(double tokens_per_s) { return grouped_number(std::llround(tokens_per_s)) + " tokens/s"; }
std::string memory_text(int64_t bytes) {
  return bytes < 1 << 20 ? fmt::format("{} bytes", grouped_number(bytes)) : bytes_text(static_cast<double>(bytes));
}

}  // namespace

size_t bytes_of(const std::vector<gpt2::TrainingMemory>& memory) {
  size_t sum = 0;
  for (const gpt2::TrainingMemory& use : memory) sum += use.bytes;
  return sum;
}

void print_training_memory(Output& out, const TrainingSetup& setup, const std::vector<gpt2::TrainingMemory>& memory) {
  const gpt2::TrainOptions& o = setup.run.options;
  Table table({Column::text("what").as_key(), Column::number("memory", "bytes"), Column::number("share").ranked(1)},
              fmt::format("Memory of training in {}, batch {}, seqlen {}{}", name_of(o.dtype), o.sequences, o.seqlen,
                          setup.share.context_ranks > 1 ? fmt::format(", of one of {} processes that share them", setup.share.context_ranks) : ""));
  const auto total = static_cast<double>(bytes_of(memory));
  for (const gpt2::TrainingMemory& use : memory)
    table.add({use.what, Cell(memory_text(static_cast<int64_t>(use.bytes)), std::to_string(use.bytes)),
               percent_cell(static_cast<double>(use.bytes) / total)});
  table.add({"in all", Cell(memory_text(static_cast<int64_t>(total)), std::to_string(bytes_of(memory))), percent_cell(1)});
  out.print(table);
}

std::vector<std::string> progress_notes(const LogLine& line, const TrainingPace& pace, int64_t memory) {
  std::vector<std::string> notes{fmt::format("loss {:.4f}", line.loss), rate_text(pace.tokens_per_s())};
  if (pace.peak > 0) notes.push_back("MFU " + percent_text(pace.mfu()));
  notes.push_back(fmt::format("norm {:.3g}", line.gradient_norm));
  if (memory > 0) notes.push_back(memory_text(memory));
  return notes;
}

std::string step_in_words(const LogLine& line, const TrainingPace& pace) {
  return fmt::format("step {}: loss {:.4f}{}, gradient norm {:.3g}, learning rate {:.3g}, {}", line.step, line.loss,
                     line.validated ? fmt::format(", validation {:.4f}", line.validation_loss) : "", line.gradient_norm, line.learning_rate,
                     rate_text(pace.tokens_per_s())) +
         (pace.peak > 0 ? ", MFU " + percent_text(pace.mfu()) : "");
}

void say_beginning(const Output& out, const TrainingSetup& setup) {
  const gpt2::RunDescription& run = setup.run;
  const gpt2::TrainOptions& o = run.options;
  out.say(fmt::format("{} parameters, {}; {} tokens of data, {} to a step; {} steps into {}", grouped_number(gpt2::parameters_of(run.config)),
                      name_of(o.dtype), grouped_number(setup.loader->tokens()), grouped_number(o.sequences * o.seqlen * o.accumulate),
                      grouped_number(o.schedule.steps), printable(setup.folder->path())));
  const gpt2::Share& share = setup.share;
  if (share.context_ranks > 1)
    out.say(fmt::format("{} processes share each sequence; {} group{} of them {} the {} batch{} of a step; this is rank 0.", share.context_ranks,
                        share.data_ranks, share.data_ranks == 1 ? "" : "s", share.data_ranks == 1 ? "has" : "share", grouped_number(o.accumulate),
                        o.accumulate == 1 ? "" : "es"));
  else if (setup.launch.several())
    out.say(fmt::format("{} processes share the {} batches of a step; this is rank 0.", setup.launch.ranks, grouped_number(o.accumulate)));
  if (setup.from) out.say(fmt::format("Going on from step {}: {}", setup.from->state.step, printable(setup.from->path)));
  if (!setup.from && setup.folder->before()) out.say("There is no checkpoint yet: beginning at the first step.");
  if (!setup.changed.empty()) out.say("Changed: " + setup.changed + ".");
  if (run.validation.empty()) out.say("There is no validation data (--validation): the loss of text that is not trained on stays unknown.");
  if (setup.texts.empty()) out.say("There is no tokenizer beside model or data (--tokenizer): checkpoints will take and give ids alone.");
}

void say_end(const Output& out, const TrainingSetup& setup, const std::vector<gpt2::TrainingMemory>& memory, const TrainingResult& result,
             const std::vector<LogLine>& lines) {
  const Losses losses = losses_of(lines);
  const gpt2::TrainOptions& o = setup.run.options;
  const Stability stability = stability_of(lines, o.clip);
  if (!lines.empty()) {
    std::string text = fmt::format("The loss went from {:.4f} to {:.4f} in {} steps", losses.first, losses.last, grouped_number(lines.back().step));
    if (!std::isnan(losses.last_validation)) text += fmt::format("; of text that is not trained on it is {:.4f}", losses.last_validation);
    out.say(text + ".");
    text = fmt::format("Gradient norm at most {:.3g}", stability.largest_norm);
    if (o.clip > 0) text += fmt::format(" (clipped at {:g} in {} steps)", o.clip, grouped_number(stability.clipped));
    text += fmt::format(", logits at most {:.3g}", stability.largest_logit);
    if (o.dtype == DType::kF16) text += fmt::format(", {} overflows of fp16, whose steps changed nothing", stability.overflows);
    out.say(text + ".");
  }
  if (result.pace.steps > 0) {
    std::string text = rate_text(result.pace.tokens_per_s());
    if (result.pace.peak > 0) text += fmt::format(", {} of the machine's peak", percent_text(result.pace.mfu()));
    text += fmt::format("; memory of {}", memory_text(static_cast<int64_t>(bytes_of(memory))));
    if (result.measured_memory > 0)
      text += fmt::format(" ({} {})", gpt2_gpu(o.device) ? "measured" : "the process grew by", memory_text(result.measured_memory));
    out.say(text + ".");
    if (!result.why_no_graph.empty()) out.say("Steps were launched one by one, not from a CUDA graph: " + printable(result.why_no_graph));
  }
  const std::string folder = printable(setup.folder->path());
  if (result.interrupted) {
    out.say(fmt::format("Interrupted. Go on with: fattn gpt2 train --out {} --resume", folder));
    return;
  }
  out.say(fmt::format("checkpoint: {}", printable(result.checkpoint)));
  out.say(fmt::format("loss curve: {}/loss.svg, steps: {}/log.jsonl", folder, folder));
  out.say(fmt::format("Next: fattn gpt2 generate {} {}", printable(result.checkpoint),
                      setup.texts.empty() ? "--ids 0 -n 50" : "'Once upon a time' -n 50"));
}

void draw_training(const std::string& file, const std::vector<LogLine>& lines) {
  using namespace lab::chart;
  Panel loss{"Loss"}, norm{"Gradient norm"};
  loss.x = norm.x = {"step", ScaleKind::kLinear};
  loss.y = {"nats a token", ScaleKind::kLinear};
  loss.y.from_zero = false;
  norm.y = {"before clipping", ScaleKind::kLog10};
  loss.lines.push_back(means("training", 0, lines, [](const LogLine& line) { return line.loss; }));
  norm.lines.push_back(means("training", 0, lines, [](const LogLine& line) { return line.gradient_norm; }));
  Line validation{"validation", 1};
  for (const LogLine& line : lines)
    if (line.validated) validation.points.push_back({static_cast<double>(line.step), line.validation_loss});
  if (!validation.points.empty()) loss.lines.push_back(validation);
  Figure figure{
      "Training", "Loss and gradient norm by step; bands reach from the least to the greatest of the steps that a point stands for.", {loss, norm}};
  const std::string svg = to_svg(figure) + "\n";
  WholeFile to(file);
  to.write(svg.data(), svg.size());
  to.publish();
}

Json training_record(const TrainingSetup& setup, const std::vector<gpt2::TrainingMemory>& memory, const std::optional<TrainingResult>& result,
                     const std::vector<LogLine>& lines, const gpt2::PrecisionTracker* tracker) {
  const gpt2::RunDescription& run = setup.run;
  Json record = gpt2_record("train");
  record["config"] = Json::parse(gpt2::to_json(run.config, run.options.dtype));
  record["options"] = to_json(run.options);
  record["processes"] = setup.launch.ranks;
  record["context_parallel"] = setup.share.context_ranks;
  record["parameters"] = gpt2::parameters_of(run.config);
  record["memory"] = Json::array();
  for (const gpt2::TrainingMemory& use : memory) record["memory"].push_back({{"what", use.what}, {"bytes", use.bytes}});
  record["memory_bytes"] = bytes_of(memory);
  if (!result) {
    record["run"] = nullptr;
    return record;
  }
  const Losses losses = losses_of(lines);
  const Stability stability = stability_of(lines, run.options.clip);
  record["run"] = {{"out", printable(setup.folder->path())},
                   {"data", {{"tokens", setup.loader->tokens()}, {"fingerprint", gpt2::hex_word(run.fingerprint)}}},
                   {"steps", result->steps},
                   {"resumed_from", setup.from ? Json(result->from) : Json()},
                   {"interrupted", result->interrupted},
                   {"loss_first", files::number_or_null(losses.first)},
                   {"loss_last", files::number_or_null(losses.last)},
                   {"validation_loss", files::number_or_null(losses.last_validation)},
                   {"largest_gradient_norm", files::number_or_null(stability.largest_norm)},
                   {"largest_logit", files::number_or_null(stability.largest_logit)},
                   {"clipped_steps", stability.clipped},
                   {"skipped_steps", stability.skipped},
                   {"overflows", stability.overflows},
                   {"tokens_per_s", files::number_or_null(result->pace.tokens_per_s())},
                   {"flops_per_token", result->pace.flops_per_token},
                   {"peak_flops_per_s", result->pace.peak > 0 ? Json(result->pace.peak) : Json()},
                   {"mfu", result->pace.peak > 0 ? files::number_or_null(result->pace.mfu()) : Json()},
                   {"seconds", result->pace.seconds},
                   {"memory_measured", result->measured_memory > 0 ? Json(result->measured_memory) : Json()},
                   {"checkpoint", result->checkpoint.empty() ? Json() : Json(printable(result->checkpoint))}};
  if (tracker) record["run"]["precision"] = precision_json(*tracker);
  return record;
}

}  // namespace fattn::cli
