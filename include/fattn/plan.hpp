// A plan: made once for shapes, strides and options, executed many times without allocating.
#pragma once

#include <memory>
#include <utility>

#include "fattn/problem.hpp"

namespace fattn {

class Plan {
 public:
  // Throws Error: kInvalidArgument, kUnsupported (with the reason), kOutOfMemory.
  explicit Plan(const fattn_problem& problem) {
    fattn_plan* raw = nullptr;
    check(fattn_plan_create(&problem, &raw));
    raw_.reset(raw);
  }
  Plan(const ForwardTensors& tensors, const Options& options) : Plan(describe(tensors, options)) {}
  Plan(const BackwardTensors& tensors, const Options& options) : Plan(describe(tensors, options)) {}

  fattn_plan_info info() const {
    fattn_plan_info info{};
    info.struct_size = sizeof info;
    check(fattn_plan_query(raw_.get(), &info));
    return info;
  }
  size_t workspace_bytes() const { return info().workspace_bytes; }

  // `workspace`: at least workspace_bytes() bytes on the tensors' device, aligned to 64 (CUDA: 256); shapes and strides of the
  // tensors are the plan's. `stream`: CUDA only, null is the default stream; the call returns before the work is done.
  void execute(const ForwardTensors& t, void* workspace, size_t workspace_bytes, void* stream = nullptr) const {
    fattn_buffers b = buffers(workspace, workspace_bytes, stream);
    b.q = t.q.data();
    b.k = t.k.data();
    b.v = t.v.data();
    b.o = t.o.data();
    b.lse = t.lse.data();
    b.weights = t.weights.data();
    point_to(t.scores, b);
    check(fattn_plan_execute(raw_.get(), &b));
  }
  void execute(const BackwardTensors& t, void* workspace, size_t workspace_bytes, void* stream = nullptr) const {
    fattn_buffers b = buffers(workspace, workspace_bytes, stream);
    b.q = t.q.data();
    b.k = t.k.data();
    b.v = t.v.data();
    b.o = t.o.data();
    b.lse = t.lse.data();
    b.dout = t.dout.data();
    b.dq = t.dq.data();
    b.dk = t.dk.data();
    b.dv = t.dv.data();
    point_to(t.scores, b);
    b.dbias = t.dbias.data();
    b.dlse = t.dlse.data();
    check(fattn_plan_execute(raw_.get(), &b));
  }

 private:
  static fattn_buffers buffers(void* workspace, size_t workspace_bytes, void* stream) {
    fattn_buffers b{};
    b.struct_size = sizeof b;
    b.workspace = workspace;
    b.workspace_bytes = workspace_bytes;
    b.stream = stream;
    return b;
  }
  static void point_to(const ScoreTensors& t, fattn_buffers& b) {
    b.seqused_k = t.seqused_k.data();
    b.alibi_slopes = t.alibi_slopes.data();
    b.bias = t.bias.data();
    b.mask = t.mask.data();
    b.dropout_state = t.dropout_state.data();
    b.cu_seqlens_q = t.cu_seqlens_q.data();
    b.cu_seqlens_k = t.cu_seqlens_k.data();
    b.document_q = t.document_q.data();
    b.document_k = t.document_k.data();
    b.status = t.status.data();
  }
  struct Destroy {
    void operator()(fattn_plan* plan) const { fattn_plan_destroy(plan); }
  };
  std::unique_ptr<fattn_plan, Destroy> raw_;
};

}  // namespace fattn
