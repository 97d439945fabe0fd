#include "backend/cuda/v3_backward.h"

#include <algorithm>
#include <limits>

#include "backend/cuda/call_params.h"
#include "backend/cuda/limits.h"
#include "backend/cuda/spills.h"
#include "backend/cuda/tiles/v3_backward.h"
#include "backend/cuda/v3_mask_words.h"
#include "device/tensor_map.h"
#include "device_abi/v3_documents.h"
#include "device_abi/v3_packed_tiles.h"
#include "fattn/error.hpp"
#include "shared/text.h"

namespace fattn::core::cuda {
namespace {

constexpr auto& kRows = kV3BackwardTable;

RegisterFacts facts_of(const Problem& problem) { return register_facts(problem, v3_pair_features(problem), kV3Arch, 0); }

// The row of the table, the first as wide, or -1 if that does not fit.
int choose_row(const Problem& problem, const V3Target& target, std::string_view without) {
  const int width = v3_width(problem.headdim), width_v = v3_width(problem.headdim_v);
  const RegisterFacts facts = facts_of(problem);
  for (int i = 0; i < static_cast<int>(std::size(kRows)); ++i) {
    const V3BackwardRow& row = kRows[i];
    if (row.dropout != (problem.dropout_below > 0) || (row.causal && v3_mask(problem) != V3Mask::kCausal) || row.width < std::max(width, width_v))
      continue;
    if (spills(kV3BackwardSpills, row, facts, without)) continue;
    return row.tile.shared_bytes(width, width_v, v3_pair_features(problem)) <= target.shared_bytes ? i : -1;
  }
  return -1;
}

TiledTensor tiled_dout(const Problem& p, int box_rows) { return v3_tiled(p, p.dense_rows(), p.nheads, p.headdim_v, p.dout, box_rows); }
TiledTensor tiled_dk(const Problem& p, int box_rows) { return v3_tiled(p, p.dense_keys(), p.nheads_k, p.headdim, p.dk, box_rows); }
TiledTensor tiled_dv(const Problem& p, int box_rows) { return v3_tiled(p, p.dense_keys(), p.nheads_k, p.headdim_v, p.dv, box_rows); }

constexpr int kDbiasKeys = 128;  // of a tile of kernels/v3/backward_dbias.h

// Of masks of pairs and biases. With ALiBi or softcap some kernels of a mask spill up to 36 bytes, with lengths in fp16 8; with a window, dropout or
// deterministic they compile, but have not been checked on a GPU.
std::string term_refusal(const Problem& p, std::string_view without) {
  if (p.dbias.given && !p.bias.given) return "algorithm v3's backward pass has no dbias without a bias; algorithm v2 has";
  if (!p.pair_mask.given && !p.bias.given) return {};
  const char* const name = p.bias.given ? "bias" : "mask of pairs";
  const char* const other = p.packed              ? "packed sequences"
                            : p.has_documents     ? "documents (document_q, document_k)"
                            : p.has_seqused_k     ? "lengths of the batch's entries (seqused_k)"
                            : p.windowed()        ? "a sliding window"
                            : p.has_alibi         ? "ALiBi"
                            : p.softcap > 0       ? "softcap"
                            : p.dropout_below > 0 ? "dropout"
                            : p.deterministic     ? "deterministic"
                                                  : nullptr;
  if (other != nullptr) return text("algorithm v3's backward pass has no ", name, " together with ", other, "; algorithm v2 does both");
  if (p.pair_mask.given)
    if (std::string why = v3_mask_words_refusal(p); !why.empty()) return why;
  if (!p.bias.given) return {};
  if (std::string why = register_refusal(kV3BackwardTermRefusals, facts_of(p), without); !why.empty()) return why;
  const Strides& of = p.bias.strides;
  if (p.bias.dtype != DType::kF32 && (p.seqlen_k % 2 != 0 || of.batch % 2 != 0 || of.row % 2 != 0 || of.head % 2 != 0))
    return text("seqlen_k is ", p.seqlen_k, " and the bias has strides of ", of.batch, ", ", of.row, " and ", of.head,
                " elements; algorithm v3's backward pass reads two elements of 16 bits at once, and takes multiples of 2");
  if (!p.dbias.given) return {};
  if (std::max(p.headdim, p.headdim_v) <= 128 && ((p.dbias.batch < p.batch && of.batch != 0) || (p.dbias.heads < p.nheads && of.head != 0) ||
                                                  (p.dbias.rows < p.seqlen_q && of.row != 0)))  // it is read once for all that is added up
    return "dbias sums over a dimension that bias has; up to headdim 128 algorithm v3's backward pass has only sums over what shares a bias; "
           "algorithm v2 has both";
  if (p.dbias.batch * p.dbias.heads > kMaxGrid / std::max<int64_t>(1, p.dbias.rows))
    return text("dbias has ", p.dbias.batch * p.dbias.heads, " * ", p.dbias.rows, " rows, which is more than ", kMaxGrid, "; split the batch");
  const int64_t tiles = ceil_div(p.seqlen_k, kDbiasKeys) * ceil_div(p.dbias.rows, 2 * kV3BackwardRows);
  if (p.dbias.batch * p.dbias.heads > kMaxGrid / std::max<int64_t>(1, tiles))
    return text("dbias has ", p.dbias.batch, " * ", p.dbias.heads, " * ", tiles, " tiles, which is more than ", kMaxGrid, "; split the batch");
  return {};
}

// o and dq are read and written 16 bytes at a time, without TMA.
std::string unaligned(const Strides& strides, const Problem& p, const char* name) {
  if (aligned(strides, p.dense_batch(), p.dense_rows(), p.nheads, p.dtype)) return {};
  return text(name, " has strides of ", strides.batch, ", ", strides.row, " and ", strides.head, " elements; they must be multiples of 8");
}

// Of each head: blocks of queries in the workspace, and tiles of keys that there may be.
int64_t row_blocks_of(const Problem& p) {
  return p.packed ? most_packed_tiles(p.total_q, p.batch, kV3BackwardRows) : ceil_div(p.seqlen_q, kV3BackwardRows);
}
int64_t key_tiles_of(const Problem& p, int block_n) {
  if (!p.packed) return ceil_div(p.seqlen_k, block_n);
  return std::min<int64_t>(most_packed_tiles(p.total_k, p.batch, block_n), p.batch * ceil_div(p.seqlen_k, block_n));
}

// Key heads whose tiles run side by side; that a few do evens out what multiprocessors have, under a causal mask because the longest tiles of all
// come first. As measured (docs/results/h200-v3-backward-tune.json): up to 128 under a causal mask as many as have 16384 rows, 4 to 16, without one
// 2048; more lose 5 to 15 % where rows are long, all of it to the limit of power: HBM is read more often. Above, where additions to dq are the limit,
// no more than 4, and than have their queries' q, dout and dq in a part of the L2. Sections are of a size, but with a ring: there it is one head or,
// under a causal mask, up to 16, and never more than a generation, whose tiles would come up together with those that wait for it, and wait for ever.
// In a window that has a beginning the tiles are alike but for those of the last keys, which fewer queries see: side by side these come last and even
// out what multiprocessors have; as many as have the rows that tiles see at once in L2, in sections of a size. Deterministic: all, because the CTAs
// of one head wait for each other. Of packed sequences, whose tiles are uneven in whatever mask, as many heads as have the rows of the longest in
// half of the L2.
int heads_per_section(const Problem& problem, int width, int block_n, int generation, const V3Target& target) {
  const int64_t heads = problem.packed ? problem.nheads_k : problem.batch * problem.nheads_k;
  if (problem.deterministic) return static_cast<int>(heads);
  const int64_t row_bytes = 2 * (problem.headdim + problem.headdim_v) + 4 * width, l2_bytes = target.l2_bytes;
  if (!problem.packed && problem.mask().begins()) {
    const int64_t right = problem.causal ? 0 : problem.window_right < 0 ? problem.seqlen_q : problem.window_right;
    const int64_t rows = std::clamp<int64_t>(problem.window_left + 1 + right + block_n, 1, std::max<int64_t>(1, problem.seqlen_q));
    const int64_t apart = target.multiprocessors * int64_t{block_n} * row_bytes;  // of tiles that run at once, in all heads together
    const int64_t most = std::clamp<int64_t>((l2_bytes * 3 / 4 - apart) / (problem.group() * rows * row_bytes), 1, heads);
    return static_cast<int>(ceil_div(heads, ceil_div(heads, most)));
  }
  const int64_t head_bytes = std::max<int64_t>(1, problem.group() * problem.seqlen_q * row_bytes);
  if (problem.packed) return static_cast<int>(std::clamp<int64_t>(l2_bytes / 2 / head_bytes, 1, heads));
  const bool uneven = last_rows_longest(problem);
  if (generation > 0) return uneven ? std::min(generation, 16) : 1;
  const int64_t in_l2 = (uneven ? 4 * l2_bytes : l2_bytes) / 3 / head_bytes, rows = std::max<int64_t>(1, problem.group() * problem.seqlen_q);
  const int64_t most = width > 128 ? std::clamp<int64_t>(in_l2, 1, 4)
                       : uneven    ? std::clamp<int64_t>(16384 / rows, 4, 16)
                                   : std::clamp<int64_t>(2048 / rows, 1, 16);
  return static_cast<int>(ceil_div(heads, ceil_div(heads, most)));
}

// Tiles may have nothing to do, or add in the order of the keys, or the kernel has no registers for it, or is limited by its additions to dq.
bool has_ring_kernels(const Problem& problem, const V3BackwardTile& tile, int width) {
  return !tile.by_role && width % 64 == 0 && !(width == 64 && problem.dropout_below > 0) && !problem.deterministic && !problem.packed &&
         !problem.has_seqused_k && !problem.has_documents;
}

// Key heads of a generation of the ring of dq's accumulators (kernels/v3/backward_ring.h): as many as have the tiles that run at once. 0: there is no
// ring, because tiles may have nothing to do or add in the order of the keys, the kernel has no registers for it or is limited by its additions to
// dq, four generations are all heads or so, or do not stay in L2, or a tile would convert more than 1 part (in windows 1.3) for each of its blocks of
// queries, or (rows are so long that) a generation is of fewer heads than pay. Measured with tune_v3_backward: the ring and where it ends at each
// seqlen.
int ring_generation(const Problem& problem, const V3BackwardTile& tile, int width, int row_blocks, int key_tiles, const V3Target& target) {
  if (!has_ring_kernels(problem, tile, width) || key_tiles < 3) return 0;
  const int64_t heads = problem.batch * problem.nheads_k, block_n = tile.block_n(), parts = row_blocks * int64_t{width / 32};
  int64_t blocks = row_blocks;  // of queries, of a tile of keys on average
  if (problem.mask().begins())
    blocks =
        std::min(blocks, (problem.window_left + std::max<int64_t>(problem.causal ? 0 : problem.window_right, 0) + block_n) / kV3BackwardRows + 1);
  else if (problem.causal)
    blocks = ceil_div(blocks * (key_tiles + 1), 2 * key_tiles);
  constexpr int64_t kMostParts = 1 << 24;  // of a key head: counted in fp32
  const bool windowed = problem.mask().begins();
  if (10 * parts > (windowed ? 13 : 10) * blocks * key_tiles || problem.group() * parts > kMostParts) return 0;
  const int64_t least = std::max<int64_t>(1, (target.multiprocessors + key_tiles / 2) / key_tiles);
  const int64_t head_bytes = problem.group() * row_blocks * kV3BackwardRows * width * 4, most = target.l2_bytes * 3 / 4 / (4 * head_bytes);
  const int64_t fewest = last_rows_longest(problem) ? 2 : 1;
  if (heads < 5 * least || most < std::max(least, fewest)) return 0;
  // Where tiles are uneven: better if the last generation is a whole one.
  int64_t best = least;
  if (last_rows_longest(problem) || windowed)
    for (int64_t generation = least; generation <= std::min({most, least * 7 / 5, heads / 5}); ++generation)
      if (ceil_div(heads, generation) * generation < ceil_div(heads, best) * best) best = generation;
  return static_cast<int>(best);
}

}  // namespace

int V3BackwardTile::shared_bytes(int width, int width_v, const PairFeatures& pair) const {
  const int block_m = kV3BackwardRows, both = v3_columns(width) + v3_columns(width_v);
  const int stages_ds = 2, row_slots = by_role ? stages : stages_ds, barriers = 6 + 4 * stages + 2 * stages_ds;
  const int place = (pair.packed || pair.documents ? 80 : 32) + (pair.alibi ? 16 : 0);
  const int kept = pair.dropout ? (512 + 2 * 8) * block_n() / 64 : 0;
  return kColumnBytes * (block_n() * both + stages * block_m * both + stages_ds * block_n()) + (stagings + (by_role ? 1 : 0)) * 4 * block_m * 64 +
         2 * row_slots * 4 * block_m + 8 * barriers + place + kept;
}

std::span<const V3BackwardRow> v3_backward_rows() { return kRows; }

std::string v3_backward_refusal(const Problem& problem, const V3Target& target, std::string_view without) {
  std::string why = v3_refusal(problem);
  if (!why.empty()) return why;
  if (problem.fp32_out) return "algorithm v3's backward pass writes dq, dk and dv in q's dtype; algorithm v2 writes them in fp32, too";
  if (problem.has_documents && (problem.deterministic || problem.softcap > 0 || problem.has_alibi || problem.dropout_below > 0))
    return text("algorithm v3's backward pass has no documents (document_q, document_k) together with ",
                problem.deterministic ? "deterministic"
                : problem.softcap > 0 ? "softcap"
                : problem.has_alibi   ? "ALiBi"
                                      : "dropout",
                "; algorithm v2 does both");
  why = term_refusal(problem, without);
  if (!why.empty()) return why;
  if (problem.headdim % 8 != 0 || problem.headdim_v % 8 != 0)
    return text("headdim is ", problem.headdim, " and headdim_v ", problem.headdim_v, "; algorithm v3's backward pass takes multiples of 8");
  const std::pair<TiledTensor, const char*> tensors[] = {{tiled_q(problem, 64), "q"},   {tiled_k(problem, 64), "k"},
                                                         {tiled_v(problem, 64), "v"},   {tiled_dout(problem, 64), "dout"},
                                                         {tiled_dk(problem, 64), "dk"}, {tiled_dv(problem, 64), "dv"}};
  for (const auto& [tensor, name] : tensors)
    if (why.empty()) why = tensor_map_refusal(tensor, name);
  if (why.empty()) why = unaligned(problem.o, problem, "o");
  if (why.empty()) why = unaligned(problem.dq, problem, "dq");
  if (!why.empty()) return why;
  const int row = choose_row(problem, target, without);
  if (row < 0)
    return text("no backward tile for headdim ", problem.headdim, " and headdim_v ", problem.headdim_v, " fits into ", target.shared_bytes,
                " bytes of shared memory");
  why = register_refusal(kV3BackwardRefusals, facts_of(problem), without);
  if (!why.empty()) return why;
  // Counted in 32 bits.
  const int64_t tiles = std::max(row_blocks_of(problem), key_tiles_of(problem, kRows[row].tile.block_n()));
  if (problem.packed && tiles > 0 && problem.nheads > kMaxGrid / 2 / tiles)
    return text("nheads ", problem.nheads, " * up to ", tiles, " tiles is more than ", kMaxGrid / 2, "; split the sequences");
  if (!problem.packed && problem.batch * problem.nheads > kMaxGrid / 2 / tiles)
    return text("batch ", problem.batch, " * nheads ", problem.nheads, " * ", tiles, " tiles is more than ", kMaxGrid / 2, "; split the batch");
  return {};
}

int dbias_shared_bytes(const V3BackwardKey& key) {
  const int columns = v3_columns(key.width) + v3_columns(key.width_v), key_stages = 2, stages = std::max(key.width, key.width_v) <= 64 ? 4 : 2;
  return kColumnBytes * columns * (key_stages * kDbiasKeys + stages * kV3BackwardRows) + stages * 2 * 4 * kV3BackwardRows +
         16 * (key_stages + stages);
}

// The work of the kernel that computes dbias: where tiles do not fill the GPU twice, several CTAs have a part of what is added up in one.
void divide_dbias(const Problem& p, const V3Target& target, V3BackwardPlan& plan) {
  const int64_t row_tiles = ceil_div(p.seqlen_q, 2 * kV3BackwardRows), of_rows = p.dbias.rows == 1 ? 1 : row_tiles;
  plan.dbias_tiles = ceil_div(p.seqlen_k, kDbiasKeys) * of_rows * p.dbias.heads * p.dbias.batch;
  const int64_t summands = p.batch / std::max<int64_t>(1, p.dbias.batch) * (p.nheads / p.dbias.heads) * row_tiles / std::max<int64_t>(1, of_rows);
  const int64_t wanted = ceil_div(int64_t{2} * target.multiprocessors, std::max<int64_t>(1, plan.dbias_tiles));
  plan.dbias_parts = static_cast<int>(std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, summands)));
  plan.dbias_ctas = plan.dbias_parts > 1 ? plan.dbias_tiles : std::min<int64_t>(plan.dbias_tiles, target.multiprocessors);
  plan.dbias_shared_bytes = dbias_shared_bytes(plan.dbias);
}

V3BackwardPlan plan_v3_backward(const Problem& problem, const V3Target& target, std::string_view without) {
  const int row = choose_row(problem, target, without);
  if (row < 0) throw Error(ErrorCode::kInternal, "plan_v3_backward() was called for a problem that v3_backward_refusal() refuses");
  V3BackwardPlan plan = plan_v3_backward(problem, target, kRows[row].tile);
  for (V3BackwardKey* key : {&plan.main, &plan.finish})
    if (key->row < 0) key->row = row;
  return plan;
}

V3BackwardPlan plan_v3_backward(const Problem& problem, const V3Target& target, const V3BackwardTile& tile) {
  const int row_blocks = static_cast<int>(row_blocks_of(problem)), key_tiles = static_cast<int>(key_tiles_of(problem, tile.block_n()));
  return plan_v3_backward(problem, target, tile, ring_generation(problem, tile, v3_width(problem.headdim), row_blocks, key_tiles, target));
}

V3BackwardPlan plan_v3_backward(const Problem& problem, const V3Target& target, const V3BackwardTile& tile, int generation) {
  V3BackwardPlan plan;
  V3BackwardKey key;
  key.dtype = static_cast<int32_t>(problem.dtype);
  key.width = v3_width(problem.headdim);
  key.width_v = v3_width(problem.headdim_v);
  key.mask = v3_mask(problem);
  key.score = problem.softcap > 0 ? V3Score::kCapped : V3Score::kPlain;
  key.deterministic = problem.deterministic;
  key.row = -1;
  const PairFeatures pair = v3_pair_features(problem);
  key.pair = pair_bits(pair);
  plan.tile = tile;
  plan.row_blocks = static_cast<int>(row_blocks_of(problem));
  plan.key_tiles = static_cast<int>(key_tiles_of(problem, plan.tile.block_n()));
  plan.generation = generation;
  key.ring = plan.generation > 0;
  plan.main = plan.prepare = plan.finish = key;
  // The small kernels do not depend on everything; what they do not depend on is the same in all keys, so that fewer are compiled.
  plan.prepare.kind = KernelKind::kV3BackwardPrepare;
  plan.prepare.mask = V3Mask::kFull;
  plan.prepare.score = V3Score::kPlain;
  plan.prepare.row = 0;
  plan.prepare.pair = pair_bits(
      {.lengths = pair.lengths, .dropout = pair.dropout, .packed = pair.packed, .dlse = problem.has_dlse});  // the others know row sums only
  plan.finish.kind = KernelKind::kV3BackwardFinish;
  plan.finish.width_v = key.width;
  plan.finish.deterministic = 0;
  PairFeatures of_finish = pair;  // where a part of a matrix is, is nothing to it
  of_finish.places = false;
  plan.finish.pair = pair_bits(of_finish);
  if (key.mask == V3Mask::kFull && !pair.packed && !pair.hides()) {  // calls without a mask have one kernel
    plan.finish.score = V3Score::kPlain;
    plan.finish.row = 0;
    plan.finish.pair = pair_bits({.dropout = pair.dropout});
  }
  if (pair.dbias) {
    PairFeatures without = pair;
    without.dbias = false;
    plan.finish.pair = pair_bits(without);  // the last kernel has nothing to do with it
    if (!plan.tile.by_role) {               // and the main one no registers for it
      plan.main.pair = pair_bits(without);
      plan.dbias = key;
      plan.dbias.kind = KernelKind::kV3BackwardDbias;
      plan.dbias.row = plan.dbias.ring = 0;
    }
  }

  plan.heads_per_section = heads_per_section(problem, key.width, plan.tile.block_n(), plan.generation, target);
  if (plan.generation > 0 && problem.mask().begins() && plan.heads_per_section > 1) plan.heads_per_section = plan.generation;
  if (plan.generation > 0 && plan.heads_per_section > plan.generation)
    throw Error(ErrorCode::kInternal, text("a section of ", plan.heads_per_section, " heads is more than a generation of ", plan.generation,
                                           " of the ring of dq: its tiles would wait for each other for ever"));
  const int64_t all_heads = problem.dense_batch() * problem.nheads, ring_generations = 4, left_over = 2;  // generations
  plan.ring_heads = static_cast<int>(plan.generation > 0 ? ring_generations * plan.generation * problem.group() : all_heads);
  plan.grid = problem.dense_batch() * problem.nheads_k * plan.key_tiles;
  plan.prepare_grid = all_heads * plan.row_blocks;
  plan.finish_grid = (plan.generation > 0 ? left_over * plan.generation * problem.group() : all_heads) * plan.row_blocks;
  plan.threads = plan.tile.threads();
  plan.shared_bytes = plan.tile.shared_bytes(key.width, key.width_v, pair);
  plan.finish_shared_bytes = kV3BackwardRows * kColumnBytes * v3_columns(key.width);
  const int64_t rows = plan.prepare_grid * kV3BackwardRows;
  plan.lse_log2_offset = int64_t{plan.ring_heads} * plan.row_blocks * kV3BackwardRows * key.width * 4;
  plan.row_sum_offset = plan.lse_log2_offset + rows * 4;
  plan.nonfinite_offset = plan.row_sum_offset + rows * 4;
  plan.tiles_offset = plan.nonfinite_offset + ceil_div(plan.prepare_grid * 4, 16) * 16;
  plan.semaphore_offset = plan.tiles_offset;
  if (problem.packed) {
    plan.semaphore_offset += static_cast<int64_t>(sizeof(V3PackedTile)) * plan.key_tiles;
  }
  if (problem.has_documents && problem.packed) {  // behind the list of tiles
    plan.semaphore_offset += v3_packed_document_bytes(problem.total_k, kV3DocumentRows, problem.total_q, kV3BackwardRows, problem.batch);
    plan.document_grid = plan.grid > 0 ? most_packed_tiles(problem.total_k, problem.batch, kV3DocumentCtaRows) : 0;
  } else if (problem.has_documents) {
    plan.semaphore_offset += problem.batch * v3_document_bytes(problem.seqlen_k, plan.tile.block_n(), problem.seqlen_q, kV3BackwardRows);
    plan.document_grid = problem.batch * v3_document_ctas(problem.seqlen_k, plan.tile.block_n());
  }
  if (problem.pair_mask.given) {
    const V3MaskWords words = v3_mask_words(problem);
    plan.tiles_offset += words.before;
    plan.semaphore_offset += words.bytes;
    plan.mask_grid = words.grid;
    plan.mask_threads = words.threads;
  }
  const int64_t flags = problem.deterministic ? 1 + plan.prepare_grid
                        : plan.generation > 0 ? 1 + ceil_div(problem.batch * problem.nheads_k, plan.generation)
                                              : 0;
  plan.workspace_bytes = plan.semaphore_offset + flags * 4;
  if (problem.dbias.given) {
    if (!plan.tile.by_role) divide_dbias(problem, target, plan);
    if (plan.tile.by_role || plan.dbias_parts > 1) plan.dbias_grid = problem.dbias.batch * problem.dbias.heads * problem.dbias.rows;
    if (plan.dbias_grid > 0 && !dbias_in_place(problem)) {
      plan.dbias_offset = ceil_div(plan.workspace_bytes, 16) * 16;
      plan.workspace_bytes = plan.dbias_offset + dbias_bytes(problem);
    }
  }
  return plan;
}

std::array<V3BackwardKey, 3> other_keys_of(const Problem& problem, const V3BackwardPlan& plan) {
  std::array<V3BackwardKey, 3> keys = {plan.prepare, plan.main, plan.finish};
  if (has_ring_kernels(problem, plan.tile, plan.main.width))
    for (V3BackwardKey& key : keys) key.ring = !key.ring;
  return keys;
}

void set_v3_backward_params(V3BackwardParams& params, const Problem& problem, const V3BackwardPlan& plan, CudaDevice& device,
                            const fattn_buffers& b) {
  const int block_n = plan.tile.block_n();
  encode_tensor_map(params.q, device, tiled_q(problem, kV3BackwardRows), b.q);
  encode_tensor_map(params.k, device, tiled_k(problem, block_n), b.k);
  encode_tensor_map(params.v, device, tiled_v(problem, block_n), b.v);
  encode_tensor_map(params.dout, device, tiled_dout(problem, kV3BackwardRows), b.dout);
  encode_tensor_map(params.dk, device, tiled_dk(problem, 64), b.dk);  // a warpgroup's
  encode_tensor_map(params.dv, device, tiled_dv(problem, 64), b.dv);
  if (plan.dbias_tiles > 0) {
    encode_tensor_map(params.dbias_k, device, tiled_k(problem, kDbiasKeys), b.k);
    encode_tensor_map(params.dbias_v, device, tiled_v(problem, kDbiasKeys), b.v);
  }
  params.call =
      pair_params(backward_params(problem, plan.heads_per_section, b, problem.deterministic, plan.row_sum_offset, plan.semaphore_offset), problem, b);
  set_dbias_params(params.call, problem, b.dbias, b.workspace, plan.dbias_offset);
  params.work.lse_log2 = reinterpret_cast<float*>(static_cast<char*>(b.workspace) + plan.lse_log2_offset);
  if (problem.packed || problem.has_documents || problem.pair_mask.given) params.call.tiles = static_cast<char*>(b.workspace) + plan.tiles_offset;
  params.work.nonfinite = reinterpret_cast<int*>(static_cast<char*>(b.workspace) + plan.nonfinite_offset);
  params.work.looks_at_q = problem.softcap > 0 ? 1 : 0;
  params.work.columns = static_cast<int>(problem.headdim);
  params.work.columns_v = static_cast<int>(problem.headdim_v);
  params.work.row_blocks = plan.row_blocks;
  params.work.key_tiles = plan.key_tiles;
  params.work.ring_heads = plan.ring_heads;
  params.work.generation = plan.generation;
  params.work.finished = plan.generation > 0 ? reinterpret_cast<int*>(static_cast<char*>(b.workspace) + plan.semaphore_offset) : nullptr;
}

V3DocumentRangesKey v3_document_ranges_key(const V3BackwardPlan& plan) {
  const bool packed = pair_features_of(plan.main.pair).packed;
  return {.block_m = packed ? kV3DocumentRows : plan.tile.block_n(), .block_n = kV3BackwardRows, .of_keys = 1, .packed = packed};
}

V3PackedKeyTilesKey v3_packed_key_tiles_key(const Problem& problem, const V3BackwardPlan& plan) {
  return {.block_n = plan.tile.block_n(), .lengths = problem.has_seqused_k};
}

}  // namespace fattn::core::cuda
