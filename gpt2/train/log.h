// The log of a training run: a line of JSON a step. A run that goes on from a checkpoint leaves out what came after it.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "gpt2/train/step_lines.h"

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
  // Lines of steps up to `after` become lines(); StepLines has the rest.
  TrainingLog(const std::string& path, int64_t after);

  void add(const LogLine& line);
  const std::vector<LogLine>& lines() const { return lines_; }

 private:
  std::vector<LogLine> lines_;  // before the file, whose lines it takes
  StepLines file_;
};

}  // namespace fattn::gpt2
