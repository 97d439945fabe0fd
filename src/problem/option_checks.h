// The options of a description that no tensor says: each within its limits.
#pragma once

#include "problem/problem.h"

namespace fattn::core {

// Throws Error(kAbi).
void check_abi_version(uint32_t version);
void check_options(const fattn_problem& given);
// Who computes a call of any kind, and with what.
void check_execution(int32_t backend, int32_t cpu_isa, int32_t num_threads, const fattn_executor* executor);

}  // namespace fattn::core
