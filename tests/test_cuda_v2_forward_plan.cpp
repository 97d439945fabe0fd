// The host side of the CUDA v2 forward kernel: the table of tiles, refusals, keys, parameters and the emitted source. Needs no GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <set>
#include <string>

#include "backend/cuda/pair_features.h"
#include "backend/cuda/v2_forward.h"

namespace fattn::core::cuda {
namespace {

// Shared memory of a CTA and of a multiprocessor: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
const V2Target kTargets[] = {
    {75, 75, 65536, 65536, 6 << 20},    {80, 80, 166912, 167936, 40 << 20},   {86, 80, 101376, 102400, 6 << 20},   {89, 80, 101376, 102400, 72 << 20},
    {90, 80, 232448, 233472, 50 << 20}, {100, 80, 232448, 233472, 126 << 20}, {120, 80, 101376, 102400, 96 << 20}, {90, 75, 65536, 233472, 50 << 20},
};
const V2Target kHopper = kTargets[4];
const V2Target kTuring = kTargets[0];

Problem problem_of(DType dtype, int64_t headdim, int64_t headdim_v, bool causal) {
  Problem p;
  p.dtype = dtype;
  p.batch = 2;
  p.seqlen_q = 300;
  p.seqlen_k = 523;
  p.nheads = 6;
  p.nheads_k = 2;
  p.headdim = headdim;
  p.headdim_v = headdim_v;
  p.causal = causal;
  p.softmax_scale = 0.125;
  p.q = {300 * 6 * headdim, 6 * headdim, headdim};
  p.k = {523 * 2 * headdim, 2 * headdim, headdim};
  p.v = {523 * 2 * headdim_v, 2 * headdim_v, headdim_v};
  p.o = {300 * 6 * headdim_v, 6 * headdim_v, headdim_v};
  p.lse = {6 * 300, 1, 300};
  return p;
}

TEST(V2ForwardPlanSmall, EveryHeaddimHasATileThatFits) {
  for (const V2Target& target : kTargets) {
    for (const bool causal : {false, true}) {
      for (int headdim = 1; headdim <= 256; ++headdim) {
        for (const int headdim_v : {headdim, 1, 64, 256}) {
          for (const DType dtype : {DType::kF16, DType::kF32}) {
            if (dtype == DType::kF32 && target.level < 80) continue;
            const Problem p = problem_of(dtype, headdim, headdim_v, causal);
            ASSERT_EQ(v2_forward_refusal(p, target), "") << target.arch << " " << headdim << " " << headdim_v;
            const V2ForwardPlan plan = plan_v2_forward(p, target);
            const V2ForwardRow& row = v2_forward_rows()[static_cast<size_t>(plan.key.row)];
            EXPECT_LE(plan.shared_bytes, target.shared_bytes);
            EXPECT_GE(row.headdim, std::max(headdim, headdim_v));
            EXPECT_EQ(row.f32, dtype == DType::kF32);
            EXPECT_EQ(plan.grid, (300 + plan.tile.block_m() - 1) / plan.tile.block_m() * 12);
          }
        }
      }
    }
  }
}

// What kernels/v2/forward.h, forward_f32.h and kernels/tile assume of a tile.
TEST(V2ForwardPlanSmall, TilesAreWellFormed) {
  for (const V2ForwardRow& row : v2_forward_rows()) {
    const V2ForwardTile& tile = row.tile;
    EXPECT_EQ(tile.step_n % 16, 0);
    EXPECT_EQ(tile.block_n % tile.step_n, 0);
    if (row.f32) {
      EXPECT_LE(tile.stages, 2);
    } else {
      EXPECT_EQ(tile.exact_n % 16, 0);
      EXPECT_EQ(tile.step_n % tile.exact_n, 0);
    }
    EXPECT_EQ(tile.block_m() * 64 % 1024, 0);
    EXPECT_EQ(tile.block_n * 64 % 1024, 0);
    EXPECT_LE(tile.threads(), 1024);
    EXPECT_GE(tile.ctas, 1);
    if (row.level == 75) {
      EXPECT_EQ(tile.stages, 1) << "copies through registers are not asynchronous";
    }
    // Output, scores and queries in registers, at 255 a thread.
    const int output = tile.row_tiles * row.headdim / 2, scores = tile.row_tiles * tile.step_n / 2;
    const int queries = tile.queries_in_registers ? tile.row_tiles * row.headdim / 4 : 0;
    EXPECT_LE(output + scores + queries, 65536 / (tile.threads() * tile.ctas) - 32) << row.headdim;
  }
}

TEST(V2ForwardPlanSmall, RefusesWithAReason) {
  const auto refusal = [](auto change, const V2Target& target) {
    Problem p = problem_of(DType::kBF16, 64, 64, false);
    change(p);
    return v2_forward_refusal(p, target);
  };
  const auto nothing = [](Problem&) {};
  EXPECT_EQ(refusal(nothing, kHopper), "");
  EXPECT_NE(refusal([](Problem& p) { p.dtype = DType::kF64; }, kHopper).find("fp32, fp16 and bf16"), std::string::npos);
  EXPECT_NE(refusal([](Problem& p) { p.dtype = DType::kF32; }, kTuring).find("fp32 needs compute capability 8.0"), std::string::npos);
  EXPECT_NE(refusal(nothing, kTuring).find("bf16"), std::string::npos);
  EXPECT_NE(refusal([](Problem& p) { p.headdim = 257; }, kHopper).find("257"), std::string::npos);
  EXPECT_NE(refusal([](Problem& p) { p.headdim_v = 264; }, kHopper).find("264"), std::string::npos);
  EXPECT_NE(refusal([](Problem& p) { p.seqlen_k = int64_t{1} << 31; }, kHopper).find("seqlen_k"), std::string::npos);
  EXPECT_NE(refusal([](Problem& p) { p.batch = p.seqlen_q = int64_t{1} << 20; }, kHopper).find("grid"), std::string::npos);
  const auto longest = [](Problem& p) { p.seqlen_k = int64_t{1} << 30; };
  EXPECT_EQ(refusal(longest, kHopper), "");
  EXPECT_NE(refusal([&](Problem& p) { longest(p), p.window_left = 9; }, kHopper).find("with a window"), std::string::npos);
  V2Target level = kHopper;
  level.level = 90;
  EXPECT_NE(refusal(nothing, level).find("90"), std::string::npos);
  V2Target little = kHopper;
  little.shared_bytes = 16384;
  EXPECT_NE(refusal(nothing, little).find("16384"), std::string::npos);
}

TEST(V2ForwardPlanSmall, AddressesAndStridesDecideTheCopies) {
  const V2ForwardPlan plan = plan_v2_forward(problem_of(DType::kBF16, 64, 64, false), kHopper);
  EXPECT_EQ(v2_forward_key(plan, true).aligned, 1);
  EXPECT_EQ(v2_forward_key(plan, false).aligned, 0);
  Problem p = problem_of(DType::kBF16, 64, 64, false);
  p.k.row += 1;
  EXPECT_FALSE(plan_v2_forward(p, kHopper).aligned_strides);
  p = problem_of(DType::kBF16, 64, 64, false);
  p.v.batch += 4;
  EXPECT_FALSE(plan_v2_forward(p, kHopper).aligned_strides);
  p.batch = 1;  // a stride that is never used
  EXPECT_TRUE(plan_v2_forward(p, kHopper).aligned_strides);
  EXPECT_FALSE(plan_v2_forward(problem_of(DType::kBF16, 60, 60, false), kHopper).aligned_strides);
  EXPECT_FALSE(plan_v2_forward(problem_of(DType::kBF16, 64, 36, false), kHopper).aligned_strides);
  // Four fp32 are 16 bytes.
  EXPECT_TRUE(plan_v2_forward(problem_of(DType::kF32, 64, 36, false), kHopper).aligned_strides);
  EXPECT_FALSE(plan_v2_forward(problem_of(DType::kF32, 62, 62, false), kHopper).aligned_strides);
}

TEST(V2ForwardPlanSmall, ScaleGoesIntoParameters) {
  const auto params = [](double scale) {
    Problem p = problem_of(DType::kBF16, 64, 64, true);
    p.softmax_scale = scale;
    return v2_forward_params(p, plan_v2_forward(p, kHopper), {});
  };
  EXPECT_FLOAT_EQ(params(0.125).softmax_scale_log2, 0.125f * 1.44269504f);
  EXPECT_FLOAT_EQ(params(-2).softmax_scale_log2, 2 * 1.44269504f);
  EXPECT_FLOAT_EQ(params(-2).softmax_scale, -2);
  for (const double zero : {0.0, 1e-60, -1e-60}) {
    EXPECT_EQ(params(zero).softmax_scale, 0);
    EXPECT_EQ(params(zero).softmax_scale_log2, 1);
  }
  EXPECT_EQ(params(1e60).softmax_scale_log2, FLT_MAX);
  EXPECT_EQ(params(1).group, 3);
}

TEST(V2ForwardPlanSmall, WindowsAndSoftcapGoIntoKeysAndParameters) {
  Problem p = problem_of(DType::kBF16, 64, 64, true);
  p.softmax_scale = -0.5;
  const auto params = [&] { return v2_forward_params(p, plan_v2_forward(p, kHopper), {}); };
  const auto source = [&] { return v2_forward_request(plan_v2_forward(p, kHopper).key).source; };
  const auto has = [&](const char* text) { return source().find(text) != std::string::npos; };
  EXPECT_TRUE(has("kCausal = true") && has("kWindow = false") && has("kCapped = false") && has("AttentionParams p")) << source();
  p.window_left = 9;
  EXPECT_EQ(params().window_left, 9);
  EXPECT_EQ(params().window_right, 0) << "causal";
  EXPECT_TRUE(has("kCausal = false") && has("kWindow = true") && has("kCapped = false") && has("FeatureParams p")) << source();
  p.causal = false;
  p.window_left = -1, p.window_right = 7;
  EXPECT_EQ(params().window_left, -1);
  EXPECT_EQ(params().window_right, 7);
  p.window_right = -1, p.softcap = 20;
  EXPECT_TRUE(has("kWindow = false") && has("kCapped = true") && has("FeatureParams p")) << source();
  EXPECT_FLOAT_EQ(params().softmax_scale_log2, 20 * 1.44269504f) << "what tanh is multiplied by";
  EXPECT_FLOAT_EQ(params().score_factor, kTanhUnit * -0.5f / 20);
  EXPECT_FLOAT_EQ(params().softmax_scale, 1) << "its sign is in the factor";
}

TEST(V2ForwardPlanSmall, FeaturesOfPairsGoIntoKeysAndTiles) {
  Problem p = problem_of(DType::kBF16, 128, 128, true);
  const V2ForwardKey plain = plan_v2_forward(p, kHopper).key;
  EXPECT_EQ(plain.pair, 0);
  EXPECT_EQ(v2_forward_request(plain).source.find("kPair"), std::string::npos);
  p.has_seqused_k = true;
  EXPECT_EQ(plan_v2_forward(p, kHopper).key.row, plain.row) << "lengths cost no registers";
  Problem full = p;
  full.causal = false;
  EXPECT_NE(v2_forward_request(plan_v2_forward(full, kHopper).key).source.find("kStepN = 32;"), std::string::npos) << "64 spills";
  p.dropout_below = 1;
  p.has_alibi = p.pair_mask.given = true;
  p.bias = {true, DType::kF32, 1, 1, 1, {}};
  const V2ForwardPlan plan = plan_v2_forward(p, kHopper);
  EXPECT_TRUE(v2_forward_rows()[static_cast<size_t>(plan.key.row)].heavy);
  const std::string source = v2_forward_request(plan.key).source;
  EXPECT_NE(source.find("kPair = {.lengths = true, .alibi = true, .bias = 2, .mask = true, .dropout = true, .dbias = false};"), std::string::npos)
      << source;
  EXPECT_NE(source.find("fattn::PairParams p"), std::string::npos);
  EXPECT_NE(source.find("lengths, ALiBi, fp32 bias, mask, dropout"), std::string::npos) << source;
  Problem part = p;
  part.dropout_places = true;
  EXPECT_EQ(plan_v2_forward(part, kHopper).key.row, plan.key.row) << "the place costs no registers";
  EXPECT_NE(v2_forward_request(plan_v2_forward(part, kHopper).key).source.find(".dbias = false, .places = true};"), std::string::npos);
  part.dropout_below = 0;
  EXPECT_EQ(v2_forward_request(plan_v2_forward(part, kHopper).key).source.find(".places"), std::string::npos) << "without dropout there is none";
  for (int bits = 0; bits < 16384; ++bits)
    if ((bits >> 2 & 3) != 3) {
      EXPECT_EQ(pair_bits(pair_features_of(bits)), bits);
    }
  for (const V2Target& target : kTargets)
    for (int headdim = 1; headdim <= 256; ++headdim) {
      Problem any = p;
      any.dtype = DType::kF16;
      any.headdim = any.headdim_v = headdim;
      EXPECT_EQ(v2_forward_refusal(any, target).find("together above headdim 192") != std::string::npos, target.level < 80 && headdim > 192)
          << target.arch << " " << headdim;
      any.dropout_below = 0;
      EXPECT_EQ(v2_forward_refusal(any, target), "") << target.arch << " " << headdim;
    }
}

// In fp32 too, at every width and on every device that has it, with tiles of its own.
TEST(V2ForwardPlanSmall, Fp32TakesFeatures) {
  for (const V2Target& target : kTargets)
    for (int headdim = 8; headdim <= 256; headdim += 8) {
      if (target.level < 80) continue;
      Problem p = problem_of(DType::kF32, headdim, headdim, true);
      p.has_seqused_k = true;
      EXPECT_EQ(v2_forward_refusal(p, target).find("for fp32 have registers for up to 192") != std::string::npos, headdim > 192);
      EXPECT_EQ(plan_v2_forward(p, target).key.row, plan_v2_forward(problem_of(DType::kF32, headdim, headdim, true), target).key.row);
      p.has_seqused_k = false;
      p.softcap = 20;
      p.window_left = 10;
      p.window_right = 0;
      ASSERT_EQ(v2_forward_refusal(p, target), "");
      V2ForwardPlan plan = plan_v2_forward(p, target);
      EXPECT_EQ(v2_forward_rows()[static_cast<size_t>(plan.key.row)].heavy, headdim > 64 || target.arch != 90);
      p.has_seqused_k = p.has_alibi = p.pair_mask.given = true;
      p.bias = {true, DType::kF32, 1, 1, 1, {}};
      p.dropout_below = 1;
      const std::string why = v2_forward_refusal(p, target);
      ASSERT_EQ(why.find("for fp32 have registers for up to 192") != std::string::npos, headdim > 192);
      ASSERT_EQ(why.find("for fp32 have registers for up to 128") != std::string::npos, headdim > 128 && headdim <= 192);
      if (headdim > 192) continue;
      p.pair_mask.given = headdim <= 128;
      ASSERT_EQ(v2_forward_refusal(p, target), "");
      plan = plan_v2_forward(p, target);
      EXPECT_TRUE(v2_forward_rows()[static_cast<size_t>(plan.key.row)].heavy);
      EXPECT_LE(plan.shared_bytes, target.shared_bytes);
      const std::string source = v2_forward_request(plan.key).source;
      p.has_documents = true;
      EXPECT_EQ(v2_forward_refusal(p, target), "");
      for (const char* part : {"kWindow = true;", "kCapped = true;", "kCausal = false;", ".bias = 2", "fattn::PairParams p", "forward_f32.h"})
        EXPECT_NE(source.find(part), std::string::npos) << part << "\n" << source;
    }
}

TEST(V2ForwardPlanSmall, BiasAndMaskComeThroughSharedMemory) {
  for (const V2Target& target : kTargets)
    for (int headdim = 8; headdim <= 256; headdim += 8)
      for (const auto& [bias, mask] : {std::pair{0, true}, {1, false}, {2, false}, {2, true}}) {
        Problem p = problem_of(DType::kF16, headdim, headdim, true);
        p.bias = {bias != 0, bias == 2 ? DType::kF32 : DType::kF16, 1, 1, 1, {}};
        p.pair_mask.given = mask;
        const V2ForwardPlan plan = plan_v2_forward(p, target);
        const V2ForwardRow& row = v2_forward_rows()[static_cast<size_t>(plan.key.row)];
        const bool staged = v2_forward_request(plan.key).source.find("kStaged = true") != std::string::npos;
        EXPECT_EQ(row.staged, staged);
        EXPECT_TRUE(row.heavy);
        EXPECT_FALSE(staged && target.level < 80) << "they are copied by cp.async";
        if (target.level >= 80 && headdim <= 128 && bias != 2) {
          EXPECT_TRUE(staged) << target.arch << " " << headdim;
        }
        const TermTile terms{row.tile.block_m(), row.tile.block_n, 2 * bias, mask, false};
        EXPECT_EQ(plan.shared_bytes, row.tile.shared_bytes(headdim, headdim, p.dtype) + (staged ? row.tile.stages * terms.bytes() : 0));
        EXPECT_LE(plan.shared_bytes, target.shared_bytes);
        EXPECT_EQ(terms.bias_pitch() % 16, 0);
        EXPECT_EQ(terms.mask_pitch() % 16, 0);
      }
  // What is alone leaves a warp two tiles of rows.
  Problem p = problem_of(DType::kBF16, 128, 128, true);
  p.has_alibi = true;
  EXPECT_EQ(plan_v2_forward(p, kHopper).tile.row_tiles, 2);
  p.dropout_below = 1;
  EXPECT_EQ(plan_v2_forward(p, kHopper).tile.row_tiles, 1) << "both spill";
  p.has_alibi = false;
  EXPECT_EQ(plan_v2_forward(p, kHopper).tile.row_tiles, 2);
  p.dropout_below = 0;
  p.bias = {true, DType::kBF16, 1, 1, 1, {}};
  EXPECT_EQ(plan_v2_forward(p, kHopper).tile.row_tiles, 2);
}

TEST(V2ForwardPlanSmall, PackedSequencesAndDocumentsGoIntoKeysAndTiles) {
  Problem p = problem_of(DType::kBF16, 128, 128, true);
  const V2ForwardKey plain = plan_v2_forward(p, kHopper).key;
  p.packed = true;
  p.total_q = p.total_k = 1000;
  const V2ForwardKey packed = plan_v2_forward(p, kHopper).key;
  EXPECT_EQ(packed.row, plain.row) << "sequences cost no registers";
  const std::string source = v2_forward_request(packed).source;
  EXPECT_NE(source.find(".dbias = false, .packed = true};"), std::string::npos) << source;
  EXPECT_NE(source.find("causal, packed, unaligned, tile"), std::string::npos) << source;
  EXPECT_NE(source.find("fattn::PairParams p"), std::string::npos);
  p.has_documents = true;
  const V2ForwardPlan plan = plan_v2_forward(p, kHopper);
  EXPECT_TRUE(v2_forward_rows()[static_cast<size_t>(plan.key.row)].heavy) << "ids may hide any pair";
  EXPECT_NE(v2_forward_request(plan.key).source.find(".packed = true, .documents = true};"), std::string::npos);
  EXPECT_TRUE(plan.tile.queries_in_registers);
  p.has_alibi = true;
  EXPECT_FALSE(plan_v2_forward(p, kHopper).tile.queries_in_registers) << "they would leave too few for ids and slopes";
}

// In fp32 up to headdim 192; a CTA keeps in shared memory where its sequence's keys begin.
TEST(V2ForwardPlanSmall, Fp32TakesPackedSequences) {
  for (const V2Target& target : kTargets)
    for (int headdim = 8; headdim <= 256; headdim += 8)
      for (const bool window : {false, true}) {
        if (target.level < 80) continue;
        Problem p = problem_of(DType::kF32, headdim, headdim, !window);
        if (window) p.window_left = 10;
        const V2ForwardPlan dense = plan_v2_forward(p, target);
        p.packed = true;
        p.total_q = p.total_k = 1000;
        const std::string why = v2_forward_refusal(p, target);
        ASSERT_EQ(why.find("with packed sequences, pages, lengths") != std::string::npos, headdim > 192) << why;
        if (headdim > 192) continue;
        ASSERT_EQ(why, "");
        const V2ForwardPlan plan = plan_v2_forward(p, target);
        EXPECT_EQ(plan.shared_bytes, plan.tile.shared_bytes(headdim, headdim, p.dtype) + 4);
        EXPECT_LE(plan.shared_bytes, target.shared_bytes);
        if (!window) {
          EXPECT_EQ(plan.key.row, dense.key.row) << "sequences cost no registers";
        }
        const std::string source = v2_forward_request(plan.key).source;
        EXPECT_NE(source.find("forward_f32.h"), std::string::npos);
        EXPECT_NE(source.find(".dbias = false, .packed = true};"), std::string::npos) << source;
        p.has_documents = p.has_alibi = true;
        p.dropout_below = 1;
        EXPECT_EQ(v2_forward_refusal(p, target), "");
        p.bias = {true, DType::kF32, 1, 1, 1, {}};
        EXPECT_EQ(v2_forward_refusal(p, target).find("documents of packed sequences, a bias") != std::string::npos, headdim > 128);
      }
}

TEST(V2ForwardPlanSmall, SectionsCoverTheHeads) {
  for (const int64_t seqlen_k : {0, 1, 512, 8192, 1 << 20}) {
    for (const int64_t batch : {1, 3, 64}) {
      Problem p = problem_of(DType::kBF16, 128, 128, true);
      p.batch = batch;
      p.seqlen_k = seqlen_k;
      const V2ForwardPlan plan = plan_v2_forward(p, kHopper);
      EXPECT_GE(plan.heads_per_section, 1);
      EXPECT_LE(plan.heads_per_section, batch * p.nheads);
    }
  }
  EXPECT_EQ(plan_v2_forward(problem_of(DType::kBF16, 128, 128, false), kHopper).heads_per_section, 1);
}

TEST(V2ForwardPlanSmall, SourcesDifferWhereKeysDo) {
  std::set<std::string> sources;
  size_t count = 0;
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const int headdim : {64, 72, 128, 256}) {
      for (const bool causal : {false, true}) {
        for (const bool aligned : {false, true}) {
          V2ForwardKey key = plan_v2_forward(problem_of(dtype, headdim, headdim, causal), kHopper).key;
          key.aligned = aligned;
          const jit::Request request = v2_forward_request(key);
          EXPECT_EQ(request.arch, 90);
          EXPECT_FALSE(request.arch_specific);
          const std::string header = dtype == DType::kF32 ? "kernels/v2/forward_f32.h" : "kernels/v2/forward.h";
          EXPECT_NE(request.source.find("#include \"" + header + "\""), std::string::npos);
          EXPECT_NE(request.source.find(request.entry + "("), std::string::npos);
          EXPECT_NE(request.source.find("kHeaddim = " + std::to_string(headdim) + ";"), std::string::npos);
          sources.insert(request.source);
          ++count;
        }
      }
    }
  }
  EXPECT_EQ(sources.size(), count);
}

}  // namespace
}  // namespace fattn::core::cuda
