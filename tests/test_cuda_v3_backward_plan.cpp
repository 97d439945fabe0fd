// The host side of the CUDA v3 backward kernels: the table of tiles, refusals, workspace, parameters and the emitted sources. Needs no GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "backend/cuda/v3_backward.h"
#include "backend/cuda/v3_mask_words.h"
#include "device_abi/v3_packed_tiles.h"
#include "v3_problem.h"

namespace fattn::core::cuda {
namespace {

Problem gradient_problem(DType dtype, int64_t headdim, int64_t headdim_v, bool causal, int64_t seqlen_q = 300, int64_t seqlen_k = 523) {
  Problem p = problem_of(dtype, headdim, headdim_v, causal, seqlen_q, seqlen_k);
  p.backward = true;
  p.dq = p.q, p.dk = p.k, p.dv = p.v, p.dout = p.o;
  return p;
}

TEST(V3BackwardPlanSmall, EveryPairOfHeaddimsHasATileThatFits) {
  for (const bool causal : {false, true})
    for (int64_t headdim = 8; headdim <= 256; headdim += 8)
      for (int64_t headdim_v = 8; headdim_v <= 256; headdim_v += 8) {
        const Problem p = gradient_problem(DType::kF16, headdim, headdim_v, causal);
        ASSERT_EQ(v3_backward_refusal(p, kH200), "") << headdim << " " << headdim_v;
        const V3BackwardPlan plan = plan_v3_backward(p, kH200);
        EXPECT_LE(plan.shared_bytes, kH200.shared_bytes);
        EXPECT_LE(plan.finish_shared_bytes, 48 << 10) << "no opting in";
        EXPECT_GE(plan.main.width, headdim);
        EXPECT_GE(plan.main.width_v, headdim_v);
        EXPECT_EQ(plan.grid, (523 + plan.tile.block_n() - 1) / plan.tile.block_n() * 4);
        EXPECT_EQ(plan.prepare_grid, 5 * 12);
      }
}

// What kernels/v3 assumes of a tile. Registers: setmaxnreg beyond what the launch gave would wait for ever.
TEST(V3BackwardPlanSmall, TilesAreWellFormed) {
  for (const V3BackwardRow& row : v3_backward_rows()) {
    const V3BackwardTile& tile = row.tile;
    EXPECT_LE(tile.block_n(), 256) << "a box of TMA";
    EXPECT_TRUE(tile.by_role ? tile.groups == 2 && tile.own_loader && tile.stages >= 2 : tile.stages == 3);
    EXPECT_TRUE(tile.by_role ? tile.stagings == 0 : tile.stagings == 1 || tile.stagings == 2);
    for (const int registers : {tile.main_registers, tile.dq_registers, tile.loader_registers}) EXPECT_EQ(registers % 8, 0);
    EXPECT_LE(tile.moved_registers(), tile.launch_registers() * (tile.threads() / 128));
    EXPECT_GE(tile.main_registers, tile.launch_registers());
    EXPECT_LE(tile.dq_registers, tile.launch_registers());
    EXPECT_LE(tile.launch_registers() * tile.threads(), 65536);
    // dk and dv (or one of them), scores and an operand in registers.
    const int gradients = tile.by_role ? row.width / 2 : row.width;
    EXPECT_LE(gradients + 32 + 16, tile.main_registers - 24 + (tile.by_role ? 0 : 8)) << row.width;
    EXPECT_GE(tile.dq_registers, 24 + 32);
  }
}

// Every tile of every key head is somebody's, once, and those of one head come in the order of the keys: as kernels/v3/backward_schedule.h counts.
TEST(V3BackwardPlanSmall, TheGridTakesEveryTileOnceAndInOrder) {
  for (const bool causal : {false, true})
    for (const bool deterministic : {false, true})
      for (const int64_t seqlen : {1, 500, 4096})
        for (const int64_t batch : {1, 41}) {
          Problem p = gradient_problem(DType::kBF16, 128, 128, causal, seqlen, seqlen);
          p.batch = batch;
          p.deterministic = deterministic;
          const V3BackwardPlan plan = plan_v3_backward(p, kH200);
          const int heads = static_cast<int>(batch) * 2;
          std::vector<int> next(static_cast<size_t>(heads));
          for (int index = 0; index < plan.grid; ++index) {
            const int per_section = plan.heads_per_section * plan.key_tiles, section = index / per_section,
                      in_section = index - section * per_section;
            const int first = section * plan.heads_per_section, in_it = std::min(plan.heads_per_section, heads - first);
            const int head = first + in_section % in_it;
            ASSERT_LT(head, heads);
            EXPECT_EQ(in_section / in_it, next[static_cast<size_t>(head)]++);
          }
          EXPECT_EQ(std::count(next.begin(), next.end(), plan.key_tiles), heads);
          EXPECT_TRUE(!deterministic || plan.heads_per_section == heads);
        }
}

TEST(V3BackwardPlanSmall, WorkspaceIsWhatTheKernelsCountOn) {
  Problem p = gradient_problem(DType::kBF16, 72, 40, true, 300, 523);
  for (const bool deterministic : {false, true}) {
    p.deterministic = deterministic;
    const V3BackwardPlan plan = plan_v3_backward(p, kH200);
    const int64_t rows = 2 * 6 * 320;  // blocks of 64
    EXPECT_EQ(plan.lse_log2_offset, rows * 96 * 4);
    EXPECT_EQ(plan.row_sum_offset, plan.lse_log2_offset + rows * 4);
    EXPECT_EQ(plan.nonfinite_offset, plan.row_sum_offset + rows * 4);
    EXPECT_EQ(plan.semaphore_offset, plan.nonfinite_offset + (rows / 64 * 4 + 15) / 16 * 16) << "flags of each block of queries";
    EXPECT_EQ(plan.workspace_bytes, plan.semaphore_offset + (deterministic ? 4 * (1 + rows / 64) : 0));
    for (const int64_t offset : {plan.lse_log2_offset, plan.row_sum_offset, plan.semaphore_offset}) EXPECT_EQ(offset % 16, 0) << "bulk copies";
  }
}

// With more heads a section than a generation has, its tiles would come up together with those that wait for it, and wait for ever.
TEST(V3BackwardPlanSmall, ASectionIsAtMostAGeneration) {
  int small = 0;
  for (const int headdim : {64, 128})
    for (const int64_t window : {-1, 1023})
      for (const bool causal : {false, true})
        for (const int seqlen : {512, 1024, 2048, 4096, 8192, 16384}) {
          Problem p = gradient_problem(DType::kBF16, headdim, headdim, causal, seqlen, seqlen);
          p.batch = 4, p.nheads_k = p.nheads = 32;
          p.window_left = window;
          const V3BackwardPlan plan = plan_v3_backward(p, kH200);
          if (plan.generation == 0) continue;
          EXPECT_LE(plan.heads_per_section, plan.generation) << headdim << " " << causal << " " << window << " " << seqlen;
          small += plan.generation < 8;
        }
  EXPECT_GT(small, 4);
}

// As the search for tiles has them: a plan follows the tile and the ring that it is given.
TEST(V3BackwardPlanSmall, ATileNeedNotBeOfTheTable) {
  Problem p = gradient_problem(DType::kBF16, 128, 128, true, 2048, 2048);
  p.batch = 32, p.nheads_k = p.nheads = 8;
  const V3BackwardPlan chosen = plan_v3_backward(p, kH200), same = plan_v3_backward(p, kH200, chosen.tile);
  EXPECT_GE(chosen.main.row, 0);
  EXPECT_EQ(same.main.row, -1);
  EXPECT_EQ(v3_backward_request(same.main, same.tile).source, v3_backward_request(chosen.main).source);
  EXPECT_EQ(v3_backward_request(same.finish, same.tile).source, v3_backward_request(chosen.finish).source);
  EXPECT_EQ(same.workspace_bytes, chosen.workspace_bytes);
  ASSERT_GT(chosen.generation, 0);

  const V3BackwardPlan none = plan_v3_backward(p, kH200, chosen.tile, 0);
  EXPECT_EQ(none.main.ring, 0);
  EXPECT_EQ(none.finish_grid, none.prepare_grid);
  EXPECT_EQ(none.lse_log2_offset, int64_t{256} * 2048 * 128 * 4);
  const V3BackwardPlan larger = plan_v3_backward(p, kH200, chosen.tile, 2 * chosen.generation);
  EXPECT_EQ(larger.ring_heads, 2 * chosen.ring_heads);
  EXPECT_EQ(larger.finish_grid, 2 * chosen.finish_grid);

  const V3BackwardTile roles{true, 2, 4, 0, true, 208, 72, 24};
  const V3BackwardPlan other = plan_v3_backward(p, kH200, roles);
  EXPECT_EQ(other.generation, 0);
  EXPECT_EQ(other.key_tiles, 32);
  EXPECT_EQ(other.grid, 256 * 32);
  EXPECT_EQ(other.shared_bytes, roles.shared_bytes(128, 128, {}));
  EXPECT_NE(v3_backward_request(other.main, roles).source.find("kStages = 4"), std::string::npos);
  EXPECT_NE(v3_backward_request(other.finish, roles).source.find("kBlockN = 64"), std::string::npos);
}

// Of many heads dq's accumulators are a ring of four generations, and what the last two leave is the last kernel's.
TEST(V3BackwardPlanSmall, ManyHeadsShareARing) {
  for (const int64_t headdim : {64, 128})
    for (const bool causal : {false, true})
      for (const int64_t group : {1, 2}) {
        Problem p = gradient_problem(DType::kBF16, headdim, headdim, causal, 1024, 1024);
        p.batch = 64, p.nheads_k = 8, p.nheads = 8 * group;
        const V3BackwardPlan plan = plan_v3_backward(p, kH200);
        const int64_t width = plan.main.width;
        if (headdim * group > 128) {
          EXPECT_EQ(plan.generation, 0) << "four generations do not stay in L2";
          continue;
        }
        Problem shorter = p;
        shorter.batch = 128, shorter.seqlen_q = shorter.seqlen_k = 512;
        EXPECT_EQ(plan_v3_backward(shorter, kH200).generation == 0, headdim == 128 && causal) << "1.6 parts to be converted for each block of a tile";
        ASSERT_GT(plan.generation, 0) << headdim;
        EXPECT_GE(plan.generation * plan.key_tiles, 132 - plan.key_tiles / 2) << "all that run at once are of two generations";
        EXPECT_EQ(plan.ring_heads, 4 * plan.generation * group);
        EXPECT_EQ(plan.heads_per_section, causal ? 16 : 1);
        EXPECT_EQ(plan.lse_log2_offset, plan.ring_heads * 1024 * width * 4);
        EXPECT_LE(plan.lse_log2_offset, kH200.l2_bytes * 3 / 4);
        EXPECT_EQ(plan.workspace_bytes, plan.semaphore_offset + 4 * (1 + (512 + plan.generation - 1) / plan.generation));
        EXPECT_EQ(plan.prepare_grid, 512 * group * 16);
        EXPECT_EQ(plan.finish_grid, 2 * plan.generation * group * 16);
        for (const V3BackwardKey& key : {plan.prepare, plan.main, plan.finish})
          EXPECT_NE(v3_backward_request(key).source.find("kRing = true"), std::string::npos);
        for (const V3BackwardKey& key : other_keys_of(p, plan)) EXPECT_EQ(key.ring, 0) << "packed too, for fewer heads";
        const auto has_none = [&](auto change) {
          Problem other = p;
          change(other);
          const V3BackwardPlan without = plan_v3_backward(other, kH200);
          EXPECT_EQ(v3_backward_request(without.main).source.find("kRing"), std::string::npos);
          return without.generation == 0 && without.finish_grid == without.prepare_grid && without.ring_heads == other.batch * other.nheads;
        };
        EXPECT_TRUE(has_none([](Problem& q) { q.batch = 4; }));
        Problem few = p;
        few.batch = 1;
        EXPECT_EQ(other_keys_of(few, plan_v3_backward(few, kH200))[1].ring, 1);
        few.deterministic = true;
        EXPECT_EQ(other_keys_of(few, plan_v3_backward(few, kH200))[1].ring, 0);
        EXPECT_TRUE(has_none([](Problem& q) { q.deterministic = true; }));
        EXPECT_TRUE(has_none([](Problem& q) { q.has_seqused_k = true; }));
        EXPECT_TRUE(has_none([](Problem& q) { q.window_left = q.window_right = 0; })) << "more parts than blocks";
      }
}

TEST(V3BackwardPlanSmall, RefusesWithAReason) {
  const auto refusal = [](auto change) {
    Problem p = gradient_problem(DType::kBF16, 64, 64, false);
    change(p);
    return v3_backward_refusal(p, kH200);
  };
  EXPECT_EQ(refusal([](Problem&) {}), "");
  EXPECT_NE(refusal([](Problem& p) { p.dtype = DType::kF32; }).find("fp16 and bf16"), std::string::npos);
  EXPECT_NE(refusal([](Problem& p) { p.headdim = 264; }).find("264"), std::string::npos);
  EXPECT_NE(refusal([](Problem& p) { p.headdim_v = 60; }).find("multiples of 8"), std::string::npos);
  EXPECT_NE(refusal([](Problem& p) { p.dout.row += 4; }).find("dout has a stride of"), std::string::npos);
  EXPECT_NE(refusal([](Problem& p) { p.dk.head = 0; }).find("dk has a stride of 0"), std::string::npos);
  EXPECT_NE(refusal([](Problem& p) { p.dv.batch += 1; }).find("dv has a stride of"), std::string::npos);
  EXPECT_NE(refusal([](Problem& p) { p.o.row += 4; }).find("o has strides of"), std::string::npos);
  EXPECT_NE(refusal([](Problem& p) { p.dq.head += 4; }).find("dq has strides of"), std::string::npos);
  EXPECT_NE(refusal([](Problem& p) { p.seqlen_q = 0; }).find("q has one row of size 0"), std::string::npos);
  EXPECT_NE(refusal([](Problem& p) { p.batch = p.seqlen_q = int64_t{1} << 20; }).find("split the batch"), std::string::npos);
  EXPECT_NE(v3_backward_refusal(gradient_problem(DType::kBF16, 64, 64, false), {65536, 60 << 20, 132}).find("65536"), std::string::npos);
}

// What it has no registers for it says, so that v2 takes it.
TEST(V3BackwardPlanSmall, SoftcapHasRegistersForAllButDropout) {
  for (const auto& [headdim, headdim_v] : {std::pair{64, 64}, {64, 72}, {96, 96}, {128, 128}, {192, 192}, {256, 256}})
    for (const bool window : {false, true}) {
      Problem p = gradient_problem(DType::kBF16, headdim, headdim_v, !window);
      p.softcap = 30;
      if (window) p.window_left = 9;
      EXPECT_EQ(v3_backward_refusal(p, kH200), "");
      p.has_alibi = p.has_seqused_k = true;
      EXPECT_EQ(v3_backward_refusal(p, kH200), "");
      p.has_alibi = p.has_seqused_k = false;
      p.dropout_below = 1000;
      EXPECT_NE(v3_backward_refusal(p, kH200).find("no registers for softcap with dropout"), std::string::npos);
    }
  Problem p = gradient_problem(DType::kBF16, 256, 256, true);
  p.window_left = 9;
  EXPECT_EQ(v3_backward_refusal(p, kH200), "") << "a window by itself";
  const V3BackwardPlan plan = plan_v3_backward(p, kH200);
  EXPECT_NE(v3_backward_request(plan.main).source.find("FeatureParams call"), std::string::npos);
  EXPECT_NE(v3_backward_request(plan.finish).source.find("v3::WindowMask"), std::string::npos);
  EXPECT_EQ(v3_backward_request(plan.prepare).source.find("FeatureParams"), std::string::npos) << "knows no mask";
}

// Lengths are the main kernel's, and the first one's, which makes dq of an entry out of range NaN; the last one asks where a mask hides keys.
TEST(V3BackwardPlanSmall, LengthsAreInTheKernelsThatReadThem) {
  for (const bool causal : {false, true}) {
    Problem p = gradient_problem(DType::kBF16, 128, 128, causal);
    p.has_seqused_k = true;
    ASSERT_EQ(v3_backward_refusal(p, kH200), "");
    const V3BackwardPlan plan = plan_v3_backward(p, kH200);
    const std::string lengths = ".lengths = true", taken = "PairParams call";
    EXPECT_NE(v3_backward_request(plan.main).source.find(lengths), std::string::npos);
    EXPECT_NE(v3_backward_request(plan.main).source.find(taken), std::string::npos);
    EXPECT_NE(v3_backward_request(plan.prepare).source.find(lengths), std::string::npos);
    EXPECT_EQ(v3_backward_request(plan.finish).source.find(lengths) != std::string::npos, causal);
    V3BackwardParams params;
    fattn_buffers buffers{};
    buffers.seqused_k = reinterpret_cast<const int*>(64);
    buffers.workspace = reinterpret_cast<void*>(1 << 20);
    p.seqused_k_stride = 3;
    set_v3_backward_params(params, p, plan, cuda_device(0), buffers);
    EXPECT_EQ(params.call.lengths, buffers.seqused_k);
    EXPECT_EQ(params.call.length_stride, 3);
  }
}

// A term of the score: the kernels that take exponentials have it, the first one does not.
TEST(V3BackwardPlanSmall, AlibiIsInTheKernelsThatTakeExponentials) {
  Problem p = gradient_problem(DType::kBF16, 128, 128, true);
  const int plain = plan_v3_backward(p, kH200).shared_bytes;
  p.has_alibi = true;
  ASSERT_EQ(v3_backward_refusal(p, kH200), "");
  const V3BackwardPlan plan = plan_v3_backward(p, kH200);
  EXPECT_EQ(plan.shared_bytes, plain + 16) << "slopes";
  EXPECT_NE(v3_backward_request(plan.main).source.find(".alibi = true"), std::string::npos);
  EXPECT_NE(v3_backward_request(plan.finish).source.find(".alibi = true"), std::string::npos);
  EXPECT_EQ(v3_backward_request(plan.prepare).source.find(".alibi"), std::string::npos);
}

// Dropout: tiles with a loader of its own, whose other warps make the bits, or at headdim 64 those of dq; 1 / (1 - p) is in every kernel.
TEST(V3BackwardPlanSmall, DropoutHasTilesOfItsOwn) {
  for (const int headdim : {64, 128, 192, 256})
    for (const bool causal : {false, true}) {
      Problem p = gradient_problem(DType::kBF16, headdim, headdim, causal);
      p.dropout_below = 6554;
      ASSERT_EQ(v3_backward_refusal(p, kH200), "");
      const V3BackwardPlan plan = plan_v3_backward(p, kH200);
      EXPECT_EQ(plan.tile.own_loader, headdim > 64);
      EXPECT_LE(plan.tile.block_n() / 64, 3) << "warps that make bits";
      EXPECT_GE(plan.tile.own_loader ? plan.tile.loader_registers : plan.tile.dq_registers, 32);
      EXPECT_LE(plan.shared_bytes, kH200.shared_bytes);
      for (const V3BackwardKey& key : {plan.prepare, plan.main, plan.finish})
        EXPECT_NE(v3_backward_request(key).source.find(".dropout = true"), std::string::npos);
      Problem part = p;
      part.dropout_places = true;
      const V3BackwardPlan of_part = plan_v3_backward(part, kH200);
      EXPECT_NE(v3_backward_request(of_part.main).source.find(".places = true"), std::string::npos);
      for (const auto key : {&V3BackwardPlan::prepare, &V3BackwardPlan::finish})
        EXPECT_EQ(v3_backward_request(of_part.*key).source, v3_backward_request(plan.*key).source) << "no matter where the part is";
      Problem capped = p, all = p;
      capped.softcap = 30;
      EXPECT_NE(v3_backward_refusal(capped, kH200).find("softcap with dropout"), std::string::npos);
      all.has_alibi = true;
      EXPECT_EQ(v3_backward_refusal(all, kH200).empty(), headdim <= 192);
      if (headdim <= 192) {
        EXPECT_TRUE(plan_v3_backward(all, kH200).tile.own_loader) << "no registers for both where there are three warpgroups of keys";
      }
      all.has_seqused_k = true;
      EXPECT_NE(v3_backward_refusal(all, kH200).find("ALiBi and dropout together"), std::string::npos);
      std::swap(all.has_seqused_k, all.deterministic);
      EXPECT_NE(v3_backward_refusal(all, kH200).find("ALiBi and dropout together"), std::string::npos);
    }
}

Problem packed_problem(int64_t headdim, bool causal, int64_t sequences, int64_t most, int64_t total) {
  Problem p = gradient_problem(DType::kBF16, headdim, headdim, causal);
  p.packed = true;
  p.batch = sequences, p.seqlen_q = p.seqlen_k = most, p.total_q = p.total_k = total;
  for (Strides* strides : {&p.q, &p.k, &p.v, &p.o, &p.dout, &p.dq, &p.dk, &p.dv, &p.lse}) strides->batch = 0;
  return p;
}

// Of packed sequences the workspace has their rows, and a block more for each, not the longest's for all; and a list of the tiles of keys.
TEST(V3BackwardPlanSmall, PackedSequencesHaveAListOfTilesAndTheirRowsInTheWorkspace) {
  for (const int headdim : {64, 96, 128, 192, 256})
    for (const bool causal : {false, true})
      for (const bool deterministic : {false, true})
        for (const int64_t most : {100, 4096, 100000}) {
          Problem p = packed_problem(headdim, causal, 300, most, 200000);
          p.deterministic = deterministic;
          ASSERT_EQ(v3_backward_refusal(p, kH200), "") << headdim;
          const V3BackwardPlan plan = plan_v3_backward(p, kH200);
          const int64_t block_n = plan.tile.block_n(), blocks = 200000 / 64 + 300, tiles = 200000 / block_n + 300;
          EXPECT_EQ(plan.row_blocks, blocks);
          EXPECT_EQ(plan.prepare_grid, 6 * blocks);
          EXPECT_EQ(plan.grid, 2 * std::min(tiles, 300 * ((most + block_n - 1) / block_n))) << "no more than there may be";
          EXPECT_EQ(plan.lse_log2_offset, plan.prepare_grid * 64 * plan.main.width * 4);
          EXPECT_EQ(plan.semaphore_offset, plan.tiles_offset + 32 * plan.key_tiles);
          EXPECT_EQ(plan.workspace_bytes, plan.semaphore_offset + (deterministic ? 4 * (1 + plan.prepare_grid) : 0));
          for (const int64_t offset : {plan.tiles_offset, plan.semaphore_offset}) EXPECT_EQ(offset % 16, 0);
          EXPECT_GE(plan.heads_per_section, deterministic ? 2 : 1);
          EXPECT_LE(plan.heads_per_section, 2);
          for (const V3BackwardKey& key : {plan.prepare, plan.main, plan.finish}) {
            const std::string source = v3_backward_request(key).source;
            EXPECT_NE(source.find(".packed = true"), std::string::npos);
            EXPECT_EQ(source.find("v3::FullMask"), std::string::npos) << "rows behind a sequence are another's";
          }
        }
  // Whatever the lengths, a sequence's blocks end before the next one's begin, and within the workspace.
  for (const int length : {0, 1, 63, 64, 65, 128, 1000})
    for (int n = 0, begin = 0, end = 0; n < 200; begin += length, ++n) {
      EXPECT_GE(begin / 64 + n, end) << "as packed_block_of() has it";
      end = begin / 64 + n + (length + 63) / 64;
      EXPECT_LE(end, most_packed_tiles(begin + length, n + 1, 64));
    }
  const std::string list = v3_packed_key_tiles_request({.block_n = 192}).source;
  EXPECT_NE(list.find("packed_key_tiles<192, false>(call, work)"), std::string::npos) << list;
}

// The list of tiles says how many keys a sequence uses; the kernels themselves are those without.
TEST(V3BackwardPlanSmall, LengthsOfPackedSequencesAreInTheListOfTiles) {
  for (const int headdim : {64, 96, 128, 192, 256})
    for (const bool causal : {false, true})
      for (const int64_t most : {100, 4096}) {
        Problem p = packed_problem(headdim, causal, 300, most, 200000);
        const V3BackwardPlan without = plan_v3_backward(p, kH200);
        p.has_seqused_k = true;
        ASSERT_EQ(v3_backward_refusal(p, kH200), "") << headdim;
        const V3BackwardPlan plan = plan_v3_backward(p, kH200);
        const int64_t block_n = plan.tile.block_n();
        EXPECT_EQ(plan.key_tiles, std::min(200000 / block_n + 300, 300 * ((most + block_n - 1) / block_n)));
        EXPECT_EQ(plan.semaphore_offset, plan.tiles_offset + 32 * plan.key_tiles);
        EXPECT_EQ(v3_backward_request(plan.main).source, v3_backward_request(without.main).source);
        EXPECT_EQ(v3_backward_request(plan.prepare).source, v3_backward_request(without.prepare).source);
        EXPECT_EQ(v3_backward_request(plan.finish).source, v3_backward_request(without.finish).source);
        const std::string list = v3_packed_key_tiles_request(v3_packed_key_tiles_key(p, plan)).source;
        EXPECT_NE(list.find("packed_key_tiles<" + std::to_string(block_n) + ", true>(call, work)"), std::string::npos) << list;
      }
  // However many keys each uses, the list has room for all.
  for (const int keys : {1, 191, 192, 193, 1000})
    for (const int used : {0, 1, 64, 192, 193, 1000}) {
      if (used > keys) continue;
      EXPECT_LE(50 * ((used + 191) / 192 + (keys - used + 191) / 192), most_packed_tiles(50 * keys, 2 * 50, 192));
    }
}

TEST(V3BackwardPlanSmall, PackedSequencesAreRefusedWithWhatHasNoRegisters) {
  const auto refusal = [](int64_t headdim, bool causal, auto change) {
    Problem p = packed_problem(headdim, causal, 3, 200, 500);
    change(p);
    return v3_backward_refusal(p, kH200);
  };
  EXPECT_EQ(refusal(128, false, [](Problem& p) { p.window_left = 50; }), "");
  EXPECT_EQ(refusal(128, true, [](Problem& p) { p.softcap = 9; }), "");
  EXPECT_EQ(refusal(128, true, [](Problem& p) { p.dropout_below = 9; }), "");
  EXPECT_EQ(refusal(128, true, [](Problem& p) { p.has_alibi = true; }), "");
  EXPECT_EQ(refusal(64, false, [](Problem& p) { p.has_alibi = true; }), "");
  EXPECT_NE(refusal(128, false, [](Problem& p) { p.has_alibi = true; }).find("ALiBi in packed sequences"), std::string::npos);
  EXPECT_NE(refusal(64, true, [](Problem& p) { p.has_alibi = true, p.dropout_below = 9; }).find("together"), std::string::npos);
  EXPECT_NE(refusal(64, true, [](Problem& p) { p.nheads = 1 << 20, p.total_q = int64_t{1} << 28; }).find("split the sequences"), std::string::npos);
  EXPECT_NE(refusal(64, true, [](Problem& p) { p.total_k = 0; }).find("k has one row of size 0"), std::string::npos);
}

// Behind the first kernel one finds the blocks of queries that each 64 keys see; its workspace is that of tiles.
TEST(V3BackwardPlanSmall, DocumentsHaveRangesAndAMaskThatBegins) {
  for (const int headdim : {64, 96, 128, 192, 256})
    for (const bool causal : {false, true})
      for (const bool window : {false, true})
        for (const bool lengths : {false, true}) {
          Problem p = gradient_problem(DType::kBF16, headdim, headdim, causal);
          p.batch = 400;  // without documents there would be a ring
          p.has_documents = true;
          p.has_seqused_k = lengths;
          p.window_left = window ? 50 : -1;
          ASSERT_EQ(v3_backward_refusal(p, kH200), "") << headdim;
          const V3BackwardPlan plan = plan_v3_backward(p, kH200);
          const int64_t block_n = plan.tile.block_n(), tiles = (p.seqlen_k + block_n - 1) / block_n, queries = (p.seqlen_q + 63) / 64 * 64;
          EXPECT_EQ(plan.generation, 0);
          EXPECT_EQ(plan.tiles_offset % 16, 0);
          EXPECT_EQ(plan.workspace_bytes, plan.tiles_offset + p.batch * (tiles * block_n / 64 * 16 + queries * 4));
          EXPECT_EQ(plan.document_grid, p.batch) << "16 warps take all keys";
          const char* const mask = window   ? "v3::DocumentMask<fattn::v3::WindowMask>"
                                   : causal ? "v3::DocumentMask<fattn::v3::CausalMask>"
                                            : "v3::DocumentMask<fattn::v3::FullMask>";
          for (const V3BackwardKey& key : {plan.main, plan.finish}) {
            const std::string source = v3_backward_request(key).source;
            EXPECT_NE(source.find(".documents = true"), std::string::npos);
            EXPECT_NE(source.find(mask), std::string::npos) << source;
          }
          EXPECT_EQ(v3_backward_request(plan.prepare).source.find("documents"), std::string::npos) << "knows rows only";
          const std::string ranges = v3_document_ranges_request(v3_document_ranges_key(plan)).source;
          EXPECT_NE(ranges.find("document_ranges<" + std::to_string(block_n) + ", 64, true>(call)"), std::string::npos) << ranges;
        }
  const auto refusal = [](auto change, bool packed = false) {
    Problem p = packed ? packed_problem(128, true, 3, 200, 500) : gradient_problem(DType::kBF16, 128, 128, true);
    p.has_documents = true;
    change(p);
    return v3_backward_refusal(p, kH200);
  };
  EXPECT_NE(refusal([](Problem& p) { p.deterministic = true; }).find("together with deterministic"), std::string::npos);
  EXPECT_NE(refusal([](Problem& p) { p.softcap = 9; }).find("together with softcap"), std::string::npos);
  EXPECT_NE(refusal([](Problem& p) { p.has_alibi = true; }).find("together with ALiBi"), std::string::npos);
  EXPECT_NE(refusal([](Problem& p) { p.dropout_below = 9; }).find("together with dropout"), std::string::npos);
  EXPECT_EQ(refusal([](Problem&) {}, true), "");
  EXPECT_NE(refusal([](Problem& p) { p.deterministic = true; }, true).find("together with deterministic"), std::string::npos);
}

// Behind the list of tiles of keys, of each 64 keys whatever a tile has. One kernel finds them for all.
TEST(V3BackwardPlanSmall, DocumentsOfPackedSequencesHaveRangesBehindTheListOfTiles) {
  for (const int headdim : {64, 96, 128, 192, 256})
    for (const bool causal : {false, true})
      for (const bool window : {false, true}) {
        Problem p = packed_problem(headdim, causal, 7, 4096, 9000);
        p.total_q = 8000;
        p.window_left = window ? 50 : -1;
        const V3BackwardPlan without = plan_v3_backward(p, kH200);
        p.has_documents = true;
        ASSERT_EQ(v3_backward_refusal(p, kH200), "") << headdim;
        const V3BackwardPlan plan = plan_v3_backward(p, kH200);
        EXPECT_EQ(plan.key_tiles, without.key_tiles);
        EXPECT_EQ(plan.tiles_offset, without.tiles_offset);
        EXPECT_EQ(plan.tiles_offset % 16, 0);
        EXPECT_EQ(plan.workspace_bytes, plan.tiles_offset + 32 * plan.key_tiles + 16 * (9000 / 64 + 7) + 4 * 64 * (8000 / 64 + 7));
        EXPECT_EQ(plan.document_grid, 9000 / 1024 + 7);
        EXPECT_EQ(plan.shared_bytes, without.shared_bytes);
        const char* const mask = window   ? "v3::DocumentMask<fattn::v3::WindowMask>"
                                 : causal ? "v3::DocumentMask<fattn::v3::CausalMask>"
                                          : "v3::DocumentMask<fattn::v3::FullMask>";
        for (const V3BackwardKey& key : {plan.main, plan.finish}) {
          const std::string source = v3_backward_request(key).source;
          EXPECT_NE(source.find(".packed = true, .documents = true"), std::string::npos) << source;
          EXPECT_NE(source.find(mask), std::string::npos) << source;
        }
        const std::string ranges = v3_document_ranges_request(v3_document_ranges_key(plan)).source;
        EXPECT_NE(ranges.find("document_ranges_of_packed_keys(call, work)"), std::string::npos) << ranges;
        p.has_seqused_k = true;  // in any order, so that the parts of sequences might not lie apart
        EXPECT_NE(v3_backward_refusal(p, kH200).find("no documents (document_q, document_k) in packed sequences with lengths"), std::string::npos);
      }
  Problem nobody = packed_problem(128, false, 0, 0, 2000);
  nobody.has_documents = true;
  EXPECT_EQ(plan_v3_backward(nobody, kH200).document_grid, 0) << "rows of no sequence";
}

// Behind the first kernel one makes words of the mask, once for what shares it; any pair may then be hidden.
TEST(V3BackwardPlanSmall, AMaskOfPairsHasWordsInTheWorkspace) {
  const auto masked = [](int64_t headdim, bool causal, Strides strides) {
    Problem p = gradient_problem(DType::kBF16, headdim, headdim, causal);
    p.pair_mask = {true, DType::kU8, strides.batch ? p.batch : 1, strides.head ? p.nheads : 1, strides.row ? p.seqlen_q : 1, strides};
    return p;
  };
  for (const int headdim : {64, 96, 128, 192, 256})
    for (const bool causal : {false, true}) {
      const int64_t row = 523, head = 300 * row;
      const struct {
        Strides strides;
        int64_t heads, row_blocks;
      } kinds[] = {{{6 * head, row, head}, 12, 5}, {{0, row, head}, 6, 5}, {{head, row, 0}, 2, 5}, {{0, row, 0}, 1, 5}, {{row, 0, 0}, 2, 1}};
      for (const auto& [strides, heads, row_blocks] : kinds) {
        const Problem p = masked(headdim, causal, strides);
        ASSERT_EQ(v3_backward_refusal(p, kH200), "") << headdim;
        const V3BackwardPlan plan = plan_v3_backward(p, kH200);
        EXPECT_EQ(plan.workspace_bytes, plan.tiles_offset + heads * row_blocks * 9 * 64 * 64 / 8);
        const int64_t shown = (heads * row_blocks * 9 + 511) / 512 * 512;
        EXPECT_EQ(plan.tiles_offset, plan.nonfinite_offset + (plan.prepare_grid * 4 + 15) / 16 * 16 + shown) << "which blocks show anything";
        EXPECT_EQ(plan.mask_grid, heads * row_blocks * 3) << "256 keys a CTA";
        EXPECT_EQ(plan.mask_threads, 128);
        for (const V3BackwardKey* key : {&plan.main, &plan.finish}) {
          const std::string source = v3_backward_request(*key).source;
          EXPECT_NE(source.find(".mask = true"), std::string::npos);
          EXPECT_NE(source.find(causal ? "v3::CausalMask" : "v3::EntryMask"), std::string::npos) << "what is hidden is looked for";
          EXPECT_EQ(source.find("v3::PairsMask") != std::string::npos, key == &plan.main) << "which alone has tiles that a mask narrows";
        }
        EXPECT_EQ(v3_backward_request(plan.prepare).source.find("kPair"), std::string::npos) << "knows rows only";
      }
    }
  EXPECT_EQ(v3_mask_words_request({}).entry, "fattn_v3_mask_words");
  EXPECT_NE(v3_mask_words_request({}).source.find("mask_words<false, false>"), std::string::npos);
  EXPECT_NE(v3_mask_words_request({.forward = 1}).source.find("mask_words<true, false>"), std::string::npos);
  const auto refusal = [&](auto change) {
    Problem p = masked(128, true, {0, 523, 0});
    change(p);
    return v3_backward_refusal(p, kH200);
  };
  EXPECT_EQ(refusal([](Problem& p) { p.has_dlse = true; }), "");
  EXPECT_NE(refusal([](Problem& p) { p.has_seqused_k = true; }).find("together with lengths"), std::string::npos);
  EXPECT_NE(refusal([](Problem& p) { p.window_left = 50; }).find("together with a sliding window"), std::string::npos);
  EXPECT_NE(refusal([](Problem& p) { p.dropout_below = 9; }).find("together with dropout"), std::string::npos);
  EXPECT_NE(refusal([](Problem& p) { p.deterministic = true; }).find("together with deterministic"), std::string::npos);
  EXPECT_NE(refusal([](Problem& p) { p.has_documents = true; }).find("together with documents"), std::string::npos);
  EXPECT_NE(refusal([](Problem& p) { p.has_alibi = true; }).find("together with ALiBi"), std::string::npos);
  EXPECT_NE(refusal([](Problem& p) { p.softcap = 9; }).find("together with softcap"), std::string::npos);
  EXPECT_NE(refusal([](Problem& p) { p.seqlen_q = p.seqlen_k = 1 << 22; }).find("split the batch"), std::string::npos);
}

// A bias is read where it is; its gradient, up to headdim 128 by a kernel of its own, is summed there, or in the workspace, between two kernels of
// algorithm v2.
TEST(V3BackwardPlanSmall, ABiasIsReadInPlaceAndItsGradientSummedInFp32) {
  const auto biased = [](int64_t headdim, DType dtype, bool gradient) {
    Problem p = gradient_problem(DType::kBF16, headdim, headdim, false, 300, 524);
    p.bias = {true, dtype, 1, p.nheads, p.seqlen_q, {0, 524, 300 * 524}};
    if (gradient) p.dbias = p.bias;
    return p;
  };
  for (const int headdim : {64, 96, 128, 192, 256})
    for (const DType dtype : {DType::kF32, DType::kBF16})
      for (const bool gradient : {false, true}) {
        const Problem p = biased(headdim, dtype, gradient);
        const bool own = gradient && headdim <= 128;
        ASSERT_EQ(v3_backward_refusal(p, kH200), "") << headdim;
        const V3BackwardPlan plan = plan_v3_backward(p, kH200);
        EXPECT_EQ(plan.dbias_grid, gradient ? 6 * 300 : 0);
        EXPECT_EQ(plan.workspace_bytes, gradient && dtype != DType::kF32 ? plan.dbias_offset + 6 * 300 * 524 * 4 : plan.tiles_offset);
        EXPECT_EQ(plan.dbias_offset % 16, 0);
        const std::string main = v3_backward_request(plan.main).source, finish = v3_backward_request(plan.finish).source;
        for (const std::string& source : {main, finish}) {
          EXPECT_NE(source.find(dtype == DType::kF32 ? ".bias = 2" : ".bias = 1"), std::string::npos);
          EXPECT_NE(source.find("v3::EntryMask"), std::string::npos) << "-Inf hides any pair";
        }
        EXPECT_EQ(main.find(".dbias = true") != std::string::npos, gradient && !own);
        EXPECT_EQ(plan.dbias_tiles, own ? 5 * 3 * 6 : 0);  // of 128 x 128
        EXPECT_EQ(plan.dbias_parts, own ? 2 : 1) << "both batch entries at once: there are more multiprocessors than tiles";
        EXPECT_EQ(plan.dbias_ctas, plan.dbias_tiles);
        if (own) {
          EXPECT_LE(plan.dbias_shared_bytes, kH200.shared_bytes);
          const std::string source = v3_backward_request(plan.dbias).source;
          EXPECT_NE(source.find("backward_dbias<Spec>"), std::string::npos);
          EXPECT_NE(source.find(".dbias = true"), std::string::npos);
          EXPECT_NE(source.find("v3::EntryMask"), std::string::npos);
        }
        EXPECT_EQ(finish.find(".dbias = true"), std::string::npos);
      }
  const auto refusal = [&](DType dtype, bool gradient, auto change) {
    Problem p = biased(128, dtype, gradient);
    change(p);
    return v3_backward_refusal(p, kH200);
  };
  // Tiles for all multiprocessors: an element is written once, where it is to be, and a CTA takes one after another.
  for (const bool rows : {true, false}) {
    Problem p = biased(128, DType::kBF16, true);
    p.seqlen_q = 4096;
    p.seqlen_k = 8192;
    p.bias = p.dbias = {true, DType::kBF16, 1, p.nheads, rows ? p.seqlen_q : 1, {0, rows ? p.seqlen_k : 0, p.seqlen_k * (rows ? p.seqlen_q : 1)}};
    const V3BackwardPlan plan = plan_v3_backward(p, kH200);
    EXPECT_EQ(plan.dbias_tiles, 64 * (rows ? 32 : 1) * p.nheads);
    EXPECT_EQ(plan.dbias_parts, 1);
    EXPECT_EQ(plan.dbias_grid, 0);
    EXPECT_EQ(plan.dbias_ctas, kH200.multiprocessors);
    EXPECT_EQ(plan.workspace_bytes,
              plan.semaphore_offset + 4 * (plan.generation > 0 ? 1 + (p.batch * p.nheads_k + plan.generation - 1) / plan.generation : 0));
  }
  EXPECT_EQ(refusal(DType::kBF16, false, [](Problem& p) { p.pair_mask = p.bias; }), "");
  EXPECT_NE(refusal(DType::kF32, false, [](Problem& p) { p.pair_mask = p.bias; }).find("bias in fp32"), std::string::npos);
  EXPECT_NE(refusal(DType::kBF16, false, [](Problem& p) { p.seqlen_k = 523; }).find("multiples of 2"), std::string::npos);
  EXPECT_NE(refusal(DType::kBF16, false, [](Problem& p) { p.bias.strides.row = 525; }).find("multiples of 2"), std::string::npos);
  EXPECT_EQ(refusal(DType::kF32, false, [](Problem& p) { p.seqlen_k = 523; }), "");
  EXPECT_NE(refusal(DType::kF32, false, [](Problem& p) { p.dropout_below = 9; }).find("bias together with dropout"), std::string::npos);
  EXPECT_NE(refusal(DType::kF32, false, [](Problem& p) { p.has_seqused_k = true; }).find("bias together with lengths"), std::string::npos);
  EXPECT_NE(refusal(DType::kF32, true, [](Problem& p) { p.deterministic = true; }).find("deterministic"), std::string::npos);
  for (const bool mask : {false, true})
    EXPECT_NE(
        refusal(DType::kBF16, true, [&](Problem& p) { p.bias.given = false, p.pair_mask = p.bias, p.pair_mask.given = mask; }).find("without a bias"),
        std::string::npos);
  // What shares an element of dbias has to share the bias, too, up to headdim 128.
  for (const int dimension : {0, 1, 2})
    for (const int64_t headdim : {128, 192}) {
      const auto narrow = [&](Problem& p) {
        p.headdim = p.headdim_v = headdim;
        p.bias = p.dbias = {true, DType::kF32, p.batch, p.nheads, p.seqlen_q, {6 * 300 * 524, 524, 300 * 524}};
        (dimension == 0 ? p.dbias.batch : dimension == 1 ? p.dbias.heads : p.dbias.rows) = 1;
        (dimension == 0 ? p.dbias.strides.batch : dimension == 1 ? p.dbias.strides.head : p.dbias.strides.row) = 0;
      };
      EXPECT_EQ(refusal(DType::kF32, true, narrow).find("a dimension that bias has") != std::string::npos, headdim == 128);
      const auto shared = [&](Problem& p) {
        narrow(p);
        (dimension == 0 ? p.bias.strides.batch : dimension == 1 ? p.bias.strides.head : p.bias.strides.row) = 0;
      };
      EXPECT_EQ(refusal(DType::kF32, true, shared), "") << "expanded";
    }
  const auto causal = [](Problem& p) { p.causal = true, p.headdim = p.headdim_v = 256; };
  for (const DType dtype : {DType::kF32, DType::kBF16}) EXPECT_EQ(refusal(dtype, false, causal), "");
}

TEST(V3BackwardPlanSmall, ParametersDescribeTheCall) {
  CudaDevice& device = cuda_device(0);
  Problem p = gradient_problem(DType::kBF16, 72, 40, true);
  p.softmax_scale = -2;
  p.deterministic = true;
  const V3BackwardPlan plan = plan_v3_backward(p, kH200);
  const auto at = [](uintptr_t address) { return reinterpret_cast<void*>(address); };
  V3BackwardParams params;
  fattn_buffers buffers{};
  buffers.q = at(4096), buffers.k = at(8192), buffers.v = at(12288), buffers.o = at(16384), buffers.dout = at(20480), buffers.lse = at(64);
  buffers.dq = at(24576), buffers.dk = at(28672), buffers.dv = at(32768), buffers.workspace = at(1 << 20);
  set_v3_backward_params(params, p, plan, device, buffers);
  EXPECT_EQ(params.q.opaque[0], 4096u);  // where the stub of the driver puts the address
  EXPECT_EQ(params.k.opaque[0], 8192u);
  EXPECT_EQ(params.v.opaque[0], 12288u);
  EXPECT_EQ(params.dout.opaque[0], 20480u);
  EXPECT_EQ(params.dk.opaque[0], 28672u);
  EXPECT_EQ(params.dv.opaque[0], 32768u);
  EXPECT_EQ(params.call.o, at(16384));
  EXPECT_EQ(params.call.dq, at(24576));
  EXPECT_EQ(params.call.dq_accum, at(1 << 20));
  EXPECT_EQ(params.work.lse_log2, at((1 << 20) + static_cast<uintptr_t>(plan.lse_log2_offset)));
  EXPECT_EQ(params.call.row_sum, at((1 << 20) + static_cast<uintptr_t>(plan.row_sum_offset)));
  EXPECT_EQ(params.call.dq_semaphore, at((1 << 20) + static_cast<uintptr_t>(plan.semaphore_offset)));
  EXPECT_EQ(params.call.group, 3);
  EXPECT_FLOAT_EQ(params.call.softmax_scale, -2);
  EXPECT_EQ(params.call.dk_strides.row, p.dk.row);
  EXPECT_EQ(params.work.columns, 72);
  EXPECT_EQ(params.work.columns_v, 40);
  EXPECT_EQ(params.work.row_blocks, 5);
  EXPECT_EQ(params.work.key_tiles, plan.key_tiles);
}

TEST(V3BackwardPlanSmall, SourcesDifferWhereKeysDo) {
  std::set<std::string> sources;
  size_t count = 0;
  for (const DType dtype : {DType::kF16, DType::kBF16})
    for (const int headdim : {64, 96, 128, 192, 256})
      for (const bool causal : {false, true})
        for (const bool deterministic : {false, true}) {
          Problem p = gradient_problem(dtype, headdim, headdim, causal);
          p.deterministic = deterministic;
          const V3BackwardPlan plan = plan_v3_backward(p, kH200);
          const jit::Request request = v3_backward_request(plan.main);
          EXPECT_EQ(request.arch, 90);
          EXPECT_TRUE(request.arch_specific);
          EXPECT_NE(request.source.find("#include \"kernels/v3/backward.h\""), std::string::npos);
          EXPECT_NE(request.source.find("kHeaddim = " + std::to_string(headdim) + ";"), std::string::npos);
          EXPECT_NE(v3_backward_request(plan.prepare).source.find("fattn_v3_bwd_prepare("), std::string::npos);
          EXPECT_NE(v3_backward_request(plan.finish).source.find("fattn_v3_bwd_finish("), std::string::npos);
          sources.insert(request.source);
          ++count;
        }
  EXPECT_EQ(sources.size(), count);
}

}  // namespace
}  // namespace fattn::core::cuda
