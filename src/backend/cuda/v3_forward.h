// Host side of kernels/v3/forward.h: which problems it takes, the tile and the order of the work for each, the source of a specialisation, and what a
// launch needs.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>

#include "backend/cuda/kernel_kind.h"
#include "backend/cuda/spills.h"
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
  int groups = 0, block_n = 0, stages_k = 0, stages_v = 0, query_buffers = 0;
  bool ping_pong = false, skip = false;
  int early_eighths = 0, producer_registers = 0, consumer_registers = 0;
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

// What a row of the table is for: kAny, kUncapped and kCapped for most of what problems have, the others for one thing alone. Capped scores want
// registers, of four warpgroups under a causal mask all exponentials early. Documents in windows or beside other features want more, and with softcap
// or dropout leave the widest heads none to pass over blocks (kTightDocuments). Biases want registers too, and room for their tiles. kPlain: no
// feature of a pair but ALiBi, and no softcap. tiles/v3_forward_rules.h says which problems have which.
enum class V3RowScores { kAny, kUncapped, kCapped, kDocuments, kTightDocuments, kTerms, kMask, kDropout, kPlain };

// A row of the table of tiles (tiles/v3_forward.h).
struct V3ForwardRow {
  int width = 0;  // v3_row_width() of the problem's
  V3Mask mask = V3Mask::kFull;
  int most_keys = std::numeric_limits<int>::max();  // for seqlen_k up to this
  double speed = 1;                                 // over that of the first row for such problems, when all multiprocessors are busy
  V3RowScores scores = V3RowScores::kAny;
  V3ForwardTile tile = {};
};
std::span<const V3ForwardRow> v3_forward_rows();

// Whether the row is for such problems, but for width and mask. `without`: a rule of tiles/v3_forward_rules.h that is not to count.
bool v3_row_takes(const V3ForwardRow& row, const RegisterFacts& facts, std::string_view without = {});

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

// Why the kernel cannot compute the problem on the target; empty: it can, with pointers that tensor_map_takes(). `without` here and below: a rule on
// registers that is not to count.
std::string v3_forward_refusal(const Problem& problem, const V3Target& target, std::string_view without = {});

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
V3ForwardPlan plan_v3_forward(const Problem& problem, const V3Target& target, std::string_view without = {});
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
