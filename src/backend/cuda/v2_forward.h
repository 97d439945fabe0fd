// Host side of kernels/v2/forward.h and, for fp32, kernels/v2/forward_f32.h: which problems they take, the tile for each, the source of a
// specialisation, and what a launch needs.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "backend/cuda/kernel_kind.h"
#include "backend/cuda/target.h"
#include "device_abi/attention_params.h"
#include "jit/jit.h"
#include "problem/problem.h"

namespace fattn::core::cuda {

// Names as in kernels/v2/forward.h.
struct V2ForwardTile {
  int warps = 0, row_tiles = 0, block_n = 0, stages = 0, step_n = 0, exact_n = 0;  // exact_n: not in fp32
  bool queries_in_registers = false;
  int ctas = 0;

  constexpr int block_m() const { return warps * row_tiles * 16; }
  constexpr int threads() const { return warps * 32; }
  int shared_bytes(int headdim, int headdim_v, DType dtype, bool own = false) const;  // own: batch_invariant
};

// A row of the table of tiles (tiles/v2_forward.h): for max(headdim, headdim_v) up to `headdim` on `level`, in fp32 or in 16 bits. The first row is
// taken whose CTAs, as many as it wants on a multiprocessor, fit into its shared memory; if there is none, the first of which one fits. Under
// batch_invariant the bits follow from exact_n and block_n (in fp32 from nothing of a tile), so these must not follow from more than the device, the
// dtype, the options and the headdims.
struct V2ForwardRow {
  int level = 0, headdim = 0;
  bool causal = true;  // also under a causal mask or in a window
  bool f32 = false;
  bool heavy = false;   // for terms of pairs, dropout and what else takes registers (kV2ForwardHeavy)
  bool hides = true;    // also with bias or a mask of pairs
  bool staged = false;  // for these alone, which come through shared memory
  bool own = false;     // for batch_invariant alone
  bool few = false;     // for as many queries as a tile has, or fewer
  V2ForwardTile tile = {};
};
std::span<const V2ForwardRow> v2_forward_rows();

// Tells one specialisation from another; 64 bytes without padding.
struct V2ForwardKey {
  KernelKind kind = KernelKind::kV2Forward;
  int32_t arch = 0;
  int32_t level = 0;
  int32_t dtype = 0;  // DType
  int32_t headdim = 0, headdim_v = 0;
  int32_t causal = 0;              // by itself; with a window it is part of that
  int32_t window = 0, capped = 0;  // capped: softcap
  int32_t aligned = 0;
  int32_t row = 0;       // of the table
  int32_t pair = 0;      // pair_bits()
  int32_t own_bits = 0;  // batch_invariant
  std::array<int32_t, 3> reserved{};
};
static_assert(sizeof(V2ForwardKey) == 64);

// Why the kernel cannot compute the problem on the target; empty: it can. `without` here and below: a rule on registers (spills.h) that is not to
// count.
std::string v2_forward_refusal(const Problem& problem, const V2Target& target, std::string_view without = {});

struct V2ForwardPlan {
  V2ForwardKey key;  // but for `aligned`, which depends on the pointers
  V2ForwardTile tile;
  int64_t grid = 0;  // CTAs, one-dimensional; 0: nothing to do
  int threads = 0, shared_bytes = 0;
  int heads_per_section = 0;
  bool aligned_strides = false;
};
// For problems that are not refused.
V2ForwardPlan plan_v2_forward(const Problem& problem, const V2Target& target, std::string_view without = {});

// The key of a call whose tensors begin at multiples of 16 bytes, or not: 16-byte copies, or the slower ones that take any address.
V2ForwardKey v2_forward_key(const V2ForwardPlan& plan, bool aligned);

PagedParams v2_forward_params(const Problem& problem, const V2ForwardPlan& plan, const fattn_buffers& buffers);

jit::Request v2_forward_request(const V2ForwardKey& key);

}  // namespace fattn::core::cuda
