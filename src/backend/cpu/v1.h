// Algorithm v1 on the CPU: FlashAttention as published in 2022, forward and backward, for those who want to see and measure what FlashAttention-2
// changed. A task is a head: query heads forward, key heads backward.
#pragma once

#include "plan/plan.h"

namespace fattn::core {

// Throws Error(kOutOfMemory) if the size exceeds what an address can hold.
size_t v1_workspace_bytes(const Plan& plan);

void execute_v1(const Plan& plan, const fattn_buffers& buffers);

}  // namespace fattn::core
