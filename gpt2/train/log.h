// The log of a training run: a line of JSON a step. A run that goes on from a checkpoint leaves out what came after it.
#pragma once

#include <cstdint>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace fattn::gpt2 {

struct LogLine {
  int64_t step = 0, tokens = 0, targets = 0;  // tokens and targets of the step
  double loss = 0, learning_rate = 0, gradient_norm = 0, logit_scale = 0, loss_scale = 1;
  int64_t overflows = 0;  // so far
  bool skipped = false;   // this step's gradients were not finite, in fp16: no weight has changed
  double validation_loss = 0;
  bool validated = false;
  double seconds = 0;  // that the step took
};

nlohmann::ordered_json to_json(const LogLine& line);

class TrainingLog {
 public:
  // Keeps lines of steps up to `after`, which become lines(), and goes on behind them. A last line that is cut off is left out. Throws
  // std::runtime_error where the file cannot be read or written, or is no log.
  TrainingLog(const std::string& path, int64_t after);
  ~TrainingLog();
  TrainingLog(const TrainingLog&) = delete;
  TrainingLog& operator=(const TrainingLog&) = delete;

  // Is with the system when this returns: kill -9 loses no line.
  void add(const LogLine& line);
  const std::vector<LogLine>& lines() const { return lines_; }

 private:
  const std::string path_;
  std::FILE* file_ = nullptr;
  std::vector<LogLine> lines_;
};

}  // namespace fattn::gpt2
