// Host side of kernels/v3/forward.h: which problems it takes, the tile and the order of the work for each, the source of a specialisation, and what a
// launch needs.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "backend/cuda/kernel_kind.h"
#include "backend/cuda/target.h"
#include "backend/cuda/v3_common.h"
#include "device/cuda_device.h"
#include "device_abi/attention_params.h"
#include "device_abi/tensor_map.h"
#include "device_abi/v3_forward_work.h"
#include "jit/jit.h"
#include "problem/problem.h"

namespace fattn::core::cuda {

// Names as in kernels/v3/forward_shape.h.
struct V3ForwardTile {
  int groups, block_n, stages_k, stages_v, query_buffers;
  bool ping_pong, skip;
  int early_eighths, producer_registers, consumer_registers;
  int stages_terms = 0;

  // Costs 5 to 8 % where registers are few, whatever the scores are; nothing where there are many. Kernels with softcap are it in any case.
  constexpr bool careful() const { return consumer_registers >= 224; }
  constexpr int block_m() const { return 64 * groups; }
  constexpr int threads() const { return 128 * (groups + 1); }
  constexpr int launch_registers() const { return v3_launch_registers(threads()); }
  // setmaxnreg beyond what the launch gave would wait for ever.
  constexpr bool registers_suffice() const { return producer_registers + groups * consumer_registers <= launch_registers() * (groups + 1); }
  // Queries are loaded for each warpgroup by itself (kernels/v3/forward_shape.h: kQueriesByGroup).
  constexpr bool queries_by_group(V3Mask mask, bool documents = false) const {
    return mask == V3Mask::kWindow && skip && query_buffers == 1 && !documents;
  }
  // `pair`: of its features, what takes shared memory.
  int shared_bytes(int width, int width_v, const PairFeatures& pair = {}) const;
};

// Which scores a row of the table is for: capped ones want registers, of four warpgroups under a causal mask all exponentials early.
// Documents in windows or beside other features want more, and with softcap or dropout leave the widest heads none to pass over blocks.
// Biases want registers too, and room for their tiles.
// A mask of pairs alone wants a few registers, and dropout at headdim 64 under a causal mask more warps than others there have registers for.
// Plain ones have no feature of a pair but ALiBi, and no softcap.
enum class V3RowScores { kAny, kUncapped, kCapped, kDocuments, kTightDocuments, kTerms, kMask, kDropout, kPlain };

// A row of the table of tiles.
struct V3ForwardRow {
  int width;  // v3_row_width() of the problem's
  V3Mask mask;
  int most_keys;  // for seqlen_k up to this
  double speed;   // over that of the first row for such problems, when all multiprocessors are busy
  V3ForwardTile tile;
  V3RowScores scores = V3RowScores::kAny;
  // Two warpgroups have registers for most of what problems have besides.
  constexpr bool has_registers() const { return tile.groups <= 2 && !special(); }
  // Lengths, or packed sequences; `more`: with ALiBi or softcap besides. At headdim 64 packed sequences in windows have no registers for more
  // warpgroups (spills of 4 bytes), lengths under a causal mask none for three (8 bytes). Other rows with registers for softcap are for it. Windows
  // of 1024 keys over 4 packed sequences of 4096 rows (one H100, 2026-11-25): three warpgroups 0.92 of the time of two at headdim 96, 0.91 at 128; of
  // 256 keys over 16 of 64 to 1984 rows 0.94 and 0.86.
  constexpr bool takes_lengths(bool more, bool packed) const {
    if (more || (packed && mask == V3Mask::kWindow && width == 64)) return has_registers();
    if (width == 64 && mask == V3Mask::kCausal && !packed)
      return tile.groups != 3 && !special() && !(scores == V3RowScores::kCapped && tile.groups > 2);
    return scores != V3RowScores::kCapped && !special();
  }
  // Documents: with blocks of 128 keys spills of 4 to 136 bytes in windows and if there are `more` features.
  // Three warpgroups are faster by a tenth at headdim 64, causal, and have registers without; four have none. Without a mask their 192 rows
  // cross more documents than that is worth: 4 x 4096, 32 heads, 4 documents each 0.366 ms, of two 0.339; of uneven length 0.537 and 0.502.
  // `many`: with softcap or dropout. In packed sequences the widest heads have registers for these all the same.
  constexpr bool takes_documents(bool more, bool many, bool packed) const {
    const bool tight = width == 256 && mask != V3Mask::kFull && many && !packed;
    if (tight || scores == V3RowScores::kTightDocuments) return tight && scores == V3RowScores::kTightDocuments;
    more = more || many || packed;
    if (width == 64 && mask == V3Mask::kCausal && !more) return tile.groups == 3 && scores == V3RowScores::kDocuments;
    return more || mask == V3Mask::kWindow ? tile.groups <= 2 && tile.block_n == 64 && !takes_terms() : has_registers();
  }
  // Random numbers come in blocks of 64 keys, and want registers, the more the less regular the mask is: spills of 64 to 104 bytes in others. `more`:
  // with lengths, packed sequences or ALiBi besides.
  constexpr bool takes_dropout(bool more) const {
    if (width == 64 && mask == V3Mask::kCausal && !more) return scores == V3RowScores::kDropout;
    const int groups = more ? 2 : mask == V3Mask::kFull && tile.block_n == 64 ? 4 : tile.block_n == 64 ? 3 : 2;
    return tile.block_n % 64 == 0 && tile.groups <= groups && !special();
  }
  constexpr bool takes(bool capped) const {
    if (scores == V3RowScores::kPlain) return !capped;
    return scores == V3RowScores::kAny || (!special() && (scores == V3RowScores::kCapped) == capped);
  }
  constexpr bool takes_terms() const { return scores == V3RowScores::kTerms; }
  // A mask of pairs alone: its words are of 64 keys. At headdim 64 it has tiles of its own; at 128, without another mask, two
  // warpgroups are faster.
  constexpr bool takes_mask(bool lengths) const {
    if (lengths) return has_registers() && tile.block_n % 64 == 0;
    if (width == 64) return scores == V3RowScores::kMask;
    return tile.block_n % 64 == 0 && !special() && !(width == 128 && mask == V3Mask::kFull && tile.groups > 2);
  }
  // For problems of one kind alone.
  constexpr bool special() const {
    return scores == V3RowScores::kDocuments || scores == V3RowScores::kTightDocuments || scores == V3RowScores::kTerms ||
           scores == V3RowScores::kMask || scores == V3RowScores::kDropout || scores == V3RowScores::kPlain;
  }
};
std::span<const V3ForwardRow> v3_forward_rows();

// The rows for these widths: the least that has any.
int v3_row_width(int width, int width_v);

// Tells one specialisation from another; 64 bytes without padding.
struct V3ForwardKey {
  KernelKind kind = KernelKind::kV3Forward;
  int32_t dtype = 0;  // DType
  int32_t width = 0, width_v = 0;
  V3Mask mask = V3Mask::kFull;
  V3Score score = V3Score::kPlain;  // kSigned: softmax_scale is negative or 0
  int32_t row = 0;                  // of the table
  int32_t pair = 0;                 // pair_bits(), of lengths or packed sequences, ALiBi, dropout, documents, bias and mask
  std::array<int32_t, 8> reserved{};
};
static_assert(sizeof(V3ForwardKey) == 64);

// The kernel that lists the tiles of packed sequences (kernels/v3/packed_tiles.h); 64 bytes without padding.
struct V3PackedTilesKey {
  KernelKind kind = KernelKind::kV3PackedTiles;
  V3Mask mask = V3Mask::kFull;
  int32_t block_m = 0, block_n = 0;
  int32_t lengths = 0;    // whether they use some of their keys alone
  int32_t documents = 0;  // whether the blocks that their documents leave are counted
  std::array<int32_t, 10> reserved{};
};
static_assert(sizeof(V3PackedTilesKey) == 64);
jit::Request v3_packed_tiles_request(const V3PackedTilesKey& key);

// The kernel that finds what the ids of documents let queries see, or backward keys (kernels/v3/documents.h); 64 bytes without padding.
struct V3DocumentRangesKey {
  KernelKind kind = KernelKind::kV3DocumentRanges;
  int32_t block_m = 0, block_n = 0;
  int32_t of_keys = 0;
  int32_t packed = 0;
  std::array<int32_t, 11> reserved{};
};
static_assert(sizeof(V3DocumentRangesKey) == 64);
jit::Request v3_document_ranges_request(const V3DocumentRangesKey& key);

// Why the kernel cannot compute the problem on the target; empty: it can, with pointers that tensor_map_takes().
std::string v3_forward_refusal(const Problem& problem, const V3Target& target);

struct V3ForwardPlan {
  V3ForwardKey key;
  V3ForwardTile tile;
  int64_t tiles = 0;
  int grid = 0, threads = 0, shared_bytes = 0;
  int row_tiles = 0, heads_per_section = 0, tiles_per_cta = 0, tile_groups = 0;
  int64_t workspace_bytes = 0;  // what a kernel before this one writes: of packed sequences the list of tiles, of documents the blocks of keys,
                                // of a mask of pairs its words and the blocks that it shows
  int document_grid = 0;        // of that kernel
  int64_t mask_grid = 0;        // CTAs of the kernel that makes words of a mask of pairs
  int mask_threads = 0;         // of each
  int64_t mask_words = 0;       // where in the workspace the words are
};
// Of a plan for documents.
V3DocumentRangesKey v3_document_ranges_key(const V3ForwardPlan& plan);
// Of a plan for packed sequences.
V3PackedTilesKey v3_packed_tiles_key(const Problem& problem, const V3ForwardPlan& plan);
// For problems that are not refused.
V3ForwardPlan plan_v3_forward(const Problem& problem, const V3Target& target);
// With a tile that the table need not have, as the search for tiles tries them; key.row is -1.
V3ForwardPlan plan_v3_forward(const Problem& problem, const V3Target& target, const V3ForwardTile& tile);

// The kernel's parameters, and where they are, in order.
struct V3ForwardParams {
  PairParams call;
  V3ForwardWork work;
  TensorMap q, k, v, o;
  std::array<void*, 6> pointers() { return {&call, &work, &q, &k, &v, &o}; }
};
void set_v3_forward_params(V3ForwardParams& params, const Problem& problem, const V3ForwardPlan& plan, CudaDevice& device,
                           const fattn_buffers& buffers);

jit::Request v3_forward_request(const V3ForwardKey& key);
jit::Request v3_forward_request(const V3ForwardKey& key, const V3ForwardTile& tile);

}  // namespace fattn::core::cuda
