#include "backend/cuda/requests.h"

#include "backend/cuda/plan/planners.h"

namespace fattn::core {

std::vector<jit::Request> requests_for(const Problem& problem, int arch) {
  return cuda::plan_routes(problem, cuda::any_target(arch, problem.cuda_level)).front().requests();
}

}  // namespace fattn::core
