// The library on a CUDA device: inputs are copied there once, calls are timed by events, results are copied back for the check.
#include <algorithm>
#include <array>
#include <utility>

#include "fattn/device.hpp"
#include "measure/library_plans.h"

namespace fattn::measure {
namespace {

class CudaContestant final : public Contestant {
 public:
  CudaContestant(std::string provider, const Options& options, const Placement& place) : plans_(std::move(provider), options, place), place_(place) {}

  Identity identity() const override { return plans_.identity(); }

  void prepare(const ProblemSpec& spec, const Inputs& inputs, bool grad, int64_t memory_limit) override {
    accept(spec, grad, memory_limit);
    guarded([&] {
      q_ = upload(inputs.q);
      k_ = upload(inputs.k);
      v_ = upload(inputs.v);
      if (grad) dout_ = upload(inputs.dout);
      for (size_t i = 0; i < scores_.size(); ++i)
        if (inputs.scores[i].size() > 0) scores_[i] = upload(inputs.scores[i]);
    });
  }

  void accept(const ProblemSpec& spec, bool grad, int64_t memory_limit) override {
    release();
    for (cuda::Buffer* input : {&q_, &k_, &v_, &dout_}) *input = cuda::Buffer();
    for (cuda::Buffer& input : scores_) input = cuda::Buffer();
    spec_ = spec;
    grad_ = grad;
    guarded([&] {
      plans_.make(spec, grad);
      int64_t total = spec.input_bytes(grad);
      const auto workspace = static_cast<int64_t>(plans_.workspace_bytes(all_passes()));
      if (__builtin_add_overflow(total, spec.output_bytes(grad), &total) || __builtin_add_overflow(total, workspace, &total))
        throw Failure(Status::kOutOfMemory, "the tensors have more bytes than any machine can address");
      const auto free_bytes = static_cast<int64_t>(cuda::memory(place_.index).free_bytes);
      const int64_t allowed = memory_limit > 0 ? std::min(memory_limit, free_bytes) : free_bytes;
      if (total > allowed)
        throw Failure(Status::kOutOfMemory, plans_.provider() + ": " + describe(spec) + " takes " + mebibytes(static_cast<double>(total)) + " on " +
                                                place_.name() + "; allowed: " + mebibytes(static_cast<double>(allowed)) +
                                                (allowed < free_bytes ? " (--memory-limit)" : " (free on the device)"));
    });
  }

  MemoryUse memory(Pass pass) override {
    MemoryUse use;
    use.method = "allocated";
    use.extra_bytes = spec_.output_bytes(pass != Pass::kForward) + static_cast<int64_t>(plans_.workspace_bytes(pass));
    return use;
  }

  const Outputs& compute() override {
    guarded([&] {
      allocate();
      for_outputs(device_, spec_, all_passes(), [](cuda::Buffer& buffer, int64_t) {
        if (buffer.bytes() > 0) buffer.fill(0xff);  // NaN, should a kernel leave something out
      });
      run(all_passes());
      download(outputs_.o, device_.o);
      download(outputs_.lse, device_.lse);
      if (grad_) {
        download(outputs_.dq, device_.dq);
        download(outputs_.dk, device_.dk);
        download(outputs_.dv, device_.dv);
        if (spec_.dbias) download(outputs_.dbias, device_.dbias);
      }
    });
    return outputs_;
  }

  std::vector<double> time(Pass pass, int samples, int warmup) override {
    std::vector<double> seconds;
    guarded([&] {
      allocate();
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
    device_ = DeviceOutputs();
    workspace_ = cuda::Buffer();
    flush_ = cuda::Buffer();
  }

 private:
  struct DeviceOutputs {
    cuda::Buffer o, lse, dq, dk, dv, dbias;
  };

  Pass all_passes() const { return grad_ ? Pass::kForwardBackward : Pass::kForward; }

  cuda::Buffer upload(const Pages& pages) const {
    cuda::Buffer buffer(place_.index, pages.size());
    buffer.copy_from(pages.data(), pages.size());
    return buffer;
  }
  static void download(Pages& pages, const cuda::Buffer& buffer) {
    if (pages.size() < buffer.bytes()) pages = Pages(buffer.bytes());
    buffer.copy_to(pages.data(), buffer.bytes());
  }

  void allocate() {
    const auto need = [&](cuda::Buffer& buffer, int64_t bytes) {
      if (static_cast<int64_t>(buffer.bytes()) < bytes) buffer = cuda::Buffer(place_.index, static_cast<size_t>(bytes));
    };
    for_outputs(device_, spec_, all_passes(), need);
    need(workspace_, static_cast<int64_t>(plans_.workspace_bytes(all_passes())));
  }

  void run(Pass pass) {
    Addresses at{q_.get(),          k_.get(),         v_.get(),         dout_.get(),      device_.o.get(),
                 device_.lse.get(), device_.dq.get(), device_.dk.get(), device_.dv.get(), device_.dbias.get()};
    for (size_t i = 0; i < scores_.size(); ++i) at.scores[i] = scores_[i].get();
    plans_.execute(pass, at, workspace_.get(), workspace_.bytes());
  }

  // Fills the L2 cache with other data than the call's, long enough that the call is queued before it begins.
  void flush() {
    const auto bytes = static_cast<size_t>(flush_bytes(place_));
    if (bytes == 0) return;
    if (flush_.bytes() < bytes) flush_ = cuda::Buffer(place_.index, bytes);
    for (int i = 0; i < kFlushRepeats; ++i) flush_.fill(0);
  }

  LibraryPlans plans_;
  Placement place_;
  ProblemSpec spec_;
  bool grad_ = false;
  cuda::Buffer q_, k_, v_, dout_, workspace_, flush_;
  std::array<cuda::Buffer, kScoreInputs> scores_;
  DeviceOutputs device_;
  Outputs outputs_;
};

}  // namespace

int64_t flush_bytes(const Placement& place) { return place.device == Device::kCuda && place.flush_l2 ? 4 * cuda::info(place.index).l2_bytes : 0; }

std::unique_ptr<Contestant> make_cuda_contestant(std::string provider, const Options& options, const Placement& place) {
  return std::make_unique<CudaContestant>(std::move(provider), options, place);
}

}  // namespace fattn::measure
