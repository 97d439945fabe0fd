#include "backend/cuda/v3_forward_f32.h"

#include <algorithm>

#include "backend/cuda/call_params.h"
#include "backend/cuda/kernel_source.h"
#include "backend/cuda/limits.h"
#include "backend/cuda/tiles/v3_forward_f32.h"
#include "backend/cuda/v3_sections.h"
#include "fattn/error.hpp"
#include "plan/features.h"
#include "shared/text.h"

namespace fattn::core::cuda {
namespace {

constexpr int kMostHeaddim = 128;

constexpr auto& kRows = kV3ForwardF32Table;

int choose_row(const Problem& problem) {
  for (int i = 0; i < static_cast<int>(std::size(kRows)); ++i)
    if (problem.headdim <= kRows[i].headdim && problem.headdim_v <= kRows[i].headdim_v) return i;
  return -1;
}

// Queries of a key head below which v3 is not chosen, for there are none to share the split keys and values, which take memory. From these on it is
// faster than v2 (docs/results/LOG.md).
constexpr int64_t kFewestQueries = 16;

std::string feature_refusal(const Problem& p) {
  const char* what = p.windowed()          ? "windows"
                     : p.softcap > 0       ? "softcap"
                     : p.packed            ? "packed sequences"
                     : p.has_seqused_k     ? "lengths (seqused_k)"
                     : p.has_alibi         ? "ALiBi"
                     : p.has_documents     ? "documents"
                     : p.bias.given        ? "bias"
                     : p.pair_mask.given   ? "mask of pairs"
                     : p.dropout_below > 0 ? "dropout"
                                           : nullptr;
  if (!what) return {};
  return text("algorithm v3 has no ", what, " in fp32; algorithm v2 has");
}

// As v3_forward.cpp has it for 16 bits: under a causal mask the tiles of several heads side by side, of as many as have their keys and values in L2.
void schedule(const Problem& problem, const V3Target& target, V3ForwardF32Plan& plan) {
  const int64_t heads = problem.batch * problem.nheads;
  plan.grid = static_cast<int>(std::min<int64_t>(plan.tiles, target.multiprocessors));
  plan.heads_per_section = 1;
  if (!last_rows_longest(problem)) return;
  const auto width = [](int64_t headdim) { return static_cast<int64_t>(v3_f32_block_bytes(static_cast<int>(headdim))); };
  const int64_t head_bytes = plan.blocks * (width(problem.headdim) + width(problem.headdim_v));
  const int64_t most = std::max<int64_t>(1, target.l2_bytes * 3 / 4 / head_bytes * problem.group());
  constexpr int64_t kFewHeads = 8;
  V3Turns turns{problem.mask(), heads, plan.tile.block_m(), kV3F32Block, plan.grid, most, plan.grid / 3.0};
  if (most < kFewHeads && plan.tiles > 2 * plan.grid) {
    plan.tiles_per_cta = 2;
    plan.heads_per_section = static_cast<int>(v3_free_heads_per_section(turns, plan.tiles_per_cta));
    plan.grid = static_cast<int>(ceil_div(plan.tiles, plan.tiles_per_cta));
    return;
  }
  plan.heads_per_section = static_cast<int>(v3_heads_per_section(turns));
}

std::string comment_of(const V3ForwardF32Key& key) {
  std::string line = text("// fp32, headdim ", key.headdim);
  if (key.headdim_v != key.headdim) line += text(" and ", key.headdim_v);
  if (key.mask == V3Mask::kCausal) line += ", causal";
  if (key.sinks != 0) line += ", sinks";
  return line + (key.aligned ? "" : ", unaligned");
}

}  // namespace

int V3ForwardF32Tile::shared_bytes(int headdim, int headdim_v) const {
  const int query_bytes = queries_in_registers ? 0 : groups * 2 * 2 * 64 * v3_f32_width(headdim);
  return query_bytes + stages_k * v3_f32_block_bytes(headdim) + stages_v * v3_f32_block_bytes(headdim_v) + 32 * (stages_k + stages_v);
}

std::span<const V3ForwardF32Row> v3_forward_f32_rows() { return kRows; }

std::string v3_forward_f32_refusal(const Problem& problem, const V3Target& target) {
  if (std::string why = lacks(problem, Way::kCudaV3); !why.empty()) return why;
  if (std::string why = feature_refusal(problem); !why.empty()) return why;
  const int row = choose_row(problem);
  if (row < 0)
    return text("headdim is ", problem.headdim, " and headdim_v ", problem.headdim_v, "; algorithm v3 in fp32 takes up to ", kMostHeaddim,
                ", algorithm v2 up to 256");
  if (problem.empty() || problem.seqlen_k == 0) return "there are no queries or no keys; algorithm v2 takes such problems";
  if (problem.seqlen_q > kMaxSeqlen || problem.seqlen_k > kMaxSeqlen)
    return text("seqlen_q is ", problem.seqlen_q, " and seqlen_k ", problem.seqlen_k, "; the CUDA kernels take up to ", kMaxSeqlen);
  if (problem.algorithm != Algorithm::kV3 && problem.seqlen_q * problem.group() < kFewestQueries)
    return text(problem.seqlen_q * problem.group(), " queries of a key head are fewer than ", kFewestQueries,
                ", too few for splitting keys and values in advance");
  const int64_t bytes = kRows[row].tile.shared_bytes(static_cast<int>(problem.headdim), static_cast<int>(problem.headdim_v));
  if (bytes > target.shared_bytes)
    return text("a tile for headdim ", problem.headdim, " and headdim_v ", problem.headdim_v, " takes ", bytes,
                " bytes of shared memory, and there are ", target.shared_bytes);
  const int64_t tiles = ceil_div(problem.seqlen_q, kRows[row].tile.block_m()), blocks = ceil_div(problem.seqlen_k, kV3F32Block);
  // Both are counted in 32 bits, tiles some turns of the grid beyond the last.
  if (problem.batch * problem.nheads > kMaxGrid / 2 / std::max(tiles, blocks))
    return text("batch ", problem.batch, " * nheads ", problem.nheads, " * ", std::max(tiles, blocks),
                " tiles of queries or blocks of keys is more than ", kMaxGrid / 2, "; split the batch");
  return {};
}

V3ForwardF32Plan plan_v3_forward_f32(const Problem& problem, const V3Target& target) {
  const int row = choose_row(problem);
  if (row < 0) throw Error(ErrorCode::kInternal, "plan_v3_forward_f32() was called for a problem that v3_forward_f32_refusal() refuses");
  V3ForwardF32Plan plan;
  plan.key.headdim = static_cast<int32_t>(problem.headdim);
  plan.key.headdim_v = static_cast<int32_t>(problem.headdim_v);
  plan.key.mask = v3_mask(problem);
  plan.key.row = row;
  plan.key.sinks = problem.has_sinks;
  plan.tile = kRows[row].tile;
  plan.row_tiles = static_cast<int>(ceil_div(problem.seqlen_q, plan.tile.block_m()));
  plan.tiles = problem.batch * problem.nheads * plan.row_tiles;
  plan.threads = plan.tile.threads();
  plan.shared_bytes = plan.tile.shared_bytes(plan.key.headdim, plan.key.headdim_v);
  plan.blocks = static_cast<int>(ceil_div(problem.seqlen_k, kV3F32Block));
  const int64_t blocks = problem.batch * problem.nheads_k * plan.blocks;
  plan.split_grid = 2 * blocks;
  plan.values_offset = blocks * v3_f32_block_bytes(plan.key.headdim);
  plan.factors_offset = plan.values_offset + blocks * v3_f32_block_bytes(plan.key.headdim_v);
  plan.spoilt_offset = plan.factors_offset + 2 * blocks * static_cast<int64_t>(sizeof(V3F32Factor));
  plan.workspace_bytes = plan.spoilt_offset + blocks * static_cast<int64_t>(sizeof(V3F32Spoilt));
  const auto rows_aligned = [&](const Strides& strides, int64_t rows, int64_t heads) {
    return aligned(strides, problem.batch, rows, heads, problem.dtype);
  };
  const int64_t at_once = copied_at_once(problem.dtype);
  plan.aligned_strides = problem.headdim % at_once == 0 && problem.headdim_v % at_once == 0 &&
                         rows_aligned(problem.q, problem.seqlen_q, problem.nheads) && rows_aligned(problem.o, problem.seqlen_q, problem.nheads) &&
                         rows_aligned(problem.k, problem.seqlen_k, problem.nheads_k) && rows_aligned(problem.v, problem.seqlen_k, problem.nheads_k);
  schedule(problem, target, plan);
  return plan;
}

V3ForwardF32Key V3ForwardF32Plan::split_key() const {
  V3ForwardF32Key split = key;
  split.kind = KernelKind::kV3ForwardF32Split;
  split.mask = V3Mask::kFull;
  split.row = split.sinks = 0;
  return split;
}

V3ForwardF32Params v3_forward_f32_params(const Problem& problem, const V3ForwardF32Plan& plan, const fattn_buffers& b) {
  V3ForwardF32Params params{};
  static_cast<FeatureParams&>(params.call) = forward_params(problem, plan.heads_per_section, b);
  params.call.sinks = static_cast<const float*>(b.sinks);
  params.call.sinks_stride = problem.sinks_stride;
  params.work.columns = plan.key.headdim;
  params.work.columns_v = plan.key.headdim_v;
  params.work.row_tiles = plan.row_tiles;
  params.work.tiles = static_cast<int>(plan.tiles);
  params.work.tiles_per_cta = plan.tiles_per_cta;
  const int heads = static_cast<int>(problem.batch * problem.nheads), per_section = plan.heads_per_section;
  params.work.sections = static_cast<int>(ceil_div(heads, per_section));
  params.work.heads_of_last = heads - (params.work.sections - 1) * per_section;
  params.work.by_section = divisor_of(per_section * plan.row_tiles);
  params.work.by_heads = divisor_of(per_section);
  params.work.by_heads_of_last = divisor_of(params.work.heads_of_last);
  params.work.by_nheads = divisor_of(static_cast<int>(problem.nheads));
  params.work.by_group = divisor_of(static_cast<int>(problem.group()));
  auto* const first = static_cast<unsigned char*>(b.workspace);
  params.parts.k = first;
  params.parts.v = first + plan.values_offset;
  params.parts.k_factors = reinterpret_cast<V3F32Factor*>(first + plan.factors_offset);
  params.parts.v_factors = params.parts.k_factors + plan.split_grid / 2;
  params.parts.v_spoilt = reinterpret_cast<V3F32Spoilt*>(first + plan.spoilt_offset);
  params.parts.blocks = plan.blocks;
  return params;
}

jit::Request v3_forward_f32_request(const V3ForwardF32Key& key) {
  if (key.kind == KernelKind::kV3ForwardF32Split)
    return {
        .entry = "fattn_v3_f32_split",
        .source = text(comment_of(key), ", keys and values in two parts\n#include \"kernels/v3/forward_f32_split.h\"\n\n",
                       "extern \"C\" __global__ void __launch_bounds__(", kV3F32SplitThreads, ")\n",
                       "fattn_v3_f32_split(const __grid_constant__ fattn::AttentionParams call, const __grid_constant__ fattn::V3F32Parts parts) {\n",
                       "  fattn::v3::split_keys_and_values<", key.headdim, ", ", key.headdim_v, ", ", key.aligned ? "true" : "false",
                       ">(call, parts);\n}\n"),
        .arch = kV3Arch,
        .arch_specific = true};
  const V3ForwardF32Tile& tile = kRows[key.row].tile;
  std::string source = text(comment_of(key), ", tile ", tile.block_m(), " x ", kV3F32Block,
                            "\n#include \"kernels/v3/forward_f32.h\"\n#include \"kernels/v3/mask.h\"\n\nstruct Spec {\n  using Mask = fattn::",
                            kV3MaskTypes[static_cast<int>(key.mask)], ";\n");
  const auto add_int = [&](const char* name, int value) { source += text("  static constexpr int ", name, " = ", value, ";\n"); };
  const auto add_bool = [&](const char* name, bool value) {
    source += text("  static constexpr bool ", name, " = ", value ? "true" : "false", ";\n");
  };
  add_int("kHeaddim", key.headdim);
  add_int("kHeaddimV", key.headdim_v);
  add_bool("kAligned", key.aligned != 0);
  add_int("kGroups", tile.groups);
  add_int("kStagesK", tile.stages_k);
  add_int("kStagesV", tile.stages_v);
  add_bool("kQueriesInRegisters", tile.queries_in_registers);
  add_int("kProducerRegisters", tile.producer_registers);
  add_int("kConsumerRegisters", tile.consumer_registers);
  add_bool("kWindow", false);
  add_bool("kCapped", false);
  const int32_t pair = pair_bits({.sinks = key.sinks != 0});
  source += pair_line(pair);
  source += text("};\n\nextern \"C\" __global__ void __launch_bounds__(", tile.threads(), ", 1)\n",
                 "fattn_v3_fwd_f32(const __grid_constant__ fattn::", params_of(false, pair),
                 " call, const __grid_constant__ fattn::V3ForwardWork work,\n"
                 "                 const __grid_constant__ fattn::V3F32Parts parts) {\n"
                 "  fattn::v3::forward_f32<Spec>({call, work, parts});\n}\n");
  return {.entry = "fattn_v3_fwd_f32", .source = source, .arch = kV3Arch, .arch_specific = true};
}

}  // namespace fattn::core::cuda
