// Tiles of the v3 backward kernel, and what has no registers in them. Which were tried: docs/results/LOG.md.
#pragma once

#include "backend/cuda/spills.h"
#include "backend/cuda/v3_backward.h"

namespace fattn::core::cuda {

// What build/tests/tune_v3_backward finds fastest (docs/results/h200-v3-backward-tune.json), but where less than 1.5 % is between them.
// clang-format off
inline constexpr V3BackwardRow kV3BackwardTable[] = {
    {.width = 64,
     .tile = {.groups = 3, .stages = 3, .stagings = 2, .main_registers = 144, .dq_registers = 80, .loader_registers = 0}},
    {.width = 64, .causal = true,
     .tile = {.groups = 2, .stages = 3, .stagings = 2, .own_loader = true, .main_registers = 208, .dq_registers = 72, .loader_registers = 24}},
    {.width = 96, .causal = true,  // without a mask 3 to 7 % slower than the next
     .tile = {.groups = 2, .stages = 3, .stagings = 2, .own_loader = true, .main_registers = 200, .dq_registers = 88, .loader_registers = 24}},
    {.width = 128,
     .tile = {.groups = 2, .stages = 3, .stagings = 2, .own_loader = true, .main_registers = 208, .dq_registers = 72, .loader_registers = 24}},
    {.width = 192,
     .tile = {.by_role = true, .groups = 2, .stages = 2, .own_loader = true, .main_registers = 192, .dq_registers = 104, .loader_registers = 24}},
    {.width = 256,
     .tile = {.by_role = true, .groups = 2, .stages = 2, .own_loader = true, .main_registers = 208, .dq_registers = 72, .loader_registers = 24}},
    // With dropout, whose bits are made by the loader's idle warps or, at 64, by warps of dq; not tuned.
    {.width = 64, .dropout = true,
     .tile = {.groups = 3, .stages = 3, .stagings = 2, .main_registers = 144, .dq_registers = 80, .loader_registers = 0}},
    {.width = 128, .dropout = true,
     .tile = {.groups = 2, .stages = 3, .stagings = 2, .own_loader = true, .main_registers = 208, .dq_registers = 64, .loader_registers = 32}},
    {.width = 192, .dropout = true,
     .tile = {.by_role = true, .groups = 2, .stages = 2, .own_loader = true, .main_registers = 208, .dq_registers = 64, .loader_registers = 32}},
    {.width = 256, .dropout = true,
     .tile = {.by_role = true, .groups = 2, .stages = 2, .own_loader = true, .main_registers = 208, .dq_registers = 64, .loader_registers = 32}},
};
// clang-format on

// setmaxnreg beyond what the launch gave would wait for ever.
static_assert([] {
  for (const V3BackwardRow& row : kV3BackwardTable)
    if (row.tile.moved_registers() > row.tile.launch_registers() * (row.tile.threads() / 128)) return false;
  return true;
}());

// Which rows of the table a rule is about.
struct V3BackwardRowsOf {
  int groups = 0;

  constexpr bool has(const V3BackwardRow& row) const { return row.tile.groups == groups; }
};

// clang-format off
inline constexpr SpillRule<V3BackwardRowsOf> kV3BackwardSpills[] = {
    {.name = "ALiBi and dropout",
     .where = {.all = with::kAlibi | with::kDropout}, .tiles = {.groups = 3}, .bytes = {8, 8}},
    {.name = "causal with an fp32 bias",
     .where = {.all = with::kCausal | with::kFp32Bias, .none = with::kWindow}, .tiles = {.groups = 3}, .bytes = {16, 16}},
};

// Of biases and masks, which are asked about before tensors and tiles.
inline constexpr RefusalRule kV3BackwardTermRefusals[] = {
    {.name = "fp32 bias and mask",
     .where = {.all = with::kFp32Bias | with::kMask},
     .why = "algorithm v3's backward pass has no registers for a bias in fp32 together with a mask of pairs; algorithm v2 does both, and so does a "
            "bias of q's dtype",
     .bytes = {}},
};

inline constexpr RefusalRule kV3BackwardRefusals[] = {
    {.name = "softcap and dropout",
     .where = {.all = with::kSoftcap | with::kDropout},
     .why = "algorithm v3's backward pass has no registers for softcap with dropout; algorithm v2 does both",
     .bytes = {}},
    {.name = "ALiBi and dropout beside lengths or deterministic",
     .where = {.all = with::kAlibi | with::kDropout, .any = with::kLengths | with::kDeterministic},
     .why = "algorithm v3's backward pass has no registers for ALiBi and dropout together with lengths of the batch's entries (seqused_k) or "
            "deterministic; algorithm v2 does all",
     .bytes = {}},
    {.name = "ALiBi and dropout above 192",
     .where = {.above = 192, .all = with::kAlibi | with::kDropout},
     .why = "{headdims}; algorithm v3's backward pass has registers for ALiBi and dropout together up to {most}",
     .bytes = {}},
    {.name = "packed sequences, ALiBi and dropout",
     .where = {.all = with::kPacked | with::kAlibi | with::kDropout},
     .why = "algorithm v3's backward pass has no registers for packed sequences, ALiBi and dropout together; algorithm v2 does all",
     .bytes = {}},
    {.name = "packed sequences and ALiBi at 65 to 128",
     .where = {.above = 64, .up_to = 128, .all = with::kPacked | with::kAlibi, .none = with::kCausal},
     .why = "{headdims}; algorithm v3's backward pass has registers for ALiBi in packed sequences, unless it is causal, up to {most} and above 128",
     .bytes = {}},
};
// clang-format on

}  // namespace fattn::core::cuda
