#include "backend/cpu/call.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace fattn::core {
namespace {

constexpr int64_t kFloat = static_cast<int64_t>(sizeof(float)), kHalf = static_cast<int64_t>(sizeof(uint16_t));

int64_t main_tasks(const Plan& plan) {
  const Problem& p = plan.problem;
  const CpuPlan& c = plan.cpu;
  switch (c.path) {
    case CpuPlan::Path::kForward:  // packed: at most
      return p.packed ? p.nheads * (p.total_q / c.rows + std::min(p.batch, p.total_q)) : p.batch * p.nheads * ((p.seqlen_q + c.rows - 1) / c.rows);
    case CpuPlan::Path::kDecode: return p.batch * ((p.nheads_k + c.heads - 1) / c.heads) * c.splits;
    case CpuPlan::Path::kBackward: return p.backward_units() * c.splits;
  }
  return 0;
}

}  // namespace

bool walks_all_of_dbias(const Problem& p) {
  return p.dbias.given && p.dbias.rows > 1 && !p.packed && !p.has_seqused_k && p.batch > 0 && p.nheads > 0 && p.seqlen_k > 0;
}

CpuWorkspace lay_out_cpu(const Plan& plan) {
  const Problem& p = plan.problem;
  const CpuPlan& c = plan.cpu;
  const CpuKernels& kernels = kernels_of(c.isa);
  const KernelDType dtype = kernel_dtype(p.dtype);
  const KernelShape shape{c.rows,
                          c.task_k,
                          c.block_k,
                          static_cast<int>(p.headdim),
                          static_cast<int>(p.headdim_v),
                          c.heads,
                          p.has_pair_terms() || p.dropout_below > 0 || p.dbias.given || p.has_documents,
                          p.paged};
  CpuWorkspace w;
  WorkspaceLayout layout;
  size_t scratch = 0;
  switch (c.path) {
    case CpuPlan::Path::kForward: scratch = kernels.forward_scratch(dtype, shape); break;
    case CpuPlan::Path::kDecode: {
      scratch = kernels.decode_scratch(dtype, shape);
      const int64_t rows = c.rows;
      w.largest = layout.add({p.batch, p.nheads_k, c.splits, rows, kFloat});
      w.sum = layout.add({p.batch, p.nheads_k, c.splits, rows, kFloat});
      w.acc = layout.add({p.batch, p.nheads_k, c.splits, rows, p.headdim_v, kFloat});
      break;
    }
    case CpuPlan::Path::kBackward:
      scratch = kernels.backward_scratch(dtype, shape);
      w.delta = layout.add({p.dense_batch(), p.nheads, p.dense_rows(), kFloat});
      if (p.out_dtype() != DType::kF32) w.dq_low = layout.add({p.dense_batch(), p.nheads, p.dense_rows(), p.headdim, kHalf});
      if (c.splits > 1) w.walked = layout.add({p.batch, p.nheads_k, c.splits, static_cast<int64_t>(sizeof(int64_t))});
      w.dbias_in_output = p.dbias.given && p.dbias.dtype == DType::kF32;
      // Nothing is summed where each part of dbias is one head's of one batch entry.
      if (p.dbias.given && !w.dbias_in_output && (!walks_all_of_dbias(p) || p.shares_dbias_of_batch() || p.shares_dbias_of_heads()))
        w.dbias = layout.add({p.dbias.batch, p.dbias.heads, p.dbias.rows, p.seqlen_k, kFloat});
      break;
  }
  if (p.packed) {
    w.order = layout.add({p.batch, static_cast<int64_t>(sizeof(int64_t))});
    w.ends = layout.add({p.batch, static_cast<int64_t>(sizeof(int64_t))});
  }
  w.scratch_of_worker = (scratch + 63) / 64 * 64;
  w.scratch = layout.add({workers_of(plan, main_tasks(plan)), static_cast<int64_t>(w.scratch_of_worker)});
  w.total = layout.total();
  return w;
}

void finish_packed_rows(const CpuCall& call) {
  const Problem& p = call.p;
  const int64_t begin = end_of_queries(p, call.b);
  run_tasks(call.plan, "rows of no sequence", (p.total_q - begin) * p.nheads, [&](int64_t i, int) {
    const int64_t row = begin + i / p.nheads, h = i % p.nheads;
    std::memset(at(call.b.o, place(p.o, 0, row, h), call.out_element), 0, static_cast<size_t>(p.headdim_v) * call.out_element);
    if (p.want_lse) static_cast<float*>(call.b.lse)[place(p.lse, 0, row, h)] = -std::numeric_limits<float>::infinity();
  });
}

}  // namespace fattn::core
