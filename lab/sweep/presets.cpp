#include "lab/sweep/presets.h"

#include <algorithm>

namespace fattn::lab {
namespace {

using measure::Pass;
using measure::ProblemSpec;

ProblemSpec problem(int64_t batch, int64_t seqlen, int64_t nheads, int64_t headdim, bool causal = false) {
  ProblemSpec s;
  s.batch = batch;
  s.seqlen_q = s.seqlen_k = seqlen;
  s.nheads = s.nheads_k = nheads;
  s.headdim = s.headdim_v = headdim;
  s.causal = causal;
  return s;
}

std::vector<SweepPreset> all() {
  const std::vector<Pass> passes = {Pass::kForward, Pass::kBackward, Pass::kForwardBackward};
  const std::vector<std::string> two = {"standard", "fattn"};
  std::vector<SweepPreset> presets = {
      {"headline",
       "batch 16, seqlen 1024, 32 heads, embedding 2048, causal and not, beside the documents' 9x, 4.5x and 14 %",
       SweepAxis::kCausal,
       {0, 1},
       problem(16, 1024, 32, 64),
       passes,
       two},
      {"seqlen", "seqlen 256 to 16384; batch 4, 12 heads, headdim 64", SweepAxis::kSeqlen, values_by_factor(256, 16384, 2), problem(4, 1024, 12, 64),
       passes, two},
      {"batch", "batch 1 to 16; seqlen 1024, 12 heads, headdim 64", SweepAxis::kBatch, values_by_factor(1, 16, 2), problem(4, 1024, 12, 64), passes,
       two},
      {"heads", "8 to 64 heads of an embedding of 2048; batch 16, seqlen 1024", SweepAxis::kNheads, values_by_factor(8, 64, 2),
       problem(16, 1024, 32, 64), passes, two},
      {"embed", "embedding 512 to 4096 with 32 heads; batch 16, seqlen 1024", SweepAxis::kEmbed, values_by_factor(512, 4096, 2),
       problem(16, 1024, 32, 64), passes, two},
      {"gpt2-medium",
       "seqlen 512 to 8192, causal; batch 4, 16 heads, headdim 64; standard, v1, v2 and the library's choice",
       SweepAxis::kSeqlen,
       values_by_factor(512, 8192, 2),
       problem(4, 1024, 16, 64, true),
       passes,
       {"standard", "v1", "v2", "fattn"}},
      {"ci",
       "seqlen 64 to 256 with few samples, in seconds: for machines that test",
       SweepAxis::kSeqlen,
       values_by_factor(64, 256, 2),
       problem(1, 128, 2, 32),
       {Pass::kForward, Pass::kBackward},
       two},
  };
  measure::SamplingOptions few;
  few.repeats = 6;
  few.min_seconds = 0;
  few.max_seconds = 0.2;
  few.warmup = 1;
  presets.back().sampling = few;
  return presets;
}

}  // namespace

const std::vector<SweepPreset>& sweep_presets() {
  static const std::vector<SweepPreset> presets = all();
  return presets;
}

const SweepPreset* sweep_preset(const std::string& name) {
  const auto& presets = sweep_presets();
  const auto found = std::find_if(presets.begin(), presets.end(), [&](const SweepPreset& p) { return p.name == name; });
  return found == presets.end() ? nullptr : &*found;
}

}  // namespace fattn::lab
