// What memory the CPU's backward pass needs: workspace, gradients, o and lse together, as `fattn bench` counts them.
#include <gtest/gtest.h>

#include "fattn/fattn.hpp"
#include "testing/run.h"
#include "testing/targets.h"

namespace fattn::testing {
namespace {

constexpr double kMiB = 1024 * 1024;

struct Known {
  DType dtype;
  int64_t headdim;
  bool causal;
  double most_mib;
};
// Of batch 1, seqlen 2048, 8 heads, 2 threads. That is what PyTorch 2.15 takes.
constexpr Known kKnown[] = {
    {DType::kF32, 64, false, 22.1}, {DType::kF32, 128, true, 42.1}, {DType::kF16, 128, false, 25.0}, {DType::kBF16, 128, false, 25.0}};

TEST(CpuMemory, OfTheBackwardPassHasOneDq) {
  int measured = 0;
  for (const Known& known : kKnown) {
    Case c;
    c.dtype = known.dtype;
    c.seqlen_q = c.seqlen_k = 2048;
    c.nheads = c.nheads_k = 8;
    c.headdim = c.headdim_v = known.headdim;
    c.causal = known.causal;
    const CaseInputs in = make_inputs(c);
    const CaseForward forward = make_forward(c);
    const CaseGradients gradients = make_gradients(c);
    for (const Target& target : all_targets()) {
      if (target.backend != Backend::kCpu || target.algorithm == Algorithm::kStandard || !why_unavailable(target, known.dtype).empty()) continue;
      Options options = options_of(c, target);
      options.num_threads = 2;
      const BackwardTensors tensors{in.q, in.k, in.v, forward.o, forward.lse, in.dout, gradients.dq, gradients.dk, gradients.dv};
      const auto workspace = static_cast<double>(Plan(tensors, options).workspace_bytes());
      const double outputs = 2048 * 8 * (4.0 * static_cast<double>(known.headdim) * (known.dtype == DType::kF32 ? 4 : 2) + 4);
      EXPECT_TRUE(workspace + outputs <= known.most_mib * kMiB)
          << name_of(c) << " on " << name_of(target) << ": " << workspace / kMiB << " MiB of workspace and " << outputs / kMiB
          << " MiB of outputs, allowed " << known.most_mib;
      ++measured;
    }
  }
  EXPECT_GT(measured, 0);
}

}  // namespace
}  // namespace fattn::testing
