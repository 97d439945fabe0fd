// The optimizer's step over all numbers, the sum of their squares, and that of losses: blocks of a constant size, so that sums are the same on every
// machine.
#include <cmath>

#include "ops/backends.h"
#include "ops/cpu/host.h"

namespace fattn::ops::cpu {
namespace {

constexpr int64_t kBlock = 16384;

class CpuSquareSum final : public Kernel<SquareSum> {
 public:
  CpuSquareSum(const SquareSum& p, const Device& device) : workers_(device) { layout_.add({ceil_div(p.rows, kBlock), 8}); }
  size_t workspace_bytes() const override { return layout_.total(); }
  void execute(const SquareSum::Buffers& b, void* workspace, void*) const override {
    auto* parts = static_cast<double*>(workspace);
    const int64_t blocks = ceil_div(b.rows, kBlock);
    workers_.run(blocks, [&](int64_t i, int) { parts[i] = sum_of(b.x + i * kBlock, std::min(kBlock, b.rows - i * kBlock)); });
    *b.sum = 0;
    for (int64_t i = 0; i < blocks; ++i) *b.sum += parts[i];
    if (b.finite && !std::isfinite(*b.finite)) *b.sum = NAN;
  }

 private:
  // Several sums, so that none waits for the one before.
  static double sum_of(const float* x, int64_t n) {
    constexpr int64_t kSums = 8;
    double sums[kSums] = {};
    int64_t i = 0;
    for (; i + kSums <= n; i += kSums)
      for (int64_t k = 0; k < kSums; ++k) sums[k] += static_cast<double>(x[i + k]) * static_cast<double>(x[i + k]);
    for (; i < n; ++i) sums[0] += static_cast<double>(x[i]) * static_cast<double>(x[i]);
    double all = 0;
    for (const double sum : sums) all += sum;
    return all;
  }

  const Workers workers_;
  core::WorkspaceLayout layout_;
};

class CpuLossSums final : public Kernel<LossSums> {
 public:
  void execute(const LossSums::Buffers& b, void*, void*) const override { add_losses(b); }
};

class CpuAdamWStep final : public Kernel<AdamWStep> {
 public:
  CpuAdamWStep(const AdamWStep& p, const Device& device) : p_(p), kernels_(kernels_of(device)), workers_(device) {}
  void execute(const AdamWStep::Buffers& given, void*, void*) const override {
    const AdamWStep::Buffers b = with_changing(given);
    AdamWTask task{};
    task.scale = static_cast<float>(b.scale);
    task.take_m = static_cast<float>(1 - b.beta1);
    task.take_v = static_cast<float>(1 - b.beta2);
    task.step_m = static_cast<float>(-b.learning_rate / (1 - std::pow(b.beta1, b.step)));
    task.step_v = static_cast<float>(1 / (1 - std::pow(b.beta2, b.step)));
    task.epsilon = static_cast<float>(b.epsilon);
    task.keep_less = static_cast<float>(-b.learning_rate * b.weight_decay);
    workers_.run(ceil_div(b.rows, kBlock), [&](int64_t i, int) {
      const int64_t at = i * kBlock;
      AdamWTask own = task;
      own.gradient = b.gradient + at;
      own.master = b.master + at;
      own.m = b.m + at;
      own.v = b.v + at;
      own.weight = b.weight ? bytes_at(b.weight, at, size_of(p_.dtype)) : nullptr;
      own.n = std::min(kBlock, b.rows - at);
      kernels_.adamw(kernel_dtype(p_.dtype), own);
    });
  }

 private:
  const AdamWStep p_;
  const OpsKernels& kernels_;
  const Workers workers_;
};

}  // namespace

std::unique_ptr<const Kernel<LossSums>> make(const LossSums&, const Device&) { return std::make_unique<CpuLossSums>(); }
std::unique_ptr<const Kernel<SquareSum>> make(const SquareSum& p, const Device& device) { return std::make_unique<CpuSquareSum>(p, device); }
std::unique_ptr<const Kernel<AdamWStep>> make(const AdamWStep& p, const Device& device) { return std::make_unique<CpuAdamWStep>(p, device); }

}  // namespace fattn::ops::cpu
