// The loss and its gradient: for a part of the rows at a time logits in fp32, which a pass makes their gradient in place, in the dtype of the two
// products that follow.
#include <algorithm>
#include <bit>

#include "cpu/workspace_layout.h"
#include "ops/backends.h"
#include "ops/cuda/matmul.h"
#include "ops/cuda/pass.h"

namespace fattn::ops::cuda {
namespace {

// Of the workspace: 8192 rows of GPT-2's vocabulary. Each part of the rows adds to all of dweight, which is read and written for it, and its dx is
// to have tiles for all multiprocessors.
constexpr int64_t kMostLogits = int64_t{512} << 20;
constexpr int64_t kStrideUnit = 64;  // so that rows of any vocabulary are aligned

class CudaCrossEntropyGradient final : public Kernel<CrossEntropyGradient> {
 public:
  CudaCrossEntropyGradient(const CrossEntropyGradient& p, const Device& device)
      : p_(p),
        gpu_(device),
        matmuls_(gpu_.device()),
        key_(gpu_.key_of(KernelKind::kLossGradient, p.dtype)),
        padded_(std::max(p.vocab, p.padded)),
        stride_(pieces(padded_, kStrideUnit) * kStrideUnit),
        most_rows_(std::min(p.rows, std::max<int64_t>(1, static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(kMostLogits / stride_)))))) {
    gpu_.load(key_);
    product_at_ = layout_.add({static_cast<int64_t>(Matmul::kMostWorkspace)});
    logits_at_ = layout_.add({most_rows_, stride_, 4});
    for (const MatmulShape& s : {logits_of(most_rows_, {}), dx_of(most_rows_, {}), dweight_of(most_rows_, {})}) matmuls_.of(s);
  }
  size_t workspace_bytes() const override { return layout_.total(); }

  void execute(const CrossEntropyGradient::Buffers& b, void* workspace, void* stream) const override {
    auto* product_room = static_cast<char*>(workspace) + product_at_;
    auto* logits = reinterpret_cast<float*>(static_cast<char*>(workspace) + logits_at_);
    const auto multiply = [&](const MatmulShape& shape, const Matmul::Operands& operands) {
      matmuls_.of(shape)->run(operands, product_room, stream_of(stream));
    };
    for (int64_t row = 0; row < b.rows; row += most_rows_) {
      const int64_t rows = std::min(most_rows_, b.rows - row);
      CrossEntropyGradient::Buffers part = b;  // of these rows
      part.x = static_cast<const char*>(b.x) + row * p_.width * static_cast<int64_t>(size_of(p_.dtype));
      part.dx = b.dx ? b.dx + row * p_.width : nullptr;
      multiply(logits_of(rows, part), {part.x, b.weight, nullptr, nullptr, logits});
      const LogitGradientParams params{logits,
                                       stride_,
                                       b.target + row,
                                       b.loss + row,
                                       b.largest ? b.largest + row : nullptr,
                                       b.scale,
                                       b.scale_at,
                                       static_cast<int>(rows),
                                       static_cast<int>(p_.vocab),
                                       static_cast<int>(padded_),
                                       b.dx ? 1 : 0};
      gpu_.launch(key_, rows, kLogitThreads, 0, &params, stream);
      if (!b.dx) continue;
      multiply(dx_of(rows, part), {logits, b.weight, nullptr, nullptr, part.dx});
      multiply(dweight_of(rows, part), {logits, part.x, nullptr, b.dweight, b.dweight});
    }
  }

 private:
  int64_t size() const { return static_cast<int64_t>(size_of(p_.dtype)); }
  int64_t gradient_stride() const { return stride_ * 4 / size(); }
  static int64_t address(const void* p) { return static_cast<int64_t>(reinterpret_cast<uintptr_t>(p) % 16); }

  // (rows, vocab) = x weight^T
  MatmulShape logits_of(int64_t rows, const CrossEntropyGradient::Buffers& b) const {
    MatmulShape s;
    s.rows = rows, s.columns = padded_, s.inner = p_.width;
    s.b_turned = true;
    s.dtype = p_.dtype;
    s.a_stride = s.b_stride = p_.width;
    s.c_stride = stride_;
    s.a_alignment = alignment_of({p_.width * size(), address(b.x)});
    s.b_alignment = alignment_of({p_.width * size(), address(b.weight)});
    return s;
  }
  // (rows, width) = gradient weight
  MatmulShape dx_of(int64_t rows, const CrossEntropyGradient::Buffers& b) const {
    MatmulShape s;
    s.rows = rows, s.columns = p_.width, s.inner = padded_;
    s.dtype = p_.dtype;
    s.a_stride = gradient_stride();
    s.b_stride = s.c_stride = p_.width;
    s.b_alignment = alignment_of({p_.width * size(), address(b.weight)});
    s.c_alignment = alignment_of({p_.width * 4, address(b.dx)});
    return s;
  }
  // (vocab, width) += gradient^T x
  MatmulShape dweight_of(int64_t rows, const CrossEntropyGradient::Buffers& b) const {
    MatmulShape s;
    s.rows = padded_, s.columns = p_.width, s.inner = rows;
    s.a_turned = true;
    s.dtype = p_.dtype;
    s.a_stride = gradient_stride();
    s.b_stride = s.c_stride = p_.width;
    s.b_alignment = alignment_of({p_.width * size(), address(b.x)});
    s.c_alignment = alignment_of({p_.width * 4, address(b.dweight)});
    return s;
  }

  const CrossEntropyGradient p_;
  const Gpu gpu_;
  const Matmuls matmuls_;
  const KernelKey key_;
  const int64_t padded_, stride_, most_rows_;  // of the logits: columns, elements between rows, rows at a time
  core::WorkspaceLayout layout_;
  size_t product_at_ = 0, logits_at_ = 0;
};

}  // namespace

std::unique_ptr<const Kernel<CrossEntropyGradient>> make(const CrossEntropyGradient& p, const Device& device) {
  return std::make_unique<CudaCrossEntropyGradient>(p, device);
}

}  // namespace fattn::ops::cuda
