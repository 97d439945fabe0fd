// The CPU backend: fused attention (FlashAttention-2 loop order) forward, backward and decode.
#pragma once

#include "plan/plan.h"

namespace fattn::core {

void execute_cpu(const Plan& plan, const fattn_buffers& buffers);

}  // namespace fattn::core
