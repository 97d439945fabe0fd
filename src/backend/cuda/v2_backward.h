// Host side of kernels/v2/backward*.h, in fp32 of backward_f32*.h: which problems they take, the tile for each, the source of a specialisation, and
// what the launches need.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "backend/cuda/kernel_kind.h"
#include "backend/cuda/target.h"
#include "device_abi/attention_params.h"
#include "device_abi/backward_f32_layout.h"
#include "device_abi/backward_layout.h"
#include "jit/jit.h"
#include "problem/problem.h"

namespace fattn::core::cuda {

// A BackwardTile of any widths.
struct V2BackwardShape {
  int block_m = 0, block_n = 0, key_groups = 1, group_warps = 1, chunk = 0;
  bool pipelined = false;
};

// A row of the table of tiles (tiles/v2_backward.h): for max(headdim, headdim_v) up to `headdim` on `level`, in fp32 or in 16 bits. Of several the
// first of which `ctas` fit into a multiprocessor's shared memory is taken. Widths are not in the table: they follow from the headdims.
struct V2BackwardRow {
  int level = 0, headdim = 0;
  int ctas = 1;        // a multiprocessor
  bool f32 = false;    // its tile is a BackwardF32Tile: one warp of each role in a group, not pipelined
  bool tight = false;  // registers just suffice, on sm_90: for causal calls, not deterministic or unaligned ones, softcap or unequal widths. Its twin
                       // differs in `chunk`
  int parts = 1;       // of a BackwardF32Tile
  bool heavy = false;  // for what has fewer registers for the rest (kV2BackwardHeavy)
  bool staged = false;    // for masks of pairs and bias, which come through shared memory
  bool one_term = false;  // fp32, of those for one of bias, mask and documents alone, without ALiBi, dropout and softcap
  int query_stages = 1;   // of a BackwardF32Tile; 2 for plain problems on sm_90: q and dout are split by a kernel before
  V2BackwardShape tile = {};

  BackwardTile tile_of(int width, int width_v) const {
    return {width, width_v, tile.block_m, tile.block_n, tile.key_groups, tile.group_warps, tile.chunk, tile.pipelined};
  }
  BackwardF32Tile f32_tile_of(int width, int width_v) const {
    return {width, width_v, tile.block_m, tile.block_n, tile.key_groups, tile.chunk, parts, query_stages};
  }
};
std::span<const V2BackwardRow> v2_backward_rows();

// Tells one specialisation of one of the three kernels from another; 64 bytes without padding.
struct V2BackwardKey {
  KernelKind kind = KernelKind::kV2Backward;
  int32_t arch = 0;
  int32_t level = 0;
  int32_t dtype = 0;  // DType
  int32_t headdim = 0, headdim_v = 0;
  int32_t causal = 0;              // by itself; with a window it is part of that
  int32_t window = 0, capped = 0;  // capped: softcap
  int32_t aligned = 0;
  int32_t deterministic = 0;
  int32_t row = 0;       // of the table
  int32_t one_head = 0;  // algorithm v1: a CTA has all keys of a head
  int32_t pair = 0;      // pair_bits()
  std::array<int32_t, 2> reserved{};
};
static_assert(sizeof(V2BackwardKey) == 64);

// Why the kernels cannot compute the problem on the target; empty: they can. `without` here and below: a rule on registers (spills.h) that is not to
// count.
std::string v2_backward_refusal(const Problem& problem, const V2Target& target, std::string_view without = {});

struct V2BackwardLaunch {
  int64_t grid = 0;  // CTAs, one-dimensional; 0: nothing to do
  int threads = 0, shared_bytes = 0;
};

// Launched in this order on one stream: prepare, split, main, finish; dbias_zero before and dbias_finish behind them.
struct V2BackwardPlan {
  V2BackwardKey key;  // of the main kernel, but for `aligned`, which depends on the pointers
  BackwardTile tile;  // of a V2BackwardRow
  V2BackwardLaunch prepare, split, main, finish, dbias_zero, dbias_finish;
  int heads_per_section = 0;
  bool aligned_strides = false;
  bool dlse = false;      // which the first kernel alone reads
  int unaligned_row = 0;  // of the table, for calls that are not aligned
  // Workspace: dq in fp32, a float a row, and, if deterministic, whose turn it is for each block of queries. 16-byte aligned.
  int64_t row_sum_offset = 0, semaphore_offset = 0, dbias_offset = 0, workspace_bytes = 0;
  // Of fp32 with q and dout split before: the parts of q, those of dout, and what undoes their factors.
  int query_blocks = 0;  // of a head
  int64_t q_parts_offset = 0, dout_parts_offset = 0, inverses_offset = 0;
};
// For problems that are not refused.
V2BackwardPlan plan_v2_backward(const Problem& problem, const V2Target& target, std::string_view without = {});
// The same with the main kernel of kernels/v1.
V2BackwardPlan plan_v1_backward(const Problem& problem, const V2Target& target);

// The keys of a call whose tensors begin at multiples of 16 bytes, or not: 16-byte copies, or the slower ones that take any address.
struct V2BackwardKeys {
  V2BackwardKey prepare, split, main, finish, dbias_zero, dbias_finish;
};
V2BackwardKeys v2_backward_keys(const V2BackwardPlan& plan, bool aligned = true);

// The parameters of the kernels, and where they are, in order: the second is for `split` and `main` where q and dout are split before.
struct V2BackwardParams {
  PairParams call;
  BackwardF32Parts parts;
  std::array<void*, 2> pointers() { return {&call, &parts}; }
};
V2BackwardParams v2_backward_params(const Problem& problem, const V2BackwardPlan& plan, const fattn_buffers& buffers);

// dbias, which is made 0 before a pass, and of 16 bits, summed in the workspace, written behind it: here and in algorithm v3. Whether no sum makes an
// element of it; whether it is summed where it will be; else what it takes of the workspace, and what the kernels are told.
bool dbias_alone(const Problem& problem);
std::string dbias_order_refusal(const Problem& problem);  // of deterministic; empty: none
bool dbias_in_place(const Problem& problem);
int64_t dbias_bytes(const Problem& problem);
// Of the kernel before a pass with dbias, or behind it (kV2DbiasZero, kV2DbiasFinish), of whatever algorithm the pass is.
V2BackwardKey dbias_key(const Problem& problem, int arch, KernelKind kind);
void set_dbias_params(PairParams& params, const Problem& problem, void* dbias, void* workspace, int64_t offset);

jit::Request v2_backward_request(const V2BackwardKey& key);

}  // namespace fattn::core::cuda
