// Algorithm `standard`: the unfused textbook attention on the CPU, the baseline that fused attention is compared with.
// Scores, mask, softmax and product are separate passes over a (seqlen_q, seqlen_k) matrix in memory, kept for every head
// in the dtype of the inputs; matrix products in fp32 by OpenBLAS, opened at run time.
//
// Roundings, to nearest even. For fp32 they are those of the fp32 operations; for fp16 and bf16 every tensor and every
// matrix that the textbook stores is rounded to that dtype, and what is computed from it sees the rounded value:
//   forward    s = round(softmax_scale q k^T)      products and sums in fp32, softmax_scale rounded to fp32
//              p = round(softmax(s))               row maximum, exp, row sum and quotient in fp32, visible keys only
//              o = round(p v)                      sums in fp32
//              lse = log(sum(exp(s)))              fp32, never rounded to 16 bits
//   backward   s as above; p = round(exp(s - lse)), with the given lse
//              dv = round(p^T dout)                sums in fp32, over the query heads of a group too
//              dp = round(dout v^T)
//              ds = round(p (dp - delta))          delta = rowsum(o dout) in fp32
//              dq = round(softmax_scale ds k), dk = round(softmax_scale ds^T q)    as dv
// Masked scores are computed and not looked at; masked weights are 0, and a NaN or Inf at a masked position reaches no
// result. A row without visible keys gives o = 0, lse = -inf and no gradient, which one whose lse is below kLowestLse
// (device_abi/lowest.h) does not have either.
#pragma once

#include <string>

#include "plan/plan.h"

namespace fattn::core {

// Empty if the standard algorithm can run `problem`, else the reason why not.
std::string standard_unsupported(const Problem& problem);

// Bytes of workspace that execute_standard needs with `threads` workers. Throws Error(kOutOfMemory) beyond 2^63 - 1.
size_t standard_workspace_bytes(const Problem& problem, int threads);

// The split of the work depends on the problem alone, so the results do not depend on the number of threads.
void execute_standard(const Plan& plan, const fattn_buffers& buffers);

}  // namespace fattn::core
