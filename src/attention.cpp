#include "attention.h"

#include <algorithm>

#include "backend/cpu/cpu.h"
#include "backend/cpu/v1.h"
#include "backend/cuda/cuda.h"
#include "backend/reference/reference.h"
#include "backend/standard/standard.h"
#include "shared/text.h"

namespace fattn::core {

Plan prepare(const fattn_problem& problem) {
  Plan plan = make_plan(validate(problem), cpu_info(), [](int index) -> const CudaDeviceInfo& { return cuda_device(index).info(); });
  if (plan.backend == Backend::kReference) return plan;
  if (plan.backend == Backend::kCuda) {
    plan_cuda_kernels(plan);
    return plan;
  }
  if (plan.algorithm == Algorithm::kStandard) {
    if (const std::string why = standard_unsupported(plan.problem); !why.empty()) throw Error(ErrorCode::kUnsupported, why);
    plan.workspace_bytes = standard_workspace_bytes(plan.problem, plan.cpu.threads);
  } else {
    plan.workspace_bytes = plan.algorithm == Algorithm::kV1 ? v1_workspace_bytes(plan) : cpu_workspace_bytes(plan);
  }
  return plan;
}

void execute(const Plan& plan, const fattn_buffers& buffers) {
  validate_buffers(plan.problem, buffers);
  if (buffers.workspace_bytes < plan.workspace_bytes)
    throw Error(ErrorCode::kWorkspace, text("the workspace has ", buffers.workspace_bytes, " bytes; this plan needs ", plan.workspace_bytes,
                                            ". Ask fattn_plan_query for the size"));
  const uintptr_t alignment = plan.backend == Backend::kCuda ? 256 : 64;
  if (plan.workspace_bytes > 0 && (!buffers.workspace || reinterpret_cast<uintptr_t>(buffers.workspace) % alignment != 0))
    throw Error(ErrorCode::kWorkspace, text("the workspace is at ", buffers.workspace, "; it must be aligned to ", alignment, " bytes and not null"));

  if (plan.backend == Backend::kCuda) return execute_cuda(plan, buffers);
  validate_host_values(plan.problem, buffers);
  if (plan.problem.want_status) std::fill_n(static_cast<int32_t*>(buffers.status), 2, 0);  // those that are not are errors
  if (plan.backend == Backend::kReference) return execute_reference(plan, buffers);
  if (plan.algorithm == Algorithm::kStandard) return execute_standard(plan, buffers);
  if (plan.algorithm == Algorithm::kV1) return execute_v1(plan, buffers);
  return execute_cpu(plan, buffers);
}

void load(const Plan& plan) {
  if (plan.backend == Backend::kCuda) load_cuda_kernels(plan);
}

}  // namespace fattn::core
