#include "backend/cuda/v2_backward.h"

#include <algorithm>
#include <bit>
#include <initializer_list>
#include <limits>

#include "backend/cuda/call_params.h"
#include "backend/cuda/kernel_source.h"
#include "backend/cuda/limits.h"
#include "backend/cuda/spills.h"
#include "backend/cuda/tiles/v2_backward.h"
#include "backend/cuda/v2_refusal.h"
#include "fattn/error.hpp"
#include "shared/text.h"

namespace fattn::core::cuda {
namespace {

constexpr auto& kRows = kV2BackwardTable;

// The kernels' widths; a tile is made for the larger of two.
int width_of(int headdim) {
  for (const int width : {32, 64, 96, 128, 192}) {
    if (headdim <= width) return width;
  }
  return 256;
}

BackwardTile tile_of(const V2BackwardRow& row, int headdim, int headdim_v) { return row.tile_of(width_of(headdim), width_of(headdim_v)); }
BackwardF32Tile f32_tile_of(const V2BackwardRow& row, int headdim, int headdim_v) { return row.f32_tile_of(width_of(headdim), width_of(headdim_v)); }

int shared_bytes(const V2BackwardRow& row, int headdim, int headdim_v, const PairFeatures& pair) {
  const BackwardTile tile = tile_of(row, headdim, headdim_v);
  const BackwardF32Tile f32 = f32_tile_of(row, headdim, headdim_v);
  const int terms = row.staged ? tile.stages() * term_tile(pair, tile.block_m, tile.block_n, true).bytes() : 0;
  if (row.f32) return pair.packed ? f32.packed_shared_bytes() : f32.shared_bytes();
  return tile.shared_bytes() + terms;
}

// Whether its warps can share out dQ.
bool shares_dq(const V2BackwardRow& row, int headdim, int headdim_v) {
  return (row.f32 ? f32_tile_of(row, headdim, headdim_v).dq_row_warps() : tile_of(row, headdim, headdim_v).dq_row_warps()) > 0;
}

// Whether a kernel is to split q and dout before the main one: a block of queries would otherwise be split by every tile of keys.
bool splits_before(const Problem& p, const V2Target& target) {
  PairFeatures besides = pair_features(p);
  besides.packed = false;
  constexpr int64_t kFewestKeys = 256;
  return target.arch == 90 && p.dtype == DType::kF32 && p.algorithm != Algorithm::kV1 && p.softcap == 0 && !p.windowed() && !p.deterministic &&
         !besides.any() && p.seqlen_q > 0 && p.seqlen_k >= kFewestKeys;
}

RegisterFacts facts_of(const Problem& problem, const V2Target& target) {
  return register_facts(problem, pair_features(problem), target.arch, target.level);
}

// One of bias, mask and documents, without ALiBi, dropout and softcap.
bool has_one_term(const RegisterFacts& facts) {
  return std::popcount(facts.has & with::kHides) == 1 && !facts.any(with::kAlibi | with::kDropout | with::kSoftcap);
}

// The row of the table, or -1 if nothing fits.
int choose_row(const Problem& problem, const V2Target& target, bool tight, std::string_view without) {
  const int headdim = static_cast<int>(problem.headdim), headdim_v = static_cast<int>(problem.headdim_v);
  const PairFeatures pair = pair_features(problem);
  const RegisterFacts facts = facts_of(problem, target);
  const bool heavy = holds_any(kV2BackwardHeavy, facts, without);
  for (int i = 0; i < static_cast<int>(std::size(kRows)); ++i) {
    const V2BackwardRow& row = kRows[i];
    if (row.f32 != (problem.dtype == DType::kF32) || row.level != target.level || facts.wider() > row.headdim || (row.tight && !tight)) continue;
    if (row.heavy != heavy || (row.staged && !can_stage(pair)) || (row.one_term && !has_one_term(facts))) continue;
    if (row.query_stages == 2 && !splits_before(problem, target)) continue;
    if (spills(kV2BackwardSpills, row, facts, without)) continue;
    if (!shares_dq(row, headdim, headdim_v)) continue;
    const int64_t bytes = shared_bytes(row, headdim, headdim_v, pair);
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

std::string v2_backward_refusal(const Problem& problem, const V2Target& target, std::string_view without) {
  if (std::string why = v2_refusal(problem, target, without); !why.empty()) return why;
  if (std::string why = register_refusal(kV2BackwardRefusals, facts_of(problem, target), without); !why.empty()) return why;
  if (std::string why = dbias_order_refusal(problem); !why.empty()) return why;
  const int row = choose_row(problem, target, false, without);
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

V2BackwardPlan plan_v2_backward(const Problem& problem, const V2Target& target, std::string_view without) {
  const int headdim = static_cast<int>(problem.headdim), headdim_v = static_cast<int>(problem.headdim_v);
  const bool deterministic = problem.deterministic && problem.seqlen_q > 0;  // without queries nothing is added
  const PairFeatures pair = pair_features(problem);
  const bool plain = problem.softcap == 0 && !problem.windowed() && !pair.any();
  const bool equal = width_of(headdim) == width_of(headdim_v);
  const bool tight = target.arch == 90 && problem.causal && !deterministic && plain && equal;  // spills elsewhere
  const int row = choose_row(problem, target, tight, without);
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
  const V2BackwardRow& chosen = kRows[row];
  plan.tile = tile_of(chosen, headdim, headdim_v);
  plan.prepare = {query_blocks(problem, kPrepareRows), kPrepareThreads, 0};
  plan.main = {problem.batch * problem.nheads_k * ceil_div(problem.seqlen_k, plan.tile.block_n) * chosen.parts, plan.tile.threads(),
               shared_bytes(chosen, headdim, headdim_v, pair)};
  // A warp takes 16 queries x 32 columns.
  plan.finish = {ceil_div(query_blocks(problem, kDqAccumRows) * (plan.tile.width / 32), kFinishThreads / 32), kFinishThreads, 0};
  plan.heads_per_section = static_cast<int>(heads_per_section(problem, plan.tile, deterministic, target.l2_bytes));
  plan.aligned_strides = aligned_strides(problem);
  plan.unaligned_row = choose_row(problem, target, false, without);
  plan.row_sum_offset = kept_blocks(problem, kDqAccumRows) * kDqAccumRows * plan.tile.width * 4;
  plan.semaphore_offset = plan.row_sum_offset + kept_rows(problem) * 4;
  plan.workspace_bytes = plan.semaphore_offset + (deterministic ? (1 + kept_blocks(problem, plan.tile.block_m)) * 4 : 0);
  if (chosen.query_stages == 2) {
    const BackwardF32Tile tile = f32_tile_of(chosen, headdim, headdim_v);
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
  const V2BackwardRow& row = kRows[key.row];
  const BackwardTile tile = tile_of(row, key.headdim, key.headdim_v);
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
