// Host side of kernels/v3/backward*.h: which problems they take, the tile for each, the source of a specialisation, and what the launches need.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "backend/cuda/kernel_kind.h"
#include "backend/cuda/v2_backward.h"
#include "backend/cuda/v3_common.h"
#include "backend/cuda/v3_forward.h"
#include "device/cuda_device.h"
#include "device_abi/attention_params.h"
#include "device_abi/tensor_map.h"
#include "device_abi/v3_backward_work.h"
#include "jit/jit.h"
#include "problem/problem.h"

namespace fattn::core::cuda {

// Names as in kernels/v3/backward_shape.h.
struct V3BackwardTile {
  bool by_role = false;
  int groups = 0, stages = 0, stagings = 0;
  bool own_loader = false;
  int main_registers = 0, dq_registers = 0, loader_registers = 0;

  constexpr int block_n() const { return by_role ? 64 : 64 * groups; }
  constexpr int threads() const { return 128 * (groups + 1 + (own_loader ? 1 : 0)); }
  constexpr int launch_registers() const { return v3_launch_registers(threads()); }
  constexpr int moved_registers() const { return groups * main_registers + dq_registers + (own_loader ? loader_registers : 0); }
  int shared_bytes(int width, int width_v, const PairFeatures& pair) const;
  bool operator==(const V3BackwardTile&) const = default;
};

// A row of the table of tiles (tiles/v3_backward.h): for the wider of headdim and headdim_v up to `width`, with or without dropout; causal: only
// under a causal mask.
struct V3BackwardRow {
  int width = 0;
  bool dropout = false, causal = false;
  V3BackwardTile tile = {};
};
std::span<const V3BackwardRow> v3_backward_rows();

// Tells one specialisation of one of the three kernels, or of kernels/v3/backward_dbias.h, from another; 64 bytes without padding.
struct V3BackwardKey {
  KernelKind kind = KernelKind::kV3Backward;
  int32_t dtype = 0;  // DType
  int32_t width = 0, width_v = 0;
  V3Mask mask = V3Mask::kFull;
  V3Score score = V3Score::kPlain;  // kSigned never
  int32_t deterministic = 0;
  int32_t row = 0;   // of the table
  int32_t pair = 0;  // pair_bits()
  int32_t ring = 0;  // whether dq is converted early (kernels/v3/backward_ring.h)
  std::array<int32_t, 6> reserved{};
};
static_assert(sizeof(V3BackwardKey) == 64);

// The kernel that lists the tiles of keys of packed sequences (kernels/v3/packed_key_tiles.h); 64 bytes without padding.
struct V3PackedKeyTilesKey {
  KernelKind kind = KernelKind::kV3PackedKeyTiles;
  int32_t block_n = 0;
  int32_t lengths = 0;  // whether they use some of their keys alone
  std::array<int32_t, 13> reserved{};
};
static_assert(sizeof(V3PackedKeyTilesKey) == 64);
jit::Request v3_packed_key_tiles_request(const V3PackedKeyTilesKey& key);

// Why the kernels cannot compute the problem on the target; empty: they can, with pointers of which each tensor_map_takes(). `without` here and
// below: a rule on registers (spills.h) that is not to count.
std::string v3_backward_refusal(const Problem& problem, const V3Target& target, std::string_view without = {});

// Launched in this order on one stream: prepare, with documents the kernel that finds their blocks, with a mask of pairs the one that makes words of
// it, main, finish. All but the first come up while the one before still runs. Of packed sequences a kernel that lists tiles is before them all, and
// nothing is launched of a grid of 0.
struct V3BackwardPlan {
  V3BackwardKey prepare, main, finish;
  V3BackwardTile tile;
  int64_t grid = 0, prepare_grid = 0, finish_grid = 0;  // CTAs of the main kernel, and of the others
  int threads = 0, shared_bytes = 0, finish_shared_bytes = 0;
  int row_blocks = 0, key_tiles = 0, heads_per_section = 0;  // of packed sequences, those that there may be
  int generation = 0, ring_heads = 0;                        // of the ring of dq's accumulators (V3BackwardWork); 0: all heads have a place in it
  int64_t document_grid = 0;  // CTAs of the kernel that finds what the ids of documents leave each 64 keys; behind the first kernel
  int64_t mask_grid = 0;      // CTAs of the kernel that makes words of a mask of pairs; likewise
  int mask_threads = 0;       // of each
  // With dbias: the kernel that computes it, unless the main kernel does, by tiles (0: it does), so many CTAs, and as many again for each part of
  // what is added up; CTAs of each of v2's kernels where several CTAs add to an element, before and behind; and where it is summed then, unless in
  // place.
  V3BackwardKey dbias;
  int64_t dbias_tiles = 0, dbias_ctas = 0, dbias_grid = 0, dbias_offset = 0;
  int dbias_parts = 1, dbias_shared_bytes = 0;
  // Workspace: dq in fp32, lse in other units, row sums, tiles of packed sequences or what documents leave (device_abi/v3_documents.h) or words of a
  // mask of pairs (device_abi/v3_mask_words.h) and, if deterministic, whose turn it is for each block of queries, or the ring's counts. 16-byte
  // aligned.
  int64_t lse_log2_offset = 0, row_sum_offset = 0, nonfinite_offset = 0, tiles_offset = 0, semaphore_offset = 0, workspace_bytes = 0;
};
// Of a plan for packed sequences.
V3PackedKeyTilesKey v3_packed_key_tiles_key(const Problem& problem, const V3BackwardPlan& plan);
// Of a plan for documents.
V3DocumentRangesKey v3_document_ranges_key(const V3BackwardPlan& plan);
// For problems that are not refused.
V3BackwardPlan plan_v3_backward(const Problem& problem, const V3Target& target, std::string_view without = {});
// With a tile that the table need not have, as the search for tiles tries them; the row is -1 in keys of kernels that depend on the tile.
V3BackwardPlan plan_v3_backward(const Problem& problem, const V3Target& target, const V3BackwardTile& tile);
// Also with the number of key heads in a generation of the ring of dq's accumulators, or 0: none. A ring needs two generations at least, and kernels
// for it (other_keys_of()).
V3BackwardPlan plan_v3_backward(const Problem& problem, const V3Target& target, const V3BackwardTile& tile, int generation);

// The kernels for the same problem with as many heads, or on a GPU of such a size, that the choice of a ring is the other; the plan's if there is
// none.
std::array<V3BackwardKey, 3> other_keys_of(const Problem& problem, const V3BackwardPlan& plan);

// The parameters of the kernels, and where they are, in order. The first kernel takes the first two of them only.
struct V3BackwardParams {
  PairParams call;
  V3BackwardWork work;
  TensorMap q, k, v, dout, dk, dv;
  TensorMap dbias_k, dbias_v;  // in their place in the kernel that computes dbias
  std::array<void*, 8> pointers() { return {&call, &work, &q, &k, &v, &dout, &dk, &dv}; }
  std::array<void*, 8> of_dbias() { return {&call, &work, &q, &dbias_k, &dbias_v, &dout, &dk, &dv}; }
};
void set_v3_backward_params(V3BackwardParams& params, const Problem& problem, const V3BackwardPlan& plan, CudaDevice& device,
                            const fattn_buffers& buffers);
inline constexpr int kV3DbiasThreads = 384;
int dbias_shared_bytes(const V3BackwardKey& key);  // of kernels/v3/backward_dbias.h

jit::Request v3_backward_request(const V3BackwardKey& key);
jit::Request v3_backward_request(const V3BackwardKey& key, const V3BackwardTile& tile);

}  // namespace fattn::core::cuda
