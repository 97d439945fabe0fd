// What the planners of algorithm v3 share.
#pragma once

#include <string>

#include "backend/cuda/route.h"
#include "backend/cuda/target.h"
#include "shared/text.h"

namespace fattn::core::cuda {

inline bool wants_v3(const Problem& p, const Target& t) {
  return p.algorithm == Algorithm::kV3 || (p.algorithm == Algorithm::kAuto && !p.want_weights && t.has_v3);
}
// Whose kernels are others.
inline bool is_v3_f32(const Problem& p) { return !p.backward && p.dtype == DType::kF32; }

inline std::string v3_refusal_of(const Problem& p, const Target& t, std::string (*of_kernels)(const Problem&, const V3Target&)) {
  const std::string why = t.has_v3 ? of_kernels(p, t.v3) : "it is for compute capability 9.0 alone";
  return why.empty() || p.algorithm != Algorithm::kV3 ? why : "algorithm v3 was asked for: " + why;
}

inline Route v3_route(const Problem& p) {
  Route route;
  route.algorithm = Algorithm::kV3;
  route.level = kV3Arch;
  route.title = text("cuda v3 ", p.backward ? "backward " : "forward ", name_of(p.dtype), " sm_", kV3Arch, "a",
                     p.deterministic && p.backward ? " deterministic" : "");
  route.else_why = p.algorithm == Algorithm::kV3 ? "algorithm v3 was asked for; ask for auto or v2"
                                                 : "only algorithm v3, which takes no other, can compute the problem; align it";
  return route;
}

}  // namespace fattn::core::cuda
