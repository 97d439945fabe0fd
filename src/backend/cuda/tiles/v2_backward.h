// Tiles of the v2 backward kernels, 16 bits and fp32, and what has no registers in them. Which were tried: docs/results/LOG.md.
#pragma once

#include "backend/cuda/spills.h"
#include "backend/cuda/v2_backward.h"

namespace fattn::core::cuda {

// The first row of each headdim on level 80 is what was fastest on one H200; those behind it are for GPUs with less shared memory, chosen by count of
// bytes and registers, and run for correctness only.
// clang-format off
inline constexpr V2BackwardRow kV2BackwardTable[] = {
    {.level = 80, .headdim = 64, .ctas = 2,
     .tile = {.block_m = 64, .block_n = 128, .key_groups = 2, .group_warps = 1, .chunk = 32, .pipelined = true}},
    {.level = 80, .headdim = 64, .ctas = 2,
     .tile = {.block_m = 64, .block_n = 128, .key_groups = 2, .group_warps = 1, .chunk = 32}},
    {.level = 80, .headdim = 64, .ctas = 1,
     .tile = {.block_m = 64, .block_n = 128, .key_groups = 4, .group_warps = 1, .chunk = 32, .pipelined = true}},
    {.level = 80, .headdim = 64, .ctas = 2,
     .tile = {.block_m = 64, .block_n = 64, .key_groups = 2, .group_warps = 1, .chunk = 32}},
    {.level = 80, .headdim = 96, .ctas = 1,
     .tile = {.block_m = 64, .block_n = 128, .key_groups = 4, .group_warps = 1, .chunk = 64, .pipelined = true}},
    {.level = 80, .headdim = 96, .ctas = 1,
     .tile = {.block_m = 64, .block_n = 64, .key_groups = 4, .group_warps = 1, .chunk = 64, .pipelined = true}},
    {.level = 80, .headdim = 128, .ctas = 1, .tight = true,
     .tile = {.block_m = 64, .block_n = 128, .key_groups = 4, .group_warps = 1, .chunk = 64, .pipelined = true}},
    {.level = 80, .headdim = 128, .ctas = 1,
     .tile = {.block_m = 64, .block_n = 128, .key_groups = 4, .group_warps = 1, .chunk = 32, .pipelined = true}},
    {.level = 80, .headdim = 128, .ctas = 1,
     .tile = {.block_m = 64, .block_n = 128, .key_groups = 4, .group_warps = 1, .chunk = 32}},
    {.level = 80, .headdim = 128, .ctas = 1,
     .tile = {.block_m = 64, .block_n = 64, .key_groups = 4, .group_warps = 1, .chunk = 64}},
    {.level = 80, .headdim = 256, .ctas = 1,
     .tile = {.block_m = 64, .block_n = 64, .key_groups = 2, .group_warps = 2, .chunk = 32, .pipelined = true}},
    {.level = 80, .headdim = 256, .ctas = 1,
     .tile = {.block_m = 64, .block_n = 64, .key_groups = 2, .group_warps = 2, .chunk = 32}},
    {.level = 80, .headdim = 256, .ctas = 1,
     .tile = {.block_m = 64, .block_n = 32, .key_groups = 2, .group_warps = 2, .chunk = 32}},
    {.level = 80, .headdim = 256, .ctas = 1,
     .tile = {.block_m = 32, .block_n = 32, .key_groups = 2, .group_warps = 2, .chunk = 16}},
    // With masks of pairs and bias, which come through shared memory.
    {.level = 80, .headdim = 64, .ctas = 2, .heavy = true, .staged = true,
     .tile = {.block_m = 64, .block_n = 64, .key_groups = 2, .group_warps = 1, .chunk = 32, .pipelined = true}},
    {.level = 80, .headdim = 128, .ctas = 1, .heavy = true, .staged = true,
     .tile = {.block_m = 64, .block_n = 128, .key_groups = 4, .group_warps = 1, .chunk = 32, .pipelined = true}},
    {.level = 80, .headdim = 128, .ctas = 1, .heavy = true, .staged = true,
     .tile = {.block_m = 64, .block_n = 64, .key_groups = 4, .group_warps = 1, .chunk = 32, .pipelined = true}},
    {.level = 80, .headdim = 128, .ctas = 1, .heavy = true, .staged = true,
     .tile = {.block_m = 64, .block_n = 64, .key_groups = 4, .group_warps = 1, .chunk = 32}},
    {.level = 80, .headdim = 256, .ctas = 1, .heavy = true, .staged = true,
     .tile = {.block_m = 32, .block_n = 32, .key_groups = 2, .group_warps = 2, .chunk = 16}},
    // With masks of pairs, bias, dbias, softcap and terms, or ALiBi and dropout above headdim 64, by count of registers; not timed.
    {.level = 80, .headdim = 64, .ctas = 1, .heavy = true,
     .tile = {.block_m = 64, .block_n = 64, .key_groups = 4, .group_warps = 1, .chunk = 32, .pipelined = true}},
    {.level = 80, .headdim = 128, .ctas = 1, .heavy = true,
     .tile = {.block_m = 64, .block_n = 64, .key_groups = 4, .group_warps = 1, .chunk = 32, .pipelined = true}},
    {.level = 80, .headdim = 128, .ctas = 1, .heavy = true,
     .tile = {.block_m = 64, .block_n = 64, .key_groups = 4, .group_warps = 1, .chunk = 32}},
    {.level = 80, .headdim = 256, .ctas = 1, .heavy = true,
     .tile = {.block_m = 32, .block_n = 32, .key_groups = 2, .group_warps = 2, .chunk = 16}},
    {.level = 80, .headdim = 256, .ctas = 1, .heavy = true,
     .tile = {.block_m = 32, .block_n = 16, .key_groups = 1, .group_warps = 2, .chunk = 16}},
    // Level 75; run for correctness only.
    {.level = 75, .headdim = 64, .ctas = 1,
     .tile = {.block_m = 64, .block_n = 64, .key_groups = 2, .group_warps = 1, .chunk = 32}},
    {.level = 75, .headdim = 96, .ctas = 1,
     .tile = {.block_m = 32, .block_n = 64, .key_groups = 2, .group_warps = 1, .chunk = 32}},
    {.level = 75, .headdim = 128, .ctas = 1,
     .tile = {.block_m = 32, .block_n = 64, .key_groups = 4, .group_warps = 1, .chunk = 32}},
    {.level = 75, .headdim = 192, .ctas = 1,
     .tile = {.block_m = 32, .block_n = 32, .key_groups = 2, .group_warps = 2, .chunk = 16}},
    {.level = 75, .headdim = 256, .ctas = 1,
     .tile = {.block_m = 32, .block_n = 16, .key_groups = 1, .group_warps = 2, .chunk = 16}},
    // fp32.
    {.level = 80, .headdim = 64, .ctas = 1, .f32 = true, .query_stages = 2,
     .tile = {.block_m = 64, .block_n = 128, .key_groups = 4, .group_warps = 1, .chunk = 32}},
    {.level = 80, .headdim = 64, .ctas = 1, .f32 = true,
     .tile = {.block_m = 64, .block_n = 128, .key_groups = 4, .group_warps = 1, .chunk = 32}},
    {.level = 80, .headdim = 64, .ctas = 1, .f32 = true,
     .tile = {.block_m = 64, .block_n = 64, .key_groups = 2, .group_warps = 1, .chunk = 32}},
    {.level = 80, .headdim = 128, .ctas = 1, .f32 = true, .query_stages = 2,
     .tile = {.block_m = 64, .block_n = 64, .key_groups = 4, .group_warps = 1, .chunk = 32}},
    {.level = 80, .headdim = 128, .ctas = 1, .f32 = true,
     .tile = {.block_m = 64, .block_n = 64, .key_groups = 4, .group_warps = 1, .chunk = 32}},
    {.level = 80, .headdim = 128, .ctas = 1, .f32 = true,
     .tile = {.block_m = 32, .block_n = 32, .key_groups = 2, .group_warps = 1, .chunk = 32}},
    {.level = 80, .headdim = 256, .ctas = 1, .f32 = true, .parts = 2,
     .tile = {.block_m = 32, .block_n = 64, .key_groups = 4, .group_warps = 1, .chunk = 32}},
    {.level = 80, .headdim = 256, .ctas = 1, .f32 = true, .parts = 2,
     .tile = {.block_m = 32, .block_n = 32, .key_groups = 2, .group_warps = 1, .chunk = 32}},
    {.level = 80, .headdim = 256, .ctas = 1, .f32 = true, .parts = 2,
     .tile = {.block_m = 16, .block_n = 16, .key_groups = 1, .group_warps = 1, .chunk = 16}},
    {.level = 80, .headdim = 256, .ctas = 1, .f32 = true, .parts = 2,
     .tile = {.block_m = 32, .block_n = 16, .key_groups = 1, .group_warps = 1, .chunk = 32}},
    // fp32, as above with masks of pairs and so on.
    {.level = 80, .headdim = 64, .ctas = 1, .f32 = true, .heavy = true, .one_term = true,
     .tile = {.block_m = 64, .block_n = 128, .key_groups = 4, .group_warps = 1, .chunk = 32}},
    {.level = 80, .headdim = 64, .ctas = 1, .f32 = true, .heavy = true,
     .tile = {.block_m = 64, .block_n = 64, .key_groups = 4, .group_warps = 1, .chunk = 32}},
    {.level = 80, .headdim = 128, .ctas = 1, .f32 = true, .heavy = true, .one_term = true,
     .tile = {.block_m = 64, .block_n = 64, .key_groups = 4, .group_warps = 1, .chunk = 32}},
    {.level = 80, .headdim = 128, .ctas = 1, .f32 = true, .heavy = true,
     .tile = {.block_m = 32, .block_n = 64, .key_groups = 4, .group_warps = 1, .chunk = 16}},
    {.level = 80, .headdim = 128, .ctas = 1, .f32 = true, .heavy = true,
     .tile = {.block_m = 32, .block_n = 32, .key_groups = 2, .group_warps = 1, .chunk = 16}},
    {.level = 80, .headdim = 256, .ctas = 1, .f32 = true, .parts = 2, .heavy = true,
     .tile = {.block_m = 32, .block_n = 64, .key_groups = 4, .group_warps = 1, .chunk = 16}},
    {.level = 80, .headdim = 256, .ctas = 1, .f32 = true, .parts = 2, .heavy = true,
     .tile = {.block_m = 32, .block_n = 32, .key_groups = 2, .group_warps = 1, .chunk = 16}},
    {.level = 80, .headdim = 256, .ctas = 1, .f32 = true, .parts = 2, .heavy = true,
     .tile = {.block_m = 16, .block_n = 16, .key_groups = 1, .group_warps = 1, .chunk = 16}},
    {.level = 80, .headdim = 256, .ctas = 1, .f32 = true, .parts = 2, .heavy = true,
     .tile = {.block_m = 32, .block_n = 16, .key_groups = 1, .group_warps = 1, .chunk = 16}},
};
// clang-format on

// Which rows of the table a rule is about: all that is said holds; 0 and false: whichever.
struct V2BackwardRowsOf {
  int block_m = 0, block_n = 0, chunk = 0;
  int keys_above = 0, warp_keys_above = 0;  // block_n, and a warp's share of it
  bool pipelined = false, staged = false, one_term = false;

  constexpr bool has(const V2BackwardRow& row) const {
    const V2BackwardShape& tile = row.tile;
    return (block_m == 0 || tile.block_m == block_m) && (block_n == 0 || tile.block_n == block_n) && (chunk == 0 || tile.chunk == chunk) &&
           tile.block_n > keys_above && tile.block_n > warp_keys_above * tile.key_groups && (!pipelined || tile.pipelined) &&
           (!staged || row.staged) && (!one_term || row.one_term);
  }
};
using V2BackwardSpill = SpillRule<V2BackwardRowsOf>;

// Problems for the heavy rows, and for these alone: in the others they spill.
// clang-format off
inline constexpr GroupRule kV2BackwardHeavy[] = {
    {.name = "terms of pairs",
     .where = {.level = 80, .any = with::kHides | with::kDbias}, .bytes = {16, 16}},
    {.name = "softcap with terms or dropout",
     .where = {.level = 80, .all = with::kSoftcap, .any = with::kHeavy}, .bytes = {}},
    {.name = "ALiBi and dropout above 64",
     .where = {.level = 80, .above = 64, .all = with::kAlibi | with::kDropout}, .bytes = {}},
    {.name = "dropout, deterministic, of packed sequences above 64",
     .where = {.level = 80, .above = 64, .all = with::kDropout | with::kDeterministic | with::kPacked}, .bytes = {}},
    {.name = "ALiBi in a window of packed sequences above 64",
     .where = {.level = 80, .above = 64, .all = with::kAlibi | with::kPacked | with::kWindow}, .bytes = {}},
    {.name = "gradients in fp32 up to 128",
     .where = {.level = 80, .up_to = 128, .all = with::kFp32Out}, .bytes = {}},
};

constexpr uint32_t kAllOfPackedWindows =
    with::kPacked | with::kWindow | with::kAlibi | with::kDropout | with::kBias | with::kMask | with::kDbias;
constexpr uint32_t kMuch = with::kDropout | with::kAlibi | with::kDocuments | with::kSoftcap;  // beside a bias or a mask
inline constexpr V2BackwardSpill kV2BackwardSpills[] = {
    // P^T (1 - T^2) beside P^T needs registers, and so does what every pair has.
    {.name = "softcap, terms of pairs or dropout",
     .where = {.any = with::kSoftcap | with::kHides | with::kDropout | with::kDbias}, .tiles = {.warp_keys_above = 32}, .bytes = {96, 96}},
    {.name = "ALiBi, window of packed sequences",
     .where = {.all = with::kAlibi | with::kPacked | with::kWindow}, .tiles = {.warp_keys_above = 32}, .bytes = {}},
    {.name = "ALiBi, causal in bf16, sm_90",
     .where = {.arch_from = 90, .arch_to = 90, .level = 80, .dtypes = DTypes::kBF16, .all = with::kAlibi | with::kCausal},
     .tiles = {.warp_keys_above = 32}, .bytes = {12, 12}},
    {.name = "lengths or packed sequences, causal in bf16, sm_80",
     .where = {.arch_from = 80, .arch_to = 80, .level = 80, .dtypes = DTypes::kBF16, .all = with::kCausal, .any = with::kLengths | with::kPacked},
     .tiles = {.warp_keys_above = 32}, .bytes = {8, 8}},
    {.name = "lengths, windows or packed sequences in bf16, sm_90",
     .where = {.arch_from = 90, .arch_to = 90, .level = 80, .dtypes = DTypes::kBF16, .any = with::kLengths | with::kWindow | with::kPacked},
     .tiles = {.warp_keys_above = 32}, .bytes = {12, 12}},
    {.name = "dropout in a window of packed sequences with lengths above 64 in bf16, sm_90",
     .where = {.arch_from = 90, .arch_to = 90, .level = 80, .dtypes = DTypes::kBF16, .above = 64,
               .all = with::kDropout | with::kWindow | with::kPacked | with::kLengths},
     .tiles = {.block_n = 128}, .bytes = {8, 8}},
    {.name = "bf16, sm_100",
     .where = {.arch_from = 100, .arch_to = 100, .level = 80, .dtypes = DTypes::kBF16,
               .none = with::kCausal | with::kLengths | with::kWindow | with::kPacked},
     .tiles = {.warp_keys_above = 32}, .bytes = {8, 8}},
    {.name = "bf16, causal, deterministic, sm_100",
     .where = {.arch_from = 100, .arch_to = 100, .level = 80, .dtypes = DTypes::kBF16, .all = with::kCausal | with::kDeterministic},
     .tiles = {.warp_keys_above = 32}, .bytes = {20, 20}},
    {.name = "bias or mask beside one more above 64",
     .where = {.above = 64, .any = kMuch}, .tiles = {.warp_keys_above = 16, .staged = true}, .bytes = {36, 36}},
    {.name = "mask, from sm_90 on",
     .where = {.arch_from = 90, .all = with::kMask}, .tiles = {.block_n = 128, .staged = true}, .bytes = {12, 12}},
    {.name = "gradient of an fp32 bias in a window of packed sequences above 64",
     .where = {.above = 64, .all = with::kPacked | with::kWindow | with::kFp32Bias | with::kDbias, .none = kMuch | with::kMask},
     .tiles = {.pipelined = true, .staged = true}, .bytes = {}},
    {.name = "mask in a window of packed sequences above 64, from sm_90 on",
     .where = {.arch_from = 90, .above = 64, .all = with::kPacked | with::kWindow | with::kMask, .none = kMuch | with::kBias},
     .tiles = {.pipelined = true, .staged = true}, .bytes = {20, 20}},
    {.name = "gradient of an fp32 bias in a window of packed sequences above 64, from sm_90 on",
     .where = {.arch_from = 90, .above = 64, .all = with::kPacked | with::kWindow | with::kFp32Bias | with::kDbias, .none = kMuch | with::kMask},
     .tiles = {.block_m = 64, .staged = true}, .bytes = {8, 8}},
    {.name = "documents of packed sequences, deterministic, above 192, from sm_120 on",
     .where = {.arch_from = 120, .level = 80, .dtypes = DTypes::k16, .above = 192, .all = with::kPacked | with::kDocuments | with::kDeterministic},
     .tiles = {.keys_above = 16}, .bytes = {}},
    {.name = "fp32, one term, window of packed sequences",
     .where = {.all = with::kPacked | with::kWindow}, .tiles = {.one_term = true}, .bytes = {}},
    {.name = "fp32, one term, packed sequences, from sm_100 on",
     .where = {.arch_from = 100, .all = with::kPacked}, .tiles = {.one_term = true}, .bytes = {}},
    {.name = "dbias with ALiBi and dropout above 64",
     .where = {.level = 80, .above = 64, .all = with::kDbias | with::kAlibi | with::kDropout}, .tiles = {.pipelined = true}, .bytes = {}},
    {.name = "dbias with dropout, deterministic, of packed sequences above 64",
     .where = {.level = 80, .above = 64, .all = with::kDbias | with::kDropout | with::kDeterministic | with::kPacked},
     .tiles = {.pipelined = true}, .bytes = {}},
    {.name = "dbias with ALiBi in a window of packed sequences above 64",
     .where = {.level = 80, .above = 64, .all = with::kDbias | with::kAlibi | with::kPacked | with::kWindow},
     .tiles = {.pipelined = true}, .bytes = {8, 8}},
    {.name = "packed sequences, causal above 64, from sm_100 on",
     .where = {.arch_from = 100, .dtypes = DTypes::k16, .above = 64, .all = with::kPacked | with::kCausal},
     .tiles = {.block_n = 128, .chunk = 64}, .bytes = {}},
    {.name = "all at once above 96, from sm_100 on",
     .where = {.arch_from = 100, .dtypes = DTypes::k16, .above = 96, .all = kAllOfPackedWindows}, .tiles = {.block_m = 64}, .bytes = {40, 40}},
    {.name = "all at once, deterministic above 96, sm_90",
     .where = {.arch_from = 90, .arch_to = 90, .dtypes = DTypes::k16, .above = 96, .all = kAllOfPackedWindows | with::kDeterministic},
     .tiles = {.block_m = 64}, .bytes = {8, 8}},
    {.name = "all at once and documents, deterministic above 96",
     .where = {.dtypes = DTypes::k16, .above = 96, .all = kAllOfPackedWindows | with::kDocuments | with::kDeterministic},
     .tiles = {.block_m = 64}, .bytes = {40, 40}},
};

inline constexpr RefusalRule kV2BackwardRefusals[] = {
    {.name = "level 75: terms or dropout",
     .where = {.level = 75, .any = with::kHeavy},
     .why = "the CUDA kernels for compute capability 7.5 have no documents, ALiBi, bias, mask and dropout in a backward pass; use the CPU",
     .bytes = {56, 56}},
};
// clang-format on

}  // namespace fattn::core::cuda
