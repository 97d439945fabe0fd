#include "attention.h"

#include <algorithm>
#include <optional>

#include "backend/cpu/cpu.h"
#include "backend/cpu/v1.h"
#include "backend/cuda/cuda.h"
#include "backend/reference/reference.h"
#include "backend/standard/standard.h"
#include "shared/text.h"
#include "shared/trace.h"

namespace fattn::core {

namespace {

void finish_standard(Plan& plan) {
  if (const std::string why = standard_unsupported(plan.problem); !why.empty()) throw Error(ErrorCode::kUnsupported, why);
  plan.workspace_bytes = standard_workspace_bytes(plan.problem, plan.cpu.threads);
}

// Who computes a plan.
struct Engine {
  Backend backend;
  std::optional<Algorithm> algorithm;  // none: all that the backend has
  size_t alignment;                    // bytes, of the workspace
  void (*finish)(Plan& plan);          // how much workspace it takes, and what is the backend's to decide
  void (*load)(const Plan& plan);      // null: nothing to load
  void (*execute)(const Plan& plan, const fattn_buffers& buffers);
};
constexpr Engine kEngines[] = {
    {Backend::kReference, {}, 64, [](Plan&) {}, nullptr, execute_reference},
    {Backend::kCuda, {}, 256, plan_cuda_kernels, load_cuda_kernels, execute_cuda},
    {Backend::kCpu, Algorithm::kStandard, 64, finish_standard, nullptr, execute_standard},
    {Backend::kCpu, Algorithm::kV1, 64, [](Plan& plan) { plan.workspace_bytes = v1_workspace_bytes(plan); }, nullptr, execute_v1},
    {Backend::kCpu, Algorithm::kV2, 64, [](Plan& plan) { plan.workspace_bytes = cpu_workspace_bytes(plan); }, nullptr, execute_cpu},
};

const Engine& engine_of(const Plan& plan) {
  for (const Engine& engine : kEngines)
    if (engine.backend == plan.backend && engine.algorithm.value_or(plan.algorithm) == plan.algorithm) return engine;
  throw Error(ErrorCode::kInternal, text("nothing computes algorithm ", name_of(plan.algorithm), " on backend ", name_of(plan.backend)));
}

// For a profiler.
fattn_trace_call traced_call(const Plan& plan) {
  const Problem& p = plan.problem;
  fattn_trace_call call{};
  call.struct_size = sizeof call;
  call.backward = p.backward ? 1 : 0;
  call.backend = static_cast<int32_t>(plan.backend);
  call.algorithm = static_cast<int32_t>(plan.algorithm);
  call.dtype = static_cast<int32_t>(p.dtype);
  call.device = static_cast<int32_t>(p.device);
  call.causal = p.causal ? 1 : 0;
  call.num_threads = plan.backend == Backend::kCpu ? plan.cpu.threads : 1;
  call.batch = p.batch;
  call.seqlen_q = p.seqlen_q;
  call.seqlen_k = p.seqlen_k;
  call.nheads = p.nheads;
  call.nheads_k = p.nheads_k;
  call.headdim = p.headdim;
  call.headdim_v = p.headdim_v;
  call.flops = plan.cost.flops;
  call.bytes = plan.cost.bytes;
  call.workspace_bytes = plan.workspace_bytes;
  call.kernel = plan.kernel.c_str();
  return call;
}

}  // namespace

Plan prepare(const fattn_problem& problem) {
  Plan plan = make_plan(validate(problem), cpu_info(), [](int index) -> const CudaDeviceInfo& { return cuda_device(index).info(); });
  engine_of(plan).finish(plan);
  return plan;
}

void execute(const Plan& plan, const fattn_buffers& buffers) {
  validate_buffers(plan.problem, buffers);
  if (buffers.workspace_bytes < plan.workspace_bytes)
    throw Error(ErrorCode::kWorkspace, text("the workspace has ", buffers.workspace_bytes, " bytes; this plan needs ", plan.workspace_bytes,
                                            ". Ask fattn_plan_query for the size"));
  const Engine& engine = engine_of(plan);
  if (plan.workspace_bytes > 0 && (!buffers.workspace || reinterpret_cast<uintptr_t>(buffers.workspace) % engine.alignment != 0))
    throw Error(ErrorCode::kWorkspace,
                text("the workspace is at ", buffers.workspace, "; it must be aligned to ", engine.alignment, " bytes and not null"));
  if (plan.problem.device == Device::kCpu) {
    validate_host_values(plan.problem, buffers);
    if (plan.problem.want_status) std::fill_n(static_cast<int32_t*>(buffers.status), 2, 0);  // lists that are not good are errors
  }
  if (!trace_listener.load(std::memory_order_acquire)) return engine.execute(plan, buffers);
  const fattn_trace_call call = traced_call(plan);
  const Traced traced(plan.problem.backward ? "attention backward" : "attention forward", &call);
  engine.execute(plan, buffers);
}

void load(const Plan& plan) {
  if (const Engine& engine = engine_of(plan); engine.load) engine.load(plan);
}

}  // namespace fattn::core
