// What the papers count: accesses of the memory behind the chip, by their algorithms as published.
//   standard  FlashAttention (Dao et al. 2022), algorithms 0 and 3 (appendix B): every matrix of (seqlen_q, seqlen_k) goes out and comes in
//   v1        the same, algorithms 1 and 4, theorem 2: Theta(N^2 d^2 / M) for an on-chip memory of M numbers, so not O(N)
//   v2, v3    FlashAttention-2 (Dao 2023), algorithms 1 and 2: forward the outer loop is over blocks of queries, backward over blocks of keys
// They leave out causal masks and count every number in the problem's dtype.
#pragma once

#include <string>
#include <vector>

#include "measure/traffic.h"

namespace fattn::lab {

// `pass`: forward or backward. `chip_bytes`: of the on-chip memory that v1's blocks are cut for. Empty for another algorithm.
std::vector<measure::MovedTerm> papers_terms(const std::string& algorithm, const measure::ProblemSpec& spec, measure::Pass pass, double chip_bytes);

}  // namespace fattn::lab
