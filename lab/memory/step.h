// Memory of a training step of attention, tensor by tensor: what the passes write, what is kept between them, and the peak.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "measure/contestant.h"
#include "measure/problem.h"

namespace fattn::lab {

struct StepTensor {
  std::string name;  // "q, k, v", "workspace"
  int64_t bytes = 0;
  std::string arithmetic;
  bool forward = true, backward = true;  // when it is there
  bool saved = false;                    // made by the forward pass, kept for the backward pass
};

struct AttentionStepMemory {
  std::string algorithm;
  std::string reason;  // why nothing is known of it here
  bool exact = false;  // from plans of the library; else a model
  std::vector<StepTensor> tensors;

  int64_t forward_bytes() const;   // all that is there in the forward pass
  int64_t backward_bytes() const;  // 0 without one
  int64_t peak_bytes() const;
  int64_t saved_bytes() const;
};

// Options under which plans of `algorithm` are made on `place`.
Options options_of(const std::string& algorithm, const measure::Placement& place);
// From the plans that the library makes for this problem here; `device` as in memory_machine. grad: a backward pass, too.
AttentionStepMemory planned_step(const std::string& algorithm, const measure::ProblemSpec& spec, bool grad, const std::string& device);
// Standard attention as a framework runs it operator by operator: the weights are kept, scores and weights are both there in softmax, and weights, dP
// and dS in its backward pass.
AttentionStepMemory textbook_step(const measure::ProblemSpec& spec, bool grad);

}  // namespace fattn::lab
