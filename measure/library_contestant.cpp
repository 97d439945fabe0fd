// The library as a contestant: plans made once, executed on memory whose every byte is accounted for.
#include <algorithm>
#include <new>
#include <optional>
#include <utility>

#include "fattn/plan.hpp"
#include "measure/contestant.h"

namespace fattn::measure {
namespace {

class LibraryContestant final : public Contestant {
 public:
  LibraryContestant(std::string provider, const Options& options) : provider_(std::move(provider)), options_(options) {}

  Identity identity() const override {
    Identity id;
    id.provider = provider_;
    id.version = fattn_version();
    id.backend = name_of(options_.backend);
    id.algorithm = name_of(options_.algorithm);
    id.isa = options_.cpu_isa;
    id.threads = options_.num_threads;
    if (forward_) {
      const fattn_plan_info info = forward_->info();
      id.backend = name_of(static_cast<Backend>(info.backend));
      id.algorithm = name_of(static_cast<Algorithm>(info.algorithm));
      id.isa = static_cast<Isa>(info.cpu_isa);
      id.kernel_forward = info.kernel;
      id.threads = info.num_threads;
    }
    if (backward_) id.kernel_backward = backward_->info().kernel;
    return id;
  }

  void prepare(const ProblemSpec& spec, const Inputs& inputs, bool grad, int64_t memory_limit) override {
    release();
    forward_.reset();
    backward_.reset();
    spec_ = spec;
    inputs_ = &inputs;
    grad_ = grad;
    Options options = options_;
    options.causal = spec.causal;
    guarded([&] {
      forward_.emplace(forward_tensors(), options);
      if (grad) backward_.emplace(backward_tensors(), options);
    });
    int64_t total = spec.output_bytes(grad);
    if (__builtin_add_overflow(total, static_cast<int64_t>(workspace_bytes(grad ? Pass::kForwardBackward : Pass::kForward)), &total))
      throw Failure(Status::kOutOfMemory, "outputs and workspace have more bytes than any machine can address");
    // The inputs are there already: a limit counts them, the memory available does not.
    require_memory(total, memory_limit > 0 ? std::max<int64_t>(1, memory_limit - spec.input_bytes(grad)) : 0,
                   provider_ + ": outputs and workspace for " + describe(spec));
  }

  MemoryUse memory(Pass pass) override {
    release();
    MemoryUse use;
    use.method = "allocated";
    const bool grad = pass != Pass::kForward;
    if (grad) {
      allocate(Pass::kForward);
      run_forward();  // what it leaves, o and lse, is there when the backward pass begins
      workspace_ = Pages();
    }
    const int64_t kept = grad ? spec_.o_bytes() + spec_.lse_bytes() : 0;
    const ResidentPeak peak;
    allocate(pass);
    run(pass);
    use.rss_measured = peak.measurable();
    use.rss_extra_bytes = peak.bytes_added() + kept;
    use.extra_bytes = spec_.output_bytes(grad) + static_cast<int64_t>(workspace_.size());
    return use;
  }

  const Outputs& compute() override {
    allocate(grad_ ? Pass::kForwardBackward : Pass::kForward);
    run(grad_ ? Pass::kForwardBackward : Pass::kForward);
    return outputs_;
  }

  std::vector<double> time(Pass pass, int samples, int warmup) override {
    allocate(grad_ ? Pass::kForwardBackward : Pass::kForward);
    return time_calls([&] { run(pass); }, samples, warmup);
  }

  void release() override {
    outputs_ = Outputs();
    workspace_ = Pages();
  }

 private:
  ForwardTensors forward_tensors() const {
    return {q_view(spec_, inputs_->q.data()), k_view(spec_, inputs_->k.data()),     v_view(spec_, inputs_->v.data()),
            o_view(spec_, outputs_.o.data()), lse_view(spec_, outputs_.lse.data()), {}};
  }
  BackwardTensors backward_tensors() const {
    return {q_view(spec_, inputs_->q.data()),  k_view(spec_, inputs_->k.data()),     v_view(spec_, inputs_->v.data()),
            o_view(spec_, outputs_.o.data()),  lse_view(spec_, outputs_.lse.data()), o_view(spec_, inputs_->dout.data()),
            q_view(spec_, outputs_.dq.data()), k_view(spec_, outputs_.dk.data()),    v_view(spec_, outputs_.dv.data())};
  }

  size_t workspace_bytes(Pass pass) const {
    size_t bytes = 0;
    if (pass != Pass::kBackward) bytes = std::max(bytes, forward_->workspace_bytes());
    if (pass != Pass::kForward) bytes = std::max(bytes, backward_->workspace_bytes());
    return bytes;
  }

  void allocate(Pass pass) {
    auto need = [](Pages& pages, int64_t bytes) {
      if (static_cast<int64_t>(pages.size()) < bytes) pages = Pages(static_cast<size_t>(bytes));
    };
    need(outputs_.o, spec_.o_bytes());
    need(outputs_.lse, spec_.lse_bytes());
    if (pass != Pass::kForward) {
      need(outputs_.dq, spec_.q_bytes());
      need(outputs_.dk, spec_.k_bytes());
      need(outputs_.dv, spec_.v_bytes());
    }
    need(workspace_, static_cast<int64_t>(workspace_bytes(pass)));
  }

  void run_forward() {
    guarded([&] { forward_->execute(forward_tensors(), workspace_.data(), workspace_.size()); });
  }
  void run_backward() {
    guarded([&] { backward_->execute(backward_tensors(), workspace_.data(), workspace_.size()); });
  }
  void run(Pass pass) {
    if (pass != Pass::kBackward) run_forward();
    if (pass != Pass::kForward) run_backward();
  }

  template <typename Body>
  static void guarded(const Body& body) {
    try {
      body();
    } catch (const std::exception& e) {
      throw as_failure(e);
    }
  }

  std::string provider_;
  Options options_;
  ProblemSpec spec_;
  const Inputs* inputs_ = nullptr;
  bool grad_ = false;
  std::optional<Plan> forward_, backward_;
  Outputs outputs_;
  Pages workspace_;
};

}  // namespace

std::unique_ptr<Contestant> make_library_contestant(std::string provider, const Options& options, const Placement& place) {
  if (place.device == Device::kCuda) return make_cuda_contestant(std::move(provider), options, place);
  return std::make_unique<LibraryContestant>(std::move(provider), options);
}

Failure as_failure(const std::exception& e) {
  if (const auto* failure = dynamic_cast<const Failure*>(&e)) return *failure;
  if (const auto* error = dynamic_cast<const Error*>(&e)) {
    if (error->code() == ErrorCode::kOutOfMemory) return {Status::kOutOfMemory, e.what()};
    if (error->code() == ErrorCode::kUnsupported) return {Status::kUnsupported, e.what()};
    return {Status::kFailed, e.what()};
  }
  if (dynamic_cast<const std::bad_alloc*>(&e)) return {Status::kOutOfMemory, "the allocator could not give the memory asked for (std::bad_alloc)"};
  return {Status::kFailed, e.what()};
}

}  // namespace fattn::measure
