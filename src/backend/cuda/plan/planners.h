// The planners of the CUDA backend's algorithms: each says whether it may take a problem, why it cannot, and builds its route. plan_routes() asks
// them.
#pragma once

#include <string>
#include <vector>

#include "backend/cuda/route.h"
#include "backend/cuda/target.h"
#include "backend/cuda/v2_backward.h"
#include "problem/problem.h"

namespace fattn::core::cuda {

struct Planner {
  const char* name;
  bool any_address;                                                      // its routes accept every call
  bool (*wanted)(const Problem& problem, const Target& target);          // asked for, or worth it where the choice is ours
  std::string (*refusal)(const Problem& problem, const Target& target);  // why it cannot be had; empty: it can
  Route (*route)(const Problem& problem, const Target& target);          // of problems that are wanted and not refused
};
extern const Planner kStandardPlanner, kV1Planner, kDecodePlanner, kV3F32Planner, kV3Planner, kV2Planner;

// The ways to compute a problem, the best first; what a call's addresses keep from the first goes to the next. Throws Error(kUnsupported) with the
// reason if there is none.
std::vector<Route> plan_routes(const Problem& problem, const Target& target);

// The launches of v2's backward pass, which is also v1's around another kernel.
void add_v2_backward(Route& route, const V2BackwardPlan& plan);

// Whether algorithm v2, or decode by its name, may take a problem.
inline bool wants_v2(const Problem& p) { return p.algorithm == Algorithm::kV2 || (p.algorithm == Algorithm::kAuto && !p.want_weights); }

// A route without launches yet; its title is "cuda v2 forward bf16 sm_80 (level 75)", with `what` for "v2 forward".
Route route_for(Algorithm algorithm, const char* what, const Problem& problem, const Target& target);

}  // namespace fattn::core::cuda
