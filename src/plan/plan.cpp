#include "plan/plan.h"

#include "backend/standard/standard.h"

namespace fattn::core {

Plan make_plan(const Problem& problem, const CpuInfo& cpu) {
  Plan plan;
  plan.problem = problem;
  plan.cost = cost_of(problem);
  plan.cpu.threads = problem.num_threads > 0 ? problem.num_threads : cpu.usable_threads;
  if (problem.backend == Backend::kCpu && problem.algorithm == Algorithm::kStandard) {
    const std::string why = standard_unsupported(problem);
    if (!why.empty()) throw Error(ErrorCode::kUnsupported, why);
    plan.backend = Backend::kCpu;
    plan.algorithm = Algorithm::kStandard;
    plan.workspace_bytes = standard_workspace_bytes(problem, plan.cpu.threads);
    return plan;
  }
  if (problem.backend == Backend::kCpu) throw Error(ErrorCode::kUnsupported, "backend cpu is being built");
  plan.kernel = "reference float64";
  return plan;
}

}  // namespace fattn::core
