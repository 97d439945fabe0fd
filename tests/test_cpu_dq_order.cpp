// The backward pass of the CPU with several tasks a key head: each adds to dq in its turn, so any number of threads gives the same bits.
#include <gtest/gtest.h>

#include "testing/run.h"
#include "testing/targets.h"

namespace fattn::testing {
namespace {

class CpuDqOrderSmall : public ::testing::TestWithParam<Target> {};

TEST_P(CpuDqOrderSmall, IsThatOfKeysWithAnyNumberOfThreads) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    if (!why_unavailable(GetParam(), dtype).empty()) continue;
    std::vector<Case> cases(6);
    for (Case& c : cases) {
      c.dtype = dtype;
      c.seqlen_q = 300;
      c.seqlen_k = 1300;  // three super-blocks and more
      c.nheads = 2;       // of one key head
    }
    cases[1].causal = true;
    cases[2].window_left = 200;
    cases[2].window_right = 10;
    cases[3].documents = Documents::kSorted;
    cases[4].causal = cases[4].key_lengths = true;
    cases[4].batch = 2;
    cases[5].causal = cases[5].varlen = true;
    cases[5].batch = 2;
    for (const Case& c : cases) {
      const CaseInputs in = make_inputs(c);
      Options options = options_of(c, GetParam());
      options.num_threads = 1;
      const Outputs alone = run_passes(c, in, options);
      for (const int threads : {2, 5, 16}) {
        options.num_threads = threads;
        EXPECT_TRUE(same_bits(alone, run_passes(c, in, options))) << name_of(c) << " with " << threads << " threads";
      }
    }
  }
}

std::vector<Target> cpu_targets() {
  std::vector<Target> targets;
  for (const Target& t : all_targets())
    if (t.backend == Backend::kCpu && t.algorithm == Algorithm::kV2) targets.push_back(t);
  return targets;
}
INSTANTIATE_TEST_SUITE_P(Every, CpuDqOrderSmall, ::testing::ValuesIn(cpu_targets()), [](const auto& p) { return name_of(p.param); });

}  // namespace
}  // namespace fattn::testing
