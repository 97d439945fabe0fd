#include "backend/cuda/cuda.h"

#include <algorithm>

#include "backend/cuda/lists.h"
#include "backend/cuda/plan/planners.h"
#include "backend/cuda/target.h"
#include "device/cuda_device.h"
#include "shared/text.h"

namespace fattn::core {

// The ways that a plan has: the first that accepts a call computes it.
struct CudaRoutes {
  std::vector<cuda::Route> all;
};

namespace {

// Every pointer that the kernels touch is memory of the device: host memory would be a fault that ends all work of the process there.
void require_on_device(CudaDevice& device, const Problem& p, const fattn_buffers& b, size_t workspace_bytes) {
  for (size_t i = 0; i < kTensorCount; ++i) {
    const TensorRow& row = kTensors[i];
    if (p.bytes[i] == 0 || (row.role == TensorRole::kTerm && !p.has_pairs())) continue;
    device.require_on_device(row.pointer.get(b), row.name);
  }
  if (workspace_bytes > 0 && b.workspace) device.require_on_device(b.workspace, "workspace");
}

// None accepts the call.
[[noreturn]] void refuse(const cuda::Route& route, const cuda::Misaligned& off) {
  const cuda::TensorSet of_16 = off.of_16 & route.needs_16, of_4 = off.of_4 & route.needs_4;
  size_t first = 0;
  while (((of_4 | of_16) >> first & 1) == 0) ++first;
  throw Error(ErrorCode::kUnsupported, text("backend cuda: ", kTensors[first].name, " begins at an address that is no multiple of ",
                                            (of_16 >> first & 1) != 0 ? 16 : 4, " bytes, and ", route.else_why));
}

}  // namespace

void plan_cuda_kernels(Plan& plan) {
  const Problem& p = plan.problem;
  auto routes = std::make_shared<CudaRoutes>();
  routes->all = cuda::plan_routes(p, cuda::target_on(cuda_device(p.device_index), plan.cuda.arch, p.cuda_level));
  for (const cuda::Route& route : routes->all) plan.workspace_bytes = std::max(plan.workspace_bytes, static_cast<size_t>(route.workspace_bytes));
  const cuda::Route& first = routes->all.front();
  plan.algorithm = first.algorithm;
  plan.cuda.level = first.level;
  plan.kernel = first.title;
  plan.why = first.why;
  plan.cuda.routes = std::move(routes);
}

void load_cuda_kernels(const Plan& plan) {
  CudaDevice& device = cuda_device(plan.problem.device_index);
  device.require_usable();
  plan.cuda.routes->all.front().load(device);
}

void execute_cuda(const Plan& plan, const fattn_buffers& buffers) {
  CudaDevice& device = cuda_device(plan.problem.device_index);
  device.require_usable();
  const CudaCurrent scope = device.current();
  require_on_device(device, plan.problem, buffers, plan.workspace_bytes);
  const cuda::Call call{device, plan.problem, buffers, static_cast<CUstream>(buffers.stream), cuda::misaligned(buffers)};
  if (checks_lists(plan.problem)) cuda::require_good_lists(device, plan.problem, buffers, call.stream);
  for (const cuda::Route& route : plan.cuda.routes->all)
    if (route.accepts(call.off)) return route.execute(call);
  refuse(plan.cuda.routes->all.front(), call.off);
}

}  // namespace fattn::core
