#include "backend/cuda/v2_backward.h"

#include <algorithm>
#include <initializer_list>
#include <limits>

#include "backend/cuda/call_params.h"
#include "backend/cuda/kernel_source.h"
#include "backend/cuda/limits.h"
#include "backend/cuda/v2_refusal.h"
#include "fattn/error.hpp"
#include "shared/text.h"

namespace fattn::core::cuda {
namespace {

// Level 80, the first row of each headdim: the fastest of the tiles tried on an NVIDIA H200 on 2026-11-21 (bf16, batch * seqlen = 16384, nheads *
// headdim = 2048, seqlen 512 to 16384, with and without a causal mask, all three kernels, medians of 21 interleaved with torch 2.11's
// FlashAttention-2 backward): 1.09 to 1.28 times its speed, geometric mean 1.21. Tried and slower there: headdim 64 with 128 queries a block, or
// with four key groups and one CTA a multiprocessor (by 7 and 14%); headdim 128 with chunks of 32 queries (by 5%).
// fp32 (the last rows), 2026-11-22, on the same card, batch 16, seqlen 1024, nheads * headdim = 2048, causal, all three kernels, medians of 9;
// torch's memory-efficient backend without TF32 takes 5.97, 5.94 and 6.11 ms: headdim 64 2.49 ms the first row, 2.70 two CTAs with 64 keys, 2.83
// those with steps of 64 queries; headdim 128 2.93 (with q and dout split before, in a later run, 2.17 and 2.20); headdim 256 4.51, all columns in
// one CTA, which spills, 4.63 with 32 keys. The other rows of level 80 are for devices with less shared memory, chosen by count of bytes and
// registers, run for correctness only; so is level 75.
constexpr V2BackwardRow kRows[] = {
    // level, headdim, {width, width_v, block_m, block_n, key_groups, group_warps, chunk, pipelined}, ctas, tight
    {80, 64, {0, 0, 64, 128, 2, 1, 32, true}, 2, false},
    {80, 64, {0, 0, 64, 128, 2, 1, 32, false}, 2, false},
    {80, 64, {0, 0, 64, 128, 4, 1, 32, true}, 1, false},  // 32 keys a warp
    {80, 64, {0, 0, 64, 64, 2, 1, 32, false}, 2, false},
    {80, 96, {0, 0, 64, 128, 4, 1, 64, true}, 1, false},
    {80, 96, {0, 0, 64, 64, 4, 1, 64, true}, 1, false},
    {80, 128, {0, 0, 64, 128, 4, 1, 64, true}, 1, true},
    {80, 128, {0, 0, 64, 128, 4, 1, 32, true}, 1, false},
    {80, 128, {0, 0, 64, 128, 4, 1, 32, false}, 1, false},
    {80, 128, {0, 0, 64, 64, 4, 1, 64, false}, 1, false},
    {80, 256, {0, 0, 64, 64, 2, 2, 32, true}, 1, false},
    {80, 256, {0, 0, 64, 64, 2, 2, 32, false}, 1, false},
    {80, 256, {0, 0, 64, 32, 2, 2, 32, false}, 1, false},
    {80, 256, {0, 0, 32, 32, 2, 2, 16, false}, 1, false},
    // with masks of pairs and bias, which come through shared memory
    {80, 64, {0, 0, 64, 64, 2, 1, 32, true}, 2, false, false, 1, true, true},
    {80, 128, {0, 0, 64, 128, 4, 1, 32, true}, 1, false, false, 1, true, true},
    {80, 128, {0, 0, 64, 64, 4, 1, 32, true}, 1, false, false, 1, true, true},
    {80, 128, {0, 0, 64, 64, 4, 1, 32, false}, 1, false, false, 1, true, true},
    {80, 256, {0, 0, 32, 32, 2, 2, 16, false}, 1, false, false, 1, true, true},
    // with masks of pairs, bias, dbias, softcap and terms, or ALiBi and dropout above headdim 64, by count of registers; not timed
    {80, 64, {0, 0, 64, 64, 4, 1, 32, true}, 1, false, false, 1, true},
    {80, 128, {0, 0, 64, 64, 4, 1, 32, true}, 1, false, false, 1, true},
    {80, 128, {0, 0, 64, 64, 4, 1, 32, false}, 1, false, false, 1, true},
    {80, 256, {0, 0, 32, 32, 2, 2, 16, false}, 1, false, false, 1, true},
    {80, 256, {0, 0, 32, 16, 1, 2, 16, false}, 1, false, false, 1, true},
    {75, 64, {0, 0, 64, 64, 2, 1, 32, false}, 1, false},
    {75, 96, {0, 0, 32, 64, 2, 1, 32, false}, 1, false},
    {75, 128, {0, 0, 32, 64, 4, 1, 32, false}, 1, false},
    {75, 192, {0, 0, 32, 32, 2, 2, 16, false}, 1, false},
    {75, 256, {0, 0, 32, 16, 1, 2, 16, false}, 1, false},
    // fp32
    {80, 64, {0, 0, 64, 128, 4, 1, 32, false}, 1, false, true, 1, false, false, false, 2},
    {80, 64, {0, 0, 64, 128, 4, 1, 32, false}, 1, false, true},
    {80, 64, {0, 0, 64, 64, 2, 1, 32, false}, 1, false, true},
    {80, 128, {0, 0, 64, 64, 4, 1, 32, false}, 1, false, true, 1, false, false, false, 2},
    {80, 128, {0, 0, 64, 64, 4, 1, 32, false}, 1, false, true},
    {80, 128, {0, 0, 32, 32, 2, 1, 32, false}, 1, false, true},
    {80, 256, {0, 0, 32, 64, 4, 1, 32, false}, 1, false, true, 2},
    {80, 256, {0, 0, 32, 32, 2, 1, 32, false}, 1, false, true, 2},
    {80, 256, {0, 0, 16, 16, 1, 1, 16, false}, 1, false, true, 2},
    {80, 256, {0, 0, 32, 16, 1, 1, 32, false}, 1, false, true, 2},
    // fp32, as above with masks of pairs and so on
    {80, 64, {0, 0, 64, 128, 4, 1, 32, false}, 1, false, true, 1, true, false, true},
    {80, 64, {0, 0, 64, 64, 4, 1, 32, false}, 1, false, true, 1, true},
    {80, 128, {0, 0, 64, 64, 4, 1, 32, false}, 1, false, true, 1, true, false, true},
    {80, 128, {0, 0, 32, 64, 4, 1, 16, false}, 1, false, true, 1, true},
    {80, 128, {0, 0, 32, 32, 2, 1, 16, false}, 1, false, true, 1, true},
    {80, 256, {0, 0, 32, 64, 4, 1, 16, false}, 1, false, true, 2, true},
    {80, 256, {0, 0, 32, 32, 2, 1, 16, false}, 1, false, true, 2, true},
    {80, 256, {0, 0, 16, 16, 1, 1, 16, false}, 1, false, true, 2, true},
    {80, 256, {0, 0, 32, 16, 1, 1, 16, false}, 1, false, true, 2, true},
};

// The kernels' widths; a tile is made for the larger of two.
int width_of(int headdim) {
  for (const int width : {32, 64, 96, 128, 192}) {
    if (headdim <= width) return width;
  }
  return 256;
}

// A row of the table with its widths.
V2BackwardRow row_of(int row, int headdim, int headdim_v) {
  V2BackwardRow chosen = kRows[row];
  chosen.tile.width = width_of(headdim);
  chosen.tile.width_v = width_of(headdim_v);
  return chosen;
}

int shared_bytes(const V2BackwardRow& row, const PairFeatures& pair) {
  const int terms = row.staged ? row.tile.stages() * term_tile(pair, row.tile.block_m, row.tile.block_n, true).bytes() : 0;
  if (row.f32) return pair.packed ? row.f32_tile().packed_shared_bytes() : row.f32_tile().shared_bytes();
  return row.tile.shared_bytes() + terms;
}

// Whether a kernel is to split q and dout before the main one: a block of queries would otherwise be split by every tile of keys.
bool splits_before(const Problem& p, const V2Target& target) {
  PairFeatures besides = pair_features(p);
  besides.packed = false;
  constexpr int64_t kFewestKeys = 256;
  return target.arch == 90 && p.dtype == DType::kF32 && p.algorithm != Algorithm::kV1 && p.softcap == 0 && !p.windowed() && !p.deterministic &&
         !besides.any() && p.seqlen_q > 0 && p.seqlen_k >= kFewestKeys;
}

// The row of the table, or -1 if nothing fits.
int choose_row(const Problem& problem, const V2Target& target, bool tight) {
  const int headdim = static_cast<int>(problem.headdim), headdim_v = static_cast<int>(problem.headdim_v);
  const PairFeatures pair = pair_features(problem);
  constexpr int kMostKeysCapped = 32;  // of a warp: P^T (1 - T^2) beside P^T needs registers (with 64: spills of 40 bytes at level 80)
  for (int i = 0; i < static_cast<int>(std::size(kRows)); ++i) {
    const V2BackwardRow row = row_of(i, headdim, headdim_v);
    if (row.f32 != (problem.dtype == DType::kF32) || row.level != target.level || std::max(headdim, headdim_v) > row.headdim || (row.tight && !tight))
      continue;
    const bool alibi_alone = !row.f32 && pair.alibi && !pair.hides() && !pair.dropout && !pair.dbias && problem.softcap == 0 &&
                             !(pair.packed && problem.windowed()) && std::max(headdim, headdim_v) <= 64;
    if ((problem.softcap > 0 || heavy(pair)) && !alibi_alone && row.tile.block_n / row.tile.key_groups > kMostKeysCapped) continue;
    // Sequences' own parameters take registers from ALiBi in a window and, with turns, from dropout.
    const bool crowded =
        row.level >= 80 && std::max(headdim, headdim_v) > 64 &&
        ((pair.dropout && (pair.alibi || (problem.deterministic && pair.packed))) || (pair.alibi && pair.packed && problem.windowed()));
    if (row.staged && !can_stage(pair)) continue;
    // Wide heads and 32 keys of a warp leave registers to a bias or a mask, not to much besides.
    const bool much = pair.dropout || pair.alibi || pair.documents || problem.softcap > 0 || (pair.bias != 0 && pair.mask);
    if (row.staged && std::max(headdim, headdim_v) > 64 && much && row.tile.block_n / row.tile.key_groups > 16) continue;
    // Nor, from sm_90 on, to a mask (4 to 40 bytes).
    if (row.staged && row.tile.block_n == 128 && target.arch >= 90 && pair.mask) continue;
    // In a window of packed sequences above headdim 64 stages spill with a bias in fp32 and its gradient alone (4 to 24 bytes), from sm_90 on with a
    // mask (8) and 64 queries with that bias (4 to 8).
    if (row.staged && !much && std::max(headdim, headdim_v) > 64 && pair.packed && problem.windowed()) {
      const bool fp32_gradient = pair.bias == 2 && pair.dbias;
      if (row.tile.pipelined && (fp32_gradient || (target.arch >= 90 && pair.mask))) continue;
      if (row.tile.block_m == 64 && target.arch >= 90 && fp32_gradient) continue;
    }
    // For sm_120 turns and addresses of any kind leave the widest documents of packed sequences no more than this (16 bytes).
    if (row.level >= 80 && !row.f32 && target.arch >= 120 && std::max(headdim, headdim_v) > 192 && pair.packed && pair.documents &&
        problem.deterministic && row.tile.block_n > 16)
      continue;
    if (row.heavy != (row.level >= 80 && (pair.hides() || pair.dbias || crowded || (heavy(pair) && problem.softcap > 0)))) continue;
    const int terms = (pair.bias != 0) + pair.mask + pair.documents;
    if (row.one_term && (terms != 1 || pair.alibi || pair.dropout || problem.softcap > 0)) continue;
    // What spills (4 to 16 bytes): packed sequences in a window, or for sm_100.
    if (row.one_term && pair.packed && (problem.windowed() || target.arch >= 100)) continue;
    if (crowded && pair.dbias && row.tile.pipelined) continue;
    // What spills (4 to 72 bytes): packed sequences under a causal mask for sm_100, and in a window with everything at once, with turns up to headdim
    // 64, above headdim 96 for sm_100, or with turns for sm_90 or with documents.
    if (!row.f32 && target.arch >= 100 && pair.packed && problem.causal && std::max(headdim, headdim_v) > 64 && row.tile.chunk == 64 &&
        row.tile.block_n == 128)
      continue;
    const bool everything = pair.packed && problem.windowed() && pair.alibi && pair.dropout && pair.bias != 0 && pair.mask && pair.dbias;
    if (!row.f32 && everything && problem.deterministic && row.tile.block_n == 128) continue;
    if (!row.f32 && everything && std::max(headdim, headdim_v) > 96 && row.tile.block_m == 64 &&
        (target.arch >= 100 || (problem.deterministic && (pair.documents || target.arch == 90))))
      continue;
    if (row.query_stages == 2 && !splits_before(problem, target)) continue;
    if ((row.f32 ? row.f32_tile().dq_row_warps() : row.tile.dq_row_warps()) == 0) continue;
    const int64_t bytes = shared_bytes(row, pair);
    if (bytes <= target.shared_bytes && row.ctas * (bytes + kReservedSharedBytes) <= target.shared_bytes_per_multiprocessor) return i;
  }
  return -1;
}

// Blocks of `rows` queries in the workspace, of all heads, and rows of which something is kept there.
int64_t kept_blocks(const Problem& p, int rows) {
  return p.packed ? p.nheads * int64_t{packed_blocks(p.total_q, static_cast<int>(p.batch), rows)} : p.batch * p.nheads * ceil_div(p.seqlen_q, rows);
}
int64_t kept_rows(const Problem& p) { return p.nheads * (p.packed ? p.total_q : p.batch * p.seqlen_q); }

// Query heads of the whole batch times their blocks of `rows` queries.
int64_t query_blocks(const Problem& problem, int64_t rows) { return problem.batch * problem.nheads * ceil_div(problem.seqlen_q, rows); }

bool aligned_strides(const Problem& p) {
  if (p.headdim % copied_at_once(p.dtype) != 0 || p.headdim_v % copied_at_once(p.dtype) != 0) return false;
  for (const Strides* s : {&p.q, &p.o, &p.dout, &p.dq}) {
    if (!aligned(*s, p.batch, p.dense_rows(), p.nheads, p.dtype)) return false;
  }
  for (const Strides* s : {&p.k, &p.v, &p.dk, &p.dv}) {
    if (!aligned(*s, p.batch, p.dense_keys(), p.nheads_k, p.dtype)) return false;
  }
  return true;
}

// Key heads whose tiles run side by side: as many as have their queries' q, dout and dq in half of the L2 together. Deterministic: all, because
// the CTAs of one head wait for each other.
int64_t heads_per_section(const Problem& problem, const BackwardTile& tile, bool deterministic, int64_t l2_bytes) {
  const int64_t heads = std::max<int64_t>(1, problem.batch * problem.nheads_k);
  if (deterministic) return heads;
  const int64_t head_bytes =
      problem.group() * problem.seqlen_q * (static_cast<int64_t>(size_of(problem.dtype)) * (problem.headdim + problem.headdim_v) + 4 * tile.width);
  return std::clamp<int64_t>(l2_bytes / 2 / std::max<int64_t>(1, head_bytes), 1, heads);
}

// Floats of a row of dbias in the workspace: whole units of 16 bytes.
int64_t dbias_row(const Problem& p) { return ceil_div(p.seqlen_k, 4) * 4; }

}  // namespace

bool dbias_alone(const Problem& p) { return p.dbias.batch == p.batch && p.dbias.heads == p.nheads && p.dbias.rows == p.seqlen_q; }
bool dbias_in_place(const Problem& p) { return p.dbias.dtype == DType::kF32; }
V2BackwardKey dbias_key(const Problem& p, int arch, KernelKind kind) {
  return {.kind = kind, .arch = arch, .level = arch < 80 ? 75 : 80, .dtype = static_cast<int32_t>(p.dtype), .aligned = 1};
}
int64_t dbias_bytes(const Problem& p) { return p.dbias.batch * p.dbias.heads * p.dbias.rows * dbias_row(p) * 4; }

std::span<const V2BackwardRow> v2_backward_rows() { return kRows; }

std::string dbias_order_refusal(const Problem& p) {
  if (!p.dbias.given || !p.deterministic || dbias_alone(p)) return {};
  return "deterministic is set, and the sums over a dimension of dbias that is 1 are atomic additions in any order on a GPU; leave deterministic at "
         "0, give dbias the sizes of the scores, or use the CPU";
}

std::string v2_backward_refusal(const Problem& problem, const V2Target& target) {
  if (std::string why = v2_refusal(problem, target); !why.empty()) return why;
  if (target.level < 80 && heavy(pair_features(problem)))
    return "the CUDA kernels for compute capability 7.5 have no documents, ALiBi, bias, mask and dropout in a backward pass; use the CPU";
  if (std::string why = dbias_order_refusal(problem); !why.empty()) return why;
  const int row = choose_row(problem, target, false);
  if (row < 0) {
    return text("no backward tile for headdim ", problem.headdim, " and headdim_v ", problem.headdim_v, " fits into ", target.shared_bytes,
                " bytes of shared memory");
  }
  const int64_t tiles = std::max(ceil_div(problem.seqlen_q, kDqAccumRows), ceil_div(problem.seqlen_k, kRows[row].tile.block_n) * kRows[row].parts);
  if (tiles > 0 && problem.batch > 0 && problem.nheads > kMaxGrid / tiles / problem.batch) {
    return text("batch ", problem.batch, " * nheads ", problem.nheads, " * ", tiles, " tiles is more than a grid of ", kMaxGrid, "; split the batch");
  }
  return {};
}

V2BackwardPlan plan_v2_backward(const Problem& problem, const V2Target& target) {
  const int headdim = static_cast<int>(problem.headdim), headdim_v = static_cast<int>(problem.headdim_v);
  const bool deterministic = problem.deterministic && problem.seqlen_q > 0;  // without queries nothing is added
  const PairFeatures pair = pair_features(problem);
  const bool plain = problem.softcap == 0 && !problem.windowed() && !pair.any();
  const bool tight = target.arch == 90 && !deterministic && plain && width_of(headdim) == width_of(headdim_v);  // spills elsewhere
  const int row = choose_row(problem, target, tight);
  if (row < 0) throw Error(ErrorCode::kInternal, "plan_v2_backward() was called for a problem that v2_backward_refusal() refuses");
  V2BackwardPlan plan;
  plan.key.arch = target.arch;
  plan.key.level = target.level;
  plan.key.dtype = static_cast<int32_t>(problem.dtype);
  plan.key.headdim = headdim;
  plan.key.headdim_v = headdim_v;
  plan.key.causal = problem.causal && !problem.windowed();
  plan.key.window = problem.windowed();
  plan.key.capped = problem.softcap > 0;
  plan.key.deterministic = deterministic;
  plan.key.row = row;
  plan.key.pair = pair_bits(pair);
  plan.dlse = problem.has_dlse;
  const V2BackwardRow chosen = row_of(row, headdim, headdim_v);
  plan.tile = chosen.tile;
  plan.prepare = {query_blocks(problem, kPrepareRows), kPrepareThreads, 0};
  plan.main = {problem.batch * problem.nheads_k * ceil_div(problem.seqlen_k, plan.tile.block_n) * chosen.parts, plan.tile.threads(),
               shared_bytes(chosen, pair)};
  // A warp takes 16 queries x 32 columns.
  plan.finish = {ceil_div(query_blocks(problem, kDqAccumRows) * (plan.tile.width / 32), kFinishThreads / 32), kFinishThreads, 0};
  plan.heads_per_section = static_cast<int>(heads_per_section(problem, plan.tile, deterministic, target.l2_bytes));
  plan.aligned_strides = aligned_strides(problem);
  plan.unaligned_row = choose_row(problem, target, false);
  plan.row_sum_offset = kept_blocks(problem, kDqAccumRows) * kDqAccumRows * plan.tile.width * 4;
  plan.semaphore_offset = plan.row_sum_offset + kept_rows(problem) * 4;
  plan.workspace_bytes = plan.semaphore_offset + (deterministic ? (1 + kept_blocks(problem, plan.tile.block_m)) * 4 : 0);
  if (chosen.query_stages == 2) {
    const BackwardF32Tile tile = chosen.f32_tile();
    const int64_t blocks = kept_blocks(problem, tile.block_m);
    plan.query_blocks = static_cast<int>(problem.packed ? blocks / problem.nheads : ceil_div(problem.seqlen_q, tile.block_m));
    plan.split = {2 * query_blocks(problem, tile.block_m), kBackwardF32SplitThreads, 0};
    plan.q_parts_offset = ceil_div(plan.workspace_bytes, 16) * 16;
    plan.dout_parts_offset = plan.q_parts_offset + blocks * tile.q_bytes();
    plan.inverses_offset = plan.dout_parts_offset + blocks * tile.dout_bytes();
    plan.workspace_bytes = plan.inverses_offset + 8 * blocks;
  }
  if (pair.dbias && problem.seqlen_k > 0) {
    const int64_t rows = problem.dbias.batch * problem.dbias.heads * problem.dbias.rows;
    plan.dbias_zero = {rows, kDbiasThreads, 0};
    if (!dbias_in_place(problem)) {
      plan.dbias_finish = plan.dbias_zero;
      plan.dbias_offset = ceil_div(plan.workspace_bytes, 16) * 16;
      plan.workspace_bytes = plan.dbias_offset + dbias_bytes(problem);
    }
  }
  return plan;
}

V2BackwardPlan plan_v1_backward(const Problem& problem, const V2Target& target) {
  Problem ordered = problem;
  ordered.deterministic = false;  // one CTA adds to dq, in the order of the keys: no turns are needed
  V2BackwardPlan plan = plan_v2_backward(ordered, target);
  plan.key.one_head = 1;
  plan.main.grid = problem.seqlen_k > 0 ? problem.batch * problem.nheads_k : 0;
  plan.heads_per_section = 1;
  return plan;
}

V2BackwardKeys v2_backward_keys(const V2BackwardPlan& plan, bool aligned) {
  V2BackwardKeys keys;
  keys.main = plan.key;
  keys.main.aligned = aligned && plan.aligned_strides;
  if (!keys.main.aligned) keys.main.row = plan.unaligned_row;
  keys.split = keys.main;
  keys.split.kind = KernelKind::kV2BackwardF32Split;
  keys.split.causal = 0;
  // The small kernels do not depend on everything; what they do not depend on is the same in all keys, so that fewer are compiled.
  keys.prepare = keys.main;
  keys.prepare.kind = KernelKind::kV2BackwardPrepare;
  keys.prepare.headdim = plan.tile.width;
  keys.prepare.causal = keys.prepare.window = keys.prepare.capped = keys.prepare.one_head = 0;
  const PairFeatures pair = pair_features_of(keys.main.pair);
  keys.prepare.pair = pair_bits({.lengths = pair.lengths, .packed = pair.packed, .dlse = plan.dlse});
  if (!keys.main.deterministic) keys.prepare.row = 0;
  keys.finish = keys.main;
  keys.finish.kind = KernelKind::kV2BackwardFinish;
  keys.finish.deterministic = keys.finish.row = keys.finish.one_head = 0;
  if (keys.main.dtype != static_cast<int32_t>(DType::kF32)) {
    keys.finish.pair = pair_bits({.lengths = pair.packed && pair.lengths, .packed = pair.packed, .fp32_out = pair.fp32_out});
    keys.finish.headdim_v = keys.main.headdim;
    keys.finish.causal = keys.finish.window = keys.finish.capped = 0;
  } else {  // it may compute rows again
    PairFeatures of_finish = pair;
    of_finish.dbias = false;
    keys.finish.pair = pair_bits(of_finish);
  }
  for (V2BackwardKey* const key : {&keys.dbias_zero, &keys.dbias_finish}) {
    key->arch = keys.main.arch;
    key->level = keys.main.level;
    key->dtype = keys.main.dtype;
    key->aligned = 1;
  }
  keys.dbias_zero.kind = KernelKind::kV2DbiasZero;
  keys.dbias_finish.kind = KernelKind::kV2DbiasFinish;
  return keys;
}

V2BackwardParams v2_backward_params(const Problem& problem, const V2BackwardPlan& plan, const fattn_buffers& b) {
  auto* const first = static_cast<unsigned char*>(b.workspace);
  V2BackwardParams params{
      pair_params(backward_params(problem, plan.heads_per_section, b, plan.key.deterministic != 0, plan.row_sum_offset, plan.semaphore_offset),
                  problem, b),
      {first + plan.q_parts_offset, first + plan.dout_parts_offset, reinterpret_cast<float*>(first + plan.inverses_offset), plan.query_blocks}};
  set_dbias_params(params.call, problem, b.dbias, b.workspace, plan.dbias_offset);
  return params;
}

void set_dbias_params(PairParams& params, const Problem& problem, void* out, void* workspace, int64_t offset) {
  const PairTensor& dbias = problem.dbias;
  if (!dbias.given) return;
  params.dbias_batch = static_cast<int>(dbias.batch);
  params.dbias_heads = static_cast<int>(dbias.heads);
  params.dbias_rows = static_cast<int>(dbias.rows);
  params.dbias_alone = dbias_alone(problem) ? 1 : 0;
  params.dbias_out = out;
  params.dbias_out_strides = strides_of(dbias.strides);
  if (dbias_in_place(problem)) {
    params.dbias = static_cast<float*>(out);
    params.dbias_strides = params.dbias_out_strides;
    return;
  }
  params.dbias = reinterpret_cast<float*>(static_cast<char*>(workspace) + offset);
  const auto stride = [&](int64_t size, int64_t step) { return size > 1 ? step : 0; };  // 0 where all share
  const int64_t row = dbias_row(problem);
  params.dbias_strides = {stride(dbias.batch, dbias.heads * dbias.rows * row), stride(dbias.rows, row), stride(dbias.heads, dbias.rows * row)};
}

namespace {

// The two small kernels beside a pass with dbias.
jit::Request dbias_request(const V2BackwardKey& key) {
  const bool zero = key.kind == KernelKind::kV2DbiasZero;
  const char* const name = zero ? "dbias_zero" : "dbias_finish";
  jit::Request request;
  request.entry = text("fattn_v2_", name);
  request.arch = key.arch;
  request.source =
      text("#include \"kernels/v2/dbias.h\"\nstruct Spec {\n  using Element = ",
           key.dtype == static_cast<int32_t>(DType::kBF16) ? "fattn::bf16" : "fattn::f16", ";\n};\nextern \"C\" __global__ void __launch_bounds__(",
           kDbiasThreads, ") ", request.entry, "(const __grid_constant__ fattn::PairParams p) {\n  fattn::v2::", name, "<Spec>(p);\n}\n");
  return request;
}

}  // namespace

jit::Request v2_backward_request(const V2BackwardKey& key) {
  if (key.kind == KernelKind::kV2DbiasZero || key.kind == KernelKind::kV2DbiasFinish) return dbias_request(key);
  const V2BackwardRow row = row_of(key.row, key.headdim, key.headdim_v);
  const BackwardTile& tile = row.tile;
  const bool f32 = key.dtype == static_cast<int32_t>(DType::kF32);
  const auto flag = [](bool x) { return x ? "true" : "false"; };
  struct Kernel {
    std::string file, entry;  // the function is named like the file
    int threads, ctas;
  };
  const char* const version = key.one_head != 0 ? "v1" : "v2";
  const std::string file = f32 ? "backward_f32" : "backward", small = f32 ? "fattn_v2_bwd_f32" : "fattn_v2_bwd";
  const Kernel kernel = key.kind == KernelKind::kV2BackwardPrepare    ? Kernel{"backward_prepare", small + "_prepare", kPrepareThreads, 1}
                        : key.kind == KernelKind::kV2BackwardF32Split ? Kernel{"backward_f32_split", small + "_split", kBackwardF32SplitThreads, 1}
                        : key.kind == KernelKind::kV2BackwardFinish   ? Kernel{file + "_finish", small + "_finish", kFinishThreads, 1}
                        : key.one_head != 0                           ? Kernel{file, "fattn_v1_bwd", tile.threads(), row.ctas}
                                                                      : Kernel{file, small, tile.threads(), row.ctas};
  jit::Request request;
  request.entry = kernel.entry;
  request.arch = key.arch;
  const bool main = key.kind == KernelKind::kV2Backward;  // the others take rows one by one
  const char* const element = f32 ? "float" : key.dtype == static_cast<int32_t>(DType::kBF16) ? "fattn::bf16" : "fattn::f16";
  // A row of fp32's table is written as what its kernels take.
  const std::string kind_of_tile =
      f32 ? text("  // width, width_v, block_m, block_n, key_groups, chunk, parts", row.query_stages == 2 ? ", query_stages" : "",
                 "\n"
                 "  static constexpr fattn::BackwardF32Tile kTile = {",
                 tile.width, ", ", tile.width_v, ", ", tile.block_m, ", ", tile.block_n, ", ", tile.key_groups, ", ", tile.chunk, ", ", row.parts,
                 row.query_stages == 2 ? ", 2" : "")
          : text(
                "  // width, width_v, block_m, block_n, key_groups, group_warps, chunk, pipelined\n"
                "  static constexpr fattn::BackwardTile kTile = {",
                tile.width, ", ", tile.width_v, ", ", tile.block_m, ", ", tile.block_n, ", ", tile.key_groups, ", ", tile.group_warps, ", ",
                tile.chunk, ", ", flag(tile.pipelined));
  const bool parts = row.query_stages == 2 && (main || key.kind == KernelKind::kV2BackwardF32Split);
  request.source =
      text(main ? comment_of(key, tile.block_m, tile.block_n) : comment_of(key), "#include \"kernels/", version, "/", kernel.file,
           ".h\"\n"
           "struct Spec {\n"
           "  using Element = ",
           element,
           ";\n"
           "  static constexpr int kLevel = ",
           key.level, ", kHeaddim = ", key.headdim, ", kHeaddimV = ", key.headdim_v,
           ";\n"
           "  static constexpr bool kCausal = ",
           flag(key.causal), ", kWindow = ", flag(key.window), ", kCapped = ", flag(key.capped), ", kAligned = ", flag(key.aligned),
           ", kDeterministic = ", flag(key.deterministic), ";\n", kind_of_tile, "};\n",
           row.staged && main ? "  static constexpr bool kStaged = true;\n" : "", pair_line(key.pair),
           "};\n"
           "extern \"C\" __global__ void __launch_bounds__(",
           kernel.threads, ", ", kernel.ctas, ") ", kernel.entry, "(const __grid_constant__ fattn::", params_of(key.window || key.capped, key.pair),
           parts ? " p, const __grid_constant__ fattn::BackwardF32Parts parts) {\n" : " p) {\n", "  fattn::", version, "::", kernel.file,
           parts ? "<Spec>(p, parts);\n" : "<Spec>(p);\n", "}\n");
  return request;
}

}  // namespace fattn::core::cuda
