#include "measure/library_plans.h"

#include <utility>

namespace fattn::measure {
namespace {

Tensor placed(const Tensor& view, const Placement& place) {
  return !view || place.device == Device::kCpu ? view : view.on(place.device, place.index, view.data());
}

}  // namespace

ForwardTensors forward_tensors(const ProblemSpec& spec, const Placement& place, const Addresses& at) {
  ScoreTensors scores = score_views(spec, at.scores);
  for (Tensor* t : {&scores.seqused_k, &scores.alibi_slopes, &scores.bias, &scores.mask, &scores.dropout_state, &scores.cu_seqlens_q,
                    &scores.cu_seqlens_k, &scores.document_q, &scores.document_k})
    *t = placed(*t, place);
  return {placed(q_view(spec, at.q), place),
          placed(k_view(spec, at.k), place),
          placed(v_view(spec, at.v), place),
          placed(o_view(spec, at.o), place),
          placed(lse_view(spec, at.lse), place),
          {},
          scores};
}

BackwardTensors backward_tensors(const ProblemSpec& spec, const Placement& place, const Addresses& at) {
  const ForwardTensors f = forward_tensors(spec, place, at);
  BackwardTensors b{f.q,
                    f.k,
                    f.v,
                    f.o,
                    f.lse,
                    placed(o_view(spec, at.dout), place),
                    placed(q_view(spec, at.dq), place),
                    placed(k_view(spec, at.dk), place),
                    placed(v_view(spec, at.dv), place),
                    f.scores};
  if (spec.dbias) b.dbias = placed(pair_view(spec, spec.bias, spec.bias_dtype(), at.dbias), place);
  return b;
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
