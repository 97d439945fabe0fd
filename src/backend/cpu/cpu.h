// The CPU backend: fused attention (FlashAttention-2) forward, backward and decode.
#pragma once

#include "plan/plan.h"

namespace fattn::core {

// Throws Error(kOutOfMemory) if the size exceeds what an address can hold.
size_t cpu_workspace_bytes(const Plan& plan);

void execute_cpu(const Plan& plan, const fattn_buffers& buffers);

}  // namespace fattn::core
