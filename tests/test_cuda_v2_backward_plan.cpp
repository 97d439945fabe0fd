// The backward table of tiles, without a GPU: every pair of head dimensions has a tile that its kernel can be compiled with.
#include <gtest/gtest.h>

#include "backend/cuda/pair_features.h"
#include "backend/cuda/requests.h"
#include "backend/cuda/v2_backward.h"

namespace fattn::core {
namespace {

Problem problem_of(int headdim, int headdim_v, bool causal, DType dtype = DType::kF16) {
  Problem p;
  p.backward = true;
  p.dtype = dtype;
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
        for (const int headdim_v : {8, 32, 40, 64, 96, 128, 192, 200, 256})
          for (const DType dtype : {DType::kF16, DType::kF32}) {
            if (dtype == DType::kF32 && level < 80) continue;
            const Problem p = problem_of(headdim, headdim_v, headdim % 16 == 0, dtype);
            const std::string where = std::to_string(headdim) + "/" + std::to_string(headdim_v) + " " + name_of(dtype) + " on " +
                                      std::to_string(arch) + ", level " + std::to_string(level);
            ASSERT_EQ(cuda::v2_backward_refusal(p, target), "") << where;
            const cuda::V2BackwardPlan plan = cuda::plan_v2_backward(p, target);
            EXPECT_GT(plan.tile.dq_row_warps(), 0) << where;
            EXPECT_LE(plan.main.shared_bytes, target.shared_bytes) << where;
            EXPECT_EQ(plan.main.threads, plan.tile.threads()) << where;
            EXPECT_GE(plan.tile.width, headdim);
            EXPECT_GE(plan.tile.width_v, headdim_v);
            EXPECT_EQ(cuda::v2_backward_rows()[static_cast<size_t>(plan.key.row)].f32, dtype == DType::kF32);
            if (dtype != DType::kF32) continue;
            Problem features = p;
            features.backward = features.has_seqused_k = features.has_alibi = features.pair_mask.given = true;
            features.bias = features.dbias = {true, DType::kF32, 1, 1, 1, {}};
            features.dropout_below = 1;
            for (const bool capped : {false, true}) {
              features.softcap = capped ? 20 : 0;
              features.dbias.given = !capped;
              ASSERT_EQ(cuda::v2_backward_refusal(features, target), "") << where;
              const cuda::V2BackwardPlan heavy = cuda::plan_v2_backward(features, target);
              EXPECT_GT(heavy.tile.dq_row_warps(), 0) << where;
              EXPECT_LE(heavy.main.shared_bytes, target.shared_bytes) << where;
              EXPECT_TRUE(cuda::v2_backward_rows()[static_cast<size_t>(heavy.key.row)].heavy) << where;
            }
          }
    }
}

// What kernels/v2/backward_f32.h assumes of a tile, and that it takes the bytes that the plan asks for.
TEST(V2BackwardPlanSmall, Fp32HasTilesOfItsOwn) {
  for (const cuda::V2BackwardRow& row : cuda::v2_backward_rows()) {
    if (!row.f32) continue;
    const BackwardTile tile = row.tile_of(64, 64);
    EXPECT_EQ(tile.group_warps, 1);
    EXPECT_FALSE(tile.pipelined);
    EXPECT_EQ(tile.block_n / tile.key_groups % 16, 0);
    EXPECT_EQ(tile.block_m % tile.chunk, 0);
    EXPECT_LE(2 * tile.block_m, tile.threads()) << "a thread copies one lse or one row_sum";
    EXPECT_EQ(row.f32_tile_of(64, 64).threads(), tile.threads());
    EXPECT_LE(tile.key_groups * (tile.block_m / tile.chunk), 15) << "named barriers";
  }
  const Problem p = problem_of(64, 64, true, DType::kF32);
  const cuda::V2BackwardPlan plan = cuda::plan_v2_backward(p, cuda::target_of(80));
  // K, V, Q, dO, P and dS in fp32, lse and row_sum, two numbers a warp and two more.
  EXPECT_EQ(plan.main.shared_bytes, 4 * (2 * 128 * 64 + 2 * 64 * 64 + 2 * 64 * 128) + 2 * 4 * 64 + 8 * 8 + 8 + 4 * 4);
  // dq may have to compute a row again, and so depends on the mask and on v.
  const cuda::V2BackwardKeys keys = cuda::v2_backward_keys(plan);
  EXPECT_EQ(keys.finish.causal, 1);
  EXPECT_EQ(keys.finish.headdim_v, 64);
  EXPECT_NE(cuda::v2_backward_request(keys.main).source.find("fattn::v2::backward_f32<Spec>"), std::string::npos);
  EXPECT_NE(cuda::v2_backward_request(keys.finish).source.find("fattn::v2::backward_f32_finish<Spec>"), std::string::npos);
  EXPECT_NE(cuda::v2_backward_request(keys.prepare).source.find("using Element = float;"), std::string::npos);
}

// On Hopper a kernel splits q and dout before, and the main one has two blocks of them: for plain problems of more than a few keys.
TEST(V2BackwardPlanSmall, Fp32SplitsQueriesBeforeOnHopper) {
  Problem p = problem_of(64, 40, true, DType::kF32);
  p.seqlen_k = 256;
  const auto plan = [&](int arch = 90) { return cuda::plan_v2_backward(p, cuda::target_of(arch)); };
  const cuda::V2BackwardPlan split = plan();
  const int64_t blocks = (p.seqlen_q + 63) / 64, all = p.batch * p.nheads * blocks;
  EXPECT_EQ(split.split.grid, 2 * all);
  EXPECT_EQ(split.query_blocks, blocks);
  EXPECT_GE(split.q_parts_offset, split.semaphore_offset);
  EXPECT_EQ(split.q_parts_offset % 16, 0);
  EXPECT_EQ(split.dout_parts_offset - split.q_parts_offset, all * 64 * 64 * 4);
  EXPECT_EQ(split.inverses_offset - split.dout_parts_offset, all * 64 * 64 * 4);  // of 40 columns, in 64
  EXPECT_EQ(split.workspace_bytes, split.inverses_offset + 8 * all);
  // A stage more of Q, dO, lse and row_sum, and two numbers of each stage.
  EXPECT_EQ(split.main.shared_bytes, 4 * (2 * 128 * 64 + 4 * 64 * 64 + 2 * 64 * 128) + 4 * 4 * 64 + 8 * 8 + 8 + 16 + 4 * 4);
  const cuda::V2BackwardKeys keys = cuda::v2_backward_keys(split, {});
  EXPECT_EQ(cuda::v2_backward_request(keys.split).entry, "fattn_v2_bwd_f32_split");
  EXPECT_NE(cuda::v2_backward_request(keys.main).source.find("backward_f32<Spec>(p, parts)"), std::string::npos);
  EXPECT_EQ(cuda::v2_backward_request(keys.finish).source.find("parts)"), std::string::npos);

  EXPECT_EQ(plan(80).split.grid, 0);
  p.deterministic = true;
  EXPECT_EQ(plan().split.grid, 0);
  p.deterministic = false;
  p.seqlen_k = 255;
  EXPECT_EQ(plan().split.grid, 0);
  p.seqlen_k = 256;
  p.has_seqused_k = true;
  EXPECT_EQ(plan().split.grid, 0);
}

// One term leaves registers for the larger tiles.
TEST(V2BackwardPlanSmall, Fp32HasLargerTilesForOneTerm) {
  for (const int headdim : {64, 128}) {
    Problem p = problem_of(headdim, headdim, false, DType::kF32);
    p.backward = p.pair_mask.given = true;
    const auto row = [&] { return cuda::v2_backward_rows()[static_cast<size_t>(cuda::plan_v2_backward(p, cuda::target_of(90)).key.row)]; };
    EXPECT_TRUE(row().one_term);
    EXPECT_EQ(row().tile.block_m, 64);
    p.softcap = 20;
    EXPECT_FALSE(row().one_term);
    p.softcap = 0;
    p.has_documents = true;
    EXPECT_FALSE(row().one_term);
    EXPECT_TRUE(row().heavy);
  }
}

// So it depends on whatever hides pairs or changes scores, but not on what becomes of dS.
TEST(V2BackwardPlanSmall, Fp32ComputesRowsOfDqAgainWithFeatures) {
  Problem p = problem_of(64, 64, false, DType::kF32);
  p.backward = p.has_seqused_k = p.pair_mask.given = true;
  p.window_left = 10;
  p.softcap = 20;
  const auto finish = [&] { return cuda::v2_backward_keys(cuda::plan_v2_backward(p, cuda::target_of(90)), {}).finish; };
  EXPECT_EQ(finish().window, 1);
  EXPECT_EQ(finish().capped, 1);
  EXPECT_TRUE(cuda::pair_features_of(finish().pair).lengths);
  EXPECT_TRUE(cuda::pair_features_of(finish().pair).mask);
  const std::string source = cuda::v2_backward_request(finish()).source;
  for (const char* part : {"kWindow = true", "kCapped = true", ".lengths = true", "fattn::PairParams p", "backward_f32_finish<Spec>"})
    EXPECT_NE(source.find(part), std::string::npos) << part << "\n" << source;
  p.softcap = 0;
  p.bias = p.dbias = {true, DType::kF32, 1, 1, 1, {}};
  EXPECT_FALSE(cuda::pair_features_of(finish().pair).dbias);
}

TEST(V2BackwardPlanSmall, FeaturesOfPairsHaveTilesAndKernelsOfTheirOwn) {
  for (const int arch : {80, 86, 89, 90, 100, 120})
    for (const int headdim : {8, 64, 96, 128, 192, 256})
      for (const bool softcap : {false, true})
        for (const bool mask : {false, true}) {
          Problem p = problem_of(headdim, headdim, true);
          p.has_alibi = true;
          p.dropout_below = 99;
          p.pair_mask.given = mask;
          p.softcap = softcap ? 5 : 0;
          const cuda::V2Target target = cuda::target_of(arch);
          ASSERT_EQ(cuda::v2_backward_refusal(p, target), "") << arch << " " << headdim;
          const cuda::V2BackwardPlan plan = cuda::plan_v2_backward(p, target);
          const cuda::V2BackwardRow& row = cuda::v2_backward_rows()[static_cast<size_t>(plan.key.row)];
          EXPECT_EQ(row.heavy, mask || softcap || headdim > 64) << "ALiBi and dropout above headdim 64 spill in the others";
          EXPECT_LE(row.tile.block_n / row.tile.key_groups, 32);
          EXPECT_FALSE(row.tight);
        }
  Problem p = problem_of(64, 64, true);
  p.has_seqused_k = p.has_alibi = true;
  p.dbias = {true, DType::kF16, p.batch, 1, p.seqlen_q, {p.seqlen_q * p.seqlen_k, p.seqlen_k, 0}};
  const cuda::V2BackwardPlan plan = cuda::plan_v2_backward(p, cuda::target_of(90));
  EXPECT_GE(plan.workspace_bytes, plan.dbias_offset + p.batch * p.seqlen_q * p.seqlen_k * 4);
  EXPECT_EQ(plan.dbias_offset % 4, 0);
  const cuda::V2BackwardKeys keys = cuda::v2_backward_keys(plan);
  const auto source = [](const cuda::V2BackwardKey& key) { return cuda::v2_backward_request(key).source; };
  EXPECT_NE(source(keys.main).find(".alibi = true"), std::string::npos);
  EXPECT_NE(source(keys.prepare).find(".lengths = true, .alibi = false"), std::string::npos);
  EXPECT_EQ(source(keys.finish).find("kPair"), std::string::npos);
  EXPECT_NE(source(keys.dbias_zero).find("dbias_zero<Spec>"), std::string::npos);
  EXPECT_NE(source(keys.dbias_finish).find("Element = fattn::f16"), std::string::npos);
  p.deterministic = true;
  EXPECT_NE(cuda::v2_backward_refusal(p, cuda::target_of(90)).find("atomic"), std::string::npos);
  p.dbias.heads = p.nheads;
  EXPECT_EQ(cuda::v2_backward_refusal(p, cuda::target_of(90)), "");
  EXPECT_NE(cuda::v2_backward_refusal(p, cuda::target_of(90, 75)).find("7.5"), std::string::npos);
}

TEST(V2BackwardPlanSmall, BiasAndMaskComeThroughSharedMemory) {
  for (const int arch : {80, 86, 89, 90, 100, 120})
    for (int headdim = 8; headdim <= 256; headdim += 8)
      for (const bool fp32 : {false, true}) {
        Problem p = problem_of(headdim, headdim, true);
        p.bias = p.dbias = {true, fp32 ? DType::kF32 : DType::kF16, 1, p.nheads, p.seqlen_q, {0, p.seqlen_k, p.seqlen_q * p.seqlen_k}};
        const cuda::V2Target target = cuda::target_of(arch);
        ASSERT_EQ(cuda::v2_backward_refusal(p, target), "") << arch << " " << headdim;
        const cuda::V2BackwardPlan plan = cuda::plan_v2_backward(p, target);
        const cuda::V2BackwardRow& row = cuda::v2_backward_rows()[static_cast<size_t>(plan.key.row)];
        const TermTile terms{plan.tile.block_m, plan.tile.block_n, fp32 ? 4 : 2, false, true};
        EXPECT_EQ(plan.main.shared_bytes, plan.tile.shared_bytes() + (row.staged ? plan.tile.stages() * terms.bytes() : 0));
        EXPECT_LE(plan.main.shared_bytes, target.shared_bytes);
        EXPECT_EQ(plan.tile.shared_bytes() % 16, 0) << "where the terms begin";
        const std::string source = cuda::v2_backward_request(cuda::v2_backward_keys(plan).main).source;
        EXPECT_EQ(source.find("kStaged = true") != std::string::npos, row.staged);
        if (arch == 90) {
          EXPECT_TRUE(row.staged);
          EXPECT_EQ(plan.tile.block_n, headdim > 128 ? 32 : headdim <= 64 || (headdim > 96 && fp32) ? 64 : 128) << headdim;
        }
      }
  // Not without one, and not in a wide tile with dropout besides.
  Problem other = problem_of(128, 128, true);
  other.pair_mask.given = true;
  other.dropout_below = 99;
  const auto row_of = [&] { return cuda::v2_backward_rows()[static_cast<size_t>(cuda::plan_v2_backward(other, cuda::target_of(90)).key.row)]; };
  EXPECT_TRUE(row_of().staged);
  EXPECT_EQ(row_of().tile.block_n, 64);
  other.pair_mask.given = false;
  other.has_documents = true;
  EXPECT_FALSE(row_of().staged);
  EXPECT_TRUE(row_of().heavy);
  // Rows of dbias in the workspace take vectors.
  Problem p = problem_of(64, 64, true);
  p.seqlen_k = 333;
  p.bias = p.dbias = {true, DType::kF16, 1, 1, p.seqlen_q, {0, 333, 0}};
  const cuda::V2BackwardPlan plan = cuda::plan_v2_backward(p, cuda::target_of(90));
  EXPECT_EQ(plan.dbias_offset % 16, 0);
  EXPECT_EQ(plan.workspace_bytes, plan.dbias_offset + p.seqlen_q * 336 * 4);
  fattn_buffers buffers{};
  buffers.workspace = reinterpret_cast<void*>(1 << 20);
  EXPECT_EQ(cuda::v2_backward_params(p, plan, buffers).call.dbias_strides.row, 336);
}

TEST(V2BackwardPlanSmall, TheGradientOfLseIsOfTheFirstKernelAlone) {
  for (const DType dtype : {DType::kF16, DType::kF32}) {
    Problem p = problem_of(64, 64, true, dtype);
    const auto keys = [&] { return cuda::v2_backward_keys(cuda::plan_v2_backward(p, cuda::target_of(90))); };
    const auto source = [](const cuda::V2BackwardKey& key) { return cuda::v2_backward_request(key).source; };
    const cuda::V2BackwardKeys without = keys();
    p.has_dlse = true;
    ASSERT_EQ(cuda::v2_backward_refusal(p, cuda::target_of(90)), "");
    const cuda::V2BackwardKeys with = keys();
    EXPECT_EQ(source(with.main), source(without.main));
    EXPECT_EQ(source(with.finish), source(without.finish));
    EXPECT_NE(source(with.prepare).find(".dlse = true"), std::string::npos);
    EXPECT_EQ(source(without.prepare).find("kPair"), std::string::npos);
  }
}

// Of packed sequences the workspace has their rows, and a block more for each, not the longest's for all.
TEST(V2BackwardPlanSmall, PackedSequencesHaveTheirRowsInTheWorkspace) {
  for (const auto& [deterministic, dtype] : {std::pair{false, DType::kBF16}, {true, DType::kBF16}, {false, DType::kF32}, {true, DType::kF32}}) {
    Problem p = problem_of(64, 64, true, dtype);
    p.packed = true;
    p.deterministic = deterministic;
    p.batch = 100, p.seqlen_q = p.seqlen_k = 4096, p.total_q = p.total_k = 10000;
    ASSERT_EQ(cuda::v2_backward_refusal(p, cuda::target_of(90)), "");
    const cuda::V2BackwardPlan plan = cuda::plan_v2_backward(p, cuda::target_of(90));
    const int64_t blocks = p.nheads * (10000 / 16 + 100), turns = p.nheads * (10000 / plan.tile.block_m + 100);
    EXPECT_EQ(plan.row_sum_offset, blocks * 16 * 64 * 4);
    EXPECT_EQ(plan.semaphore_offset, plan.row_sum_offset + p.nheads * 10000 * 4);
    if (plan.split.grid == 0) {
      EXPECT_EQ(plan.workspace_bytes, plan.semaphore_offset + (deterministic ? (1 + turns) * 4 : 0));
    }
    EXPECT_EQ(plan.prepare.grid, 100 * p.nheads * 4096 / kPrepareRows) << "any of them may have the most rows";
    const cuda::V2BackwardKeys keys = cuda::v2_backward_keys(plan);
    for (const cuda::V2BackwardKey& key : {keys.prepare, keys.main, keys.finish})
      EXPECT_NE(cuda::v2_backward_request(key).source.find(".packed = true"), std::string::npos);
    if (dtype != DType::kF32) continue;
    const cuda::V2BackwardRow& row = cuda::v2_backward_rows()[static_cast<size_t>(plan.key.row)];
    const BackwardF32Tile tile = row.f32_tile_of(plan.tile.width, plan.tile.width_v);
    EXPECT_EQ(plan.main.shared_bytes, tile.sequence_offset() + 16) << "where the sequence begins and ends";
    EXPECT_EQ(tile.sequence_offset() % 16, 0);
    EXPECT_GE(tile.sequence_offset(), tile.shared_bytes());
    EXPECT_EQ(plan.split.grid, deterministic ? 0 : 2 * 100 * p.nheads * 4096 / tile.block_m);
    if (deterministic) continue;
    EXPECT_EQ(plan.query_blocks, 10000 / tile.block_m + 100);
    EXPECT_EQ(plan.workspace_bytes, plan.q_parts_offset + p.nheads * plan.query_blocks * (tile.q_bytes() + tile.dout_bytes() + 8));
    EXPECT_NE(cuda::v2_backward_request(keys.split).source.find(".packed = true"), std::string::npos);
  }
  // Every sequence has its own blocks, whatever begins where.
  for (const int rows : {16, 32, 64})
    for (const int64_t length : {1, 15, 16, 17, 63, 64, 65})
      for (int n = 0; n < 50; ++n) {
        const int64_t begin = n * length, first = begin / rows + n, end = first + (length + rows - 1) / rows;
        EXPECT_LE(end, (begin + length) / rows + n + 1) << "where the next one's begin";
        EXPECT_LE(end, int64_t{packed_blocks(begin + length, n + 1, rows)});
      }
}

// A row's stride counts although no sequence may be longer than one row.
TEST(V2BackwardPlanSmall, PackedRowsAreAlignedAsTheTensorsAre) {
  Problem p = problem_of(64, 64, false);
  p.packed = true;
  p.batch = 3, p.seqlen_q = p.seqlen_k = 1, p.total_q = p.total_k = 3;
  EXPECT_TRUE(cuda::plan_v2_backward(p, cuda::target_of(90)).aligned_strides);
  p.k.row += 1;
  EXPECT_FALSE(cuda::plan_v2_backward(p, cuda::target_of(90)).aligned_strides);
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
