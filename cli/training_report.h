// What `fattn gpt2 train` says: memory, progress, the end in words, the loss as a figure, the record.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cli/output.h"
#include "cli/training_setup.h"
#include "gpt2/train/log.h"
#include "gpt2/train/network.h"
#include "gpt2/train/tracker.h"

namespace fattn::cli {

// How a run's steps went on this machine, in this process.
struct TrainingPace {
  double seconds = 0;  // of steps alone
  int64_t tokens = 0, steps = 0;
  double flops_per_token = 0, peak = 0;  // FLOP/s; 0: not known

  double tokens_per_s() const { return seconds > 0 ? static_cast<double>(tokens) / seconds : 0; }
  double mfu() const { return peak > 0 ? tokens_per_s() * flops_per_token / peak : 0; }
};

// What a run has to show in the end.
struct TrainingResult {
  TrainingPace pace;
  int64_t measured_memory = 0;  // what the process grew by at most, or a GPU's that it took; 0: not known
  std::string why_no_graph;     // on a GPU; empty: steps are replayed from one
  std::string checkpoint;       // the last one; empty: none
  int64_t from = 0;             // step that it went on from
  int64_t steps = 0;            // of the run, in all processes
  bool interrupted = false;
};

size_t bytes_of(const std::vector<gpt2::TrainingMemory>& memory);
void print_training_memory(Output& out, const TrainingSetup& setup, const std::vector<gpt2::TrainingMemory>& memory);

// "12,345 tokens/s", "loss 3.2145" and so on, the most wanted first.
std::vector<std::string> progress_notes(const gpt2::LogLine& line, const TrainingPace& pace, int64_t memory);
// The same of a step as a sentence.
std::string step_in_words(const gpt2::LogLine& line, const TrainingPace& pace);

void say_beginning(const Output& out, const TrainingSetup& setup);
void say_end(const Output& out, const TrainingSetup& setup, const std::vector<gpt2::TrainingMemory>& memory, const TrainingResult& result,
             const std::vector<gpt2::LogLine>& lines);

// Throws std::runtime_error where it cannot be written.
void draw_training(const std::string& file, const std::vector<gpt2::LogLine>& lines);

nlohmann::ordered_json training_record(const TrainingSetup& setup, const std::vector<gpt2::TrainingMemory>& memory,
                                       const std::optional<TrainingResult>& result, const std::vector<gpt2::LogLine>& lines,
                                       const gpt2::PrecisionTracker* tracker = nullptr);

}  // namespace fattn::cli
