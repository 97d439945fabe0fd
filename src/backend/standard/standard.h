// Algorithm `standard`: the unfused textbook attention on the CPU, the baseline that fused attention is compared with.
// Scores, mask, softmax and product are separate passes over a (seqlen_q, seqlen_k) matrix; matrix products by OpenBLAS,
// opened at run time.
#pragma once

#include <string>

#include "plan/plan.h"

namespace fattn::core {

// Empty if the standard algorithm can run `problem`, else the reason why not.
std::string standard_unsupported(const Problem& problem);

// Bytes of workspace that execute_standard needs with `threads` workers.
size_t standard_workspace_bytes(const Problem& problem, int threads);

void execute_standard(const Plan& plan, const fattn_buffers& buffers);

}  // namespace fattn::core
