// The backward table of tiles, without a GPU: every pair of head dimensions has a tile that its kernel can be compiled with.
#include <gtest/gtest.h>

#include "backend/cuda/requests.h"
#include "backend/cuda/v2_backward.h"

namespace fattn::core {
namespace {

Problem problem_of(int headdim, int headdim_v, bool causal) {
  Problem p;
  p.backward = true;
  p.dtype = DType::kF16;
  p.batch = 2, p.seqlen_q = p.seqlen_k = 512, p.nheads = p.nheads_k = 4;
  p.headdim = headdim, p.headdim_v = headdim_v;
  p.causal = causal;
  p.q = p.k = p.dq = p.dk = {512 * 4 * headdim, 4 * headdim, headdim};
  p.v = p.o = p.dout = p.dv = {512 * 4 * headdim_v, 4 * headdim_v, headdim_v};
  return p;
}

TEST(V2BackwardPlanSmall, EveryPairOfHeadDimensionsHasATile) {
  for (const int arch : {75, 80, 86, 89, 90, 100, 120})
    for (const int level : {75, 80}) {
      if (level > arch) continue;
      const cuda::V2Target target = cuda::target_of(arch, level);
      for (const int headdim : {8, 32, 40, 64, 96, 128, 192, 200, 256})
        for (const int headdim_v : {8, 32, 40, 64, 96, 128, 192, 200, 256}) {
          const Problem p = problem_of(headdim, headdim_v, headdim % 16 == 0);
          const std::string where =
              std::to_string(headdim) + "/" + std::to_string(headdim_v) + " on " + std::to_string(arch) + ", level " + std::to_string(level);
          ASSERT_EQ(cuda::v2_backward_refusal(p, target), "") << where;
          const cuda::V2BackwardPlan plan = cuda::plan_v2_backward(p, target);
          EXPECT_GT(plan.tile.dq_row_warps(), 0) << where;
          EXPECT_LE(plan.main.shared_bytes, target.shared_bytes) << where;
          EXPECT_EQ(plan.main.threads, plan.tile.threads()) << where;
          EXPECT_GE(plan.tile.width, headdim);
          EXPECT_GE(plan.tile.width_v, headdim_v);
        }
    }
}

TEST(V2BackwardPlanSmall, WorkspaceIsWhatTheDocumentsSay) {
  const Problem p = problem_of(64, 64, true);
  const cuda::V2BackwardPlan plan = cuda::plan_v2_backward(p, cuda::target_of(90));
  const int64_t rows = p.batch * p.nheads * p.seqlen_q;
  EXPECT_GE(plan.workspace_bytes, rows * 64 * 4 + rows * 4);
  EXPECT_LE(plan.workspace_bytes, rows * 64 * 4 + rows * 4 + 1024);
}

}  // namespace
}  // namespace fattn::core
