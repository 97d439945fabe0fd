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
    execute_on(t, workspace, workspace_bytes, stream);
  }
  void execute(const BackwardTensors& t, void* workspace, size_t workspace_bytes, void* stream = nullptr) const {
    execute_on(t, workspace, workspace_bytes, stream);
  }

 private:
  template <class Tensors>
  void execute_on(const Tensors& tensors, void* workspace, size_t workspace_bytes, void* stream) const {
    fattn_buffers b{};
    b.struct_size = sizeof b;
    b.workspace = workspace;
    b.workspace_bytes = workspace_bytes;
    b.stream = stream;
    for_each_tensor(tensors, [&](const TensorRow& row, const Tensor& view) { row.pointer.set(b, view.data()); });
    check(fattn_plan_execute(raw_.get(), &b));
  }
  struct Destroy {
    void operator()(fattn_plan* plan) const { fattn_plan_destroy(plan); }
  };
  std::unique_ptr<fattn_plan, Destroy> raw_;
};

}  // namespace fattn
