#include "attention.h"

#include "backend/cpu/cpu.h"
#include "backend/reference/reference.h"
#include "backend/standard/standard.h"
#include "shared/text.h"

namespace fattn::core {

Plan prepare(const fattn_problem& problem) { return make_plan(validate(problem), cpu_info()); }

void execute(const Plan& plan, const fattn_buffers& buffers) {
  validate_buffers(plan.problem, buffers);
  if (buffers.workspace_bytes < plan.workspace_bytes)
    throw Error(ErrorCode::kWorkspace, text("the workspace has ", buffers.workspace_bytes, " bytes; this plan needs ", plan.workspace_bytes,
                                            ". Ask fattn_plan_query for the size"));
  if (plan.workspace_bytes > 0 && (!buffers.workspace || reinterpret_cast<uintptr_t>(buffers.workspace) % 64 != 0))
    throw Error(ErrorCode::kWorkspace, text("the workspace is at ", buffers.workspace, "; it must be aligned to 64 bytes and not null"));

  if (plan.backend == Backend::kReference) return execute_reference(plan, buffers);
  if (plan.algorithm == Algorithm::kStandard) return execute_standard(plan, buffers);
  return execute_cpu(plan, buffers);
}

}  // namespace fattn::core
