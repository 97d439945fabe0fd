// Host side of kernels/v3/forward_f32.h and forward_f32_split.h: which problems they take, the tile for each, the workspace for keys and values in
// two parts, the sources of the two kernels, and what their launches need.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "backend/cuda/kernel_kind.h"
#include "backend/cuda/v3_common.h"
#include "device_abi/attention_params.h"
#include "device_abi/v3_f32_parts.h"
#include "device_abi/v3_forward_work.h"
#include "jit/jit.h"
#include "problem/problem.h"

namespace fattn::core::cuda {

// Names as in kernels/v3/forward_f32_shape.h.
struct V3ForwardF32Tile {
  int groups = 0, stages_k = 0, stages_v = 0;
  bool queries_in_registers = false;
  int producer_registers = 0, consumer_registers = 0;

  constexpr int block_m() const { return 64 * groups; }
  constexpr int threads() const { return 128 * (groups + 1); }
  constexpr int launch_registers() const { return v3_launch_registers(threads()); }
  constexpr bool registers_suffice() const { return producer_registers + groups * consumer_registers <= launch_registers() * (groups + 1); }
  int shared_bytes(int headdim, int headdim_v) const;
};

// A row of the table of tiles (tiles/v3_forward_f32.h): for headdim and headdim_v up to these. The first that a problem fits is taken.
struct V3ForwardF32Row {
  int headdim = 0, headdim_v = 0;
  V3ForwardF32Tile tile = {};
};
std::span<const V3ForwardF32Row> v3_forward_f32_rows();

// Tells one specialisation from another, of either kernel (the one that splits has neither mask nor row); 64 bytes without padding.
struct V3ForwardF32Key {
  KernelKind kind = KernelKind::kV3ForwardF32;
  int32_t headdim = 0, headdim_v = 0;
  V3Mask mask = V3Mask::kFull;
  int32_t aligned = 0;  // 16-byte copies
  int32_t row = 0;      // of the table
  int32_t sinks = 0;
  std::array<int32_t, 9> reserved{};
};
static_assert(sizeof(V3ForwardF32Key) == 64);

// Why the kernels cannot compute the problem on the target, or, where the choice is the planner's, are not worth it; empty: they are.
std::string v3_forward_f32_refusal(const Problem& problem, const V3Target& target);

struct V3ForwardF32Plan {
  V3ForwardF32Key key;  // but for `aligned`, which depends on the pointers
  V3ForwardF32Tile tile;
  bool aligned_strides = false;
  int64_t tiles = 0;
  int grid = 0, threads = 0, shared_bytes = 0;
  int row_tiles = 0, heads_per_section = 0, tiles_per_cta = 0;
  int blocks = 0;              // of keys, of a head
  int64_t split_grid = 0;      // CTAs of the first kernel
  int64_t values_offset = 0;   // in the workspace, which begins with the parts of k; then those of v
  int64_t factors_offset = 0;  // of blocks of k, then of v
  int64_t spoilt_offset = 0;   // of blocks of v
  int64_t workspace_bytes = 0;
  V3ForwardF32Key split_key() const;
};
// For problems that are not refused.
V3ForwardF32Plan plan_v3_forward_f32(const Problem& problem, const V3Target& target);

// The kernels' parameters, and where they are, in order.
struct V3ForwardF32Params {
  PairParams call;
  V3ForwardWork work;
  V3F32Parts parts;
  std::array<void*, 2> of_split() { return {&call, &parts}; }
  std::array<void*, 3> of_forward() { return {&call, &work, &parts}; }
};
V3ForwardF32Params v3_forward_f32_params(const Problem& problem, const V3ForwardF32Plan& plan, const fattn_buffers& buffers);

jit::Request v3_forward_f32_request(const V3ForwardF32Key& key);

}  // namespace fattn::core::cuda
