// The support table: which features of attention each way to compute has. The planner and the backends ask it, `fattn support` asks them; what a way
// lacks is refused with the reason that is made here.
#pragma once

#include <string>

#include "problem/problem.h"

namespace fattn::core {

// A backend with an algorithm.
enum class Way { kReference, kCpuStandard, kCpuV1, kCpuV2, kCudaStandard, kCudaV1, kCudaV2, kCudaV3, kCudaDecode };

// Empty if `way` has every feature that the problem uses, else which one it lacks and which ways have it.
std::string lacks(const Problem& problem, Way way);

// The table itself.
struct FeatureCell {
  const char *feature, *way;
  bool has;
};
int feature_count();
int way_count();
FeatureCell feature_cell(int feature, int way);

}  // namespace fattn::core
