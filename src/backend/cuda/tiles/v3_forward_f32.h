// Tiles of the v3 forward kernel in fp32. Which were tried: docs/results/LOG.md.
#pragma once

#include "backend/cuda/v3_forward_f32.h"

namespace fattn::core::cuda {

// clang-format off
inline constexpr V3ForwardF32Row kV3ForwardF32Table[] = {
    {.headdim = 64, .headdim_v = 64,
     .tile = {.groups = 2, .stages_k = 6, .stages_v = 6, .queries_in_registers = true, .producer_registers = 24, .consumer_registers = 240}},
    {.headdim = 64, .headdim_v = 128,
     .tile = {.groups = 2, .stages_k = 4, .stages_v = 3, .producer_registers = 24, .consumer_registers = 240}},
    {.headdim = 128, .headdim_v = 128,
     .tile = {.groups = 2, .stages_k = 2, .stages_v = 2, .producer_registers = 24, .consumer_registers = 240}},
};
// clang-format on

// setmaxnreg beyond what the launch gave would wait for ever.
static_assert([] {
  for (const V3ForwardF32Row& row : kV3ForwardF32Table)
    if (!row.tile.registers_suffice()) return false;
  return true;
}());

}  // namespace fattn::core::cuda
