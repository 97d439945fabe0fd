// Cross-entropy and its gradient: the logits of some rows at a time become their own gradient, which two products take.
#include "cpu/subnormals.h"
#include "ops/backends.h"
#include "ops/cpu/host.h"

namespace fattn::ops::cpu {
namespace {

// Rows at a time, so that logits have 64 MiB at most; a constant, so that sums are the same on every machine.
constexpr int64_t kMostLogits = int64_t{1} << 24, kMostAtOnce = 1024, kFewestAtOnce = 64;
int64_t rows_at_once(const CrossEntropyGradient& p) {
  return std::min(p.rows, std::clamp(kMostLogits / p.vocab / kFewestAtOnce * kFewestAtOnce, kFewestAtOnce, kMostAtOnce));
}

class CpuCrossEntropyGradient final : public Kernel<CrossEntropyGradient> {
 public:
  CpuCrossEntropyGradient(const CrossEntropyGradient& p, const Device& device)
      : p_(p), kernels_(kernels_of(device)), workers_(device), at_once_(rows_at_once(p)) {
    Product logits{at_once_, p.vocab, p.width};
    logits.b_turned = true;
    logits.a = logits.b = p.dtype;
    Product dx{at_once_, p.width, p.vocab};
    dx.b = p.dtype;
    Product dweight{p.vocab, p.width, at_once_};
    dweight.a_turned = true;
    dweight.b = p.dtype;
    logits_ = make(logits, device);
    dx_ = make(dx, device);
    dweight_ = make(dweight, device);
    logits_at_ = layout_.add({at_once_, p.vocab, 4});
    largest_at_ = layout_.add({at_once_, 4});
    products_at_ = layout_.add({static_cast<int64_t>(std::max({logits_->workspace_bytes(), dx_->workspace_bytes(), dweight_->workspace_bytes()}))});
  }
  size_t workspace_bytes() const override { return layout_.total(); }

  void execute(const CrossEntropyGradient::Buffers& given, void* workspace, void* stream) const override {
    const CrossEntropyGradient::Buffers b = with_changing(given);
    check_targets(p_, b);
    auto* logits = reinterpret_cast<float*>(static_cast<char*>(workspace) + logits_at_);
    auto* unwanted = reinterpret_cast<float*>(static_cast<char*>(workspace) + largest_at_);
    void* products = static_cast<char*>(workspace) + products_at_;
    for (int64_t begin = 0; begin < b.rows; begin += at_once_) {
      const int64_t rows = std::min(at_once_, b.rows - begin);
      const void* x = bytes_at(b.x, begin * p_.width, size_of(p_.dtype));
      logits_->execute({rows, x, b.weight, nullptr, nullptr, logits}, products, stream);
      workers_.run(ceil_div(rows, kRowsOfTask), [&](int64_t task, int) {
        const core::SubnormalsAreZero zero;
        for (int64_t r = task * kRowsOfTask; r < std::min(rows, (task + 1) * kRowsOfTask); ++r)
          kernels_.softmax({logits + r * p_.vocab, p_.vocab, b.target[begin + r], static_cast<float>(b.scale), b.dx != nullptr, b.loss + begin + r,
                            b.largest ? b.largest + begin + r : unwanted + r});
      });
      if (!b.dx) continue;
      dx_->execute({rows, logits, b.weight, nullptr, nullptr, b.dx + begin * p_.width}, products, stream);
      dweight_->execute({p_.vocab, logits, x, nullptr, b.dweight, b.dweight, rows}, products, stream);
    }
  }

 private:
  const CrossEntropyGradient p_;
  const OpsKernels& kernels_;
  const Workers workers_;
  const int64_t at_once_;
  std::unique_ptr<const Kernel<Product>> logits_, dx_, dweight_;
  core::WorkspaceLayout layout_;
  size_t logits_at_ = 0, largest_at_ = 0, products_at_ = 0;
};

}  // namespace

std::unique_ptr<const Kernel<CrossEntropyGradient>> make(const CrossEntropyGradient& p, const Device& device) {
  return std::make_unique<CpuCrossEntropyGradient>(p, device);
}

}  // namespace fattn::ops::cpu
