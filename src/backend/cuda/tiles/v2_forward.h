// Tiles of the v2 forward kernels, 16 bits and fp32, and what has no registers in them. Which were tried: docs/results/LOG.md.
#pragma once

#include "backend/cuda/spills.h"
#include "backend/cuda/v2_forward.h"

namespace fattn::core::cuda {

// The first rows of each kind are what was fastest on one H200; those behind them are for GPUs with less shared memory, and have not been timed on
// any.
// clang-format off
inline constexpr V2ForwardRow kV2ForwardTable[] = {
    {.level = 80, .headdim = 64,
     .tile = {.warps = 4, .row_tiles = 2, .block_n = 128, .stages = 2, .step_n = 64, .exact_n = 32, .queries_in_registers = true, .ctas = 2}},
    {.level = 80, .headdim = 64,
     .tile = {.warps = 4, .row_tiles = 2, .block_n = 64, .stages = 2, .step_n = 64, .exact_n = 32, .queries_in_registers = true, .ctas = 2}},
    {.level = 80, .headdim = 128,
     .tile = {.warps = 4, .row_tiles = 2, .block_n = 64, .stages = 2, .step_n = 64, .exact_n = 32, .ctas = 2}},
    {.level = 80, .headdim = 128,
     .tile = {.warps = 4, .row_tiles = 2, .block_n = 32, .stages = 2, .step_n = 32, .exact_n = 32, .ctas = 2}},
    {.level = 80, .headdim = 256, .causal = false,
     .tile = {.warps = 8, .row_tiles = 1, .block_n = 64, .stages = 2, .step_n = 32, .exact_n = 16, .queries_in_registers = true, .ctas = 1}},
    {.level = 80, .headdim = 256, .causal = false,
     .tile = {.warps = 4, .row_tiles = 1, .block_n = 32, .stages = 2, .step_n = 32, .exact_n = 32, .queries_in_registers = true, .ctas = 2}},
    {.level = 80, .headdim = 256,
     .tile = {.warps = 4, .row_tiles = 1, .block_n = 32, .stages = 2, .step_n = 32, .exact_n = 16, .queries_in_registers = true, .ctas = 2}},
    {.level = 80, .headdim = 256,
     .tile = {.warps = 4, .row_tiles = 1, .block_n = 32, .stages = 2, .step_n = 32, .exact_n = 16, .ctas = 2}},
    // Level 75; not timed.
    {.level = 75, .headdim = 64,
     .tile = {.warps = 4, .row_tiles = 2, .block_n = 64, .stages = 1, .step_n = 64, .exact_n = 32, .ctas = 1}},
    {.level = 75, .headdim = 128,
     .tile = {.warps = 4, .row_tiles = 1, .block_n = 64, .stages = 1, .step_n = 64, .exact_n = 32, .ctas = 1}},
    {.level = 75, .headdim = 256,
     .tile = {.warps = 4, .row_tiles = 1, .block_n = 32, .stages = 1, .step_n = 32, .exact_n = 16, .ctas = 1}},
    // With a bias or a mask of pairs, which come through shared memory.
    {.level = 80, .headdim = 64, .heavy = true, .staged = true,
     .tile = {.warps = 4, .row_tiles = 2, .block_n = 64, .stages = 2, .step_n = 32, .exact_n = 32, .queries_in_registers = true, .ctas = 2}},
    {.level = 80, .headdim = 128, .heavy = true, .staged = true,
     .tile = {.warps = 4, .row_tiles = 2, .block_n = 32, .stages = 2, .step_n = 32, .exact_n = 16, .ctas = 2}},
    {.level = 80, .headdim = 128, .heavy = true, .staged = true,
     .tile = {.warps = 8, .row_tiles = 1, .block_n = 64, .stages = 2, .step_n = 32, .exact_n = 32, .queries_in_registers = true, .ctas = 1}},
    {.level = 80, .headdim = 128, .heavy = true, .staged = true,
     .tile = {.warps = 4, .row_tiles = 1, .block_n = 64, .stages = 2, .step_n = 32, .exact_n = 32, .queries_in_registers = true, .ctas = 1}},
    {.level = 80, .headdim = 256, .heavy = true, .staged = true,
     .tile = {.warps = 8, .row_tiles = 1, .block_n = 32, .stages = 2, .step_n = 16, .exact_n = 16, .ctas = 1}},
    {.level = 80, .headdim = 256, .heavy = true, .staged = true,
     .tile = {.warps = 4, .row_tiles = 1, .block_n = 32, .stages = 2, .step_n = 16, .exact_n = 16, .ctas = 1}},
    // With ALiBi or dropout alone.
    {.level = 80, .headdim = 64, .heavy = true, .hides = false,
     .tile = {.warps = 4, .row_tiles = 2, .block_n = 128, .stages = 2, .step_n = 64, .exact_n = 32, .queries_in_registers = true, .ctas = 2}},
    {.level = 80, .headdim = 64, .heavy = true, .hides = false,
     .tile = {.warps = 4, .row_tiles = 2, .block_n = 64, .stages = 2, .step_n = 64, .exact_n = 32, .queries_in_registers = true, .ctas = 2}},
    {.level = 80, .headdim = 128, .heavy = true, .hides = false,
     .tile = {.warps = 4, .row_tiles = 2, .block_n = 64, .stages = 2, .step_n = 32, .exact_n = 16, .ctas = 2}},
    {.level = 80, .headdim = 128, .heavy = true, .hides = false,
     .tile = {.warps = 4, .row_tiles = 2, .block_n = 32, .stages = 2, .step_n = 32, .exact_n = 16, .ctas = 2}},
    // With terms of pairs or dropout, by count of registers; not timed.
    {.level = 80, .headdim = 64, .heavy = true,
     .tile = {.warps = 4, .row_tiles = 1, .block_n = 64, .stages = 2, .step_n = 64, .exact_n = 32, .queries_in_registers = true, .ctas = 2}},
    {.level = 80, .headdim = 128, .heavy = true,
     .tile = {.warps = 8, .row_tiles = 1, .block_n = 64, .stages = 2, .step_n = 64, .exact_n = 32, .queries_in_registers = true, .ctas = 1}},
    {.level = 80, .headdim = 128, .heavy = true,
     .tile = {.warps = 4, .row_tiles = 1, .block_n = 64, .stages = 2, .step_n = 64, .exact_n = 32, .queries_in_registers = true, .ctas = 1}},
    {.level = 80, .headdim = 256, .heavy = true,
     .tile = {.warps = 8, .row_tiles = 1, .block_n = 64, .stages = 2, .step_n = 32, .exact_n = 16, .ctas = 1}},
    {.level = 80, .headdim = 256, .heavy = true,
     .tile = {.warps = 4, .row_tiles = 1, .block_n = 32, .stages = 2, .step_n = 32, .exact_n = 16, .ctas = 1}},
    {.level = 75, .headdim = 64, .heavy = true,
     .tile = {.warps = 4, .row_tiles = 1, .block_n = 64, .stages = 1, .step_n = 64, .exact_n = 32, .ctas = 1}},
    {.level = 75, .headdim = 128, .heavy = true,
     .tile = {.warps = 4, .row_tiles = 1, .block_n = 64, .stages = 1, .step_n = 64, .exact_n = 32, .ctas = 1}},
    {.level = 75, .headdim = 256, .heavy = true,
     .tile = {.warps = 4, .row_tiles = 1, .block_n = 32, .stages = 1, .step_n = 32, .exact_n = 16, .ctas = 1}},
    // fp32.
    {.level = 80, .headdim = 64, .f32 = true,
     .tile = {.warps = 8, .row_tiles = 2, .block_n = 64, .stages = 2, .step_n = 16, .queries_in_registers = true, .ctas = 1}},
    {.level = 80, .headdim = 64, .f32 = true,
     .tile = {.warps = 8, .row_tiles = 2, .block_n = 32, .stages = 2, .step_n = 16, .queries_in_registers = true, .ctas = 1}},
    {.level = 80, .headdim = 128, .f32 = true,
     .tile = {.warps = 8, .row_tiles = 2, .block_n = 16, .stages = 2, .step_n = 16, .ctas = 1}},
    {.level = 80, .headdim = 128, .f32 = true,
     .tile = {.warps = 8, .row_tiles = 1, .block_n = 16, .stages = 2, .step_n = 16, .ctas = 1}},
    {.level = 80, .headdim = 192, .f32 = true,
     .tile = {.warps = 8, .row_tiles = 1, .block_n = 16, .stages = 2, .step_n = 16, .ctas = 1}},
    {.level = 80, .headdim = 256, .causal = false, .f32 = true,
     .tile = {.warps = 8, .row_tiles = 1, .block_n = 32, .stages = 1, .step_n = 16, .ctas = 1}},
    {.level = 80, .headdim = 256, .f32 = true,
     .tile = {.warps = 8, .row_tiles = 1, .block_n = 16, .stages = 2, .step_n = 16, .ctas = 1}},
    {.level = 80, .headdim = 256, .f32 = true,
     .tile = {.warps = 8, .row_tiles = 1, .block_n = 16, .stages = 1, .step_n = 16, .ctas = 1}},
    {.level = 80, .headdim = 256, .f32 = true,
     .tile = {.warps = 2, .row_tiles = 1, .block_n = 16, .stages = 2, .step_n = 16, .ctas = 1}},
    // fp32 with terms of pairs or dropout, with softcap above headdim 64, and in windows but for 9.0, by count of registers.
    {.level = 80, .headdim = 64, .f32 = true, .heavy = true,
     .tile = {.warps = 8, .row_tiles = 2, .block_n = 64, .stages = 2, .step_n = 16, .ctas = 1}},
    {.level = 80, .headdim = 64, .f32 = true, .heavy = true,
     .tile = {.warps = 8, .row_tiles = 2, .block_n = 32, .stages = 2, .step_n = 16, .ctas = 1}},
    {.level = 80, .headdim = 128, .f32 = true, .heavy = true,
     .tile = {.warps = 8, .row_tiles = 1, .block_n = 16, .stages = 2, .step_n = 16, .ctas = 1}},
    {.level = 80, .headdim = 256, .f32 = true, .heavy = true,
     .tile = {.warps = 8, .row_tiles = 1, .block_n = 16, .stages = 2, .step_n = 16, .ctas = 1}},
    {.level = 80, .headdim = 256, .f32 = true, .heavy = true,
     .tile = {.warps = 8, .row_tiles = 1, .block_n = 16, .stages = 1, .step_n = 16, .ctas = 1}},
    {.level = 80, .headdim = 256, .f32 = true, .heavy = true,
     .tile = {.warps = 2, .row_tiles = 1, .block_n = 16, .stages = 2, .step_n = 16, .ctas = 1}},
    {.level = 80, .headdim = 256, .f32 = true, .heavy = true,
     .tile = {.warps = 2, .row_tiles = 1, .block_n = 16, .stages = 1, .step_n = 16, .ctas = 1}},
    // Under batch_invariant. In 16 bits those of one width and kind have one block_n and one exact_n; in fp32 sizes follow from shared memory alone.
    // With few queries a CTA is one warp, of which a multiprocessor holds more.
    {.level = 80, .headdim = 64, .own = true, .few = true,
     .tile = {.warps = 1, .row_tiles = 1, .block_n = 64, .stages = 2, .step_n = 32, .exact_n = 32, .queries_in_registers = true, .ctas = 6}},
    {.level = 80, .headdim = 128, .own = true, .few = true,
     .tile = {.warps = 1, .row_tiles = 1, .block_n = 32, .stages = 2, .step_n = 32, .exact_n = 32, .queries_in_registers = true, .ctas = 6}},
    {.level = 80, .headdim = 64, .own = true,
     .tile = {.warps = 4, .row_tiles = 2, .block_n = 64, .stages = 2, .step_n = 32, .exact_n = 32, .queries_in_registers = true, .ctas = 2}},
    {.level = 80, .headdim = 128, .own = true,
     .tile = {.warps = 4, .row_tiles = 2, .block_n = 32, .stages = 2, .step_n = 32, .exact_n = 32, .ctas = 2}},
    {.level = 80, .headdim = 256, .own = true,
     .tile = {.warps = 4, .row_tiles = 1, .block_n = 32, .stages = 2, .step_n = 16, .exact_n = 16, .ctas = 2}},
    {.level = 80, .headdim = 64, .heavy = true, .staged = true, .own = true,
     .tile = {.warps = 4, .row_tiles = 1, .block_n = 64, .stages = 2, .step_n = 32, .exact_n = 32, .queries_in_registers = true, .ctas = 2}},
    {.level = 80, .headdim = 128, .heavy = true, .staged = true, .own = true,
     .tile = {.warps = 4, .row_tiles = 1, .block_n = 32, .stages = 2, .step_n = 32, .exact_n = 32, .queries_in_registers = true, .ctas = 1}},
    {.level = 80, .headdim = 256, .heavy = true, .staged = true, .own = true,
     .tile = {.warps = 4, .row_tiles = 1, .block_n = 32, .stages = 2, .step_n = 16, .exact_n = 16, .ctas = 1}},
    {.level = 80, .headdim = 64, .heavy = true, .own = true,
     .tile = {.warps = 4, .row_tiles = 1, .block_n = 64, .stages = 2, .step_n = 32, .exact_n = 32, .queries_in_registers = true, .ctas = 2}},
    {.level = 80, .headdim = 128, .heavy = true, .own = true,
     .tile = {.warps = 4, .row_tiles = 1, .block_n = 32, .stages = 2, .step_n = 32, .exact_n = 32, .queries_in_registers = true, .ctas = 1}},
    {.level = 80, .headdim = 256, .heavy = true, .own = true,
     .tile = {.warps = 4, .row_tiles = 1, .block_n = 32, .stages = 2, .step_n = 16, .exact_n = 16, .ctas = 1}},
    {.level = 75, .headdim = 64, .own = true,
     .tile = {.warps = 4, .row_tiles = 1, .block_n = 64, .stages = 1, .step_n = 32, .exact_n = 32, .ctas = 1}},
    {.level = 75, .headdim = 128, .own = true,
     .tile = {.warps = 4, .row_tiles = 1, .block_n = 64, .stages = 1, .step_n = 32, .exact_n = 32, .ctas = 1}},
    {.level = 75, .headdim = 256, .own = true,
     .tile = {.warps = 4, .row_tiles = 1, .block_n = 32, .stages = 1, .step_n = 16, .exact_n = 16, .ctas = 1}},
    {.level = 75, .headdim = 64, .heavy = true, .own = true,
     .tile = {.warps = 4, .row_tiles = 1, .block_n = 64, .stages = 1, .step_n = 32, .exact_n = 32, .ctas = 1}},
    {.level = 75, .headdim = 128, .heavy = true, .own = true,
     .tile = {.warps = 4, .row_tiles = 1, .block_n = 64, .stages = 1, .step_n = 32, .exact_n = 32, .ctas = 1}},
    {.level = 75, .headdim = 256, .heavy = true, .own = true,
     .tile = {.warps = 4, .row_tiles = 1, .block_n = 32, .stages = 1, .step_n = 16, .exact_n = 16, .ctas = 1}},
    {.level = 80, .headdim = 64, .f32 = true, .own = true, .few = true,
     .tile = {.warps = 1, .row_tiles = 1, .block_n = 32, .stages = 2, .step_n = 16, .ctas = 4}},
    {.level = 80, .headdim = 128, .f32 = true, .own = true, .few = true,
     .tile = {.warps = 1, .row_tiles = 1, .block_n = 16, .stages = 2, .step_n = 16, .ctas = 3}},
    {.level = 80, .headdim = 64, .f32 = true, .own = true,
     .tile = {.warps = 8, .row_tiles = 1, .block_n = 32, .stages = 2, .step_n = 16, .ctas = 1}},
    {.level = 80, .headdim = 128, .f32 = true, .own = true,
     .tile = {.warps = 8, .row_tiles = 1, .block_n = 16, .stages = 2, .step_n = 16, .ctas = 1}},
    {.level = 80, .headdim = 128, .f32 = true, .own = true,
     .tile = {.warps = 4, .row_tiles = 1, .block_n = 16, .stages = 2, .step_n = 16, .ctas = 1}},
    {.level = 80, .headdim = 192, .f32 = true, .own = true,
     .tile = {.warps = 8, .row_tiles = 1, .block_n = 16, .stages = 2, .step_n = 16, .ctas = 1}},
    {.level = 80, .headdim = 192, .f32 = true, .own = true,
     .tile = {.warps = 4, .row_tiles = 1, .block_n = 16, .stages = 2, .step_n = 16, .ctas = 1}},
    {.level = 80, .headdim = 192, .f32 = true, .own = true,
     .tile = {.warps = 2, .row_tiles = 1, .block_n = 16, .stages = 1, .step_n = 16, .ctas = 1}},
};
// clang-format on

// Which rows of the table a rule is about: all that is said holds; 0 and false: whichever.
struct V2ForwardRowsOf {
  int warps = 0, row_tiles = 0, block_n = 0, stages = 0;
  bool queries_in_registers = false, heavy = false, staged = false, unmasked = false;

  constexpr bool has(const V2ForwardRow& row) const {
    const V2ForwardTile& tile = row.tile;
    return (warps == 0 || tile.warps == warps) && (row_tiles == 0 || tile.row_tiles == row_tiles) && (block_n == 0 || tile.block_n == block_n) &&
           (stages == 0 || tile.stages == stages) && (!queries_in_registers || tile.queries_in_registers) && (!heavy || row.heavy) &&
           (!staged || row.staged) && (!unmasked || !row.causal);
  }
};
using V2ForwardSpill = SpillRule<V2ForwardRowsOf>;

// Problems for the heavy rows, and for these alone: in the others they spill.
// clang-format off
inline constexpr GroupRule kV2ForwardHeavy[] = {
    {.name = "terms or dropout",
     .where = {.any = with::kHeavy}, .bytes = {8, 8}},
    {.name = "fp32, softcap above 64",
     .where = {.dtypes = DTypes::kF32, .above = 64, .all = with::kSoftcap}, .bytes = {8, 8}},
    {.name = "fp32, window, before sm_90",
     .where = {.arch_to = 89, .dtypes = DTypes::kF32, .all = with::kWindow}, .bytes = {}},
    {.name = "fp32, window, from sm_100 on",
     .where = {.arch_from = 100, .dtypes = DTypes::kF32, .all = with::kWindow}, .bytes = {12, 12}},
    {.name = "fp32, window of packed sequences above 64",
     .where = {.dtypes = DTypes::kF32, .above = 64, .all = with::kWindow | with::kPacked}, .bytes = {}},
};

inline constexpr V2ForwardSpill kV2ForwardSpills[] = {
    {.name = "fp16, causal above 192, sm_80",
     .where = {.arch_from = 80, .arch_to = 80, .dtypes = DTypes::kF16, .above = 192, .all = with::kCausal},
     .tiles = {.queries_in_registers = true}, .bytes = {16, 16}},
    {.name = "packed sequences or pages above 192",
     .where = {.above = 192, .any = with::kPacked | with::kPages}, .tiles = {.queries_in_registers = true}, .bytes = {8, 8}},
    {.name = "documents beside other terms above 64",
     .where = {.above = 64, .all = with::kDocuments, .any = with::kAlibi | with::kBias | with::kMask | with::kDropout},
     .tiles = {.queries_in_registers = true}, .bytes = {}},
    {.name = "two of terms, dropout and softcap above 64",
     .where = {.above = 64, .any = with::kAlibi | with::kBias | with::kMask | with::kDropout | with::kSoftcap, .least = 2},
     .tiles = {.row_tiles = 2, .heavy = true}, .bytes = {8, 8}},
    {.name = "documents above 64",
     .where = {.above = 64, .all = with::kDocuments}, .tiles = {.row_tiles = 2, .heavy = true}, .bytes = {16, 16}},
    {.name = "causal or window above 64, from sm_100 on",
     .where = {.arch_from = 100, .dtypes = DTypes::k16, .above = 64, .any = with::kCausal | with::kWindow},
     .tiles = {.row_tiles = 2, .block_n = 64}, .bytes = {}},
    {.name = "window of packed sequences with an fp32 bias above 64",
     .where = {.above = 64, .all = with::kWindow | with::kPacked | with::kFp32Bias}, .tiles = {.row_tiles = 2, .staged = true}, .bytes = {}},
    {.name = "fp32, documents beside other terms",
     .where = {.dtypes = DTypes::kF32, .all = with::kDocuments, .any = with::kAlibi | with::kBias | with::kMask | with::kDropout | with::kDbias},
     .tiles = {.row_tiles = 2}, .bytes = {}},
    {.name = "fp32, sinks",
     .where = {.dtypes = DTypes::kF32, .all = with::kSinks}, .tiles = {.row_tiles = 2}, .bytes = {}},
    {.name = "fp32, pages of packed sequences",
     .where = {.dtypes = DTypes::kF32, .all = with::kPages | with::kPacked}, .tiles = {.row_tiles = 2}, .bytes = {}},
    {.name = "fp32, pages, from sm_100 on",
     .where = {.arch_from = 100, .dtypes = DTypes::kF32, .all = with::kPages}, .tiles = {.row_tiles = 2}, .bytes = {112, 112}},
    {.name = "fp32, unequal widths",
     .where = {.dtypes = DTypes::kF32, .narrower_up_to = 192}, .tiles = {.unmasked = true}, .bytes = {}},
    {.name = "fp32, values above 192 in a window, sm_90",
     .where = {.arch_from = 90, .arch_to = 90, .dtypes = DTypes::kF32, .above_v = 192, .all = with::kWindow, .none = with::kSoftcap},
     .tiles = {.warps = 8, .stages = 2}, .bytes = {200, 200}},
    {.name = "fp32, values above 192, causal with softcap, sm_90",
     .where = {.arch_from = 90, .arch_to = 90, .dtypes = DTypes::kF32, .above_v = 192, .all = with::kCausal | with::kSoftcap, .none = with::kWindow},
     .tiles = {.warps = 8, .stages = 2}, .bytes = {8, 8}},
    {.name = "fp32, values above 192, causal with softcap, from sm_100 on",
     .where = {.arch_from = 100, .dtypes = DTypes::kF32, .above_v = 192, .all = with::kCausal | with::kSoftcap, .none = with::kWindow},
     .tiles = {.warps = 8}, .bytes = {8, 8}},
    {.name = "fp32, window of packed sequences with ALiBi, dropout and mask above 128, from sm_100 on",
     .where = {.arch_from = 100, .dtypes = DTypes::kF32, .above = 128,
               .all = with::kWindow | with::kPacked | with::kAlibi | with::kDropout | with::kMask},
     .tiles = {.warps = 8, .stages = 2}, .bytes = {8, 8}},
    {.name = "fp32, documents in a window with softcap, ALiBi and dropout above 128, from sm_100 on",
     .where = {.arch_from = 100, .dtypes = DTypes::kF32, .above = 128,
               .all = with::kWindow | with::kSoftcap | with::kDocuments | with::kAlibi | with::kDropout},
     .tiles = {.warps = 2, .stages = 2}, .bytes = {24, 24}},
    {.name = "fp32, lengths without a mask",
     .where = {.dtypes = DTypes::kF32, .all = with::kLengths, .none = with::kPacked | with::kCausal | with::kWindow},
     .tiles = {.block_n = 64, .queries_in_registers = true}, .bytes = {16, 16}},
};

inline constexpr RefusalRule kV2ForwardRefusals[] = {
    {.name = "level 75: ALiBi and dropout with terms or lengths above 192",
     .where = {.level = 75, .above = 192, .all = with::kAlibi | with::kDropout, .any = with::kHides | with::kLengths},
     .why = "the CUDA kernels for compute capability 7.5 have no ALiBi, dropout and lengths of keys, bias, mask or documents together above headdim "
            "{most}; use the CPU",
     .bytes = {8, 8}},
    {.name = "level 75: dropout and pages above 192",
     .where = {.level = 75, .above = 192, .all = with::kDropout | with::kPages},
     .why = "the CUDA kernels for compute capability 7.5 have no dropout with a paged cache above headdim {most}; use the CPU",
     .bytes = {8, 8}},
    {.name = "fp32: any feature above 192",
     .where = {.dtypes = DTypes::kF32, .above = 192, .any = with::kHeavy | with::kLengths | with::kPacked},
     .why = "{headdims}; with packed sequences, pages, lengths of keys, ALiBi, bias, a mask of pairs, documents or dropout the CUDA kernels for fp32 "
            "have registers for up to {most}; use fp16 or bf16, or the CPU",
     .bytes = {8, 8}},
    {.name = "fp32: bias and mask beside others above 128",
     .where = {.dtypes = DTypes::kF32, .above = 128, .all = with::kBias | with::kMask, .any = with::kAlibi | with::kDropout | with::kDocuments},
     .why = "{headdims}; with a bias and a mask of pairs, and ALiBi, dropout or documents besides, the CUDA kernels for fp32 have registers for up "
            "to {most}: let the bias say what the mask says (-Inf hides), use fp16 or bf16, or the CPU",
     .bytes = {}},
    {.name = "fp32: documents of packed sequences beside others above 128",
     .where = {.dtypes = DTypes::kF32, .above = 128, .all = with::kPacked | with::kDocuments | with::kAlibi | with::kDropout,
               .any = with::kBias | with::kMask},
     .why = "{headdims}; with documents of packed sequences, a bias or a mask of pairs, ALiBi and dropout together the CUDA kernels for fp32 have "
            "registers for up to {most}; use fp16 or bf16, or the CPU",
     .bytes = {28, 28}},
};
// clang-format on

}  // namespace fattn::core::cuda
