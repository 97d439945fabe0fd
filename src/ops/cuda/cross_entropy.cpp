// Logits of some rows and a part of the vocabulary at a time, which stay in the L2 cache until the row's sums have them.
#include <algorithm>

#include "cpu/workspace_layout.h"
#include "ops/backends.h"
#include "ops/cuda/linear.h"

namespace fattn::ops::cuda {
namespace {

constexpr int64_t kMostRows = 1024, kChunk = 8192;
constexpr size_t kAlignment = 256;  // of cuBLASLt's workspace

class CudaCrossEntropy final : public Kernel<CrossEntropy> {
 public:
  CudaCrossEntropy(const CrossEntropy& p, const Device& device)
      : p_(p), gpu_(device), chunk_(product(p, std::min(p.vocab, kChunk)), device), rest_(product(p, (p.vocab - 1) % kChunk + 1), device) {
    const int64_t rows = std::min(p.rows, kMostRows);
    logits_ = layout_.add({rows, std::min(p.vocab, kChunk), 4});
    for (size_t& part : parts_) part = layout_.add({rows, 4});
    product_ = layout_.add({static_cast<int64_t>(std::max(chunk_.workspace_bytes(), rest_.workspace_bytes()) + kAlignment), 1});
    product_ = (product_ + kAlignment - 1) / kAlignment * kAlignment;
    key_.kind = KernelKind::kLoss;
    key_.arch = gpu_.arch();
    gpu_.load(key_);
  }
  size_t workspace_bytes() const override { return layout_.total(); }
  void execute(const CrossEntropy::Buffers& b, void* workspace, void* stream) const override {
    const auto at = [&](size_t offset) { return static_cast<char*>(workspace) + offset; };
    const size_t row_bytes = static_cast<size_t>(p_.width) * size_of(p_.dtype);
    const size_t weight_bytes = static_cast<size_t>(packed_stride(Linear{1, p_.width, 1})) * size_of(p_.dtype);
    for (int64_t row = 0; row < b.rows; row += kMostRows) {
      const int64_t rows = std::min(kMostRows, b.rows - row);
      for (int64_t first = 0; first < p_.vocab; first += kChunk) {
        const int64_t width = std::min(kChunk, p_.vocab - first);
        const bool is_last = first + width == p_.vocab;
        auto* logits = reinterpret_cast<float*>(at(logits_));
        (is_last ? rest_ : chunk_)
            .execute({rows, static_cast<const char*>(b.x) + static_cast<size_t>(row) * row_bytes,
                      static_cast<const char*>(b.weight) + static_cast<size_t>(first) * weight_bytes, nullptr, logits},
                     at(product_), stream);
        const LossParams params{logits,
                                b.target + row,
                                reinterpret_cast<float*>(at(parts_[0])),
                                reinterpret_cast<float*>(at(parts_[1])),
                                reinterpret_cast<float*>(at(parts_[2])),
                                b.loss ? b.loss + row : nullptr,
                                b.lse ? b.lse + row : nullptr,
                                static_cast<int>(rows),
                                static_cast<int>(width),
                                static_cast<int>(first),
                                first == 0 ? 1 : 0,
                                is_last ? 1 : 0};
        gpu_.launch(key_, rows, kOpsThreads, 0, &params, stream);
      }
    }
  }

 private:
  static Linear product(const CrossEntropy& p, int64_t out) { return {std::min(p.rows, kMostRows), p.width, out, p.dtype, DType::kF32}; }

  const CrossEntropy p_;
  const Gpu gpu_;
  const CudaLinear chunk_, rest_;
  core::WorkspaceLayout layout_;
  size_t logits_ = 0, parts_[3] = {}, product_ = 0;
  KernelKey key_;
};

}  // namespace

std::unique_ptr<const Kernel<CrossEntropy>> make(const CrossEntropy& p, const Device& device) {
  return std::make_unique<CudaCrossEntropy>(p, device);
}

}  // namespace fattn::ops::cuda
