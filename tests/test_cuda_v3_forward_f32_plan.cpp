// The host side of the CUDA v3 forward kernels for fp32: the table of tiles, refusals, the workspace, parameters and the emitted sources. Needs no
// GPU.
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "backend/cuda/v3_forward_f32.h"
#include "v3_problem.h"

namespace fattn::core::cuda {
namespace {

Problem f32(int64_t headdim, int64_t headdim_v, bool causal, int64_t seqlen_q = 300, int64_t seqlen_k = 523) {
  Problem p = problem_of(DType::kF32, headdim, headdim_v, causal, seqlen_q, seqlen_k);
  p.algorithm = Algorithm::kV3;
  return p;
}

TEST(V3ForwardF32PlanSmall, EveryPairOfHeaddimsHasATileThatFits) {
  for (const bool causal : {false, true})
    for (int64_t headdim = 1; headdim <= 128; ++headdim)
      for (int64_t headdim_v = 1; headdim_v <= 128; ++headdim_v) {
        const Problem p = f32(headdim, headdim_v, causal);
        ASSERT_EQ(v3_forward_f32_refusal(p, kH200), "") << headdim << " " << headdim_v;
        const V3ForwardF32Plan plan = plan_v3_forward_f32(p, kH200);
        EXPECT_LE(plan.shared_bytes, kH200.shared_bytes);
        EXPECT_EQ(plan.tiles, (300 + plan.tile.block_m() - 1) / plan.tile.block_m() * 12);
        EXPECT_EQ(plan.aligned_strides, headdim % 4 == 0 && headdim_v % 4 == 0);
      }
}

// What kernels/v3/forward_f32*.h assumes of a tile. Registers: setmaxnreg beyond what the launch gave would wait for ever.
TEST(V3ForwardF32PlanSmall, TilesAreWellFormed) {
  for (const V3ForwardF32Row& row : v3_forward_f32_rows()) {
    const V3ForwardF32Tile& tile = row.tile;
    EXPECT_GE(tile.stages_k, 2) << "keys are one block ahead of values";
    EXPECT_GE(tile.stages_v, 1);
    EXPECT_EQ(tile.producer_registers % 8, 0);
    EXPECT_EQ(tile.consumer_registers % 8, 0);
    EXPECT_TRUE(tile.registers_suffice());
    EXPECT_LE(tile.launch_registers() * tile.threads(), 65536);
    EXPECT_LE(tile.groups + 1, 16) << "named barriers";
    // Scores, split weights, o, a block's product and the queries, if they are there.
    const int queries = tile.queries_in_registers ? row.headdim / 2 : 0;
    EXPECT_LE(32 + 32 + row.headdim_v + queries, tile.consumer_registers - 24);
  }
}

TEST(V3ForwardF32PlanSmall, TheWorkspaceHasBothPartsOfAllKeysAndValues) {
  const Problem p = f32(96, 40, true);
  const V3ForwardF32Plan plan = plan_v3_forward_f32(p, kH200);
  const int64_t blocks = 2 * 2 * 9;  // batch, nheads_k, 523 keys by 64
  EXPECT_EQ(plan.blocks, 9);
  EXPECT_EQ(plan.split_grid, 2 * blocks);
  EXPECT_EQ(plan.values_offset, blocks * 64 * 128 * 4);
  EXPECT_EQ(plan.factors_offset, plan.values_offset + blocks * 64 * 64 * 4);
  EXPECT_EQ(plan.spoilt_offset, plan.factors_offset + 2 * blocks * 16);
  EXPECT_EQ(plan.workspace_bytes, plan.spoilt_offset + blocks * (2 * 16 + 2 * 128));
  alignas(16) static char workspace[16];
  fattn_buffers buffers{};
  buffers.workspace = workspace;
  const V3ForwardF32Params params = v3_forward_f32_params(p, plan, buffers);
  EXPECT_EQ(reinterpret_cast<char*>(params.parts.k), workspace);
  EXPECT_EQ(params.parts.v - params.parts.k, plan.values_offset);
  EXPECT_EQ(reinterpret_cast<unsigned char*>(params.parts.k_factors) - params.parts.k, plan.factors_offset);
  EXPECT_EQ(params.parts.v_factors - params.parts.k_factors, blocks);
  EXPECT_EQ(reinterpret_cast<unsigned char*>(params.parts.v_spoilt) - params.parts.k, plan.spoilt_offset);
  EXPECT_EQ(params.parts.blocks, 9);
  EXPECT_EQ(params.work.tiles, plan.tiles);
  EXPECT_FLOAT_EQ(params.call.softmax_scale_log2, 0.125f * 1.442695041f);
}

TEST(V3ForwardF32PlanSmall, RefusesWithAReason) {
  const auto refusal = [](auto change) {
    Problem p = f32(64, 64, false);
    change(p);
    return v3_forward_f32_refusal(p, kH200);
  };
  const auto says = [&](auto change, const char* what) {
    const std::string why = refusal(change);
    EXPECT_NE(why.find(what), std::string::npos) << why;
  };
  EXPECT_EQ(refusal([](Problem&) {}), "");
  says([](Problem& p) { p.window_left = 9; }, "no windows in fp32; algorithm v2 has");
  says([](Problem& p) { p.softcap = 9; }, "no softcap in fp32");
  says([](Problem& p) { p.has_seqused_k = true; }, "no lengths");
  says([](Problem& p) { p.has_alibi = true; }, "no ALiBi");
  says([](Problem& p) { p.dropout_below = 9; }, "no dropout");
  says([](Problem& p) { p.packed = true; }, "no packed sequences in fp32; algorithm v2 has");
  says([](Problem& p) { p.bias.given = true; }, "bias");
  says([](Problem& p) { p.headdim = 132; }, "132");
  says([](Problem& p) { p.headdim_v = 132; }, "132");
  says([](Problem& p) { p.seqlen_k = 0; }, "no keys");
  says([](Problem& p) { p.seqlen_k = int64_t{1} << 31; }, "seqlen_k");
  says([](Problem& p) { p.batch = int64_t{1} << 20, p.seqlen_k = int64_t{1} << 20; }, "split the batch");
}

// Splitting keys and values in advance is for many queries; who asks for v3 gets it for few, too.
TEST(V3ForwardF32PlanSmall, FewQueriesAreForV2UnlessV3IsAskedFor) {
  Problem p = f32(64, 64, false, 5);  // of three heads: 15
  EXPECT_EQ(v3_forward_f32_refusal(p, kH200), "");
  p.algorithm = Algorithm::kAuto;
  EXPECT_NE(v3_forward_f32_refusal(p, kH200).find("15 queries of a key head are fewer than 16"), std::string::npos);
  p.seqlen_q = 6;
  EXPECT_EQ(v3_forward_f32_refusal(p, kH200), "");
}

TEST(V3ForwardF32PlanSmall, StridesDecideHowRowsAreCopied) {
  const auto aligned = [&](auto change) {
    Problem p = f32(64, 64, false);
    change(p);
    return plan_v3_forward_f32(p, kH200).aligned_strides;
  };
  EXPECT_TRUE(aligned([](Problem&) {}));
  EXPECT_FALSE(aligned([](Problem& p) { p.k.row += 2; }));
  EXPECT_FALSE(aligned([](Problem& p) { p.o.head += 1; }));
}

TEST(V3ForwardF32PlanSmall, SourcesTellSpecialisationsApart) {
  std::set<std::string> sources;
  int count = 0;
  for (const auto& [headdim, headdim_v] : {std::pair<int64_t, int64_t>{64, 64}, {64, 128}, {128, 128}})
    for (const bool causal : {false, true})
      for (const int aligned : {0, 1}) {
        V3ForwardF32Plan plan = plan_v3_forward_f32(f32(headdim, headdim_v, causal), kH200);
        plan.key.aligned = aligned;
        const jit::Request main = v3_forward_f32_request(plan.key), split = v3_forward_f32_request(plan.split_key());
        EXPECT_EQ(main.entry, "fattn_v3_fwd_f32");
        EXPECT_EQ(split.entry, "fattn_v3_f32_split");
        EXPECT_TRUE(main.arch_specific && split.arch_specific);
        EXPECT_EQ(main.source.find("unaligned") != std::string::npos, aligned == 0);
        sources.insert(main.source);
        if (causal) sources.insert(split.source);
        count += causal ? 2 : 1;
      }
  EXPECT_EQ(sources.size(), static_cast<size_t>(count));
}

}  // namespace
}  // namespace fattn::core::cuda
