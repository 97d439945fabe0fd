#include "backend/cuda/v3_forward.h"

#include <algorithm>
#include <cmath>

#include "backend/cuda/call_params.h"
#include "backend/cuda/kernel_source.h"
#include "backend/cuda/limits.h"
#include "backend/cuda/tiles/v3_forward.h"
#include "backend/cuda/tiles/v3_forward_rules.h"
#include "backend/cuda/v3_mask_words.h"
#include "backend/cuda/v3_sections.h"
#include "device/tensor_map.h"
#include "device_abi/v3_documents.h"
#include "device_abi/v3_packed_tiles.h"
#include "fattn/error.hpp"
#include "shared/text.h"

namespace fattn::core::cuda {
namespace {

constexpr auto& kRows = kV3ForwardTable;

int64_t row_tiles_of(const Problem& problem, const V3ForwardTile& tile) { return ceil_div(problem.seqlen_q, tile.block_m()); }

// Tiles of a head that packed sequences may have: each ends with one that is perhaps not full.
int64_t most_packed_tiles(const Problem& problem, const V3ForwardTile& tile) {
  return fattn::most_packed_tiles(problem.total_q, problem.batch, tile.block_m());
}

RegisterFacts facts_of(const Problem& problem) { return register_facts(problem, v3_pair_features(problem), kV3Arch, 0); }

// Whether a row takes such problems; seqlen_k apart.
bool takes(const V3ForwardRow& row, const Problem& problem, const RegisterFacts& facts, const V3Target& target, std::string_view without) {
  const int width = v3_width(problem.headdim), width_v = v3_width(problem.headdim_v);
  return row.mask == v3_mask(problem) && row.width == v3_row_width(width, width_v) && v3_row_takes(row, facts, without) &&
         row.tile.shared_bytes(width, width_v, v3_pair_features(problem)) <= target.shared_bytes;
}

// Tiles of a problem come in waves of as many as there are multiprocessors, each as long as the tile has rows.
double waves(const Problem& problem, const V3ForwardTile& tile, const V3Target& target) {
  const double heads = static_cast<double>(problem.batch) * static_cast<double>(problem.nheads);
  return std::ceil(static_cast<double>(row_tiles_of(problem, tile)) * heads / target.multiprocessors);
}

// Of packed sequences, by the means of their rows and keys, a sequence's. Each ends in the middle of a tile, unless all have as many rows as the
// longest. A tile costs something besides its pairs.
double time_of_sequences(const Problem& problem, const V3ForwardRow& row) {
  constexpr double kPairsOfATile = 32768;  // what times of short and long sequences leave
  const int64_t sequences = std::max<int64_t>(1, problem.batch);
  const double rows = static_cast<double>(problem.total_q) / static_cast<double>(sequences), block_m = row.tile.block_m();
  const int64_t mean_q = std::max<int64_t>(1, problem.total_q / sequences), mean_k = problem.total_k / sequences;
  const double keys = problem.mask(Sequence{.seqlen_q = mean_q, .keys = mean_k}).visible_pairs() / static_cast<double>(mean_q);
  const auto most = static_cast<double>(row_tiles_of(problem, row.tile));
  const bool equal = problem.total_q == problem.batch * problem.seqlen_q;
  const double tiles = equal ? most : std::min(most, std::max(1.0, (rows + block_m / 2) / block_m));
  return tiles * (block_m * keys / row.speed + kPairsOfATile);
}

// The row of the table, -1 if nothing fits: the first that takes the problem, for these lengths. In small problems, of few waves, it is whichever of
// them takes the least time, and of packed sequences always: how many waves they are is in device memory.
int choose_row(const Problem& problem, const V3Target& target, std::string_view without) {
  const RegisterFacts facts = facts_of(problem);
  constexpr double kFewWaves = 4;
  int best = -1, most_keys = 0;
  double least = 0;
  for (int i = 0; i < static_cast<int>(std::size(kRows)); ++i) {
    const V3ForwardRow& row = kRows[i];
    if (!takes(row, problem, facts, target, without) || problem.seqlen_k > row.most_keys) continue;
    const double count = waves(problem, row.tile, target),
                 time = problem.packed ? time_of_sequences(problem, row) : count * row.tile.block_m() / row.speed;
    if (best < 0) {
      best = i;
      most_keys = row.most_keys;
      least = time;
      if (count > kFewWaves && !problem.packed) return best;
    } else if (row.most_keys == most_keys && time < least) {
      best = i;
      least = time;
    }
  }
  return best;
}

// CapCurve (kernels/score.h) has the fifth power of softmax_scale / softcap in fp32.
bool ratio_underflows(const Problem& problem) {
  const double ratio = std::abs(problem.softmax_scale) / problem.softcap;
  return ratio > 0 && ratio < 1e-7;
}

// A bias is copied 16 bytes at a time where its rows begin at multiples of it, else pair by pair, one on its way a thread.
bool copies_pairs(const PairTensor& bias) {
  const auto bytes = static_cast<int64_t>(size_of(bias.dtype));
  return bias.strides.row * bytes % 16 != 0 || bias.strides.batch * bytes % 16 != 0 || bias.strides.head * bytes % 16 != 0;
}

// A tile brings the terms of all of its 128 rows, whether there are queries or not.
constexpr int64_t kFewestQueriesOfTerms = 64;

// Of biases and masks of pairs. With a window, and biases at headdims between 129 and 192, in fp16 above, and at unequal widths they compile, as do
// two of bias, mask and lengths under a causal mask or above 128, but have not been checked on a GPU.
std::string term_refusal(const Problem& p) {
  if (!can_stage(v3_pair_features(p))) return {};
  const char* const what = !p.bias.given ? "mask of pairs" : p.pair_mask.given ? "bias and mask of pairs" : "bias";
  const char* const other = p.softcap > 0         ? "softcap"
                            : p.packed            ? "packed sequences"
                            : p.has_documents     ? "documents (document_q, document_k)"
                            : p.has_alibi         ? "ALiBi"
                            : p.dropout_below > 0 ? "dropout"
                            : p.windowed()        ? "a sliding window"
                                                  : nullptr;
  if (other != nullptr) return text("algorithm v3's forward pass has no ", what, " together with ", other, "; algorithm v2 does both");
  if (p.pair_mask.given)
    if (std::string why = v3_mask_words_refusal(p); !why.empty()) return why;
  if (!p.bias.given) return {};
  if (p.algorithm != Algorithm::kV3 && copies_pairs(p.bias))
    return text("the rows of a ", what,
                " do not begin at multiples of 16 bytes, which algorithm v3 copies one by one; algorithm v2 has more threads for it");
  if (p.algorithm != Algorithm::kV3 && p.seqlen_q < kFewestQueriesOfTerms)
    return text(p.seqlen_q, " queries with a ", what, " are fewer than ", kFewestQueriesOfTerms, ", from which on algorithm v3 is chosen");
  const int width = v3_width(p.headdim), several = 1 + (p.pair_mask.given ? 1 : 0) + (p.has_seqused_k ? 1 : 0);
  if (p.causal && several > 1)
    return text("algorithm v3's forward pass has one of bias, mask of pairs and lengths (seqused_k) under a causal mask; algorithm v2 has them all");
  if (width == v3_width(p.headdim_v) && (width <= 128 || (width > 192 && several == 1 && p.dtype == DType::kBF16))) return {};
  return text("headdim is ", p.headdim, " and headdim_v ", p.headdim_v,
              "; algorithm v3's forward pass has bias and mask of pairs up to 128, and one of ",
              "them without lengths (seqused_k) above 192 in bf16, where v is as wide as k; algorithm v2 has them all");
}

TiledTensor tiled_o(const Problem& p, int box_rows) { return v3_tiled(p, p.dense_rows(), p.nheads, p.headdim_v, p.o, box_rows); }

// Of a window that has a beginning. Its tiles are alike but for those of the first rows, which see fewer keys: with all heads side by side these come
// last and even out how many tiles a CTA has (16 heads of 128 tiles of 9 blocks, 132 CTAs: 136 blocks the longest, head after head 144; 135 the
// mean). L2 has to hold what the tiles of a turn see: the window of each head, and as much as they are apart.
int window_heads_per_section(const Problem& problem, const V3Target& target, const V3ForwardPlan& plan) {
  const Mask mask = problem.mask();
  const int64_t key_bytes = (problem.headdim + problem.headdim_v) * 2, block_m = plan.tile.block_m();
  const int64_t right = mask.ends() ? mask.diagonal() - 1 - (problem.seqlen_k - problem.seqlen_q) : problem.seqlen_k;
  const int64_t keys = std::clamp<int64_t>(problem.window_left + 1 + right + block_m, 1, std::max<int64_t>(1, problem.seqlen_k));
  const int64_t room = target.l2_bytes * 3 / 4 - plan.grid * block_m * key_bytes;
  const int64_t most = std::max<int64_t>(1, room / (keys * key_bytes) * problem.group());
  return static_cast<int>(v3_heads_per_section(
      {mask, problem.batch * problem.nheads, plan.tile.block_m(), plan.tile.block_n, plan.grid, most, static_cast<double>(most)}));
}

// The order of the work. Without a mask all tiles are alike: head after head, the grid takes them in turns.
// Under a causal mask the tiles of several heads run side by side, the longest first, of heads that have their keys and values in L2 together:
// v3_sections.h says how many. Long heads fill L2 too few at a time for that: pairs of tiles are then given to whichever multiprocessor is free.
void schedule(const Problem& problem, const V3Target& target, V3ForwardPlan& plan) {
  const int64_t heads = problem.batch * problem.nheads;
  plan.grid = static_cast<int>(std::min<int64_t>(plan.tiles, target.multiprocessors));
  plan.heads_per_section = 1;
  if (problem.packed) {  // in whatever mask: lengths are as uneven
    const int64_t l2_bytes = target.l2_bytes * 3 / 4, bytes = std::max<int64_t>(1, problem.total_k * (problem.headdim + problem.headdim_v) * 2);
    plan.heads_per_section = static_cast<int>(std::clamp<int64_t>(l2_bytes / bytes * problem.group(), problem.group(), problem.nheads));
    plan.tile_groups = static_cast<int>(std::clamp<int64_t>(ceil_div(bytes, l2_bytes), 1, kV3MostTileGroups));
    return;
  }
  if (problem.mask().begins()) {
    plan.heads_per_section = window_heads_per_section(problem, target, plan);
    return;
  }
  if (!last_rows_longest(problem)) return;
  const int64_t head_bytes = problem.seqlen_k * (problem.headdim + problem.headdim_v) * 2;
  const int64_t most = std::max<int64_t>(1, target.l2_bytes * 3 / 4 / head_bytes * problem.group());
  constexpr int64_t kFewHeads = 8;
  V3Turns turns{problem.mask(), heads, plan.tile.block_m(), plan.tile.block_n, plan.grid, most, plan.grid / (plan.key.width <= 128 ? 3.0 : 4.0)};
  if (most < kFewHeads && plan.tiles > 2 * plan.grid && !problem.has_documents) {
    plan.tiles_per_cta = 2;
    plan.heads_per_section = static_cast<int>(v3_free_heads_per_section(turns, plan.tiles_per_cta));
    plan.grid = static_cast<int>(ceil_div(plan.tiles, plan.tiles_per_cta));
    return;
  }
  // Short heads come and go faster than L2 is filled: fewer of them side by side were faster.
  if (plan.row_tiles < 32) turns.most_in_a_section = std::max<int64_t>(1, target.l2_bytes * 5 / 8 / head_bytes * problem.group());
  plan.heads_per_section = static_cast<int>(v3_heads_per_section(turns));
}

}  // namespace

bool v3_row_takes(const V3ForwardRow& row, const RegisterFacts& facts, std::string_view without) {
  for (const V3ForwardRowsFor& rule : kV3ForwardRowsFor)
    if (rule.where.holds(facts) && rule.name != without) return rule.rows.has(row);
  return false;
}

int v3_row_width(int width, int width_v) {
  int least = 256;
  for (const V3ForwardRow& row : kRows)
    if (row.width >= std::max(width, width_v)) least = std::min(least, row.width);
  return least;
}

int V3ForwardTile::shared_bytes(int width, int width_v, const PairFeatures& pair) const {
  const int query_bytes = block_m() * kColumnBytes * std::max(v3_columns(width), v3_columns(width_v));
  const int barriers = v3_query_barriers(groups, query_buffers, skip) + 2 * (stages_k + stages_v + stages_terms) + stages_v;
  const int bytes = query_buffers * query_bytes + block_n * kColumnBytes * (stages_k * v3_columns(width) + stages_v * v3_columns(width_v)) +
                    8 * barriers + kV3NoteBytes;
  const PairFeatures staged{.bias = pair.bias};  // of a mask there are words
  return v3_terms_offset(v3_slots_end(bytes, pair.packed), stages_terms) + stages_terms * term_tile(staged, block_m(), block_n, false).bytes();
}

std::span<const V3ForwardRow> v3_forward_rows() { return kRows; }

std::string v3_forward_refusal(const Problem& problem, const V3Target& target, std::string_view without) {
  std::string why = v3_refusal(problem);
  const RegisterFacts facts = facts_of(problem);
  if (why.empty()) why = register_refusal(kV3ForwardScoreRefusals, facts, without);
  if (why.empty() && problem.softcap > 0 && ratio_underflows(problem))
    why = text("softmax_scale is ", problem.softmax_scale, " and softcap ", problem.softcap,
               "; algorithm v3's forward pass wants a softmax_scale of at least 1e-7 of softcap; algorithm v2 takes any");
  if (why.empty() && problem.fp32_out &&
      (v3_pair_features(problem).any() || problem.has_sinks || problem.softcap > 0))  // not compiled for all of them yet
    why = "algorithm v3's forward pass has outputs in fp32 beside causal masks and windows alone; algorithm v2 has them beside every option";
  if (why.empty()) why = register_refusal(kV3ForwardRefusals, facts, without);
  if (why.empty()) why = term_refusal(problem);
  if (why.empty()) why = tensor_map_refusal(tiled_q(problem, 64), "q");
  if (why.empty()) why = tensor_map_refusal(tiled_k(problem, 64), "k");
  if (why.empty()) why = tensor_map_refusal(tiled_v(problem, 64), "v");
  if (why.empty()) why = tensor_map_refusal(tiled_o(problem, 64), "o");
  if (!why.empty()) return why;
  const int row = choose_row(problem, target, without);
  if (row < 0)
    return text("no tile for headdim ", problem.headdim, " and headdim_v ", problem.headdim_v, " fits into ", target.shared_bytes,
                " bytes of shared memory");
  if (problem.packed) {
    const int64_t most = most_packed_tiles(problem, kRows[row].tile);
    if (most > kMaxGrid / 2 / problem.nheads)
      return text("nheads ", problem.nheads, " * up to ", most, " tiles of queries is more than ", kMaxGrid / 2, "; split the sequences");
    return {};
  }
  const int64_t tiles = row_tiles_of(problem, kRows[row].tile);
  // Tiles are counted in 32 bits, some turns of the grid beyond the last.
  if (problem.batch * problem.nheads > kMaxGrid / 2 / tiles)
    return text("batch ", problem.batch, " * nheads ", problem.nheads, " * ", tiles, " tiles of queries is more than ", kMaxGrid / 2,
                "; split the batch");
  return {};
}

V3ForwardPlan plan_v3_forward(const Problem& problem, const V3Target& target, std::string_view without) {
  const int row = choose_row(problem, target, without);
  if (row < 0) throw Error(ErrorCode::kInternal, "plan_v3_forward() was called for a problem that v3_forward_refusal() refuses");
  V3ForwardPlan plan = plan_v3_forward(problem, target, kRows[row].tile);
  plan.key.row = row;
  return plan;
}

V3ForwardPlan plan_v3_forward(const Problem& problem, const V3Target& target, const V3ForwardTile& tile) {
  V3ForwardPlan plan;
  plan.key.dtype = static_cast<int32_t>(problem.dtype);
  plan.key.width = v3_width(problem.headdim);
  plan.key.width_v = v3_width(problem.headdim_v);
  plan.key.mask = v3_mask(problem);
  FeatureParams scale{};
  set_forward_scale(scale, problem.softmax_scale, problem.softcap);
  plan.key.score = problem.softcap > 0 ? V3Score::kCapped : scale.softmax_scale > 0 ? V3Score::kPlain : V3Score::kSigned;
  plan.key.row = -1;
  plan.key.pair = pair_bits(v3_pair_features(problem));
  plan.tile = tile;
  plan.row_tiles = static_cast<int>(row_tiles_of(problem, plan.tile));
  plan.tiles = problem.batch * problem.nheads * plan.row_tiles;
  if (problem.packed) {
    plan.tiles = problem.nheads * most_packed_tiles(problem, tile);
    plan.workspace_bytes = static_cast<int64_t>(sizeof(V3PackedTiles) + sizeof(V3PackedTile) * static_cast<size_t>(most_packed_tiles(problem, tile)));
  }
  if (problem.has_documents && problem.packed) {  // behind the list of tiles
    plan.workspace_bytes += v3_packed_document_bytes(problem.total_q, tile.block_m(), problem.total_k, tile.block_n, problem.batch);
    plan.document_grid = static_cast<int>(fattn::most_packed_tiles(problem.total_q, problem.batch, kV3DocumentCtaRows));
  } else if (problem.has_documents) {
    plan.workspace_bytes = problem.batch * v3_document_bytes(problem.seqlen_q, tile.block_m(), problem.seqlen_k, tile.block_n);
    plan.document_grid = static_cast<int>(problem.batch * v3_document_ctas(problem.seqlen_q, tile.block_m()));
  }
  if (problem.pair_mask.given) {
    const V3MaskWords words = v3_mask_words(problem);
    plan.workspace_bytes = words.bytes;
    plan.mask_grid = words.grid;
    plan.mask_threads = words.threads;
    plan.mask_words = words.before;
  }
  plan.threads = plan.tile.threads();
  plan.shared_bytes = plan.tile.shared_bytes(plan.key.width, plan.key.width_v, v3_pair_features(problem));
  schedule(problem, target, plan);
  return plan;
}

void set_v3_forward_params(V3ForwardParams& params, const Problem& problem, const V3ForwardPlan& plan, CudaDevice& device, const fattn_buffers& b) {
  const int block_n = plan.tile.block_n;
  encode_tensor_map(params.q, device, tiled_q(problem, plan.tile.queries_by_group(plan.key.mask, problem.has_documents) ? 64 : plan.tile.block_m()),
                    b.q);
  encode_tensor_map(params.k, device, tiled_k(problem, block_n), b.k);
  encode_tensor_map(params.v, device, tiled_v(problem, block_n), b.v);
  if (!problem.fp32_out) encode_tensor_map(params.o, device, tiled_o(problem, 64), b.o);  // fp32 does not leave by TMA
  params.call = pair_params(forward_params(problem, plan.heads_per_section, b), problem, b);
  params.call.tiles = static_cast<char*>(b.workspace) + plan.mask_words;
  params.call.tile_groups = plan.tile_groups;
  params.work.columns = static_cast<int>(problem.headdim);
  params.work.columns_v = static_cast<int>(problem.headdim_v);
  params.work.row_tiles = plan.row_tiles;
  params.work.tiles = static_cast<int>(plan.tiles);
  params.work.tiles_per_cta = plan.tiles_per_cta;
  const int heads = static_cast<int>(problem.batch * problem.nheads), per_section = plan.heads_per_section;
  params.work.sections = static_cast<int>(ceil_div(heads, per_section));
  params.work.heads_of_last = heads - (params.work.sections - 1) * per_section;
  if (!problem.packed) {  // whose tiles are in a list
    params.work.by_section = divisor_of(per_section * plan.row_tiles);
    params.work.by_heads = divisor_of(per_section);
    params.work.by_heads_of_last = divisor_of(params.work.heads_of_last);
  }
  params.work.by_nheads = divisor_of(static_cast<int>(problem.nheads));
  params.work.by_group = divisor_of(static_cast<int>(problem.group()));
}

V3PackedTilesKey v3_packed_tiles_key(const Problem& problem, const V3ForwardPlan& plan) {
  // In wider heads the order of the sequences' own lengths was faster, up to 1.2 times.
  const bool by_documents = problem.has_documents && std::max(problem.headdim, problem.headdim_v) <= 128;
  return {.mask = plan.key.mask,
          .block_m = plan.tile.block_m(),
          .block_n = plan.tile.block_n,
          .lengths = problem.has_seqused_k,
          .documents = by_documents};
}

jit::Request v3_packed_tiles_request(const V3PackedTilesKey& key) {
  const std::string entry = "fattn_v3_packed_tiles";
  return {.entry = entry,
          .source = text("// tiles of packed sequences", key.lengths != 0 ? " with lengths" : "", key.documents != 0 ? " with documents, " : ", ",
                         key.block_m, " x ", key.block_n, "\n#include \"kernels/v3/packed_tiles.h\"\nextern \"C\" __global__ void __launch_bounds__(",
                         kV3PackThreads, ", 1)\n", entry, "(const __grid_constant__ fattn::PairParams call) {\n  fattn::v3::packed_tiles<fattn::",
                         kV3MaskTypes[static_cast<int>(key.mask)], ", ", key.block_m, ", ", key.block_n, key.lengths != 0 ? ", true" : ", false",
                         key.documents != 0 ? ", true" : "", ">(call);\n}\n"),
          .arch = kV3Arch,
          .arch_specific = true};
}

V3DocumentRangesKey v3_document_ranges_key(const V3ForwardPlan& plan) {
  return {.block_m = plan.tile.block_m(), .block_n = plan.tile.block_n, .packed = pair_features_of(plan.key.pair).packed};
}

jit::Request v3_document_ranges_request(const V3DocumentRangesKey& key) {
  const std::string entry = "fattn_v3_document_ranges";
  const bool packed_keys = key.of_keys != 0 && key.packed != 0;  // has a list of tiles before its part of the workspace
  const std::string function = packed_keys ? "document_ranges_of_packed_keys"
                                           : text("document_ranges<", key.block_m, ", ", key.block_n, key.of_keys != 0 ? ", true" : ", false",
                                                  key.packed != 0 ? ", true" : "", ">");
  return {.entry = entry,
          .source = text("// documents", key.of_keys != 0 ? " of keys" : "", key.packed != 0 ? " of packed sequences, " : ", ", key.block_m, " x ",
                         key.block_n, "\n#include \"kernels/v3/documents.h\"\nextern \"C\" __global__ void __launch_bounds__(", kV3DocumentThreads,
                         ", 1)\n", entry, "(const __grid_constant__ fattn::PairParams call",
                         packed_keys ? ", const __grid_constant__ fattn::V3BackwardWork work" : "", ") {\n  fattn::v3::", function,
                         packed_keys ? "(call, work);\n}\n" : "(call);\n}\n"),
          .arch = kV3Arch,
          .arch_specific = true};
}

jit::Request v3_forward_request(const V3ForwardKey& key) { return v3_forward_request(key, kRows[key.row].tile); }

jit::Request v3_forward_request(const V3ForwardKey& key, const V3ForwardTile& tile) {
  V3Source source(key.dtype, key.width, key.width_v);
  source.comment_on(key.mask, key.score);
  source.add(names_of_pair(key.pair));
  source.add(", tile ", tile.block_m(), " x ", tile.block_n, tile.skip ? ", skipping" : "", "\n");
  source.add("#include \"kernels/v3/forward.h\"\n#include \"kernels/v3/mask.h\"\n#include \"kernels/v3/score.h\"\n\nstruct Spec {\n");
  source.add_element(key.dtype);
  const PairFeatures pair = pair_features_of(key.pair);
  if ((pair.lengths || pair.packed || pair.documents) && key.mask == V3Mask::kFull)
    source.add_type("Mask", "v3::EntryMask");  // keys behind an entry's last are hidden
  else
    source.add_mask(key.mask);
  source.add_score(key.score);
  source.add_int("kHeaddim", key.width);
  source.add_int("kHeaddimV", key.width_v);
  source.add_int("kGroups", tile.groups);
  source.add_int("kBlockN", tile.block_n);
  source.add_int("kStagesK", tile.stages_k);
  source.add_int("kStagesV", tile.stages_v);
  if (tile.stages_terms > 0) source.add_int("kStagesTerms", tile.stages_terms);
  source.add_int("kQueryBuffers", tile.query_buffers);
  source.add_bool("kPingPong", tile.ping_pong);
  source.add_bool("kSkip", tile.skip);
  source.add_int("kEarlyEighths", tile.early_eighths);
  // Dropout with documents leaves the widest heads too few registers for it, but in packed sequences.
  const bool tight = pair.documents && pair.dropout && !pair.packed && key.width_v > 192;
  source.add_bool("kCareful", (tile.careful() && !tight) || key.score == V3Score::kCapped);
  source.add_int("kProducerRegisters", tile.producer_registers);
  source.add_int("kConsumerRegisters", tile.consumer_registers);
  source.add(pair_line(key.pair));
  source.add("};\n\nextern \"C\" __global__ void __launch_bounds__(", tile.threads(), ", 1)\n",
             "fattn_v3_fwd(const __grid_constant__ fattn::", params_of(has_features(key.mask, key.score), key.pair),
             " call, const __grid_constant__ fattn::V3ForwardWork work,\n"
             "             const __grid_constant__ fattn::TensorMap q, const __grid_constant__ fattn::TensorMap k,\n"
             "             const __grid_constant__ fattn::TensorMap v, const __grid_constant__ fattn::TensorMap o) {\n"
             "  fattn::v3::forward<Spec>({call, work, q, k, v, o});\n}\n");
  return {.entry = "fattn_v3_fwd", .source = source.text(), .arch = kV3Arch, .arch_specific = true};
}

}  // namespace fattn::core::cuda
