// Advice on how to train or run a model in a given memory: from the memory model alone, and its time where rates are known.
#pragma once

#include <optional>
#include <string>

#include "lab/advise/step_memory.h"

namespace fattn::lab {

struct AdviceRequest {
  double memory_bytes = 0;
  ModelSize model;
  Task task = Task::kTrain;
  Precision precision = Precision::kBF16;
  int64_t seqlen = 1024;
  int64_t effective_batch = 32;  // sequences of an optimizer step; of inference the most at once
};

struct Advice {
  bool fits = false;
  StepPlan plan;                  // of a micro-batch
  int64_t accumulation = 1;       // micro-batches of an optimizer step
  StepMemory memory, standard;    // the second: the same plan with standard attention
  int64_t standard_batch = 0;     // the most that standard attention could have; 0: not even one sequence
  std::string why, would_fit;     // where nothing fits
  std::string checkpointing_why;  // why it is on or off
  int64_t effective_batch() const { return plan.batch * accumulation; }
};

Advice advise(const AdviceRequest& request);

// The largest batch up to `most` whose plan stays within the memory; 0: none.
int64_t largest_batch(StepPlan plan, double memory_bytes, int64_t most);

}  // namespace fattn::lab
