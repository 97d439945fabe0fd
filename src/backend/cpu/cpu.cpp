// The CPU backend's tasks: a problem is cut into tasks as the plan says, and they are handed to the workers. Every task writes memory of its own, so
// the results do not depend on who runs it or when.
#include "backend/cpu/cpu.h"

#include "backend/cpu/call.h"

namespace fattn::core {

size_t cpu_workspace_bytes(const Plan& plan) { return lay_out_cpu(plan).total; }

void execute_cpu(const Plan& plan, const fattn_buffers& buffers) {
  const Problem& p = plan.problem;
  const CpuCall call{plan,
                     p,
                     plan.cpu,
                     buffers,
                     kernels_of(plan.cpu.isa),
                     kernel_dtype(p.dtype),
                     size_of(p.dtype),
                     kernel_dtype(p.out_dtype()),
                     size_of(p.out_dtype()),
                     lay_out_cpu(plan),
                     static_cast<char*>(buffers.workspace)};
  switch (plan.cpu.path) {
    case CpuPlan::Path::kForward: return cpu_forward(call);
    case CpuPlan::Path::kDecode: return cpu_decode(call);
    case CpuPlan::Path::kBackward: return cpu_backward(call);
  }
}

}  // namespace fattn::core
