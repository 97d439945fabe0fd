// Checks a contestant's results against the float64 oracle before anything is timed.
#pragma once

#include <cstdint>
#include <vector>

#include "measure/contestant.h"
#include "measure/record.h"

namespace fattn::cli {

// How much the oracle, which is slow, may compute for one contestant: FLOPs of a forward pass.
constexpr double kOracleFlops = 3e8;

// All of the problem where that is little enough. Otherwise samples: of the forward pass, rows of the real result at the
// beginning, the middle and the end, against all keys; of the backward pass, one group of heads of the real result where
// the oracle can afford all its rows, else a smaller problem that is computed for the check. Where scores depend on more than q and k,
// a smaller problem of both passes, and those rows that stay what they are without the others. TensorCheck::where says which.
// Every number of every output must be finite (inputs are). Leaves the contestant prepared for `spec`, its outputs in
// `outputs`. Throws measure::Failure where the contestant fails, not where a check does.
std::vector<measure::TensorCheck> check_against_oracle(measure::Contestant& contestant, const measure::ProblemSpec& spec,
                                                       const measure::Inputs& inputs, bool grad, int64_t memory_limit, double oracle_flops,
                                                       const measure::Outputs*& outputs);

}  // namespace fattn::cli
