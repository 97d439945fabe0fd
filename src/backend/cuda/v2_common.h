// What the host sides of the v2 forward and backward kernels share: the target, the limits, alignment, the sizes of a call.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "problem/problem.h"
#include "shared/attention_params.h"
#include "shared/term_tile.h"
#include "shared/text.h"

namespace fattn::core::cuda {

// What is asked of the device. `level` is what the kernel is written for, 75 or 80; `arch` what it is compiled for.
struct V2Target {
  int arch = 0;
  int level = 0;
  int64_t shared_bytes = 0;                     // that a CTA can have (opted in)
  int64_t shared_bytes_per_multiprocessor = 0;  // for all CTAs there
  int64_t l2_bytes = 0;
};

inline constexpr int64_t kReservedSharedBytes = 1024;    // of each CTA, by the system
inline constexpr int64_t kMaxSeqlen = int64_t{1} << 30;  // rows and keys are counted in 32 bits, with room for a tile
inline constexpr int64_t kMaxGrid = std::numeric_limits<int32_t>::max();

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Why no v2 kernel can compute the problem on the target, whatever its tiles; empty: tiles and grid decide.
std::string v2_refusal(const Problem& problem, const V2Target& target);
// Part of it, and of v3_refusal(): lengths that are too great for a window.
std::string window_refusal(const Problem& problem);

// Whether 16-byte copies can take rows with these strides. A stride along a dimension of one element is never used.
bool aligned(const Strides& strides, int64_t batch, int64_t rows, int64_t heads, DType dtype);
constexpr int64_t copied_at_once(DType dtype) { return dtype == DType::kF32 ? 4 : 8; }  // elements of 16 bytes
inline bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

inline TensorStrides strides_of(const Strides& strides) { return {strides.batch, strides.row, strides.head}; }

// ", dropout" and so on, of the features in a key.
std::string names_of_pair(int32_t bits);

// The first line of a kernel's source, which `fattn cache list` shows: "// bf16, headdim 128, causal, tile 128 x 64, level 80". `block_m` 0: no tile.
template <class Key>
std::string comment_of(const Key& key, int block_m = 0, int block_n = 0) {
  std::string line = text("// ", name_of(static_cast<DType>(key.dtype)), ", headdim ", key.headdim);
  if (key.headdim_v != key.headdim) line += text(" and ", key.headdim_v);
  if (key.causal) line += ", causal";
  if constexpr (requires { key.window; }) {
    if (key.window) line += ", window";
    if (key.capped) line += ", softcap";
  }
  if constexpr (requires { key.pair; }) line += names_of_pair(key.pair);
  if constexpr (requires { key.deterministic; })
    if (key.deterministic) line += ", deterministic";
  if (!key.aligned) line += ", unaligned";
  if (block_m > 0) line += text(", tile ", block_m, " x ", block_n);
  return line + text(", level ", key.level, "\n");
}

// What a specialisation's kernel takes: the longer parameters only where it reads what they have more, so that the others are as they were.
constexpr const char* params_of(bool features, int32_t pair = 0) { return pair != 0 ? "PairParams" : features ? "FeatureParams" : "AttentionParams"; }

// ---- Features of pairs ----

PairFeatures pair_features(const Problem& problem);
// A number for a kernel's key, and back. dlse is of the key that prepares a backward pass alone.
int32_t pair_bits(const PairFeatures& pair);
PairFeatures pair_features_of(int32_t bits);
// The line of a specialisation that says them; none if there are none.
std::string pair_line(int32_t bits);
// Whether scores or weights have a part for every pair, which takes registers.
inline bool heavy(const PairFeatures& pair) { return pair.terms() || pair.dropout || pair.dbias; }

// Whether there is something that can come through shared memory: bias or a mask of pairs.
inline bool can_stage(const PairFeatures& pair) { return pair.bias != 0 || pair.mask; }
// What a tile of them takes there.
constexpr TermTile term_tile(const PairFeatures& pair, int rows, int keys, bool transposed) {
  return {rows, keys, pair.bias == 0 ? 0 : pair.bias == 2 ? 4 : 2, pair.mask, transposed};
}

// `params` with what a problem's features of pairs need; dbias itself is the backward pass's business.
PairParams pair_params(const FeatureParams& params, const Problem& problem, const fattn_buffers& buffers);

// Sizes, the window, and the strides of q, k, v, o and lse; the rest is zero.
FeatureParams v2_params(const Problem& problem, int heads_per_section);

// v2_params() with all that a backward pass takes besides; the offsets are of its parts of the workspace, which begins with dq in fp32.
FeatureParams backward_params(const Problem& problem, int heads_per_section, const fattn_buffers& buffers, bool deterministic, int64_t row_sum_offset,
                              int64_t semaphore_offset);

// softmax_scale and softmax_scale_log2 of a forward pass; with softcap also score_factor.
void set_forward_scale(FeatureParams& params, double softmax_scale, double softcap);

// Whether rows see ever more keys, so that the last tiles of queries take longest; in a window with a beginning all take as long.
inline bool last_rows_longest(const Problem& problem) { return problem.causal && !problem.mask().begins(); }

}  // namespace fattn::core::cuda
