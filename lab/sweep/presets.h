// Whole experiments by name: those of the documents that this laboratory began with, and a small one for machines that test.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lab/sweep/axis.h"
#include "measure/sampling.h"

namespace fattn::lab {

struct SweepPreset {
  std::string name, what;  // `what`: for help
  SweepAxis axis = SweepAxis::kSeqlen;
  std::vector<int64_t> values;
  measure::ProblemSpec spec;  // but for the dtype, which is the device's
  std::vector<measure::Pass> passes;
  std::vector<std::string> contestants;
  std::optional<measure::SamplingOptions> sampling = std::nullopt;
};

const std::vector<SweepPreset>& sweep_presets();
const SweepPreset* sweep_preset(const std::string& name);

// What the documents say of attention on their GPU, which they do not name: batch 16, seqlen 1024, 32 heads, embedding 2048.
struct Headline {
  double forward = 9, backward = 4.5;  // times as fast as PyTorch's attention
  double memory_share = 0.14;          // of its peak memory
};
inline constexpr Headline kDocuments;

}  // namespace fattn::lab
