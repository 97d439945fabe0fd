#include "backend/cuda/v2_forward.h"

#include <algorithm>

#include "backend/cuda/call_params.h"
#include "backend/cuda/kernel_source.h"
#include "backend/cuda/limits.h"
#include "backend/cuda/v2_refusal.h"
#include "fattn/error.hpp"
#include "shared/text.h"

namespace fattn::core::cuda {
namespace {

// Measured 2026-11-21 on one H200 (CUDA 13.0, driver 580.159): bf16, batch * seqlen = 16384, nheads * headdim = 2048, seqlen 512 to 16384, medians
// of 31 launches by events, in turn with torch 2.11's FLASH_ATTENTION. Speed over torch's, geometric mean over seqlen, plain / causal (`fattn compare
// --device cuda` measures it again):
//   headdim  64  1.19 / 1.22 the first row; 64 keys a block 1.16 / 1.19; three CTAs and steps of 32 keys 1.18 / 1.22; queries in shared memory 1.13
//   headdim 128  1.14 / 1.23 the first row; steps of 32 keys 1.08 / 1.16; 8 warps: 1.05 / 1.09, with 128 keys a block 1.10 / 1.13
//   headdim 256  8 warps 1.05 / 1.08, two CTAs of 4 warps 1.04 / 1.11; queries in shared memory 1.00 / 1.04 and 0.98 / 1.05
// The second rows of level 80 are for GPUs with less shared memory; neither they nor level 75 have been timed on such GPUs.
// fp32 (the last rows), 2026-11-22, on the same card, batch 16, seqlen 1024, nheads * headdim = 2048, causal, medians of 15 launches; torch's
// memory-efficient backend without TF32 takes 2.25, 1.84 and 1.86 ms:
//   headdim  64  1.02 to 1.04 ms the first row; 128 keys a block 1.03; two CTAs of 4 warps 1.05 to 1.09; one row tile a warp 1.26 to 1.55
//   headdim 128  1.15 ms the first row; 32 keys a block 1.05, but that spills; one row tile a warp 1.21 to 1.52
//   headdim 256  1.35 ms the row with two stages; 32 keys a block, one stage 1.39; 4 warps 2.05
// clang-format off
constexpr V2ForwardRow kRows[] = {
    // level, headdim, causal, {warps, row_tiles, block_n, stages, step_n, exact_n, queries_in_registers, ctas}
    {80, 64, true, {4, 2, 128, 2, 64, 32, true, 2}},
    {80, 64, true, {4, 2, 64, 2, 64, 32, true, 2}},
    {80, 128, true, {4, 2, 64, 2, 64, 32, false, 2}},
    {80, 128, true, {4, 2, 32, 2, 32, 32, false, 2}},
    {80, 256, false, {8, 1, 64, 2, 32, 16, true, 1}},
    {80, 256, false, {4, 1, 32, 2, 32, 32, true, 2}},
    {80, 256, true, {4, 1, 32, 2, 32, 16, true, 2}},
    {80, 256, true, {4, 1, 32, 2, 32, 16, false, 2}},  // of packed sequences, not timed
    {75, 64, true, {4, 2, 64, 1, 64, 32, false, 1}},
    {75, 128, true, {4, 1, 64, 1, 64, 32, false, 1}},
    {75, 256, true, {4, 1, 32, 1, 32, 16, false, 1}},
    // with bias or a mask of pairs, which come through shared memory
    {80, 64, true, {4, 2, 64, 2, 32, 32, true, 2}, false, true, true, true},
    {80, 128, true, {4, 2, 32, 2, 32, 16, false, 2}, false, true, true, true},
    {80, 128, true, {8, 1, 64, 2, 32, 32, true, 1}, false, true, true, true},
    {80, 128, true, {4, 1, 64, 2, 32, 32, true, 1}, false, true, true, true},
    {80, 256, true, {8, 1, 32, 2, 16, 16, false, 1}, false, true, true, true},
    {80, 256, true, {4, 1, 32, 2, 16, 16, false, 1}, false, true, true, true},
    // with ALiBi or dropout alone
    {80, 64, true, {4, 2, 128, 2, 64, 32, true, 2}, false, true, false},
    {80, 64, true, {4, 2, 64, 2, 64, 32, true, 2}, false, true, false},
    {80, 128, true, {4, 2, 64, 2, 32, 16, false, 2}, false, true, false},
    {80, 128, true, {4, 2, 32, 2, 32, 16, false, 2}, false, true, false},
    // with terms of pairs or dropout, by count of registers; not timed
    {80, 64, true, {4, 1, 64, 2, 64, 32, true, 2}, false, true},
    {80, 128, true, {8, 1, 64, 2, 64, 32, true, 1}, false, true},
    {80, 128, true, {4, 1, 64, 2, 64, 32, true, 1}, false, true},
    {80, 256, true, {8, 1, 64, 2, 32, 16, false, 1}, false, true},
    {80, 256, true, {4, 1, 32, 2, 32, 16, false, 1}, false, true},
    {75, 64, true, {4, 1, 64, 1, 64, 32, false, 1}, false, true},
    {75, 128, true, {4, 1, 64, 1, 64, 32, false, 1}, false, true},
    {75, 256, true, {4, 1, 32, 1, 32, 16, false, 1}, false, true},
    {80, 64, true, {8, 2, 64, 2, 16, 0, true, 1}, true},
    {80, 64, true, {8, 2, 32, 2, 16, 0, true, 1}, true},
    {80, 128, true, {8, 2, 16, 2, 16, 0, false, 1}, true},
    {80, 128, true, {8, 1, 16, 2, 16, 0, false, 1}, true},  // 4 warps with two row tiles each spill on sm_120
    {80, 192, true, {8, 1, 16, 2, 16, 0, false, 1}, true},
    {80, 256, false, {8, 1, 32, 1, 16, 0, false, 1}, true},  // the next one spills on sm_90 where no mask ends rows
    {80, 256, true, {8, 1, 16, 2, 16, 0, false, 1}, true},
    {80, 256, true, {8, 1, 16, 1, 16, 0, false, 1}, true},
    {80, 256, true, {2, 1, 16, 2, 16, 0, false, 1}, true},
    // fp32 with terms of pairs or dropout, with softcap above headdim 64, and in windows but for 9.0, by count of registers
    {80, 64, true, {8, 2, 64, 2, 16, 0, false, 1}, true, true},
    {80, 64, true, {8, 2, 32, 2, 16, 0, false, 1}, true, true},
    {80, 128, true, {8, 1, 16, 2, 16, 0, false, 1}, true, true},
    {80, 256, true, {8, 1, 16, 2, 16, 0, false, 1}, true, true},
    {80, 256, true, {8, 1, 16, 1, 16, 0, false, 1}, true, true},
    {80, 256, true, {2, 1, 16, 2, 16, 0, false, 1}, true, true},
    {80, 256, true, {2, 1, 16, 1, 16, 0, false, 1}, true, true},
};
// clang-format on

int shared_bytes(const V2ForwardRow& row, const Problem& problem) {
  const int terms = row.staged ? row.tile.stages * term_tile(pair_features(problem), row.tile.block_m(), row.tile.block_n, false).bytes() : 0;
  const int first_key = row.f32 && problem.packed ? 4 : 0;  // of the sequence
  return row.tile.shared_bytes(static_cast<int>(problem.headdim), static_cast<int>(problem.headdim_v), problem.dtype) + terms + first_key;
}

constexpr int round_up(int x, int to) { return (x + to - 1) / to * to; }
int64_t tiles_of(const Problem& problem, const V2ForwardTile& tile) { return ceil_div(problem.seqlen_q, tile.block_m()); }

// The row of the table, or -1 if nothing fits.
int choose_row(const Problem& problem, const V2Target& target) {
  const int headdim = static_cast<int>(problem.headdim), headdim_v = static_cast<int>(problem.headdim_v);
  const PairFeatures pair = pair_features(problem);
  // Queries in registers leave too few (spills of 4 to 24 bytes) to packed sequences and pages at the widest, and to ids of documents beside all
  // else; for sm_80 in fp16 also to a causal mask at the widest.
  const bool crowded = (target.arch == 80 && problem.dtype == DType::kF16 && problem.causal && std::max(headdim, headdim_v) > 192) ||
                       ((pair.packed || pair.paged) && std::max(headdim, headdim_v) > 192) ||
                       (pair.documents && (pair.alibi || pair.bias != 0 || pair.mask || pair.dropout) && std::max(headdim, headdim_v) > 64);
  // Wide heads leave two tiles of rows of a warp registers for one of these, not for several.
  const int features = (pair.alibi ? 1 : 0) + (pair.bias != 0 ? 1 : 0) + (pair.mask ? 1 : 0) + (pair.dropout ? 1 : 0) + (problem.softcap > 0 ? 1 : 0);
  // Two tiles of rows of a warp leave none (spills of 16 bytes) to a window of packed sequences above headdim 64.
  const bool f32_window = problem.windowed() && (target.arch != 90 || (pair.packed && std::max(headdim, headdim_v) > 64));
  const bool several = std::max(headdim, headdim_v) > 64 && (features > 1 || pair.documents);
  const bool masked = problem.causal || problem.windowed();
  int fits_once = -1;
  for (int i = 0; i < static_cast<int>(std::size(kRows)); ++i) {
    const V2ForwardRow& row = kRows[i];
    const bool many_registers =
        heavy(pair) || (problem.dtype == DType::kF32 && ((problem.softcap > 0 && std::max(headdim, headdim_v) > 64) || f32_window));
    if (row.heavy && several && row.tile.row_tiles > 1) continue;
    if (row.heavy != many_registers || (row.staged && !can_stage(pair)) || (pair.hides() && !row.hides) || (crowded && row.tile.queries_in_registers))
      continue;
    if (row.f32 != (problem.dtype == DType::kF32) || row.level != target.level || std::max(headdim, headdim_v) > row.headdim ||
        (masked && !row.causal))
      continue;
    if (row.f32 && pair.documents && heavy(pair.with_documents(false)) && row.tile.row_tiles > 1) continue;  // spills
    if (row.f32 && problem.has_sinks && row.tile.row_tiles > 1) continue;                                    // 4 to 20 bytes
    if (row.f32 && pair.paged && (pair.packed || target.arch >= 100) && row.tile.row_tiles > 1) continue;    // 8 to 20 bytes
    // Of unequal widths that tile spills, and the one behind it does not.
    if (row.f32 && !row.causal && std::min(headdim, headdim_v) <= 192) continue;
    // Two tiles of rows of a warp spill for sm_100 (4 to 24 bytes) in a window and under a causal mask.
    if (!row.f32 && target.arch >= 100 && std::max(headdim, headdim_v) > 64 && row.tile.row_tiles == 2 && row.tile.block_n == 64 && masked) continue;
    // For sm_90 the widest values spill there in a window, or with softcap under a causal mask (40 and 4 bytes); with one stage of keys they do not.
    // The latter spill for sm_100 with either, and not with two warps.
    const bool capped_rows = problem.causal && !problem.windowed() && problem.softcap > 0;
    if (row.f32 && row.tile.warps == 8 && headdim_v > 192 &&
        ((target.arch == 90 && row.tile.stages == 2 && (capped_rows || (problem.windowed() && problem.softcap == 0))) ||
         (target.arch >= 100 && capped_rows)))
      continue;
    // For sm_100 the widest packed sequences in a window spill with ALiBi, dropout and a mask of pairs (4 bytes), unless keys have one
    // stage.
    if (row.f32 && target.arch >= 100 && row.tile.warps == 8 && row.tile.stages == 2 && std::max(headdim, headdim_v) > 128 && pair.packed &&
        problem.windowed() && pair.alibi && pair.dropout && pair.mask)
      continue;
    // For sm_120 documents in a window with softcap, ALiBi and dropout spill above headdim 128 (24 bytes), unless keys have one stage.
    if (row.f32 && target.arch >= 100 && row.tile.warps == 2 && row.tile.stages == 2 && std::max(headdim, headdim_v) > 128 && problem.windowed() &&
        problem.softcap > 0 && pair.documents && pair.alibi && pair.dropout)
      continue;
    // 64 keys a block spill with lengths of keys where no mask ends rows (8 to 28 bytes); 32 do not.
    if (row.f32 && row.tile.queries_in_registers && row.tile.block_n == 64 && pair.lengths && !problem.packed && !problem.causal &&
        !problem.windowed())
      continue;
    // Two tiles of rows of a warp spill (4 to 36 bytes) in a window of packed sequences with a bias in fp32.
    if (row.staged && row.tile.row_tiles == 2 && std::max(headdim, headdim_v) > 64 && pair.packed && problem.windowed() && pair.bias == 2) continue;
    const int64_t bytes = shared_bytes(row, problem);
    if (bytes > target.shared_bytes) continue;
    if (row.tile.ctas * (bytes + kReservedSharedBytes) <= target.shared_bytes_per_multiprocessor) return i;
    if (fits_once < 0) fits_once = i;
  }
  return fits_once;
}

// Under a causal mask the tiles of several heads run side by side, the longest first, so that the short ones fill the end: as many heads as have
// their keys and values in L2 together, in sections of equal size (measured as above, headdim 128: 1.23; head after head 1.16; a smaller
// last section 1.14).
int64_t heads_per_section(const Problem& problem, const V2Target& target) {
  const int64_t heads = problem.batch * problem.nheads;
  if (!last_rows_longest(problem) || heads == 0) return 1;
  const int64_t head_bytes =
      std::max<int64_t>(1, problem.seqlen_k * (problem.headdim + problem.headdim_v) * static_cast<int64_t>(size_of(problem.dtype)));
  const int64_t most = std::max<int64_t>(1, target.l2_bytes * 3 / 4 / head_bytes) * problem.group();
  const int64_t sections = ceil_div(heads, most);
  return ceil_div(heads, sections);
}

}  // namespace

int V2ForwardTile::shared_bytes(int headdim, int headdim_v, DType dtype) const {
  const int wide = round_up(headdim, 32), wide_v = round_up(headdim_v, 32);
  // In fp32 o does not pass through shared memory, each warp has a place for two numbers, and there are seven more.
  if (dtype == DType::kF32) return 4 * (block_m() * wide + stages * block_n * (wide + wide_v)) + 8 * warps + 28;
  return 2 * (block_m() * std::max(wide, wide_v) + stages * block_n * (wide + wide_v));
}

std::span<const V2ForwardRow> v2_forward_rows() { return kRows; }

std::string v2_forward_refusal(const Problem& problem, const V2Target& target) {
  if (std::string why = v2_refusal(problem, target); !why.empty()) return why;
  const PairFeatures pair = pair_features(problem);
  if (target.level < 80 && std::max(problem.headdim, problem.headdim_v) > 192 && pair.alibi && (pair.hides() || pair.lengths) && pair.dropout)
    return "the CUDA kernels for compute capability 7.5 have no ALiBi, dropout and lengths of keys, bias, mask or documents together above headdim "
           "192; use the CPU";
  if (target.level < 80 && std::max(problem.headdim, problem.headdim_v) > 192 && pair.dropout && pair.paged)
    return "the CUDA kernels for compute capability 7.5 have no dropout with a paged cache above headdim 192; use the CPU";
  if (problem.dtype == DType::kF32 && std::max(problem.headdim, problem.headdim_v) > 192 && pair.any())
    return text("headdim is ", problem.headdim, " and headdim_v ", problem.headdim_v,
                "; with packed sequences, pages, lengths of keys, ALiBi, bias, a mask of pairs, documents or dropout the CUDA kernels for fp32 have "
                "registers for up to 192; use fp16 or bf16, or the CPU");
  if (problem.dtype == DType::kF32 && std::max(problem.headdim, problem.headdim_v) > 128 && pair.bias != 0 && pair.mask &&
      (pair.alibi || pair.dropout || pair.documents))
    return text(
        "headdim is ", problem.headdim, " and headdim_v ", problem.headdim_v,
        "; with a bias and a mask of pairs, and ALiBi, dropout or documents besides, the CUDA kernels for fp32 have registers for up to 128: let the "
        "bias say what the mask says (-Inf hides), use fp16 or bf16, or the CPU");
  if (problem.dtype == DType::kF32 && std::max(problem.headdim, problem.headdim_v) > 128 && pair.packed && pair.documents && can_stage(pair) &&
      pair.alibi && pair.dropout)
    return text(
        "headdim is ", problem.headdim, " and headdim_v ", problem.headdim_v,
        "; with documents of packed sequences, a bias or a mask of pairs, ALiBi and dropout together the CUDA kernels for fp32 have registers "
        "for up to 128; use fp16 or bf16, or the CPU");
  const int row = choose_row(problem, target);
  if (row < 0) {
    return text("no tile for headdim ", problem.headdim, " and headdim_v ", problem.headdim_v, " fits into ", target.shared_bytes,
                " bytes of shared memory");
  }
  const int64_t tiles = tiles_of(problem, kRows[row].tile);
  if (tiles > 0 && problem.batch > 0 && problem.nheads > kMaxGrid / tiles / problem.batch) {
    return text("batch ", problem.batch, " * nheads ", problem.nheads, " * ", tiles, " tiles of queries is more than a grid of ", kMaxGrid,
                "; split the batch");
  }
  return {};
}

V2ForwardPlan plan_v2_forward(const Problem& problem, const V2Target& target) {
  const int headdim = static_cast<int>(problem.headdim), headdim_v = static_cast<int>(problem.headdim_v);
  const int row = choose_row(problem, target);
  if (row < 0) throw Error(ErrorCode::kInternal, "plan_v2_forward() was called for a problem that v2_forward_refusal() refuses");
  V2ForwardPlan plan;
  plan.key.arch = target.arch;
  plan.key.level = target.level;
  plan.key.dtype = static_cast<int32_t>(problem.dtype);
  plan.key.headdim = headdim;
  plan.key.headdim_v = headdim_v;
  plan.key.causal = problem.causal && !problem.windowed();
  plan.key.window = problem.windowed();
  plan.key.capped = problem.softcap > 0;
  plan.key.row = row;
  plan.key.pair = pair_bits(pair_features(problem));
  plan.tile = kRows[row].tile;
  plan.grid = tiles_of(problem, plan.tile) * problem.nheads * problem.batch;
  plan.threads = plan.tile.threads();
  plan.shared_bytes = shared_bytes(kRows[row], problem);
  plan.heads_per_section = static_cast<int>(heads_per_section(problem, target));
  const auto rows_aligned = [&](const Strides& strides, int64_t rows, int64_t heads) {
    return aligned(strides, problem.batch, rows, heads, problem.dtype);
  };
  plan.aligned_strides = headdim % copied_at_once(problem.dtype) == 0 && headdim_v % copied_at_once(problem.dtype) == 0 &&
                         rows_aligned(problem.q, problem.dense_rows(), problem.nheads) &&
                         rows_aligned(problem.o, problem.dense_rows(), problem.nheads) &&
                         rows_aligned(problem.k, problem.dense_keys(), problem.nheads_k) &&
                         rows_aligned(problem.v, problem.dense_keys(), problem.nheads_k) && pages_aligned(problem);
  return plan;
}

V2ForwardKey v2_forward_key(const V2ForwardPlan& plan, bool aligned) {
  V2ForwardKey key = plan.key;
  key.aligned = aligned && plan.aligned_strides;
  return key;
}

PagedParams v2_forward_params(const Problem& problem, const V2ForwardPlan& plan, const fattn_buffers& b) {
  PagedParams params{};
  static_cast<PairParams&>(params) = pair_params(forward_params(problem, plan.heads_per_section, b), problem, b);
  if (problem.paged) params.pages = page_params(problem, b);
  return params;
}

jit::Request v2_forward_request(const V2ForwardKey& key) {
  const V2ForwardTile& tile = kRows[key.row].tile;
  const bool f32 = key.dtype == static_cast<int32_t>(DType::kF32);
  const std::string function = f32 ? "forward_f32" : "forward", entry = f32 ? "fattn_v2_fwd_f32" : "fattn_v2_fwd";
  std::string source = comment_of(key, tile.block_m(), tile.block_n) + text("#include \"kernels/v2/", function, ".h\"\n\nstruct Spec {\n");
  if (!f32) source += text("  using Element = fattn::", key.dtype == static_cast<int32_t>(DType::kBF16) ? "bf16" : "f16", ";\n");
  const auto add_int = [&](const char* name, int value) { source += text("  static constexpr int ", name, " = ", value, ";\n"); };
  const auto add_bool = [&](const char* name, bool value) {
    source += text("  static constexpr bool ", name, " = ", value ? "true" : "false", ";\n");
  };
  if (!f32) add_int("kLevel", key.level);
  add_int("kHeaddim", key.headdim);
  add_int("kHeaddimV", key.headdim_v);
  add_bool("kCausal", key.causal != 0);
  add_bool("kWindow", key.window != 0);
  add_bool("kCapped", key.capped != 0);
  add_bool("kAligned", key.aligned != 0);
  add_int("kWarps", tile.warps);
  add_int("kRowTiles", tile.row_tiles);
  add_int("kBlockN", tile.block_n);
  add_int("kStages", tile.stages);
  // Many registers: copies element by element, caps, terms, and, at headdim 65 to 128, lengths and packed sequences under the full mask.
  const PairFeatures pair = pair_features_of(key.pair);
  const bool entries_alone = !kRows[key.row].heavy && (pair.lengths || pair.packed) && !key.causal && !key.window && key.level >= 80 &&
                             key.headdim > 64 && key.headdim <= 128;
  const bool crowded = !key.aligned || key.capped || pair.hides() || (pair.alibi && key.headdim > 128) || entries_alone;
  add_int("kStepN", crowded && !f32 && !kRows[key.row].staged ? tile.exact_n : tile.step_n);
  if (!f32) add_int("kExactN", tile.exact_n);
  add_bool("kQueriesInRegisters", tile.queries_in_registers);
  add_int("kCtas", tile.ctas);
  if (kRows[key.row].staged) add_bool("kStaged", true);
  source += pair_line(key.pair);
  source += text(
      "};\n\n"
      "extern \"C\" __global__ void __launch_bounds__(Spec::kWarps * 32, Spec::kCtas) ",
      entry, "(const __grid_constant__ fattn::", params_of(key.window || key.capped, key.pair),
      " p) {\n"
      "  fattn::v2::",
      function,
      "<Spec>(p);\n"
      "}\n");
  return {.entry = entry, .source = source, .arch = key.arch};
}

}  // namespace fattn::core::cuda
