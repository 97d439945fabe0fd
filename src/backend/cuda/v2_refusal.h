// What no kernel of algorithm v2 computes, forward or backward, whatever its tiles.
#pragma once

#include <string>
#include <string_view>

#include "backend/cuda/target.h"
#include "problem/problem.h"

namespace fattn::core::cuda {

// Empty: tiles and grid decide. `without`: a rule on registers (spills.h) that is not to count.
std::string v2_refusal(const Problem& problem, const V2Target& target, std::string_view without = {});

}  // namespace fattn::core::cuda
