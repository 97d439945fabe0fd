// The library on a CUDA device: inputs are copied there once, calls are timed by events, results are copied back for the check.
#include <algorithm>
#include <optional>
#include <utility>

#include "fattn/device.hpp"
#include "fattn/plan.hpp"
#include "measure/contestant.h"

namespace fattn::measure {
namespace {

class CudaContestant final : public Contestant {
 public:
  CudaContestant(std::string provider, const Options& options, const Placement& place)
      : provider_(std::move(provider)), options_(options), place_(place) {}

  Identity identity() const override {
    Identity id;
    id.provider = provider_;
    id.version = fattn_version();
    id.backend = name_of(Backend::kCuda);
    id.algorithm = name_of(options_.algorithm);
    id.device = place_.name();
    if (forward_) {
      const fattn_plan_info info = forward_->info();
      id.backend = name_of(static_cast<Backend>(info.backend));
      id.algorithm = name_of(static_cast<Algorithm>(info.algorithm));
      id.kernel_forward = info.kernel;
    }
    if (backward_) id.kernel_backward = backward_->info().kernel;
    return id;
  }

  void prepare(const ProblemSpec& spec, const Inputs& inputs, bool grad, int64_t memory_limit) override {
    release();
    for (cuda::Buffer* input : {&q_, &k_, &v_, &dout_}) *input = cuda::Buffer();
    forward_.reset();
    backward_.reset();
    spec_ = spec;
    grad_ = grad;
    Options options = options_;
    options.causal = spec.causal;
    guarded([&] {
      forward_.emplace(forward_tensors(), options);
      if (grad) backward_.emplace(backward_tensors(), options);
      int64_t total = spec.input_bytes(grad);
      const auto workspace = static_cast<int64_t>(workspace_bytes(grad ? Pass::kForwardBackward : Pass::kForward));
      if (__builtin_add_overflow(total, spec.output_bytes(grad), &total) || __builtin_add_overflow(total, workspace, &total))
        throw Failure(Status::kOutOfMemory, "the tensors have more bytes than any machine can address");
      const auto free_bytes = static_cast<int64_t>(cuda::memory(place_.index).free_bytes);
      const int64_t allowed = memory_limit > 0 ? std::min(memory_limit, free_bytes) : free_bytes;
      if (total > allowed)
        throw Failure(Status::kOutOfMemory, provider_ + ": " + describe(spec) + " takes " + mebibytes(static_cast<double>(total)) + " on " +
                                                place_.name() + "; allowed: " + mebibytes(static_cast<double>(allowed)) +
                                                (allowed < free_bytes ? " (--memory-limit)" : " (free on the device)"));
      q_ = upload(inputs.q);
      k_ = upload(inputs.k);
      v_ = upload(inputs.v);
      if (grad) dout_ = upload(inputs.dout);
    });
  }

  MemoryUse memory(Pass pass) override {
    MemoryUse use;
    use.method = "allocated";
    use.extra_bytes = spec_.output_bytes(pass != Pass::kForward) + static_cast<int64_t>(workspace_bytes(pass));
    return use;
  }

  const Outputs& compute() override {
    guarded([&] {
      const Pass pass = grad_ ? Pass::kForwardBackward : Pass::kForward;
      allocate(pass);
      for (cuda::Buffer* output : {&o_, &lse_, &dq_, &dk_, &dv_})
        if (output->bytes() > 0) output->fill(0xff);  // NaN, should a kernel leave something out
      run(pass);
      download(outputs_.o, o_);
      download(outputs_.lse, lse_);
      if (grad_) {
        download(outputs_.dq, dq_);
        download(outputs_.dk, dk_);
        download(outputs_.dv, dv_);
      }
    });
    return outputs_;
  }

  std::vector<double> time(Pass pass, int samples, int warmup) override {
    std::vector<double> seconds;
    guarded([&] {
      allocate(grad_ ? Pass::kForwardBackward : Pass::kForward);
      if (grad_ && pass == Pass::kBackward) run(Pass::kForward);
      cuda::Event begin(place_.index), end(place_.index);
      for (int i = 0; i < warmup; ++i) run(pass);
      while (static_cast<int>(seconds.size()) < samples) {
        flush();
        begin.record();
        run(pass);
        end.record();
        seconds.push_back(begin.seconds_to(end));
      }
    });
    return seconds;
  }

  void release() override {
    outputs_ = Outputs();
    for (cuda::Buffer* buffer : {&o_, &lse_, &dq_, &dk_, &dv_, &workspace_, &flush_}) *buffer = cuda::Buffer();
  }

 private:
  Tensor placed(const Tensor& view, const cuda::Buffer& buffer) const { return view.on(Device::kCuda, place_.index, buffer.get()); }
  ForwardTensors forward_tensors() const {
    return {placed(q_view(spec_, nullptr), q_), placed(k_view(spec_, nullptr), k_),     placed(v_view(spec_, nullptr), v_),
            placed(o_view(spec_, nullptr), o_), placed(lse_view(spec_, nullptr), lse_), {}};
  }
  BackwardTensors backward_tensors() const {
    const ForwardTensors f = forward_tensors();
    return {f.q,
            f.k,
            f.v,
            f.o,
            f.lse,
            placed(o_view(spec_, nullptr), dout_),
            placed(q_view(spec_, nullptr), dq_),
            placed(k_view(spec_, nullptr), dk_),
            placed(v_view(spec_, nullptr), dv_)};
  }

  size_t workspace_bytes(Pass pass) const {
    size_t bytes = 0;
    if (pass != Pass::kBackward) bytes = std::max(bytes, forward_->workspace_bytes());
    if (pass != Pass::kForward) bytes = std::max(bytes, backward_->workspace_bytes());
    return bytes;
  }

  cuda::Buffer upload(const Pages& pages) const {
    cuda::Buffer buffer(place_.index, pages.size());
    buffer.copy_from(pages.data(), pages.size());
    return buffer;
  }
  static void download(Pages& pages, const cuda::Buffer& buffer) {
    if (pages.size() < buffer.bytes()) pages = Pages(buffer.bytes());
    buffer.copy_to(pages.data(), buffer.bytes());
  }

  void allocate(Pass pass) {
    auto need = [&](cuda::Buffer& buffer, int64_t bytes) {
      if (static_cast<int64_t>(buffer.bytes()) < bytes) buffer = cuda::Buffer(place_.index, static_cast<size_t>(bytes));
    };
    need(o_, spec_.o_bytes());
    need(lse_, spec_.lse_bytes());
    if (pass != Pass::kForward) {
      need(dq_, spec_.q_bytes());
      need(dk_, spec_.k_bytes());
      need(dv_, spec_.v_bytes());
    }
    need(workspace_, static_cast<int64_t>(workspace_bytes(pass)));
  }

  void run(Pass pass) {
    if (pass != Pass::kBackward) forward_->execute(forward_tensors(), workspace_.get(), workspace_.bytes());
    if (pass != Pass::kForward) backward_->execute(backward_tensors(), workspace_.get(), workspace_.bytes());
  }

  // Fills the L2 cache with other data than the call's, long enough that the call is queued before it begins.
  void flush() {
    const auto bytes = static_cast<size_t>(flush_bytes(place_));
    if (bytes == 0) return;
    if (flush_.bytes() < bytes) flush_ = cuda::Buffer(place_.index, bytes);
    for (int i = 0; i < kFlushRepeats; ++i) flush_.fill(0);
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
  Placement place_;
  ProblemSpec spec_;
  bool grad_ = false;
  std::optional<Plan> forward_, backward_;
  cuda::Buffer q_, k_, v_, dout_, o_, lse_, dq_, dk_, dv_, workspace_, flush_;
  Outputs outputs_;
};

}  // namespace

int64_t flush_bytes(const Placement& place) { return place.device == Device::kCuda && place.flush_l2 ? 4 * cuda::info(place.index).l2_bytes : 0; }

std::unique_ptr<Contestant> make_cuda_contestant(std::string provider, const Options& options, const Placement& place) {
  return std::make_unique<CudaContestant>(std::move(provider), options, place);
}

}  // namespace fattn::measure
