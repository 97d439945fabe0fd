// The optimizer's step, the sum of squares before it, and the sums of losses. Sums are of parts that depend on their number alone.
#include <cstddef>

#include "cpu/workspace_layout.h"
#include "ops/backends.h"
#include "ops/cuda/pass.h"

namespace fattn::ops::cuda {
namespace {

constexpr int64_t kMostParts = 1024;
int64_t parts_of(int64_t count) { return std::min(kMostParts, ctas_for(count)); }

static_assert(sizeof(AdamWChanging) == sizeof(AdamWStep::Changing) && offsetof(AdamWChanging, scale) == offsetof(AdamWStep::Changing, scale) &&
              offsetof(AdamWChanging, learning_rate) == offsetof(AdamWStep::Changing, learning_rate) &&
              offsetof(AdamWChanging, step) == offsetof(AdamWStep::Changing, step));

class CudaSquareSum final : public Kernel<SquareSum> {
 public:
  CudaSquareSum(const SquareSum& p, const Device& device)
      : gpu_(device), key_(gpu_.key_of(KernelKind::kSquareSum)), join_(gpu_.key_of(KernelKind::kJoinSquares)) {
    gpu_.load(key_);
    gpu_.load(join_);
    layout_.add({parts_of(p.rows), 8});
  }
  size_t workspace_bytes() const override { return layout_.total(); }
  void execute(const SquareSum::Buffers& b, void* workspace, void* stream) const override {
    auto* parts = static_cast<double*>(workspace);
    const int64_t n = parts_of(b.rows);
    const SquareSumParams params{b.x, parts, b.rows, in_fours(DType::kF32, {b.x}) ? 1 : 0};
    gpu_.launch(key_, n, kOpsThreads, 0, &params, stream);
    const JoinSquaresParams joined{parts, b.finite, b.sum, static_cast<int>(n)};
    gpu_.launch(join_, 1, kOpsThreads, 0, &joined, stream);
  }

 private:
  const Gpu gpu_;
  const KernelKey key_, join_;
  core::WorkspaceLayout layout_;
};

class CudaLossSums final : public Kernel<LossSums> {
 public:
  explicit CudaLossSums(const Device& device) : gpu_(device), key_(gpu_.key_of(KernelKind::kLossSums)) { gpu_.load(key_); }
  void execute(const LossSums::Buffers& b, void*, void* stream) const override {
    const LossSumsParams params{b.target, b.loss, b.largest, b.sums, static_cast<int>(b.rows)};
    gpu_.launch(key_, 1, kLogitThreads, 0, &params, stream);
  }

 private:
  const Gpu gpu_;
  const KernelKey key_;
};

class CudaAdamWStep final : public Kernel<AdamWStep> {
 public:
  CudaAdamWStep(const AdamWStep& p, const Device& device) : p_(p), gpu_(device), key_(gpu_.key_of(KernelKind::kAdamW, p.dtype)) { gpu_.load(key_); }
  void execute(const AdamWStep::Buffers& b, void*, void* stream) const override {
    const bool wide = in_fours(DType::kF32, {b.gradient, b.master, b.m, b.v}) && in_fours(p_.dtype, {b.weight});
    const AdamWParams params{b.gradient,
                             b.master,
                             b.m,
                             b.v,
                             b.weight,
                             {b.scale, b.learning_rate, b.step},
                             reinterpret_cast<const AdamWChanging*>(b.changing),
                             b.square_sum,
                             b.clip,
                             b.beta1,
                             b.beta2,
                             b.epsilon,
                             b.weight_decay,
                             b.rows,
                             wide ? 1 : 0};
    gpu_.launch(key_, ctas_for(b.rows), kOpsThreads, 0, &params, stream);
  }

 private:
  const AdamWStep p_;
  const Gpu gpu_;
  const KernelKey key_;
};

}  // namespace

std::unique_ptr<const Kernel<LossSums>> make(const LossSums&, const Device& device) { return std::make_unique<CudaLossSums>(device); }
std::unique_ptr<const Kernel<SquareSum>> make(const SquareSum& p, const Device& device) { return std::make_unique<CudaSquareSum>(p, device); }
std::unique_ptr<const Kernel<AdamWStep>> make(const AdamWStep& p, const Device& device) { return std::make_unique<CudaAdamWStep>(p, device); }

}  // namespace fattn::ops::cuda
