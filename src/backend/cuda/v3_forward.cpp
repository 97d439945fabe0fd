#include "backend/cuda/v3_forward.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "backend/cuda/v2_common.h"
#include "device/tensor_map.h"
#include "fattn/error.hpp"
#include "shared/text.h"

namespace fattn::core::cuda {
namespace {

constexpr int kWidths[] = {64, 96, 128, 192, 256};
constexpr int kAnyLength = std::numeric_limits<int>::max();

// Measured 2026-11-21 on one H200 (CUDA 13.0, driver 580.159), bf16, batch * seqlen = 16384, nheads * headdim = 2048, medians of 15 to 20 launches by
// events, in turn with cuDNN through torch 2.11. TFLOP/s of the first row at seqlen 512, 2048, 8192, 16384 and of what it was chosen over:
//   64          431 563 564 567; 3 groups x 128 keys: 389 543 565 567; 3 x 64: 365 502 518 520; 2 x 128: 400 516 517 520
//   64 causal   260 430 510 527; 3 x 128: 203 399 513 540; 3 x 64, skipping: 221 384 475 496; 2 x 128: 218 387 465 481
//   128         517 729 738 703; 2 x 128: 504 708 736 709
//   128 causal  294 521 563 606; 2 x 128: 282 551 664 713; 3 x 64, skipping: 296 532 612 657
//   256         533 755 810 815; 3 + 2 stages: 526 750 808 815
//   256 causal  293 606 777 794; in turns at the tensor cores instead of skipping: 277 593 770 792
// and at seqlen 1024, 8192 of 96 498 610 (2 x 128: 485 605), causal 362 530 (3 x 64, skipping: 352 550); 192 665 794 (2 x 96: 622 785), causal
// 461 650 (2 x 96: 418 661); 192 with 128 610 811, causal 412 750.
// clang-format off
constexpr V3ForwardRow kRows[] = {
    // width, causal, most_keys, speed, {groups, block_n, stages_k, stages_v, query_buffers, ping_pong, skip, early_eighths, registers}
    {64, false, kAnyLength, 1.0, {4, 64, 4, 4, 2, true, false, 4, 32, 112}},
    {64, false, kAnyLength, 0.92, {2, 128, 3, 3, 2, true, false, 4, 40, 232}},
    {64, true, 4096, 1.0, {4, 64, 4, 4, 2, false, true, 6, 32, 112}},
    {64, true, 4096, 0.9, {2, 128, 3, 3, 2, true, false, 4, 40, 232}},
    {64, true, kAnyLength, 1.0, {3, 128, 3, 3, 2, true, false, 7, 32, 160}},
    {96, false, kAnyLength, 1.0, {3, 64, 4, 4, 2, true, false, 6, 32, 160}},
    {96, false, kAnyLength, 0.98, {2, 128, 3, 2, 2, true, false, 4, 40, 232}},
    {96, true, 2048, 1.0, {2, 128, 3, 2, 2, true, false, 4, 40, 232}},
    {96, true, kAnyLength, 1.0, {3, 64, 4, 4, 2, false, true, 6, 32, 160}},
    {128, false, kAnyLength, 1.0, {3, 64, 4, 4, 2, true, false, 6, 32, 160}},
    {128, false, kAnyLength, 0.98, {2, 128, 3, 2, 2, true, false, 4, 40, 232}},
    {128, true, 512, 1.0, {2, 64, 4, 4, 2, false, true, 8, 40, 232}},
    {128, true, kAnyLength, 1.0, {2, 128, 3, 2, 2, true, false, 4, 40, 232}},
    {192, false, kAnyLength, 1.0, {2, 128, 2, 2, 1, true, false, 4, 40, 232}},  // for v up to 128
    {192, false, kAnyLength, 1.0, {2, 64, 3, 2, 2, true, false, 8, 40, 232}},
    {192, true, kAnyLength, 1.0, {2, 128, 2, 2, 1, true, false, 4, 40, 232}},  // for v up to 128
    {192, true, kAnyLength, 1.0, {2, 64, 3, 2, 2, false, true, 8, 40, 232}},
    {256, false, kAnyLength, 1.0, {2, 64, 2, 2, 1, true, false, 8, 40, 232}},
    {256, true, kAnyLength, 1.0, {2, 64, 3, 2, 1, false, true, 8, 40, 232}},
};
// clang-format on

// setmaxnreg beyond what the launch gave would wait for ever.
constexpr bool registers_suffice(const V3ForwardTile& tile) {
  return tile.producer_registers + tile.groups * tile.consumer_registers <= tile.launch_registers() * (tile.groups + 1);
}
static_assert([] {
  for (const V3ForwardRow& row : kRows)
    if (!registers_suffice(row.tile)) return false;
  return true;
}());

constexpr int columns(int width) { return (width + 63) / 64; }  // of 64 elements, as TMA copies them

int64_t row_tiles_of(const Problem& problem, const V3ForwardTile& tile) { return ceil_div(problem.seqlen_q, tile.block_m()); }

// Whether a row takes such problems; seqlen_k apart.
bool takes(const V3ForwardRow& row, const Problem& problem, const V3Target& target) {
  const int width = v3_width(problem.headdim), width_v = v3_width(problem.headdim_v);
  return row.causal == problem.causal && row.width == v3_row_width(width, width_v) && row.tile.shared_bytes(width, width_v) <= target.shared_bytes;
}

// Tiles of a problem come in waves of as many as there are multiprocessors, each as long as the tile has rows.
double waves(const Problem& problem, const V3ForwardTile& tile, const V3Target& target) {
  const double heads = static_cast<double>(problem.batch) * static_cast<double>(problem.nheads);
  return std::ceil(static_cast<double>(row_tiles_of(problem, tile)) * heads / target.multiprocessors);
}

// The row of the table, -1 if nothing fits: the first that takes the problem, for these lengths. In small problems, of few waves, it is whichever of
// them takes the least time.
int choose_row(const Problem& problem, const V3Target& target) {
  constexpr double kFewWaves = 4;
  int best = -1, most_keys = 0;
  double least = 0;
  for (int i = 0; i < static_cast<int>(std::size(kRows)); ++i) {
    const V3ForwardRow& row = kRows[i];
    if (!takes(row, problem, target) || problem.seqlen_k > row.most_keys) continue;
    const double count = waves(problem, row.tile, target), time = count * row.tile.block_m() / row.speed;
    if (best < 0) {
      best = i;
      most_keys = row.most_keys;
      least = time;
      if (count > kFewWaves) return best;
    } else if (row.most_keys == most_keys && time < least) {
      best = i;
      least = time;
    }
  }
  return best;
}

TiledTensor tiled(DType dtype, int64_t batch, int64_t rows, int64_t heads, int64_t headdim, const Strides& strides, int box_rows) {
  return {dtype, batch, rows, heads, headdim, strides.batch, strides.row, strides.head, box_rows};
}
TiledTensor tiled_q(const Problem& p, int box_rows) { return tiled(p.dtype, p.batch, p.seqlen_q, p.nheads, p.headdim, p.q, box_rows); }
TiledTensor tiled_k(const Problem& p, int box_rows) { return tiled(p.dtype, p.batch, p.seqlen_k, p.nheads_k, p.headdim, p.k, box_rows); }
TiledTensor tiled_v(const Problem& p, int box_rows) { return tiled(p.dtype, p.batch, p.seqlen_k, p.nheads_k, p.headdim_v, p.v, box_rows); }
TiledTensor tiled_o(const Problem& p, int box_rows) { return tiled(p.dtype, p.batch, p.seqlen_q, p.nheads, p.headdim_v, p.o, box_rows); }

// The order of the work. Without a mask all tiles are alike: head after head, the grid takes them in turns. Under a causal mask the tiles of several
// heads run side by side, the longest first, as many heads as have their keys and values in L2 together. If these are a whole part of the grid, a
// turn of the grid is tiles of equal length, or nearly so. Long heads fill L2 too few at a time for that: pairs of tiles are then given to whichever
// multiprocessor is free. Measured as above, causal, turns with sections of equal size / of a part of the grid / single tiles / pairs:
//   headdim 128: seqlen 512 284 294 238 -, 2048 521 551 500 533, 8192 658 664 638 642, 16384 556 634 701 713
//   headdim 256: seqlen 512 275 293 284 -, 2048 592 606 600 588, 4096 710 715 711 645, 8192 488 650 770 777, 16384 481 480 792 794
void schedule(const Problem& problem, const V3Target& target, V3ForwardPlan& plan) {
  const int64_t heads = problem.batch * problem.nheads;
  plan.grid = static_cast<int>(std::min<int64_t>(plan.tiles, target.multiprocessors));
  plan.heads_per_section = 1;
  if (!problem.causal) return;
  const int64_t head_bytes = problem.seqlen_k * (problem.headdim + problem.headdim_v) * 2;
  const int64_t most = std::max<int64_t>(1, target.l2_bytes * 3 / 4 / head_bytes * problem.group());
  constexpr int64_t kFewHeads = 8;
  if (most < kFewHeads && plan.tiles > 2 * plan.grid) {
    plan.heads_per_section = static_cast<int>(ceil_div(heads, ceil_div(heads, most)));
    plan.tiles_per_cta = 2;
    plan.grid = static_cast<int>(ceil_div(plan.tiles, plan.tiles_per_cta));
    return;
  }
  int64_t parts = 1;
  while (target.multiprocessors / parts > most) ++parts;
  plan.heads_per_section = static_cast<int>(std::min(heads, target.multiprocessors / parts));
}

}  // namespace

int v3_width(int64_t headdim) {
  for (const int width : kWidths)
    if (headdim <= width) return width;
  return 0;
}

int v3_row_width(int width, int width_v) {
  int least = 256;
  for (const V3ForwardRow& row : kRows)
    if (row.width >= std::max(width, width_v)) least = std::min(least, row.width);
  return least;
}

int V3ForwardTile::shared_bytes(int width, int width_v) const {
  const int column_bytes = 128, query_bytes = block_m() * column_bytes * std::max(columns(width), columns(width_v));
  const int barriers = query_buffers * (2 + groups) + 2 * stages_k + 2 * stages_v;
  return query_buffers * query_bytes + block_n * column_bytes * (stages_k * columns(width) + stages_v * columns(width_v)) + 8 * barriers;
}

std::span<const V3ForwardRow> v3_forward_rows() { return kRows; }

std::string v3_forward_refusal(const Problem& problem, const V3Target& target) {
  if (problem.dtype != DType::kF16 && problem.dtype != DType::kBF16)
    return text("dtype is ", name_of(problem.dtype), "; the CUDA kernels of algorithm v3 take fp16 and bf16");
  if (v3_width(problem.headdim) == 0 || v3_width(problem.headdim_v) == 0)
    return text("headdim is ", problem.headdim, " and headdim_v ", problem.headdim_v, "; the CUDA kernels of algorithm v3 take up to 256");
  if (problem.seqlen_q > kMaxSeqlen || problem.seqlen_k > kMaxSeqlen)
    return text("seqlen_q is ", problem.seqlen_q, " and seqlen_k ", problem.seqlen_k, "; the CUDA kernels take up to ", kMaxSeqlen);
  std::string why = tensor_map_refusal(tiled_q(problem, 64), "q");
  if (why.empty()) why = tensor_map_refusal(tiled_k(problem, 64), "k");
  if (why.empty()) why = tensor_map_refusal(tiled_v(problem, 64), "v");
  if (why.empty()) why = tensor_map_refusal(tiled_o(problem, 64), "o");
  if (!why.empty()) return why;
  const int row = choose_row(problem, target);
  if (row < 0)
    return text("no tile for headdim ", problem.headdim, " and headdim_v ", problem.headdim_v, " fits into ", target.shared_bytes,
                " bytes of shared memory");
  const int64_t tiles = row_tiles_of(problem, kRows[row].tile);
  // Tiles are counted in 32 bits, some turns of the grid beyond the last.
  if (problem.batch * problem.nheads > kMaxGrid / 2 / tiles)
    return text("batch ", problem.batch, " * nheads ", problem.nheads, " * ", tiles, " tiles of queries is more than ", kMaxGrid / 2,
                "; split the batch");
  return {};
}

V3ForwardPlan plan_v3_forward(const Problem& problem, const V3Target& target) {
  const int row = choose_row(problem, target);
  if (row < 0) throw Error(ErrorCode::kInternal, "plan_v3_forward() was called for a problem that v3_forward_refusal() refuses");
  V3ForwardPlan plan;
  plan.key.dtype = static_cast<int32_t>(problem.dtype);
  plan.key.width = v3_width(problem.headdim);
  plan.key.width_v = v3_width(problem.headdim_v);
  plan.key.causal = problem.causal;
  AttentionParams scale{};
  set_forward_scale(scale, problem.softmax_scale);
  plan.key.signed_scores = !(scale.softmax_scale > 0);
  plan.key.row = row;
  plan.tile = kRows[row].tile;
  plan.row_tiles = static_cast<int>(row_tiles_of(problem, plan.tile));
  plan.tiles = problem.batch * problem.nheads * plan.row_tiles;
  plan.threads = plan.tile.threads();
  plan.shared_bytes = plan.tile.shared_bytes(plan.key.width, plan.key.width_v);
  schedule(problem, target, plan);
  return plan;
}

void set_v3_forward_params(V3ForwardParams& params, const Problem& problem, const V3ForwardPlan& plan, CudaDevice& device, const void* q,
                           const void* k, const void* v, void* o, float* lse) {
  const int block_n = plan.tile.block_n;
  encode_tensor_map(params.q, device, tiled_q(problem, plan.tile.block_m()), q);
  encode_tensor_map(params.k, device, tiled_k(problem, block_n), k);
  encode_tensor_map(params.v, device, tiled_v(problem, block_n), v);
  encode_tensor_map(params.o, device, tiled_o(problem, 64), o);
  params.call = v2_params(problem, plan.heads_per_section);
  set_forward_scale(params.call, problem.softmax_scale);
  params.call.q = q;
  params.call.k = k;
  params.call.v = v;
  params.call.o = o;
  params.call.lse = lse;
  params.work.columns = static_cast<int>(problem.headdim);
  params.work.columns_v = static_cast<int>(problem.headdim_v);
  params.work.row_tiles = plan.row_tiles;
  params.work.tiles = static_cast<int>(plan.tiles);
  params.work.tiles_per_cta = plan.tiles_per_cta;
}

jit::Request v3_forward_request(const V3ForwardKey& key) {
  const V3ForwardTile& tile = kRows[key.row].tile;
  // The first line is shown by `fattn cache list`.
  std::string source = text("// ", name_of(static_cast<DType>(key.dtype)), ", headdim up to ", key.width);
  if (key.width_v != key.width) source += text(" and ", key.width_v);
  source += text(key.causal != 0 ? ", causal" : "", key.signed_scores != 0 ? ", scale not positive" : "", ", tile ", tile.block_m(), " x ",
                 tile.block_n, tile.skip ? ", skipping" : "", "\n");
  source += "#include \"kernels/v3/forward.h\"\n#include \"kernels/v3/mask.h\"\n#include \"kernels/v3/score.h\"\n\nstruct Spec {\n";
  const auto add_type = [&](const char* name, const char* type) { source += text("  using ", name, " = fattn::", type, ";\n"); };
  const auto add_int = [&](const char* name, int value) { source += text("  static constexpr int ", name, " = ", value, ";\n"); };
  const auto add_bool = [&](const char* name, bool value) {
    source += text("  static constexpr bool ", name, " = ", value ? "true" : "false", ";\n");
  };
  add_type("Element", key.dtype == static_cast<int32_t>(DType::kBF16) ? "bf16" : "f16");
  add_type("Mask", key.causal != 0 ? "v3::CausalMask" : "v3::FullMask");
  add_type("Score", key.signed_scores != 0 ? "v3::SignedScore" : "v3::PlainScore");
  add_int("kHeaddim", key.width);
  add_int("kHeaddimV", key.width_v);
  add_int("kGroups", tile.groups);
  add_int("kBlockN", tile.block_n);
  add_int("kStagesK", tile.stages_k);
  add_int("kStagesV", tile.stages_v);
  add_int("kQueryBuffers", tile.query_buffers);
  add_bool("kPingPong", tile.ping_pong);
  add_bool("kSkip", tile.skip);
  add_int("kEarlyEighths", tile.early_eighths);
  add_int("kProducerRegisters", tile.producer_registers);
  add_int("kConsumerRegisters", tile.consumer_registers);
  source += text("};\n\nextern \"C\" __global__ void __launch_bounds__(", tile.threads(), ", 1)\n",
                 "fattn_v3_fwd(const __grid_constant__ fattn::AttentionParams call, const __grid_constant__ fattn::V3ForwardWork work,\n"
                 "             const __grid_constant__ fattn::TensorMap q, const __grid_constant__ fattn::TensorMap k,\n"
                 "             const __grid_constant__ fattn::TensorMap v, const __grid_constant__ fattn::TensorMap o) {\n"
                 "  fattn::v3::forward<Spec>({call, work, q, k, v, o});\n}\n");
  return {.entry = "fattn_v3_fwd", .source = source, .arch = kV3Arch, .arch_specific = true};
}

}  // namespace fattn::core::cuda
