#include "backend/cuda/v2_forward.h"

#include <algorithm>

#include "backend/cuda/call_params.h"
#include "backend/cuda/kernel_source.h"
#include "backend/cuda/limits.h"
#include "backend/cuda/spills.h"
#include "backend/cuda/tiles/v2_forward.h"
#include "backend/cuda/v2_refusal.h"
#include "fattn/error.hpp"
#include "shared/text.h"

namespace fattn::core::cuda {
namespace {

constexpr auto& kRows = kV2ForwardTable;

int shared_bytes(const V2ForwardRow& row, const Problem& problem) {
  const int terms = row.staged ? row.tile.stages * term_tile(pair_features(problem), row.tile.block_m(), row.tile.block_n, false).bytes() : 0;
  const int first_key = row.f32 && problem.packed ? 4 : 0;  // of the sequence
  return row.tile.shared_bytes(static_cast<int>(problem.headdim), static_cast<int>(problem.headdim_v), problem.dtype, row.own) + terms + first_key;
}

constexpr int round_up(int x, int to) { return (x + to - 1) / to * to; }
int64_t tiles_of(const Problem& problem, const V2ForwardTile& tile) { return ceil_div(problem.seqlen_q, tile.block_m()); }

RegisterFacts facts_of(const Problem& problem, const V2Target& target) {
  return register_facts(problem, pair_features(problem), target.arch, target.level);
}

// Under batch_invariant: steps and blocks of keys are those of every call with the same rows, `few`, which asks for seqlen_q, has those of the
// others.
int choose_own_row(const Problem& problem, const V2Target& target) {
  const PairFeatures pair = pair_features(problem);
  const bool f32 = problem.dtype == DType::kF32, heavy = fattn::core::cuda::heavy(pair);
  for (int i = 0; i < static_cast<int>(std::size(kRows)); ++i) {
    const V2ForwardRow& row = kRows[i];
    if (!row.own || row.f32 != f32 || row.level != target.level || std::max(problem.headdim, problem.headdim_v) > row.headdim) continue;
    if (row.few && problem.seqlen_q > row.tile.block_m()) continue;
    if (!f32 && (row.heavy != heavy || (row.staged && !can_stage(pair)))) continue;
    constexpr int kFirstKey = 4;  // of packed sequences
    if (shared_bytes(row, problem) + (f32 && !problem.packed ? kFirstKey : 0) <= target.shared_bytes) return i;
  }
  return -1;
}

// The row of the table, or -1 if nothing fits.
int choose_row(const Problem& problem, const V2Target& target, std::string_view without) {
  if (problem.batch_invariant) return choose_own_row(problem, target);
  const PairFeatures pair = pair_features(problem);
  const RegisterFacts facts = facts_of(problem, target);
  const bool heavy = holds_any(kV2ForwardHeavy, facts, without), masked = problem.causal || problem.windowed();
  int fits_once = -1;
  for (int i = 0; i < static_cast<int>(std::size(kRows)); ++i) {
    const V2ForwardRow& row = kRows[i];
    if (row.own || row.f32 != (problem.dtype == DType::kF32) || row.level != target.level || facts.wider() > row.headdim || (masked && !row.causal))
      continue;
    if (row.heavy != heavy || (row.staged && !can_stage(pair)) || (pair.hides() && !row.hides)) continue;
    if (spills(kV2ForwardSpills, row, facts, without)) continue;
    const int64_t bytes = shared_bytes(row, problem);
    if (bytes > target.shared_bytes) continue;
    if (row.tile.ctas * (bytes + kReservedSharedBytes) <= target.shared_bytes_per_multiprocessor) return i;
    if (fits_once < 0) fits_once = i;
  }
  return fits_once;
}

std::string own_bits_refusal(const Problem& problem) {
  if (!problem.batch_invariant) return {};
  constexpr int64_t kWidest = 192, kFarthest = int64_t{1} << 24;
  if (problem.dtype == DType::kF32 && std::max(problem.headdim, problem.headdim_v) > kWidest)
    return text("headdim is ", problem.headdim, " and headdim_v ", problem.headdim_v, "; with batch_invariant the CUDA kernels for fp32 take up to ",
                kWidest, "; use fp16 or bf16, or the CPU");
  if (problem.has_alibi && std::max(problem.seqlen_q, problem.seqlen_k) > kFarthest)
    return text("seqlen_q is ", problem.seqlen_q, " and seqlen_k ", problem.seqlen_k, "; with batch_invariant and ALiBi the CUDA kernels take up to ",
                kFarthest, ", where distances are exact in fp32");
  return {};
}

// Under a causal mask the tiles of several heads run side by side, the longest first, so that the short ones fill the end: as many heads as have
// their keys and values in L2 together, in sections of equal size, which was faster than head after head or a smaller last section.
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

int V2ForwardTile::shared_bytes(int headdim, int headdim_v, DType dtype, bool own) const {
  const int wide = round_up(headdim, 32), wide_v = round_up(headdim_v, 32);
  // In fp32 o does not pass through shared memory, each warp has a place for two numbers, and there are seven more.
  if (dtype == DType::kF32) return (own ? 6 : 4) * (block_m() * wide + stages * block_n * (wide + wide_v)) + 8 * warps + 28;
  return 2 * (block_m() * std::max(wide, wide_v) + stages * block_n * (wide + wide_v));
}

std::span<const V2ForwardRow> v2_forward_rows() { return kRows; }

std::string v2_forward_refusal(const Problem& problem, const V2Target& target, std::string_view without) {
  if (std::string why = v2_refusal(problem, target, without); !why.empty()) return why;
  if (std::string why = register_refusal(kV2ForwardRefusals, facts_of(problem, target), without); !why.empty()) return why;
  if (std::string why = own_bits_refusal(problem); !why.empty()) return why;
  const int row = choose_row(problem, target, without);
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

V2ForwardPlan plan_v2_forward(const Problem& problem, const V2Target& target, std::string_view without) {
  const int headdim = static_cast<int>(problem.headdim), headdim_v = static_cast<int>(problem.headdim_v);
  const int row = choose_row(problem, target, without);
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
  plan.key.own_bits = problem.batch_invariant;
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
  std::string source = comment_of(key, tile.block_m(), tile.block_n) + text("#include \"kernels/v2/", function, ".h\"\n");
  if (key.own_bits && f32) source += "#include \"kernels/v2/forward_f32_own.h\"\n";
  source += "\nstruct Spec {\n";
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
  if (key.own_bits) add_bool("kOwnBits", true);
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
