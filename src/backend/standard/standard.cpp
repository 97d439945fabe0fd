#include "backend/standard/standard.h"

#include <atomic>
#include <limits>

#include "backend/standard/layout.h"
#include "backend/standard/passes.h"
#include "backend/standard/row_passes.h"
#include "cpu/executor.h"
#include "cpu/openblas.h"
#include "cpu/subnormals.h"
#include "shared/text.h"
#include "shared/trace.h"

namespace fattn::core {
namespace {

// Runs body(task, scratch) for every task in [0, count) on the workers. `name` is for profilers.
template <class Body>
void for_each_task(const StandardCall& call, const char* name, int64_t count, const Body& body) {
  if (count == 0) return;
  std::atomic<int64_t> next{0};
  run_workers(call.p.executor, call.at.workers, [&](int worker) {
    const SubnormalsAreZero zero;
    const Traced traced(name);
    const OneBlasThread one_thread(call.blas);
    for (int64_t task = next++; task < count; task = next++) body(task, call.scratch(worker));
  });
}

template <class E>
void execute_as(const StandardCall& call) {
  if (!call.p.backward) {
    for_each_task(call, "blocks of rows", call.at.row_tasks, [&](int64_t task, float* scratch) { standard_forward_rows<E>(call, task, scratch); });
    return;
  }
  for_each_task(call, "blocks of rows", call.at.row_tasks, [&](int64_t task, float* scratch) { standard_backward_rows<E>(call, task, scratch); });
  for_each_task(call, "blocks of keys", call.at.key_tasks, [&](int64_t task, float* scratch) { standard_backward_keys<E>(call, task, scratch); });
}

}  // namespace

std::string standard_unsupported(const Problem& p) {
  if (p.dtype == DType::kF64) return "algorithm standard on the CPU takes fp32, fp16 and bf16, not fp64; use backend reference for fp64";
  constexpr int64_t kMaxKeys = std::numeric_limits<int32_t>::max();
  if (p.seqlen_k > kMaxKeys)
    return text("algorithm standard takes a seqlen_k of at most ", kMaxKeys, " (the 32-bit leading dimension of BLAS), not ", p.seqlen_k,
                "; use algorithm v2");
  if (!openblas()) return "algorithm standard on the CPU needs OpenBLAS: " + openblas().reason;
  return "";
}

size_t standard_workspace_bytes(const Problem& problem, int threads) { return layout_of(problem, threads).total; }

void execute_standard(const Plan& plan, const fattn_buffers& buffers) {
  const Layout at = layout_of(plan.problem, plan.cpu.threads);
  const StandardCall call{plan.problem, buffers, at, openblas()};
  switch (plan.problem.dtype) {
    case DType::kF32: return execute_as<float>(call);
    case DType::kF16: return execute_as<Half>(call);
    case DType::kBF16: return execute_as<Brain>(call);
    default: throw Error(ErrorCode::kInternal, standard_unsupported(plan.problem));
  }
}

}  // namespace fattn::core
