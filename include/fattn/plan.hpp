// A plan: made once for shapes, strides and options, executed many times without allocating.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "fattn/problem.hpp"

namespace fattn {

namespace detail {
// The same but for where its memory is. Strides of a tensor without elements, and one along a dimension of one element, reach nothing.
inline bool is_as_planned(const fattn_tensor& planned, const fattn_tensor& t) {
  if (planned.ndim != t.ndim) return false;
  if (t.ndim == 0) return true;
  bool same = planned.dtype == t.dtype && planned.device_type == t.device_type && planned.device_index == t.device_index;
  bool empty = false;
  for (int i = 0; i < t.ndim; ++i) {
    same = same && planned.shape[i] == t.shape[i];
    empty = empty || t.shape[i] == 0;
  }
  for (int i = 0; i < t.ndim && !empty; ++i) same = same && (planned.strides[i] == t.strides[i] || t.shape[i] == 1);
  return same;
}
inline std::string text_of(const fattn_tensor& t) {
  if (t.ndim == 0) return "absent";
  const auto list = [&](const int64_t* numbers) {
    std::string all;
    for (int i = 0; i < t.ndim; ++i) all += (i > 0 ? ", " : "") + std::to_string(numbers[i]);
    return "(" + all + ")";
  };
  const std::string place = t.device_type == FATTN_DEVICE_CUDA ? "CUDA device " + std::to_string(t.device_index) : "the CPU";
  return std::string(name_of(static_cast<DType>(t.dtype))) + " of shape " + list(t.shape) + " and strides " + list(t.strides) + " on " + place;
}
}  // namespace detail

class Plan {
 public:
  // Throws Error: kInvalidArgument, kUnsupported (with the reason), kOutOfMemory.
  explicit Plan(const fattn_problem& problem) : problem_(problem) {
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

  // `workspace`: at least workspace_bytes() bytes on the tensors' device, aligned to 64 (CUDA: 256). The tensors are those that the plan was made
  // for, in any memory; of others it throws Error. `stream`: CUDA only, null is the default stream; the call returns before the work is done.
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
    for_each_tensor(tensors, [&](const TensorRow& row, const Tensor& view) {
      const fattn_tensor& planned = problem_.*row.described;
      if (!detail::is_as_planned(planned, view.raw())) refuse(row.name, planned, view.raw());
      row.pointer.set(b, view.data());
    });
    check(fattn_plan_execute(raw_.get(), &b));
  }
  [[noreturn]] static void refuse(const char* name, const fattn_tensor& planned, const fattn_tensor& given) {
    throw Error(ErrorCode::kInvalidArgument, std::string(name) + " is " + detail::text_of(given) + "; in this plan it is " +
                                                 detail::text_of(planned) + ". Make a plan for these tensors, or pass those that it was made for");
  }
  struct Destroy {
    void operator()(fattn_plan* plan) const { fattn_plan_destroy(plan); }
  };
  std::unique_ptr<fattn_plan, Destroy> raw_;
  fattn_problem problem_;  // of which tensors alone are looked at
};

}  // namespace fattn
