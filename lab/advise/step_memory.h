// The memory of a training step or of inference, line by line, each with the arithmetic that gives it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lab/advise/model_size.h"

namespace fattn::lab {

enum class Task { kTrain, kInfer };
enum class Precision { kBF16, kFP16, kFP32 };
constexpr const char* name_of(Precision p) { return p == Precision::kBF16 ? "bf16" : p == Precision::kFP16 ? "fp16" : "fp32"; }

struct StepPlan {
  ModelSize model;
  Task task = Task::kTrain;
  Precision precision = Precision::kBF16;  // of products; training in 16 bits keeps fp32 master weights
  int64_t seqlen = 1024, batch = 1;
  bool checkpointing = false;  // each layer keeps its input alone and is computed again
  bool standard = false;       // attention that stores its matrices
};

struct MemoryLine {
  std::string what, arithmetic;
  double bytes = 0;  // double: sizes of the largest models times the largest batches
};
struct StepMemory {
  std::vector<MemoryLine> lines;
  double bytes = 0;
};
StepMemory memory_of(const StepPlan& plan);

}  // namespace fattn::lab
