#include "measure/library_plans.h"

#include <utility>

namespace fattn::measure {
namespace {

template <class Tensors>
Tensors placed(const Tensors& tensors, const Placement& place) {
  if (place.device == Device::kCpu) return tensors;
  return each_tensor(tensors, [&](const Tensor& view) { return view ? view.on(place.device, place.index, view.data()) : view; });
}

}  // namespace

ForwardTensors forward_tensors(const ProblemSpec& spec, const Placement& place, const Addresses& at) {
  return placed(
      ForwardTensors{
          q_view(spec, at.q), k_view(spec, at.k), v_view(spec, at.v), o_view(spec, at.o), lse_view(spec, at.lse), {}, score_views(spec, at.scores)},
      place);
}

BackwardTensors backward_tensors(const ProblemSpec& spec, const Placement& place, const Addresses& at) {
  return placed(BackwardTensors{q_view(spec, at.q), k_view(spec, at.k), v_view(spec, at.v), o_view(spec, at.o), lse_view(spec, at.lse),
                                o_view(spec, at.dout), q_view(spec, at.dq), k_view(spec, at.dk), v_view(spec, at.dv), score_views(spec, at.scores),
                                spec.dbias ? pair_view(spec, spec.bias, spec.bias_dtype(), at.dbias) : Tensor()},
                place);
}

LibraryPlans::LibraryPlans(std::string provider, const Options& options, const Placement& place)
    : provider_(std::move(provider)), options_(options), place_(place) {}

Identity LibraryPlans::identity() const {
  const bool on_cpu = place_.device == Device::kCpu;
  Identity id;
  id.provider = provider_;
  id.version = fattn_version();
  id.backend = name_of(on_cpu ? options_.backend : Backend::kCuda);
  id.algorithm = name_of(options_.algorithm);
  id.device = place_.name();
  if (on_cpu) {
    id.isa = options_.cpu_isa;
    id.threads = options_.num_threads;
  }
  if (forward_) {
    const fattn_plan_info info = forward_->info();
    id.backend = name_of(static_cast<Backend>(info.backend));
    id.algorithm = name_of(static_cast<Algorithm>(info.algorithm));
    id.kernel_forward = info.kernel;
    if (on_cpu) {
      id.isa = static_cast<Isa>(info.cpu_isa);
      id.threads = info.num_threads;
    }
  }
  if (backward_) id.kernel_backward = backward_->info().kernel;
  return id;
}

void LibraryPlans::make(const ProblemSpec& spec, bool grad) {
  forward_.reset();
  backward_.reset();
  spec_ = spec;
  Options options = options_;
  spec.apply_to(options);
  forward_.emplace(forward_tensors(spec, place_), options);
  if (grad) backward_.emplace(backward_tensors(spec, place_), options);
}

size_t LibraryPlans::workspace_bytes(Pass pass) const {
  size_t bytes = 0;
  if (pass != Pass::kBackward) bytes = std::max(bytes, forward_->workspace_bytes());
  if (pass != Pass::kForward) bytes = std::max(bytes, backward_->workspace_bytes());
  return bytes;
}

void LibraryPlans::execute(Pass pass, const Addresses& at, void* workspace, size_t bytes) const {
  if (pass != Pass::kBackward) forward_->execute(forward_tensors(spec_, place_, at), workspace, bytes);
  if (pass != Pass::kForward) backward_->execute(backward_tensors(spec_, place_, at), workspace, bytes);
}

}  // namespace fattn::measure
