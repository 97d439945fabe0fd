// Hands heads to workers. The loops over blocks are in v1_forward.h and v1_backward.h, once for each instruction set.
#include "backend/cpu/v1.h"

#include "backend/cpu/tasks.h"

namespace fattn::core {
namespace {

// Where the pieces of the workspace begin. A worker has one head at a time, and what that keeps in memory between two blocks of keys.
struct Workspace {
  size_t scratch = 0, scratch_of_worker = 0;  // what the cache is to hold
  size_t largest = 0, sum = 0;                // forward: (worker, seqlen_q) each
  size_t sums = 0, sums_of_worker = 0;        // of outputs of 16 bits: o or, backward, dq of the group in fp32
  size_t total = 0;
};

// Heads that have something to write; those of nothing may be more than 64 bits count.
int64_t heads_of(const Problem& p) {
  if (p.seqlen_q == 0 && (!p.backward || p.seqlen_k == 0)) return 0;
  return p.batch * (p.backward ? p.nheads_k : p.nheads);
}

// Of a block; a short sequence has smaller ones.
int64_t rows_of(const Plan& plan) { return std::clamp<int64_t>(plan.problem.seqlen_q, 1, plan.cpu.rows); }
int64_t keys_of(const Plan& plan) { return std::clamp<int64_t>(plan.problem.seqlen_k, 1, plan.cpu.block_k); }

Workspace lay_out(const Plan& plan) {
  const Problem& p = plan.problem;
  const CpuKernels& kernels = kernels_of(plan.cpu.isa);
  const int64_t workers = workers_of(plan, heads_of(p)), group = p.backward ? p.group() : 1, width = p.backward ? p.headdim : p.headdim_v;
  constexpr auto kFloat = static_cast<int64_t>(sizeof(float));
  KernelShape shape{};
  shape.rows = rows_of(plan);
  shape.block_k = keys_of(plan);
  shape.headdim = static_cast<int>(p.headdim);
  shape.headdim_v = static_cast<int>(p.headdim_v);
  Workspace w;
  WorkspaceLayout layout;
  w.scratch_of_worker = p.backward ? kernels.v1_backward_scratch(shape) : kernels.v1_forward_scratch(shape);
  w.scratch = layout.add({workers, static_cast<int64_t>(w.scratch_of_worker)});
  if (!p.backward) {
    w.largest = layout.add({workers, p.seqlen_q, kFloat});
    w.sum = layout.add({workers, p.seqlen_q, kFloat});
  }
  if (p.out_dtype() != DType::kF32) {
    w.sums = layout.add({workers, group, p.seqlen_q, width, kFloat});
    w.sums_of_worker = static_cast<size_t>(group * p.seqlen_q * width * kFloat);
  }
  w.total = layout.total();
  return w;
}

// Row i sees keys below i + diagonal.
int64_t diagonal_of(const Problem& p) { return p.mask().ends() ? p.mask().diagonal() : p.seqlen_k; }

void forward(const Plan& plan, const fattn_buffers& b, const Workspace& w) {
  const Problem& p = plan.problem;
  const size_t element = size_of(p.dtype);
  auto* const workspace = static_cast<char*>(b.workspace);
  run_tasks(plan, "heads forward", heads_of(p), [&](int64_t i, int worker) {
    const int64_t n = i / p.nheads, h = i % p.nheads, hk = h / p.group();
    V1ForwardTask t{};
    t.q = at(b.q, place(p.q, n, 0, h), element);
    t.k = at(b.k, place(p.k, n, 0, hk), element);
    t.v = at(b.v, place(p.v, n, 0, hk), element);
    t.o = at(b.o, place(p.o, n, 0, h), size_of(p.out_dtype()));
    t.fp32_out = p.fp32_out;
    t.lse = p.want_lse ? at(static_cast<float*>(b.lse), place(p.lse, n, 0, h)) : nullptr;
    t.q_stride = p.q.row;
    t.k_stride = p.k.row;
    t.v_stride = p.v.row;
    t.o_stride = p.o.row;
    t.lse_stride = p.lse.row;
    t.seqlen_q = p.seqlen_q;
    t.seqlen_k = p.seqlen_k;
    t.diagonal = diagonal_of(p);
    t.rows = rows_of(plan);
    t.keys = keys_of(plan);
    t.headdim = static_cast<int>(p.headdim);
    t.headdim_v = static_cast<int>(p.headdim_v);
    t.scale = static_cast<float>(p.softmax_scale);
    t.largest = reinterpret_cast<float*>(workspace + w.largest) + worker * p.seqlen_q;
    t.sum = reinterpret_cast<float*>(workspace + w.sum) + worker * p.seqlen_q;
    t.sums = reinterpret_cast<float*>(workspace + w.sums + static_cast<size_t>(worker) * w.sums_of_worker);
    t.scratch = workspace + w.scratch + static_cast<size_t>(worker) * w.scratch_of_worker;
    kernels_of(plan.cpu.isa).v1_forward(kernel_dtype(p.dtype), t);
  });
}

void backward(const Plan& plan, const fattn_buffers& b, const Workspace& w) {
  const Problem& p = plan.problem;
  const size_t element = size_of(p.dtype);
  auto* const workspace = static_cast<char*>(b.workspace);
  run_tasks(plan, "heads backward", heads_of(p), [&](int64_t i, int worker) {
    const int64_t n = i / p.nheads_k, hk = i % p.nheads_k, h = hk * p.group();
    V1BackwardTask t{};
    t.q = at(b.q, place(p.q, n, 0, h), element);
    t.k = at(b.k, place(p.k, n, 0, hk), element);
    t.v = at(b.v, place(p.v, n, 0, hk), element);
    t.o = at(static_cast<const void*>(b.o), place(p.o, n, 0, h), element);
    t.dout = at(b.dout, place(p.dout, n, 0, h), element);
    t.lse = at(static_cast<const float*>(b.lse), place(p.lse, n, 0, h));
    t.dlse = p.has_dlse ? at(static_cast<const float*>(b.dlse), place(p.dlse, n, 0, h)) : nullptr;
    t.dq = at(b.dq, place(p.dq, n, 0, h), size_of(p.out_dtype()));
    t.dk = at(b.dk, place(p.dk, n, 0, hk), size_of(p.out_dtype()));
    t.dv = at(b.dv, place(p.dv, n, 0, hk), size_of(p.out_dtype()));
    t.fp32_out = p.fp32_out;
    t.q_stride = p.q.row;
    t.k_stride = p.k.row;
    t.v_stride = p.v.row;
    t.o_stride = p.o.row;
    t.dout_stride = p.dout.row;
    t.lse_stride = p.lse.row;
    t.dlse_stride = p.dlse.row;
    t.dq_stride = p.dq.row;
    t.dk_stride = p.dk.row;
    t.dv_stride = p.dv.row;
    t.q_head_stride = p.q.head;
    t.o_head_stride = p.o.head;
    t.dout_head_stride = p.dout.head;
    t.lse_head_stride = p.lse.head;
    t.dlse_head_stride = p.dlse.head;
    t.dq_head_stride = p.dq.head;
    t.group = p.group();
    t.seqlen_q = p.seqlen_q;
    t.seqlen_k = p.seqlen_k;
    t.diagonal = diagonal_of(p);
    t.rows = rows_of(plan);
    t.keys = keys_of(plan);
    t.headdim = static_cast<int>(p.headdim);
    t.headdim_v = static_cast<int>(p.headdim_v);
    t.scale = static_cast<float>(p.softmax_scale);
    t.sums = reinterpret_cast<float*>(workspace + w.sums + static_cast<size_t>(worker) * w.sums_of_worker);
    t.scratch = workspace + w.scratch + static_cast<size_t>(worker) * w.scratch_of_worker;
    kernels_of(plan.cpu.isa).v1_backward(kernel_dtype(p.dtype), t);
  });
}

}  // namespace

size_t v1_workspace_bytes(const Plan& plan) { return lay_out(plan).total; }

void execute_v1(const Plan& plan, const fattn_buffers& buffers) {
  const Workspace w = lay_out(plan);
  plan.problem.backward ? backward(plan, buffers, w) : forward(plan, buffers, w);
}

}  // namespace fattn::core
