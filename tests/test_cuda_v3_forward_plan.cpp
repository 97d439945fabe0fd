// The host side of the CUDA v3 forward kernel: the table of tiles, refusals, the order of the work, parameters and the emitted source. Needs no GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "backend/cuda/v3_forward.h"
#include "backend/cuda/v3_sections.h"
#include "device_abi/v3_documents.h"
#include "device_abi/v3_forward_work.h"
#include "device_abi/v3_packed_tiles.h"
#include "v3_problem.h"

namespace fattn::core::cuda {
namespace {

TEST(V3ForwardPlanSmall, EveryPairOfHeaddimsHasATileThatFits) {
  for (const bool causal : {false, true})
    for (const int64_t seqlen_k : {1, 523, 100000})
      for (int64_t headdim = 8; headdim <= 256; headdim += 8)
        for (int64_t headdim_v = 8; headdim_v <= 256; headdim_v += 8) {
          const Problem p = problem_of(DType::kF16, headdim, headdim_v, causal, 300, seqlen_k);
          ASSERT_EQ(v3_forward_refusal(p, kH200), "") << headdim << " " << headdim_v;
          const V3ForwardPlan plan = plan_v3_forward(p, kH200);
          EXPECT_LE(plan.shared_bytes, kH200.shared_bytes);
          EXPECT_GE(plan.key.width, headdim);
          EXPECT_GE(plan.key.width_v, headdim_v);
          EXPECT_EQ(plan.tiles, (300 + plan.tile.block_m() - 1) / plan.tile.block_m() * 12);
        }
}

// What kernels/v3 assumes of a tile. Registers: setmaxnreg beyond what the launch gave would wait for ever.
TEST(V3ForwardPlanSmall, TilesAreWellFormed) {
  for (const V3ForwardRow& row : v3_forward_rows()) {
    const V3ForwardTile& tile = row.tile;
    const bool terms = row.scores == V3RowScores::kTerms;
    EXPECT_TRUE(tile.block_n == 64 || tile.block_n == 96 || tile.block_n == 128 || (terms && tile.block_n == 32));
    EXPECT_EQ(tile.stages_terms > 0, terms);
    RegisterFacts mask{kV3Arch, 0, DType::kBF16, row.width, row.width, with::kMask};
    mask.has |= row.mask == V3Mask::kCausal ? with::kCausal : row.mask == V3Mask::kWindow ? with::kWindow : 0;
    if (v3_row_takes(row, mask)) {
      EXPECT_EQ(tile.block_n % 64, 0) << "words of 64 keys";
    }
    if (terms) {
      EXPECT_TRUE(tile.careful() && !tile.skip) << "as kernels/v3/forward_shape.h wants it";
    }
    EXPECT_TRUE(tile.query_buffers == 1 || tile.query_buffers == 2);
    EXPECT_GE(tile.stages_k, 2) << "keys are one block ahead of values";
    EXPECT_FALSE(tile.ping_pong && tile.skip);
    EXPECT_LE(tile.block_m(), 256) << "a box of TMA";
    EXPECT_GT(row.speed, 0);
    EXPECT_LE(row.speed, 1);
    EXPECT_EQ(tile.producer_registers % 8, 0);
    EXPECT_EQ(tile.consumer_registers % 8, 0);
    EXPECT_LE(tile.producer_registers + tile.groups * tile.consumer_registers, tile.launch_registers() * (tile.groups + 1));
    EXPECT_LE(tile.launch_registers() * tile.threads(), 65536);
    // Output, scores and weights in registers.
    EXPECT_LE(row.width / 2 + tile.block_n / 2 + tile.block_n / 4, tile.consumer_registers - 24) << row.width;
  }
}

// Every tile of every head is somebody's, once: the numbers as kernels/v3/schedule.h gives them out.
TEST(V3ForwardPlanSmall, TheGridTakesEveryTileOnce) {
  for (const bool causal : {false, true})
    for (const int64_t seqlen : {1, 500, 2048, 40000})
      for (const int64_t batch : {1, 41}) {
        Problem p = problem_of(DType::kBF16, 128, 128, causal, seqlen, seqlen);
        p.batch = batch;
        p.nheads = p.nheads_k = 3;  // an odd number of tiles
        const V3ForwardPlan plan = plan_v3_forward(p, kH200);
        ASSERT_GE(plan.grid, 1);
        ASSERT_GE(plan.heads_per_section, 1);
        std::vector<int> taken(static_cast<size_t>(plan.tiles));
        for (int cta = 0; cta < plan.grid; ++cta)
          for (int nth = 0;; ++nth) {
            const int64_t turn = int64_t{nth} * plan.grid + (causal && nth % 2 == 1 ? plan.grid - 1 - cta : cta);
            const int64_t number = plan.tiles_per_cta == 0 ? turn : nth < plan.tiles_per_cta ? int64_t{cta} * plan.tiles_per_cta + nth : plan.tiles;
            if (number >= plan.tiles) break;
            ++taken[static_cast<size_t>(number)];
          }
        EXPECT_EQ(std::count(taken.begin(), taken.end(), 1), plan.tiles) << causal << " " << seqlen << " " << batch;
      }
}

TEST(V3ForwardPlanSmall, SmallProblemsTakeSmallerTiles) {
  const auto rows = [](int64_t batch, int64_t seqlen) {
    Problem p = problem_of(DType::kBF16, 128, 128, false, seqlen, seqlen);
    p.batch = batch;
    p.nheads = 16;
    return plan_v3_forward(p, kH200).tile.block_m();
  };
  EXPECT_EQ(rows(32, 512), 192);  // 12 waves: the fastest
  EXPECT_EQ(rows(1, 2048), 128);  // 256 tiles in two waves, where 192 rows would be 176 in two
  EXPECT_EQ(rows(1, 1536), 192);  // 128 tiles in one wave; 128 rows: two
}

// What the searches on one H200 found fastest, or within 1 % of it.
TEST(V3ForwardPlanSmall, SectionsAreBalancedAndFitIntoL2) {
  const auto plan_of = [](int headdim, int64_t batch, int64_t seqlen, int64_t nheads) {
    Problem p = problem_of(DType::kBF16, headdim, headdim, true, seqlen, seqlen);
    p.batch = batch;
    p.nheads = p.nheads_k = nheads;
    return plan_v3_forward(p, kH200);
  };
  EXPECT_EQ(plan_of(128, 32, 512, 16).heads_per_section, 44);
  EXPECT_EQ(plan_of(128, 16, 1024, 16).heads_per_section, 44);
  EXPECT_EQ(plan_of(128, 8, 2048, 16).heads_per_section, 33);
  EXPECT_EQ(plan_of(128, 2, 8192, 16).heads_per_section, 11);  // 12 and 6 leave 16 % of the time unused
  EXPECT_EQ(plan_of(192, 4, 4096, 10).heads_per_section, 11);
  EXPECT_EQ(plan_of(192, 16, 1024, 10).heads_per_section, 33);
  EXPECT_EQ(plan_of(256, 32, 512, 8).heads_per_section, 33);
  EXPECT_EQ(plan_of(256, 16, 1024, 8).heads_per_section, 33);
  EXPECT_EQ(plan_of(128, 8, 2048, 16).tiles_per_cta, 0);
  const V3ForwardPlan few = plan_of(128, 1, 16384, 16);
  EXPECT_EQ(few.tiles_per_cta, 2);  // five heads fill L2, too few for turns
  EXPECT_EQ(few.grid, 16 * 86 / 2);
  EXPECT_EQ(few.heads_per_section, 8);                         // up to twice as many, for the balance
  EXPECT_EQ(plan_of(192, 1, 16384, 10).heads_per_section, 5);  // three at a time would leave a section of one head for the end
}

TEST(V3ForwardPlanSmall, BalanceIsThatOfTheTurns) {
  const Mask mask{512, 512, true};
  // Four tiles a head of 1 to 4 steps, and one for the rest of each: 5, 4, 3, 2.
  EXPECT_DOUBLE_EQ(v3_balance({mask, 1, 128, 128, 4, 1, 1}, 1), 14.0 / 20);
  EXPECT_DOUBLE_EQ(v3_balance({mask, 2, 128, 128, 4, 1, 1}, 1), 1);          // 5 4 3 2 and back
  EXPECT_DOUBLE_EQ(v3_balance({mask, 2, 128, 128, 4, 2, 1}, 2), 28.0 / 28);  // 5 5 4 4, then 3 3 2 2 from the other end
  EXPECT_DOUBLE_EQ(v3_balance({mask, 3, 128, 128, 4, 3, 1}, 1), 42.0 / 48);  // and 5 4 3 2 again
}

TEST(V3ForwardPlanSmall, BalanceWhereWhoeverIsFreeTakesTheNext) {
  const Mask mask{512, 512, true};
  EXPECT_DOUBLE_EQ(v3_free_balance({mask, 1, 128, 128, 2, 1, 1}, 1, 1), 1);          // 5 and 2, 4 and 3
  EXPECT_DOUBLE_EQ(v3_free_balance({mask, 1, 128, 128, 2, 1, 1}, 1, 2), 14.0 / 18);  // 5 4 together, 3 2 together
  EXPECT_DOUBLE_EQ(v3_free_balance({mask, 3, 128, 128, 2, 1, 1}, 1, 3), 1);          // 12, 11, 10 and 9: 9 after 12, 10 after 11
}

// Heads side by side: a head's short tiles, of its first rows, then come last of all.
TEST(V3ForwardPlanSmall, TilesOfAWindowAreBalanced) {
  const Mask mask{640, 640, true, 255};
  // Five tiles a head of 1, 2, 3, 3 and 3 steps, and one for the rest of each: 4, 4, 4, 3, 2.
  EXPECT_DOUBLE_EQ(v3_balance({mask, 2, 128, 128, 4, 1, 1}, 1), 34.0 / 44);  // 4 4 4 3, back 2 4 4 4, and 3 2
  EXPECT_DOUBLE_EQ(v3_balance({mask, 2, 128, 128, 4, 2, 1}, 2), 34.0 / 36);  // 4 4 4 4, back 4 4 3 3, and 2 2
  for (const int headdim : {64, 96, 128, 192, 256})
    for (const int64_t window : {256, 1024, 4096}) {
      Problem p = problem_of(DType::kBF16, headdim, headdim, true, 16384, 16384);
      p.batch = 1;
      p.nheads = p.nheads_k = 2048 / headdim;
      p.window_left = window - 1;
      const V3ForwardPlan plan = plan_v3_forward(p, kH200);
      EXPECT_EQ(plan.tiles_per_cta, 0);
      const V3Turns turns{p.mask(), p.nheads, plan.tile.block_m(), plan.tile.block_n, plan.grid, 1, 1};
      EXPECT_GT(v3_balance(turns, plan.heads_per_section), 0.93) << headdim << " " << window;
      EXPECT_GE(v3_balance(turns, plan.heads_per_section), v3_balance(turns, 1)) << headdim << " " << window;
      // What the tiles of a turn see, in L2: less than the device's.
      const int64_t keys = std::min<int64_t>(p.seqlen_k, window + plan.tile.block_m()), apart = int64_t{plan.grid} * plan.tile.block_m();
      EXPECT_LE((plan.heads_per_section * keys + apart) * 4 * headdim, kH200.l2_bytes) << headdim << " " << window;
    }
}

// A warpgroup passes over blocks before its first (kernels/v3/forward_shape.h), and gets its queries by itself where there is one buffer of them.
TEST(V3ForwardPlanSmall, WarpgroupsOfAWindowPassOverBlocks) {
  for (const V3ForwardRow& row : v3_forward_rows()) {
    const V3ForwardTile& tile = row.tile;
    EXPECT_EQ(tile.queries_by_group(row.mask), row.mask == V3Mask::kWindow && tile.skip && tile.query_buffers == 1);
    if (row.mask == V3Mask::kWindow && tile.skip && tile.query_buffers == 2) {
      EXPECT_LE(64 * (tile.groups - 1), (tile.stages_v - 1) * tile.block_n);
    }
  }
  const V3ForwardTile three{3, 64, 6, 5, 1, false, true, 8, 32, 160};
  EXPECT_TRUE(three.queries_by_group(V3Mask::kWindow));
  EXPECT_FALSE(three.queries_by_group(V3Mask::kCausal));
  EXPECT_EQ(three.shared_bytes(128, 128), 192 * 256 + 11 * 64 * 256 + 8 * (2 * 3 + 2 * 11 + three.stages_v) + kV3NoteBytes)
      << "two barriers for each warpgroup's queries, one more for each block of values, and notes";
}

TEST(V3ForwardPlanSmall, SectionsOnAnyGpu) {
  for (const int64_t nheads : {1, 3, 16, 40})
    for (const int64_t seqlen : {130, 3072, 200000})
      for (const int multiprocessors : {1, 2, 5, 7, 78, 114, 131, 132, 144}) {
        Problem p = problem_of(DType::kBF16, 256, 256, true, seqlen, seqlen);
        p.batch = 8;
        p.nheads = p.nheads_k = nheads;
        V3Target target = kH200;
        target.multiprocessors = multiprocessors;
        const int heads = plan_v3_forward(p, target).heads_per_section;
        EXPECT_GE(heads, 1);
        EXPECT_LE(heads, 8 * nheads);
      }
}

// As kernels/v3/schedule.h divides.
TEST(V3ForwardPlanSmall, DivisorsDivide) {
  for (const int divisor :
       {1, 2, 3, 5, 6, 7, 8, 11, 12, 22, 33, 44, 66, 100, 127, 128, 132, 528, 4095, 65537, 1000003, (1 << 30) - 1, 1 << 30, (1 << 30) + 1}) {
    const Divisor by = divisor_of(divisor);
    const auto check = [&](int64_t x) {
      if (x < 0 || x > 0x7fffffff) return;
      EXPECT_EQ(static_cast<int64_t>((static_cast<uint64_t>(2 * x) * by.factor >> 32) >> by.shift), x / divisor) << x << " / " << divisor;
    };
    for (int64_t x = 1; x <= 0x7fffffff; x = x * 3 / 2 + 1)
      for (const int64_t near : {x, x / divisor * divisor - 1, x / divisor * divisor, x / divisor * divisor + 1}) check(near);
    check(0);
    check(0x7fffffff);
  }
}

TEST(V3ForwardPlanSmall, RefusesWithAReason) {
  const auto refusal = [](auto change) {
    Problem p = problem_of(DType::kBF16, 64, 64, false);
    change(p);
    return v3_forward_refusal(p, kH200);
  };
  EXPECT_NE(refusal([](Problem& p) { p.seqlen_k = int64_t{1} << 30, p.window_left = 9; }).find("with a window"), std::string::npos);
  EXPECT_EQ(refusal([](Problem&) {}), "");
  EXPECT_NE(refusal([](Problem& p) { p.dtype = DType::kF32; }).find("fp16 and bf16"), std::string::npos);
  EXPECT_NE(refusal([](Problem& p) { p.headdim = 264; }).find("264"), std::string::npos);
  EXPECT_NE(refusal([](Problem& p) { p.headdim_v = 264; }).find("264"), std::string::npos);
  EXPECT_NE(refusal([](Problem& p) { p.k.row += 4; }).find("k has a stride of"), std::string::npos);
  EXPECT_NE(refusal([](Problem& p) { p.v.head = 0; }).find("v has a stride of 0"), std::string::npos);
  EXPECT_NE(refusal([](Problem& p) { p.o.batch += 1; }).find("o has a stride of"), std::string::npos);
  EXPECT_NE(refusal([](Problem& p) { p.seqlen_k = 0; }).find("k has one row of size 0"), std::string::npos);
  EXPECT_NE(refusal([](Problem& p) { p.seqlen_q = int64_t{1} << 31; }).find("seqlen_q"), std::string::npos);
  EXPECT_NE(refusal([](Problem& p) { p.batch = p.seqlen_q = int64_t{1} << 20; }).find("split the batch"), std::string::npos);
  Problem p = problem_of(DType::kBF16, 64, 64, false);
  EXPECT_NE(v3_forward_refusal(p, {65536, 60 << 20, 132}).find("65536"), std::string::npos);
}

TEST(V3ForwardPlanSmall, ParametersDescribeTheCall) {
  CudaDevice& device = cuda_device(0);
  Problem p = problem_of(DType::kBF16, 72, 40, true);
  p.softmax_scale = -2;
  const V3ForwardPlan plan = plan_v3_forward(p, kH200);
  EXPECT_EQ(plan.key.width, 96);
  EXPECT_EQ(plan.key.width_v, 64);
  EXPECT_EQ(plan.key.score, V3Score::kSigned);
  const auto at = [](uintptr_t address) { return reinterpret_cast<void*>(address); };
  V3ForwardParams params;
  fattn_buffers buffers{};
  buffers.q = at(4096), buffers.k = at(8192), buffers.v = at(12288), buffers.o = at(16384);
  set_v3_forward_params(params, p, plan, device, buffers);
  EXPECT_EQ(params.q.opaque[0], 4096u);  // where the stub of the driver puts the address
  EXPECT_EQ(params.k.opaque[0], 8192u);
  EXPECT_EQ(params.v.opaque[0], 12288u);
  EXPECT_EQ(params.o.opaque[0], 16384u);
  EXPECT_EQ(params.call.q, at(4096));
  EXPECT_EQ(params.call.lse, nullptr);
  EXPECT_EQ(params.call.group, 3);
  EXPECT_EQ(params.call.heads_per_section, plan.heads_per_section);
  EXPECT_FLOAT_EQ(params.call.softmax_scale_log2, 2 * 1.44269504f);
  EXPECT_EQ(params.work.columns, 72);
  EXPECT_EQ(params.work.columns_v, 40);
  EXPECT_EQ(params.work.tiles, plan.tiles);
  EXPECT_EQ((params.work.sections - 1) * plan.heads_per_section + params.work.heads_of_last, 2 * 6);
  p.softmax_scale = 0;
  EXPECT_EQ(plan_v3_forward(p, kH200).key.score, V3Score::kSigned);
  p.softmax_scale = 1e-60;  // 0 in fp32
  EXPECT_EQ(plan_v3_forward(p, kH200).key.score, V3Score::kSigned);
  p.softmax_scale = 0.5;
  EXPECT_EQ(plan_v3_forward(p, kH200).key.score, V3Score::kPlain);
  p.softmax_scale = -0.5, p.softcap = 4;
  EXPECT_EQ(plan_v3_forward(p, kH200).key.score, V3Score::kCapped) << "whatever the scale's sign";
}

// Scores and masks of every kind have a row for every pair of headdims, and it is theirs.
TEST(V3ForwardPlanSmall, FeaturesHaveRowsOfTheirOwn) {
  for (const int headdim : {64, 96, 128, 192, 256})
    for (const bool causal : {false, true})
      for (const bool window : {false, true})
        for (const bool softcap : {false, true}) {
          Problem p = problem_of(DType::kBF16, headdim, headdim, causal, 9000, 9000);
          if (window) p.window_left = 100;
          if (softcap) p.softcap = 30;
          ASSERT_EQ(v3_forward_refusal(p, kH200), "");
          const V3ForwardPlan plan = plan_v3_forward(p, kH200);
          const V3ForwardRow& row = v3_forward_rows()[static_cast<size_t>(plan.key.row)];
          EXPECT_EQ(plan.key.mask, window ? V3Mask::kWindow : causal ? V3Mask::kCausal : V3Mask::kFull);
          EXPECT_EQ(row.mask, plan.key.mask);
          EXPECT_TRUE(row.scores == V3RowScores::kAny || row.scores == (softcap ? V3RowScores::kCapped : V3RowScores::kUncapped) ||
                      (!softcap && row.scores == V3RowScores::kPlain));
          const std::string source = v3_forward_request(plan.key).source;
          EXPECT_TRUE(!softcap || source.find("kCareful = true") != std::string::npos) << "or scores near softcap take the way back in every block";
          EXPECT_EQ(source.find("FeatureParams call") != std::string::npos, window || softcap);
          EXPECT_EQ(source.find("v3::WindowMask") != std::string::npos, window);
          EXPECT_EQ(source.find("v3::CappedScore") != std::string::npos, softcap);
        }
}

// What its polynomial is made of would lose digits in fp32.
TEST(V3ForwardPlanSmall, ScalesFarBelowSoftcapAreV2s) {
  for (const auto& [scale, softcap, taken] : {std::tuple{2.9e-6, 30.0, false},
                                              {3.1e-6, 30.0, true},
                                              {-1e-13, 1.0, false},
                                              {0.0, 30.0, true},
                                              {0.3, 1e20, false},
                                              {0.3, 2e6, true},
                                              {1.1e-13, 1e-6, true},
                                              {1e-14, 1e-6, false}}) {
    Problem p = problem_of(DType::kBF16, 64, 64, false, 900, 900);
    p.softmax_scale = scale;
    p.softcap = softcap;
    EXPECT_EQ(v3_forward_refusal(p, kH200).empty(), taken) << scale << " " << softcap << ": " << v3_forward_refusal(p, kH200);
  }
}

TEST(V3ForwardPlanSmall, DropoutHasATileUnderEveryMask) {
  for (const int headdim : {64, 96, 128, 192, 256})
    for (const int64_t window_left : {-1, 100})
      for (const bool causal : {false, true}) {
        Problem p = problem_of(DType::kBF16, headdim, headdim, causal, 9000, 9000);
        p.window_left = window_left;
        p.dropout_below = 1000;
        EXPECT_EQ(v3_forward_refusal(p, kH200), "") << headdim << " " << window_left << " " << causal;
      }
}

TEST(V3ForwardPlanSmall, LengthsOfBatchEntriesAreTheirOwnKernels) {
  Problem p = problem_of(DType::kBF16, 128, 128, false);
  const auto source = [&] { return v3_forward_request(plan_v3_forward(p, kH200).key).source; };
  const auto has = [&](const char* text) { return source().find(text) != std::string::npos; };
  EXPECT_TRUE(has("v3::FullMask") && has("AttentionParams call") && !has("kPair")) << source();
  p.has_seqused_k = true;
  EXPECT_EQ(v3_forward_refusal(p, kH200), "");
  EXPECT_TRUE(has("v3::EntryMask") && has("PairParams call") && has("kPair = {.lengths = true, .alibi = false")) << source();
  p.causal = true;
  EXPECT_TRUE(has("v3::CausalMask") && has(".lengths = true")) << source();
  p.softcap = 9;
  EXPECT_NE(v3_forward_refusal(p, kH200).find("with softcap"), std::string::npos);
  p.softcap = 0;
  for (const int64_t seqlen_k : {500, 5000})  // where tiles of other problems have three or four warpgroups
    for (const int headdim : {64, 96, 128, 192, 256})
      for (const bool window : {false, true}) {
        Problem any = problem_of(DType::kBF16, headdim, headdim, true, 5000, seqlen_k);
        any.has_seqused_k = true;
        if (window) any.window_left = 100;
        ASSERT_EQ(v3_forward_refusal(any, kH200), "") << headdim;
        const V3ForwardPlan plan = plan_v3_forward(any, kH200);
        any.has_seqused_k = false;
        const bool spills = headdim == 64 && !window && seqlen_k > 4096;
        EXPECT_EQ(plan.key.row == plan_v3_forward(any, kH200).key.row, !spills) << headdim << " " << window << " " << seqlen_k;
        any.has_seqused_k = any.has_alibi = true;
        EXPECT_LE(plan_v3_forward(any, kH200).tile.groups, 2) << "has no registers for both";
      }
}

TEST(V3ForwardPlanSmall, AlibiHasTheTilesOfProblemsWithoutAny) {
  for (const int headdim : {64, 96, 128, 192, 256})
    for (const bool causal : {false, true})
      for (const int64_t seqlen : {300, 9000}) {
        Problem p = problem_of(DType::kBF16, headdim, headdim, causal, seqlen, seqlen);
        const int row = plan_v3_forward(p, kH200).key.row;
        p.has_alibi = true;
        ASSERT_EQ(v3_forward_refusal(p, kH200), "");
        const V3ForwardPlan plan = plan_v3_forward(p, kH200);
        EXPECT_EQ(plan.key.row, row);
        const std::string source = v3_forward_request(plan.key).source;
        EXPECT_NE(source.find(".alibi = true"), std::string::npos);
        EXPECT_EQ(source.find("v3::EntryMask"), std::string::npos) << "no key is hidden that was not";
        p.softcap = 9;
        EXPECT_NE(v3_forward_refusal(p, kH200).find("no registers for ALiBi with softcap"), std::string::npos);
      }
}

// Random numbers are those of blocks of 64 keys, and those who draw them have registers.
TEST(V3ForwardPlanSmall, DropoutHasTilesWithRegistersForIt) {
  for (const int headdim : {64, 96, 128, 192, 256})
    for (const int headdim_v : {64, 128, 256})
      for (const bool causal : {false, true})
        for (const bool window : {false, true})
          for (const bool packed : {false, true})
            for (const int64_t seqlen : {300, 9000}) {
              Problem p = problem_of(DType::kF16, headdim, headdim_v, causal, seqlen, seqlen);
              if (window) p.window_left = 100;
              if (packed) {
                p.packed = true;
                p.total_q = p.total_k = 20000;
                p.q.batch = p.k.batch = p.v.batch = p.o.batch = 0;
              }
              const V3ForwardPlan without = plan_v3_forward(p, kH200);
              p.dropout_below = 6554;
              ASSERT_EQ(v3_forward_refusal(p, kH200), "") << headdim << " " << headdim_v;
              const V3ForwardPlan plan = plan_v3_forward(p, kH200);
              const V3ForwardTile& tile = plan.tile;
              EXPECT_LE(plan.shared_bytes, kH200.shared_bytes);
              EXPECT_EQ(plan.shared_bytes, tile.shared_bytes(plan.key.width, plan.key.width_v, {.packed = packed}));
              EXPECT_EQ(tile.block_n % 64, 0) << "as kernels/v3/dropout_bits.h draws bits";
              EXPECT_LE(tile.groups, packed ? 2 : tile.block_n == 128 ? 2 : window || causal ? 3 : 4);
              EXPECT_TRUE(tile.registers_suffice());
              const std::string source = v3_forward_request(plan.key).source;
              EXPECT_NE(source.find(".dropout = true"), std::string::npos);
              EXPECT_NE(source.find("kGroups = " + std::to_string(tile.groups) + ";"), std::string::npos) << "the source is that of the plan's tile";
              EXPECT_EQ(v3_forward_request(without.key).source.find(".dropout = true"), std::string::npos);
              p.dropout_places = true;
              EXPECT_NE(v3_forward_request(plan_v3_forward(p, kH200).key).source.find(".places = true"), std::string::npos);
            }
  Problem p = problem_of(DType::kBF16, 128, 128, true);
  p.dropout_below = 1;
  p.softcap = 9;
  EXPECT_NE(v3_forward_refusal(p, kH200).find("no registers for dropout with softcap"), std::string::npos);
}

TEST(V3ForwardPlanSmall, PackedSequencesHaveAListOfTilesAndTheRowsThatLeaveThemRegisters) {
  for (const int headdim : {64, 96, 128, 192, 256})
    for (const bool causal : {false, true})
      for (const bool window : {false, true})
        for (const double softcap : {0.0, 30.0})
          for (const int64_t most : {100, 4096, 100000}) {
            Problem p = problem_of(DType::kBF16, headdim, headdim, causal);
            p.packed = true;
            p.batch = 300, p.seqlen_q = p.seqlen_k = most, p.total_q = p.total_k = 200000;
            p.q.batch = p.k.batch = p.v.batch = p.o.batch = 0;
            p.window_left = window ? 50 : -1;
            p.softcap = softcap;
            ASSERT_EQ(v3_forward_refusal(p, kH200), "") << headdim;
            const V3ForwardPlan plan = plan_v3_forward(p, kH200);
            EXPECT_LE(plan.tile.groups, softcap > 0 ? 2 : 4);
            EXPECT_LE(plan.grid, kH200.multiprocessors);
            const int64_t tiles = 200000 / plan.tile.block_m() + 300;  // whatever the lengths
            EXPECT_EQ(plan.tiles, p.nheads * tiles);
            EXPECT_EQ(plan.workspace_bytes, 16 + 32 * tiles);
            EXPECT_EQ(plan.heads_per_section % p.group(), 0);
            EXPECT_GE(plan.tile_groups, 1);
            EXPECT_LE(plan.tile_groups, kV3MostTileGroups);
            const std::string source = v3_forward_request(plan.key).source;
            EXPECT_NE(source.find(".packed = true"), std::string::npos);
            EXPECT_EQ(source.find("v3::FullMask"), std::string::npos) << "keys behind a sequence are another's";
          }
  const std::string list = v3_packed_tiles_request({.mask = V3Mask::kCausal, .block_m = 128, .block_n = 64}).source;
  EXPECT_NE(list.find("packed_tiles<fattn::v3::CausalMask, 128, 64, false>(call)"), std::string::npos) << list;
  Problem p = problem_of(DType::kBF16, 64, 64, false);
  p.packed = true;
  p.total_q = p.total_k = 100;
  p.nheads = 1 << 20, p.total_q = int64_t{1} << 28;
  EXPECT_NE(v3_forward_refusal(p, kH200).find("split the sequences"), std::string::npos);
}

// Each sequence ends in the middle of a tile, but not where all have one length; and a tile costs something besides its pairs.
TEST(V3ForwardPlanSmall, TilesOfPackedSequencesFitTheirLengths) {
  const auto rows_of = [](int headdim, bool causal, int64_t sequences, int64_t longest, bool alibi = false, int64_t window = -1) {
    Problem p = problem_of(DType::kBF16, headdim, headdim, causal, longest, longest);
    p.packed = true;
    p.batch = sequences, p.total_q = p.total_k = 16384;
    p.q.batch = p.k.batch = p.v.batch = p.o.batch = 0;
    p.has_alibi = alibi;
    p.window_left = window;
    return plan_v3_forward(p, kH200).tile.block_m();
  };
  for (const bool causal : {false, true}) {
    EXPECT_EQ(rows_of(64, causal, 8, 4096), 256);
    EXPECT_EQ(rows_of(64, causal, 100, 4096), 256);
    EXPECT_EQ(rows_of(64, causal, 250, 4096), 128);
    EXPECT_EQ(rows_of(64, causal, 170, 128), 128) << "in which the longest fits";
    EXPECT_EQ(rows_of(64, causal, 32, 512), 256);
  }
  EXPECT_EQ(rows_of(128, false, 32, 512), 192);
  EXPECT_EQ(rows_of(128, false, 128, 128), 128) << "which fill it";
  EXPECT_EQ(rows_of(128, false, 170, 128), 128);
  EXPECT_EQ(rows_of(64, true, 8, 4096, true), 128) << "has no registers for both";
  EXPECT_EQ(rows_of(64, true, 8, 4096, false, 300), 128) << "has no registers";
  EXPECT_EQ(rows_of(96, true, 8, 4096, false, 300), 192);
  EXPECT_EQ(rows_of(128, true, 8, 4096, false, 300), 192);
}

// The list of tiles says how many keys a sequence uses, and the kernel behind it is that of sequences without lengths.
TEST(V3ForwardPlanSmall, LengthsOfPackedSequencesAreInTheListOfTilesAlone) {
  for (const int headdim : {64, 96, 128, 192, 256})
    for (const bool window : {false, true})
      for (const int more : {0, 1, 2, 3}) {  // softcap, dropout, ALiBi
        Problem p = problem_of(DType::kBF16, headdim, headdim, false, 4096, 4096);
        p.packed = true;
        p.total_q = p.total_k = 9000;
        p.q.batch = p.k.batch = p.v.batch = p.o.batch = 0;
        p.window_left = window ? 50 : -1;
        p.softcap = more == 1 ? 30 : 0;
        p.dropout_below = more == 2 ? 6554 : 0;
        p.has_alibi = more == 3;
        const V3ForwardPlan without = plan_v3_forward(p, kH200);
        const std::string list = v3_packed_tiles_request(v3_packed_tiles_key(p, without)).source;
        p.has_seqused_k = true;
        ASSERT_EQ(v3_forward_refusal(p, kH200), "") << headdim << " " << window << " " << more;
        const V3ForwardPlan plan = plan_v3_forward(p, kH200);
        EXPECT_EQ(v3_forward_request(plan.key).source, v3_forward_request(without.key).source);
        EXPECT_EQ(plan.workspace_bytes, without.workspace_bytes);
        EXPECT_NE(list.find(", false>(call)"), std::string::npos) << list;
        EXPECT_NE(v3_packed_tiles_request(v3_packed_tiles_key(p, plan)).source.find(", true>(call)"), std::string::npos);
      }
}

// A kernel of their own goes before, and its workspace has room for what it finds: 16 bytes for each 64 queries, and the ids of keys.
TEST(V3ForwardPlanSmall, DocumentsHaveRangesAndTilesWithRegistersForThem) {
  for (const int headdim : {64, 96, 128, 192, 256})
    for (const bool causal : {false, true})
      for (const bool window : {false, true})
        for (const int more : {0, 1, 2, 3})  // lengths, dropout, softcap
          for (const int64_t seqlen_k : {1, 300, 20000}) {
            Problem p = problem_of(DType::kBF16, headdim, headdim, causal, 1000, seqlen_k);
            p.has_documents = true;
            p.window_left = window ? 50 : -1;
            p.has_seqused_k = more == 1;
            p.dropout_below = more == 2 ? 6554 : 0;
            p.softcap = more == 3 ? 30 : 0;
            ASSERT_EQ(v3_forward_refusal(p, kH200), "") << headdim << " " << more;
            const V3ForwardPlan plan = plan_v3_forward(p, kH200);
            const int block_m = plan.tile.block_m(), block_n = plan.tile.block_n;
            EXPECT_EQ(block_m, headdim == 64 && causal && !window && more == 0 ? 192 : 128);
            if (window || more > 0) {
              EXPECT_EQ(block_n, 64) << "or there are too few registers";
            }
            EXPECT_LE(plan.shared_bytes, kH200.shared_bytes);
            EXPECT_EQ(plan.tiles_per_cta, 0);
            EXPECT_EQ(plan.grid, std::min<int64_t>(plan.tiles, kH200.multiprocessors));
            EXPECT_EQ(plan.workspace_bytes,
                      p.batch * ((1000 + block_m - 1) / block_m * (block_m / 64) * 16 + (seqlen_k + block_n - 1) / block_n * block_n * 4));
            EXPECT_EQ(plan.document_grid, p.batch * (block_m == 192 ? 2 : 1)) << "16 warps take 1000 queries";
            const std::string source = v3_forward_request(plan.key).source;
            EXPECT_NE(source.find(".documents = true"), std::string::npos);
            EXPECT_EQ(source.find("v3::FullMask"), std::string::npos) << "keys are hidden";
            const std::string before = v3_document_ranges_request(v3_document_ranges_key(plan)).source;
            EXPECT_NE(before.find("document_ranges<" + std::to_string(block_m) + ", " + std::to_string(block_n) + ", false>(call)"),
                      std::string::npos)
                << before;
          }
  Problem p = problem_of(DType::kBF16, 128, 128, false);
  const int row = plan_v3_forward(p, kH200).key.row;
  EXPECT_NE(v3_forward_rows()[static_cast<size_t>(row)].scores, V3RowScores::kDocuments);
}

// With softcap or dropout the widest heads have no registers to pass over blocks of documents; of packed sequences, without these and in narrower
// heads they do. Dropout then takes maxima with the whole warpgroup.
TEST(V3ForwardPlanSmall, DocumentsWithSoftcapOrDropoutPassOverNoBlocksInTheWidestHeads) {
  for (const int headdim : {192, 256})
    for (const bool window : {false, true})
      for (const bool documents : {false, true})
        for (const bool packed : {false, true})
          for (const int more : {0, 1, 2}) {  // softcap, dropout
            Problem p = problem_of(DType::kBF16, headdim, headdim, true, 1000, 4096);
            if (window) p.window_left = 500;
            p.has_documents = documents;
            p.packed = packed;
            p.total_q = p.total_k = packed ? 5000 : 0;
            if (packed) p.q.batch = p.k.batch = p.v.batch = p.o.batch = 0;
            p.softcap = more == 1 ? 30 : 0;
            p.dropout_below = more == 2 ? 6554 : 0;
            ASSERT_EQ(v3_forward_refusal(p, kH200), "") << headdim;
            const V3ForwardPlan plan = plan_v3_forward(p, kH200);
            const bool tight = headdim == 256 && documents && !packed && more > 0;
            EXPECT_EQ(plan.tile.skip, !tight) << headdim << " " << window << " " << documents << " " << packed << " " << more;
            EXPECT_NE(plan.tile.ping_pong, plan.tile.skip);
            EXPECT_EQ(v3_forward_request(plan.key).source.find("kCareful = true") != std::string::npos, !tight || more == 1);
          }
}

// Tiles that go from the first to the last block of keys of which the mask shows anything, in every dtype and whatever the scale's sign.
TEST(V3ForwardPlanSmall, AMaskOfPairsHasATileOfItsOwnInTheNarrowestHeads) {
  for (const bool causal : {false, true})
    for (const DType dtype : {DType::kF16, DType::kBF16})
      for (const double scale : {0.125, -0.125}) {
        Problem p = problem_of(dtype, 64, 64, causal, 1000, 4096);
        p.pair_mask.given = true;
        p.softmax_scale = scale;
        ASSERT_EQ(v3_forward_refusal(p, kH200), "");
        const V3ForwardTile tile = plan_v3_forward(p, kH200).tile;
        EXPECT_EQ(tile.block_m(), 192);
        EXPECT_EQ(tile.query_buffers, 1) << "two spill";
      }
}

// Biases have tiles of their own, with room for a block of them and the next. A mask of pairs takes nothing of shared memory.
TEST(V3ForwardPlanSmall, BiasesComeThroughSharedMemory) {
  for (const int headdim : {40, 64, 96, 128, 192, 256})
    for (const bool causal : {false, true})
      for (const bool lengths : {false, true})
        for (const int bias : {0, 1, 2})
          for (const bool mask : {false, true}) {
            const DType dtype = headdim == 128 ? DType::kF16 : DType::kBF16;
            Problem p = problem_of(dtype, headdim, headdim, causal, 1000, 4096);
            p.has_seqused_k = lengths;
            p.bias.given = bias > 0;
            p.bias.dtype = bias == 2 ? DType::kF32 : dtype;
            p.pair_mask.given = mask;
            const int several = (bias > 0 ? 1 : 0) + (mask ? 1 : 0) + (lengths ? 1 : 0);
            if (bias > 0 && (causal ? several > 1 || headdim == 192 : headdim > 128 && (headdim < 200 || several > 1))) {
              EXPECT_NE(v3_forward_refusal(p, kH200).find("algorithm v2 has them all"), std::string::npos) << headdim;
              continue;
            }
            ASSERT_EQ(v3_forward_refusal(p, kH200), "") << headdim;
            const V3ForwardPlan plan = plan_v3_forward(p, kH200);
            const std::string source = v3_forward_request(plan.key).source;
            EXPECT_EQ(source.find(".mask = true") != std::string::npos, mask);
            EXPECT_EQ(plan.mask_grid, mask ? 1 : 0) << "rows of the mask are one and the same, and a CTA takes 4096 keys";
            EXPECT_EQ(plan.mask_threads, mask ? 512 : 0);
            EXPECT_EQ(plan.workspace_bytes, mask ? (4096 / 64 + 1) * 512 : 0) << "words, and a range of blocks";
            if (bias == 0) {
              EXPECT_EQ(plan.tile.stages_terms, 0);
              EXPECT_EQ(plan.shared_bytes, plan.tile.shared_bytes(plan.key.width, plan.key.width_v));
              EXPECT_EQ(source.find("kStagesTerms"), std::string::npos) << "kernels without are as they were";
              continue;
            }
            EXPECT_EQ(plan.tile.stages_terms, 2);
            EXPECT_EQ(plan.tile.block_m(), 128);
            const fattn::TermTile terms = term_tile({.bias = bias}, 128, plan.tile.block_n, false);
            const int without = plan.tile.shared_bytes(plan.key.width, plan.key.width_v);
            EXPECT_EQ(plan.shared_bytes, (without + 15) / 16 * 16 + 2 * terms.bytes()) << "which begin at a multiple of 16";
            EXPECT_LE(plan.shared_bytes, kH200.shared_bytes);
            EXPECT_NE(source.find("kStagesTerms = 2"), std::string::npos);
            EXPECT_NE(source.find(".bias = " + std::to_string(bias)), std::string::npos);
            EXPECT_EQ(source.find("v3::EntryMask") != std::string::npos, lengths && !causal) << "keys behind an entry's last are hidden";
          }
}

// Words of a mask of pairs: what batch entries, heads or rows share they have once.
TEST(V3ForwardPlanSmall, AMaskBecomesWordsOfWhatIsNotShared) {
  Problem p = problem_of(DType::kBF16, 128, 128, false, 1000, 1025);
  p.pair_mask.given = true;
  const int64_t rows = 16, keys = 18;  // blocks of 64, of keys an even number
  for (const bool entries : {false, true})
    for (const bool heads : {false, true})
      for (const bool each_row : {false, true}) {
        p.pair_mask.strides = {entries ? 1 << 24 : 0, each_row ? 1025 : 0, heads ? 1 << 21 : 0};
        const int64_t masks = (entries ? p.batch : 1) * (heads ? p.nheads : 1) * (each_row ? rows : 1);
        ASSERT_EQ(v3_forward_refusal(p, kH200), "");
        const V3ForwardPlan plan = plan_v3_forward(p, kH200);
        EXPECT_EQ(plan.workspace_bytes, masks * keys * 512 + (masks * 4 + 511) / 512 * 512);
        EXPECT_EQ(plan.mask_grid, masks) << "of up to 4096 keys";
        EXPECT_EQ(plan.row_tiles, (1000 + plan.tile.block_m() - 1) / plan.tile.block_m());
      }
  p.batch = 1 << 9, p.nheads = 1 << 8;
  p.pair_mask.strides = {1 << 30, 1025, 1 << 20};
  EXPECT_NE(v3_forward_refusal(p, kH200).find("the mask of pairs has 37748736 blocks of 64 x 64, which is more than 33554432"), std::string::npos);
}

TEST(V3ForwardPlanSmall, WhatIsNotBuiltBesideBiasAndMasksIsRefused) {
  const auto refusal = [](const auto& change) {
    Problem p = problem_of(DType::kBF16, 128, 128, false);
    p.pair_mask.given = true;
    change(p);
    return v3_forward_refusal(p, kH200);
  };
  EXPECT_EQ(refusal([](Problem&) {}), "");
  EXPECT_NE(refusal([](Problem& p) { p.softcap = 30; }).find("no mask of pairs together with softcap"), std::string::npos);
  EXPECT_NE(refusal([](Problem& p) { p.has_alibi = true; }).find("together with ALiBi"), std::string::npos);
  EXPECT_NE(refusal([](Problem& p) { p.dropout_below = 6554; }).find("together with dropout"), std::string::npos);
  EXPECT_NE(refusal([](Problem& p) { p.has_documents = p.bias.given = true; }).find("no bias and mask of pairs together with documents"),
            std::string::npos);
  const auto beside_bias = [&](const auto& change) {
    return refusal([&](Problem& p) {
      p.bias.given = true;
      p.bias.dtype = p.dtype;
      change(p);
    });
  };
  EXPECT_EQ(refusal([](Problem& p) { p.dtype = DType::kF16, p.headdim = p.headdim_v = 256; }), "");
  EXPECT_EQ(refusal([](Problem& p) { p.causal = p.has_seqused_k = true; }), "");
  EXPECT_EQ(refusal([](Problem& p) { p.headdim_v = 64; }), "");
  EXPECT_NE(beside_bias([](Problem& p) { p.headdim = p.headdim_v = 256; }).find("above 192 in bf16"), std::string::npos);
  EXPECT_NE(beside_bias([](Problem& p) { p.causal = true; }).find("under a causal mask"), std::string::npos);
  EXPECT_NE(refusal([](Problem& p) { p.packed = true; }).find("together with packed sequences"), std::string::npos);
  EXPECT_NE(refusal([](Problem& p) { p.window_left = 50; }).find("together with a sliding window"), std::string::npos);
  EXPECT_NE(beside_bias([](Problem& p) { p.headdim_v = 64; }).find("where v is as wide as k"), std::string::npos);
}

// Behind the list of tiles, where a sequence's part begins by its first row and number.
TEST(V3ForwardPlanSmall, DocumentsOfPackedSequencesHaveRangesBehindTheListOfTiles) {
  for (const int headdim : {64, 96, 128, 192, 256})
    for (const bool causal : {false, true})
      for (const bool window : {false, true})
        for (const int more : {0, 1, 2}) {  // dropout, softcap
          Problem p = problem_of(DType::kBF16, headdim, headdim, causal, 4096, 4096);
          p.packed = p.has_documents = true;
          p.batch = 7, p.total_q = 9000, p.total_k = 8000;
          p.q.batch = p.k.batch = p.v.batch = p.o.batch = 0;
          p.window_left = window ? 50 : -1;
          p.dropout_below = more == 1 ? 6554 : 0;
          p.softcap = more == 2 ? 30 : 0;
          ASSERT_EQ(v3_forward_refusal(p, kH200), "") << headdim << " " << more;
          const V3ForwardPlan plan = plan_v3_forward(p, kH200);
          EXPECT_EQ(plan.tile.block_m(), 128);
          EXPECT_EQ(plan.tile.block_n, 64) << "or there are too few registers";
          EXPECT_EQ(plan.workspace_bytes, 16 + 32 * (9000 / 128 + 7) + 2 * 16 * (9000 / 128 + 7) + 4 * 64 * (8000 / 64 + 7));
          EXPECT_EQ(plan.document_grid, 9000 / 1024 + 7);
          const std::string source = v3_forward_request(plan.key).source;
          EXPECT_NE(source.find(".packed = true, .documents = true"), std::string::npos) << source;
          const std::string before = v3_document_ranges_request(v3_document_ranges_key(plan)).source;
          EXPECT_NE(before.find("document_ranges<128, 64, false, true>(call)"), std::string::npos) << before;
          p.has_seqused_k = true;  // in any order, so that the parts of sequences might not lie apart
          EXPECT_NE(v3_forward_refusal(p, kH200).find("no documents (document_q, document_k) in packed sequences with lengths"), std::string::npos);
        }
  // Whatever the lengths, the parts of sequences lie apart, and within the workspace.
  for (const int rows : {64, 128, kV3DocumentCtaRows})
    for (const int length : {0, 1, 63, 64, 129, 1500})
      for (int n = 0, begin = 0, end = 0; n < 100; begin += length, ++n) {
        EXPECT_GE(begin / rows + n, end) << "as kernels/v3/documents.h has it";
        end = begin / rows + n + (length + rows - 1) / rows;
        EXPECT_LE(end, most_packed_tiles(begin + length, n + 1, rows));
      }
}

TEST(V3ForwardPlanSmall, SourcesDifferWhereKeysDo) {
  std::set<std::string> sources;
  size_t count = 0;
  for (const DType dtype : {DType::kF16, DType::kBF16})
    for (const int headdim : {64, 96, 128, 192, 256})
      for (const bool causal : {false, true})
        for (const double scale : {0.1, -0.1}) {
          Problem p = problem_of(dtype, headdim, headdim, causal);
          p.softmax_scale = scale;
          const jit::Request request = v3_forward_request(plan_v3_forward(p, kH200).key);
          EXPECT_EQ(request.arch, 90);
          EXPECT_TRUE(request.arch_specific);
          EXPECT_NE(request.source.find("#include \"kernels/v3/forward.h\""), std::string::npos);
          EXPECT_NE(request.source.find(request.entry + "("), std::string::npos);
          EXPECT_NE(request.source.find("kHeaddim = " + std::to_string(headdim) + ";"), std::string::npos);
          sources.insert(request.source);
          ++count;
        }
  EXPECT_EQ(sources.size(), count);
}

}  // namespace
}  // namespace fattn::core::cuda
