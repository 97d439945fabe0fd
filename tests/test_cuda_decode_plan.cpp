// The host side of the CUDA decode kernels: which problems they take, tiles, splits, workspace and the emitted source. Needs no GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "backend/cuda/decode.h"
#include "backend/cuda/limits.h"
#include "device_abi/decode_shares.h"

namespace fattn::core::cuda {
namespace {

// Shared memory of a CTA and of a multiprocessor: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
const DecodeTarget kTargets[] = {
    {{80, 80, 166912, 167936, 40 << 20}, 108, 2.0e12}, {{86, 80, 101376, 102400, 6 << 20}, 84, 9e11},
    {{89, 80, 101376, 102400, 72 << 20}, 128, 1e12},   {{90, 80, 232448, 233472, 50 << 20}, 132, 4.8e12},
    {{100, 80, 232448, 233472, 126 << 20}, 148, 8e12}, {{120, 80, 101376, 102400, 96 << 20}, 170, 1.8e12},
};
const DecodeTarget kHopper = kTargets[3];

Problem problem_of(int64_t headdim, int64_t headdim_v, int64_t group, int64_t seqlen_q = 1, int64_t seqlen_k = 8192, int64_t batch = 1,
                   int64_t nheads_k = 8) {
  Problem p;
  p.dtype = DType::kBF16;
  p.batch = batch;
  p.seqlen_q = seqlen_q;
  p.seqlen_k = seqlen_k;
  p.nheads = nheads_k * group;
  p.nheads_k = nheads_k;
  p.headdim = headdim;
  p.headdim_v = headdim_v;
  p.softmax_scale = 0.125;
  p.q = {seqlen_q * p.nheads * headdim, p.nheads * headdim, headdim};
  p.k = {seqlen_k * nheads_k * headdim, nheads_k * headdim, headdim};
  p.v = {seqlen_k * nheads_k * headdim_v, nheads_k * headdim_v, headdim_v};
  p.o = {seqlen_q * p.nheads * headdim_v, p.nheads * headdim_v, headdim_v};
  p.lse = {p.nheads * seqlen_q, 1, seqlen_q};
  return p;
}

TEST(DecodePlanSmall, EveryHeaddimAndNumberOfRowsHasATileThatFits) {
  for (const DecodeTarget& target : kTargets)
    for (int64_t headdim = 8; headdim <= 256; headdim += 8)
      for (const int64_t headdim_v : {headdim, int64_t{8}, int64_t{256}})
        for (const int64_t rows : {1, 16, 17, 32, 33, 64, 500}) {
          const Problem p = problem_of(headdim, headdim_v, rows);
          ASSERT_TRUE(decode_can(p, target)) << target.device.arch << " " << headdim << " " << headdim_v << " " << rows;
          const DecodePlan plan = plan_decode(p, target);
          EXPECT_LE(plan.shared_bytes, target.device.shared_bytes);
          EXPECT_GE(decode_rows()[static_cast<size_t>(plan.key.row)].headdim, std::max(headdim, headdim_v));
          EXPECT_GE(plan.row_tiles * plan.tile.rows(), rows);
          EXPECT_LT((plan.row_tiles - 1) * plan.tile.rows(), rows);
          EXPECT_EQ(plan.grid, 8 * plan.row_tiles * plan.splits);
        }
}

// What kernels/decode assumes of a tile.
TEST(DecodePlanSmall, TilesAreWellFormed) {
  for (const DecodeRow& row : decode_rows()) {
    const DecodeTile& tile = row.tile;
    EXPECT_EQ(tile.block_n % 16, 0);
    EXPECT_EQ(tile.block_n * 64 % 1024, 0) << "tiles begin at multiples of 1024 bytes";
    EXPECT_GE(tile.stages, 2);
    EXPECT_LT(tile.teams, 16) << "each has a named barrier";
    EXPECT_LE(tile.threads(), 1024);
    // Output, scores and queries in registers, at 255 a thread.
    const int output = tile.row_tiles * row.headdim / 2, scores = tile.row_tiles * tile.block_n / 2;
    const int queries = tile.queries_in_registers ? tile.row_tiles * row.headdim / 4 : 0;
    EXPECT_LE(output + scores + queries, std::min(255, 65536 / (tile.threads() * tile.ctas)) - 32) << row.headdim;
  }
}

TEST(DecodePlanSmall, TakesFewQueriesAndManyKeys) {
  const auto takes = [](auto change, const DecodeTarget& target = kHopper) {
    Problem p = problem_of(128, 128, 4);
    change(p);
    return decode_takes(p, target);
  };
  const auto nothing = [](Problem&) {};
  EXPECT_TRUE(takes(nothing));
  EXPECT_TRUE(takes([](Problem& p) { p = problem_of(128, 128, 4, 16); })) << "64 rows";
  EXPECT_TRUE(takes([](Problem& p) { p = problem_of(128, 128, 4, 17); })) << "32 tiles of a forward kernel";
  EXPECT_FALSE(takes([](Problem& p) { p = problem_of(128, 128, 4, 17, 8192, 2); })) << "64 of them";
  EXPECT_FALSE(takes([](Problem& p) { p = problem_of(128, 128, 4, 17, 1000); })) << "so few keys";
  EXPECT_FALSE(takes([](Problem& p) { p = problem_of(128, 128, 1, 64, 64); })) << "as many queries as keys";
  EXPECT_TRUE(takes([](Problem& p) { p.has_seqused_k = true; }));
  EXPECT_FALSE(takes([](Problem& p) { p.has_alibi = true; })) << "the forward kernel has it";
  EXPECT_FALSE(takes([](Problem& p) { p.backward = true; }));
  EXPECT_FALSE(takes([](Problem& p) { p.dtype = DType::kF32; }));
  EXPECT_FALSE(takes([](Problem& p) { p.seqlen_k = 0; }));
  EXPECT_FALSE(takes([](Problem& p) { p.batch = 0; }));
  EXPECT_FALSE(takes([](Problem& p) { p.headdim = 132; }));
  EXPECT_FALSE(takes([](Problem& p) { p.headdim_v = 264; }));
  EXPECT_FALSE(takes([](Problem& p) { p.k.row += 4; })) << "no multiple of 16 bytes";
  EXPECT_FALSE(takes([](Problem& p) { p.o.head += 4; }));
  EXPECT_FALSE(takes([](Problem& p) { p.window_left = 9; }));
  EXPECT_FALSE(takes([](Problem& p) { p.softcap = 9; }));
  EXPECT_FALSE(takes([](Problem& p) { p.seqlen_k = int64_t{1} << 31; }));
  EXPECT_FALSE(takes([](Problem& p) { p.batch = int64_t{1} << 26; })) << "a grid of 32 bits";
  DecodeTarget level = kHopper;
  level.device.level = 75;
  EXPECT_FALSE(takes(nothing, level)) << "no asynchronous copies";
}

// A sequence alone is shared by most of the device; where there are sequences enough each key head is one CTA's.
TEST(DecodePlanSmall, SplitsFillTheDevice) {
  for (const int64_t headdim : {64, 128, 256}) {
    EXPECT_GE(plan_decode(problem_of(headdim, headdim, 4), kHopper).grid, 100);
    EXPECT_LE(plan_decode(problem_of(headdim, headdim, 4), kHopper).grid, 264);
  }
  EXPECT_EQ(plan_decode(problem_of(128, 128, 4, 1, 8192, 1024), kHopper).splits, 1);
  EXPECT_EQ(plan_decode(problem_of(128, 128, 4, 1, 8192, 1024), kHopper).workspace_bytes, 0);
  EXPECT_EQ(plan_decode(problem_of(128, 128, 4, 1, 5), kHopper).splits, 1) << "one step of keys";
}

// The steps that kernels/decode/forward.h gives its CTAs and teams are all steps, each once.
TEST(DecodePlanSmall, EveryStepIsSomebodysOnce) {
  for (const int64_t seqlen_k : {1, 15, 16, 17, 1000, 8192, 100003})
    for (const int64_t rows : {1, 30, 64}) {
      const DecodePlan plan = plan_decode(problem_of(128, 128, rows, 1, seqlen_k), kHopper);
      const int steps = static_cast<int>(ceil_div(seqlen_k, plan.tile.block_n)), per_split = static_cast<int>(ceil_div(steps, plan.splits));
      std::vector<int> taken(static_cast<size_t>(steps));
      for (int split = 0; split < plan.splits; ++split)
        for (int team = 0; team < plan.tile.teams; ++team) {
          const int first = split * per_split, end = std::min(steps, first + per_split);
          for (int at = end - 1 - team; at >= first; at -= plan.tile.teams) ++taken[static_cast<size_t>(at)];
        }
      EXPECT_EQ(std::count(taken.begin(), taken.end(), 1), steps) << seqlen_k << " " << rows;
    }
}

TEST(DecodePlanSmall, WorkspaceHoldsTheSplitsOfEveryRow) {
  const Problem p = problem_of(128, 64, 4, 3, 8192, 2);
  const DecodePlan plan = plan_decode(p, kHopper);
  ASSERT_GT(plan.splits, 1);
  const int64_t rows = p.batch * p.nheads * p.seqlen_q;
  EXPECT_EQ(plan.combine_grid, rows);
  EXPECT_EQ(plan.stats_offset, rows * plan.splits * 64 * 4);
  EXPECT_EQ(plan.workspace_bytes, plan.stats_offset + rows * plan.splits * 8);
  alignas(256) static char memory[1 << 20];
  ASSERT_LE(plan.workspace_bytes, static_cast<int64_t>(sizeof memory));
  fattn_buffers buffers{};
  buffers.workspace = memory;
  const DecodeParams params = decode_params(p, plan, buffers);
  EXPECT_EQ(static_cast<void*>(params.work.part_o), memory);
  EXPECT_EQ(reinterpret_cast<char*>(params.work.part_stats), memory + plan.stats_offset);
  EXPECT_EQ(params.work.rows, 12);
  EXPECT_EQ(params.work.splits, plan.splits);
  EXPECT_EQ(params.work.lengths, nullptr);
  const DecodePlan whole = plan_decode(p, kHopper, plan.key.row, 1);
  EXPECT_EQ(whole.workspace_bytes, 0);
  EXPECT_EQ(decode_params(p, whole, buffers).work.part_o, nullptr);
}

Problem with_lengths(Problem p) {
  p.has_seqused_k = true;
  return p;
}

// Several sequences with lengths are shared by all CTAs that the device holds at once, or by several times as many.
TEST(DecodePlanSmall, SequencesAreSharedByTheirLengths) {
  for (const DecodeTarget& target : kTargets)
    for (const int64_t headdim : {64, 128, 256})
      for (const int64_t rows : {1, 20, 64, 100})
        for (const int64_t nheads_k : {1, 8, 100, 1000}) {
          const Problem p = with_lengths(problem_of(headdim, headdim, rows, 1, 8192, 64, nheads_k));
          ASSERT_TRUE(decode_can(p, target));
          const DecodePlan plan = plan_decode(p, target);
          EXPECT_EQ(plan.key.shares, 1);
          EXPECT_LE(plan.shared_bytes, target.device.shared_bytes);
          EXPECT_EQ(plan.shared_bytes,
                    plan.tile.shared_bytes(plan.key.headdim, plan.key.headdim_v, false) + plan.tile.threads() / 32 * kDecodeWalkBytes);
          EXPECT_EQ(plan.grid, nheads_k * plan.row_tiles * plan.splits);
          EXPECT_GE(plan.grid, target.multiprocessors / 2);
          const int64_t slots = target.multiprocessors * plan.tile.ctas;
          EXPECT_TRUE(plan.grid <= slots || plan.grid >= 3 * target.multiprocessors) << plan.grid << " CTAs for " << slots << " places";
        }
  EXPECT_EQ(plan_decode(with_lengths(problem_of(128, 128, 4, 1, 8192, 1)), kHopper).key.shares, 0) << "one sequence";
  EXPECT_EQ(plan_decode(problem_of(128, 128, 4, 1, 8192, 64), kHopper).key.shares, 0) << "no lengths";
  EXPECT_FALSE(decode_shares(with_lengths(problem_of(128, 128, 4, 1, kMaxSeqlen, 64)))) << "units of 32 bits";
  EXPECT_EQ(plan_decode(with_lengths(problem_of(128, 128, 4, 1, 5, 3)), kHopper).splits, 3) << "three steps of keys";
}

TEST(DecodePlanSmall, WorkspaceHoldsThePartsOfSharedSequences) {
  const Problem p = with_lengths(problem_of(128, 64, 4, 3, 8192, 2));
  const DecodePlan plan = plan_decode(p, kHopper);
  ASSERT_GT(plan.splits, 1);
  const int64_t parts = 8 * 12 * (plan.splits + 2);
  EXPECT_EQ(plan.combine_grid, 2 * 8 * 12);
  EXPECT_EQ(plan.stats_offset, parts * 64 * 4);
  EXPECT_EQ(plan.parts_offset, plan.stats_offset + parts * 8);
  EXPECT_EQ(plan.workspace_bytes, plan.parts_offset + 2 * 8);
  alignas(256) static char memory[1 << 20];
  ASSERT_LE(plan.workspace_bytes, static_cast<int64_t>(sizeof memory));
  fattn_buffers buffers{};
  buffers.workspace = memory;
  EXPECT_EQ(reinterpret_cast<char*>(decode_params(p, plan, buffers).work.parts), memory + plan.parts_offset);
  EXPECT_EQ(decode_params(p, plan_decode(p, kHopper, plan.key.row, 1), buffers).work.parts, nullptr);
  for (const DecodeKey& key : {plan.key, plan.combine_key()}) EXPECT_NE(decode_request(key).source.find("kShares = true"), std::string::npos);
}

TEST(DecodePlanSmall, SourcesDifferWhereKernelsDo) {
  std::set<std::string> sources;
  size_t count = 0;
  for (const DecodeTarget& target : {kTargets[0], kHopper})
    for (const DType dtype : {DType::kBF16, DType::kF16})
      for (const int64_t headdim : {64, 96, 256})
        for (const int64_t rows : {16, 32, 64}) {
          Problem p = problem_of(headdim, 64, rows);
          p.dtype = dtype;
          const DecodePlan plan = plan_decode(p, target);
          const jit::Request request = decode_request(plan.key);
          EXPECT_EQ(request.entry, "fattn_decode");
          EXPECT_EQ(request.arch, target.device.arch);
          EXPECT_EQ(request.source.find("kDependent = true") != std::string::npos, target.device.arch >= 90);
          sources.insert(std::to_string(request.arch) + request.source);
          ++count;
          const jit::Request combine = decode_request(plan.combine_key());
          EXPECT_EQ(combine.entry, "fattn_decode_combine");
          EXPECT_EQ(combine.source.find("kHeaddim ="), std::string::npos) << "one kernel for every headdim of q and k";
        }
  EXPECT_EQ(sources.size(), count);
}

}  // namespace
}  // namespace fattn::core::cuda
