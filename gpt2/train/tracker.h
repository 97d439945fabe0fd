// Records where the tensors of a training run leave what their dtype holds: a line of JSON a step, tensor and kind of violation.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "gpt2/train/network.h"
#include "gpt2/train/precision.h"
#include "gpt2/train/step_lines.h"
#include "gpt2/train/watcher.h"

namespace fattn::gpt2 {

enum class Violation {
  kOverflow,    // Inf: count, of all elements
  kNaN,         // the same
  kUnderflow,   // share of elements below the smallest normal number of a 16-bit dtype, beyond kMostUnderflow; rows of zeros alone do not count
  kStatistics,  // rows of the residual stream whose variance LayerNorm cannot use: below epsilon, or not finite
  kLogits,      // the largest |logit|, or log-sum-exp of scores, above largest_safe_logit()
};
const char* name_of(Violation kind);  // "overflow", "nan", "underflow", "statistics", "logits"

class PrecisionTracker : public PassWatcher {
 public:
  static constexpr double kMostUnderflow = 0.25;
  static constexpr int64_t kMostLines = 100'000;  // of the file in one run; what comes after is counted only

  // Lines of steps up to `after` of a file that is there stay; StepLines has the rest.
  PrecisionTracker(const std::string& path, int64_t after, DType network, double layer_norm_epsilon);

  void begin(int64_t step, double loss_scale);
  void see(const SeenTensor& tensor) override;
  void see_gradients(Network& network);  // of all parameters
  void see_logits(double largest, int64_t rows, int64_t vocab);
  void end();  // writes the step's lines

  // What was found in this run, the worst of each kind and tensor.
  struct Found {
    Violation kind;
    std::string tensor;
    int64_t steps = 0, first_step = 0, worst_step = 0;
    double worst = 0;  // share of elements; of logits the number itself
  };
  std::vector<Found> found() const;
  int64_t steps() const { return steps_; }
  int64_t tensors() const { return tensors_; }  // that were looked at, in all steps
  int64_t lines_left_out() const { return lines_ > kMostLines ? lines_ - kMostLines : 0; }

 private:
  struct Entry {
    std::vector<int64_t> shape;
    DType stored = DType::kF32;
    int64_t count = 0, elements = 0;
    double value = 0, limit = 0;
  };
  void note(Violation kind, const std::string& tensor, std::vector<int64_t> shape, DType stored, int64_t count, int64_t elements, double value,
            double limit);
  void see_underflow(const SeenTensor& tensor);
  void see_statistics(const SeenTensor& tensor);

  const DType network_;
  const double epsilon_;
  StepLines file_;
  int64_t step_ = 0, steps_ = 0, tensors_ = 0, lines_ = 0;
  double loss_scale_ = 1;
  std::vector<float> buffer_;
  std::map<std::pair<Violation, std::string>, Entry> entries_;  // of the step
  std::map<std::pair<Violation, std::string>, Found> found_;
};

}  // namespace fattn::gpt2
