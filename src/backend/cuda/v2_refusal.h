// What no kernel of algorithm v2 computes, forward or backward, whatever its tiles.
#pragma once

#include <string>

#include "backend/cuda/target.h"
#include "problem/problem.h"

namespace fattn::core::cuda {

// Empty: tiles and grid decide.
std::string v2_refusal(const Problem& problem, const V2Target& target);

}  // namespace fattn::core::cuda
