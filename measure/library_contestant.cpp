// The library as a contestant: plans made once, executed on memory whose every byte is accounted for.
#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "measure/library_plans.h"

namespace fattn::measure {
namespace {

class LibraryContestant final : public Contestant {
 public:
  LibraryContestant(std::string provider, const Options& options) : plans_(std::move(provider), options, Placement()) {}

  Identity identity() const override { return plans_.identity(); }

  void prepare(const ProblemSpec& spec, const Inputs& inputs, bool grad, int64_t memory_limit) override {
    accept(spec, grad, memory_limit);
    inputs_ = &inputs;
  }

  void accept(const ProblemSpec& spec, bool grad, int64_t memory_limit) override {
    release();
    spec_ = spec;
    grad_ = grad;
    guarded([&] { plans_.make(spec, grad); });
    int64_t total = spec.output_bytes(grad);
    if (__builtin_add_overflow(total, static_cast<int64_t>(plans_.workspace_bytes(all_passes())), &total))
      throw Failure(Status::kOutOfMemory, "outputs and workspace have more bytes than any machine can address");
    // The inputs are there already: a limit counts them, the memory available does not.
    require_memory(total, memory_limit > 0 ? std::max<int64_t>(1, memory_limit - spec.input_bytes(grad)) : 0,
                   plans_.provider() + ": outputs and workspace for " + describe(spec));
  }

  MemoryUse memory(Pass pass) override {
    release();
    MemoryUse use;
    use.method = "allocated";
    const bool grad = pass != Pass::kForward;
    if (grad) {
      allocate(Pass::kForward);
      run(Pass::kForward);  // what it leaves, o and lse, is there when the backward pass begins
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
    allocate(all_passes());
    // NaN, should a kernel leave something out, or read what it has not written.
    for_outputs(outputs_, spec_, all_passes(), [](Pages& pages, int64_t) { std::memset(pages.data(), 0xff, pages.size()); });
    if (workspace_.size() > 0) std::memset(workspace_.data(), 0xff, workspace_.size());
    run(all_passes());
    return outputs_;
  }

  std::vector<double> time(Pass pass, int samples, int warmup) override {
    allocate(all_passes());
    return time_calls([&] { run(pass); }, samples, warmup);
  }

  void release() override {
    outputs_ = Outputs();
    workspace_ = Pages();
  }

 private:
  Pass all_passes() const { return grad_ ? Pass::kForwardBackward : Pass::kForward; }

  void allocate(Pass pass) {
    const auto need = [](Pages& pages, int64_t bytes) {
      if (static_cast<int64_t>(pages.size()) < bytes) pages = Pages(static_cast<size_t>(bytes));
    };
    for_outputs(outputs_, spec_, pass, need);
    need(workspace_, static_cast<int64_t>(plans_.workspace_bytes(pass)));
  }

  void run(Pass pass) {
    const Addresses at{inputs_->q.data(),
                       inputs_->k.data(),
                       inputs_->v.data(),
                       inputs_->dout.data(),
                       outputs_.o.data(),
                       outputs_.lse.data(),
                       outputs_.dq.data(),
                       outputs_.dk.data(),
                       outputs_.dv.data(),
                       outputs_.dbias.data(),
                       addresses_of(inputs_->scores)};
    guarded([&] { plans_.execute(pass, at, workspace_.data(), workspace_.size()); });
  }

  LibraryPlans plans_;
  ProblemSpec spec_;
  const Inputs* inputs_ = nullptr;
  bool grad_ = false;
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
