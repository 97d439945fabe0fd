// Training's passes over rows: sums of columns, activations, gradients of LayerNorm and of embeddings, rotary positions, dropout. Nothing is added by
// atomics: sums are of parts that depend on the problem alone, in a fixed order.
#include <cmath>

#include "cpu/workspace_layout.h"
#include "ops/backends.h"
#include "ops/cuda/pass.h"

namespace fattn::ops::cuda {
namespace {

constexpr int64_t kMostParts = 1024, kRowsOfPart = 256;     // of sums of columns
constexpr int64_t kMostNormCtas = 512, kRowsOfNormCta = 8;  // four CTAs on each multiprocessor of a large GPU

// Adds the sums over parts (n_parts, columns) to `to`, columns from `split` on to `second`.
class JoinSums {
 public:
  explicit JoinSums(const Gpu& gpu) : key_(gpu.key_of(KernelKind::kJoinSums)) { gpu.load(key_); }
  void run(const Gpu& gpu, const float* parts, int64_t n_parts, int64_t columns, float* to, float* second, int64_t split, void* stream) const {
    const JoinSumsParams params{parts, to, second, static_cast<int>(n_parts), static_cast<int>(columns), static_cast<int>(split)};
    gpu.launch(key_, pieces(columns, 32), kOpsThreads, 0, &params, stream);
  }

 private:
  const KernelKey key_;
};

class CudaColumnSums final : public Kernel<ColumnSums> {
 public:
  CudaColumnSums(const ColumnSums& p, const Device& device) : p_(p), gpu_(device), join_(gpu_), key_(gpu_.key_of(KernelKind::kColumnSums, p.x)) {
    gpu_.load(key_);
    layout_.add({pieces(p.rows, rows_of_part(p.rows)), p.columns, 4});
  }
  size_t workspace_bytes() const override { return layout_.total(); }
  void execute(const ColumnSums::Buffers& b, void* workspace, void* stream) const override {
    const bool wide = p_.columns % 4 == 0 && in_fours(p_.x, {b.x});
    const int64_t rows = rows_of_part(p_.rows), parts = pieces(b.rows, rows), strips = pieces(p_.columns, wide ? 128 : 32);
    auto* sums = static_cast<float*>(workspace);
    const ColumnSumsParams params{b.x, sums, b.rows, rows, static_cast<int>(p_.columns), static_cast<int>(strips), wide ? 1 : 0};
    gpu_.launch(key_, parts * strips, kOpsThreads, 0, &params, stream);
    join_.run(gpu_, sums, parts, p_.columns, b.to, nullptr, p_.columns, stream);
  }

 private:
  static int64_t rows_of_part(int64_t rows) { return std::max(kRowsOfPart, pieces(rows, kMostParts)); }

  const ColumnSums p_;
  const Gpu gpu_;
  const JoinSums join_;
  const KernelKey key_;
  core::WorkspaceLayout layout_;
};

// Both of Activate and of its gradient.
class ActivatePass {
 public:
  ActivatePass(const Gpu& gpu, DType dtype, Activation activation, bool gradient) : dtype_(dtype), key_(gpu.key_of(KernelKind::kActivate, dtype)) {
    key_.activation = static_cast<int32_t>(activation);
    key_.gradient = gradient ? 1 : 0;
    gpu.load(key_);
  }
  void run(const Gpu& gpu, const void* x, const void* dy, void* dx, void* y, int64_t count, void* stream) const {
    const ActivateParams params{x, dy, dx, y, count, in_fours(dtype_, {x, dy, dx, y}) ? 1 : 0};
    gpu.launch(key_, ctas_for(count), kOpsThreads, 0, &params, stream);
  }

 private:
  const DType dtype_;
  KernelKey key_;
};

class CudaActivate final : public Kernel<Activate> {
 public:
  CudaActivate(const Activate& p, const Device& device) : p_(p), gpu_(device), pass_(gpu_, p.dtype, p.activation, false) {}
  void execute(const Activate::Buffers& b, void*, void* stream) const override {
    pass_.run(gpu_, b.x, nullptr, nullptr, b.y, b.rows * p_.width, stream);
  }

 private:
  const Activate p_;
  const Gpu gpu_;
  const ActivatePass pass_;
};

class CudaActivationGradient final : public Kernel<ActivationGradient> {
 public:
  CudaActivationGradient(const ActivationGradient& p, const Device& device) : p_(p), gpu_(device), pass_(gpu_, p.dtype, p.activation, true) {}
  void execute(const ActivationGradient::Buffers& b, void*, void* stream) const override {
    pass_.run(gpu_, b.x, b.dy, b.dx, b.y, b.rows * p_.width, stream);
  }

 private:
  const ActivationGradient p_;
  const Gpu gpu_;
  const ActivatePass pass_;
};

class CudaLayerNormGradient final : public Kernel<LayerNormGradient> {
 public:
  CudaLayerNormGradient(const LayerNormGradient& p, const Device& device)
      : p_(p), gpu_(device), join_(gpu_), key_(gpu_.key_of(KernelKind::kNormGradient, p.dtype)) {
    key_.in = static_cast<int32_t>(p.width);
    key_.wide = p.width % 4 == 0 ? 1 : 0;
    gpu_.load(key_);
    layout_.add({ctas(p.rows), 2, p.width, 4});
  }
  size_t workspace_bytes() const override { return layout_.total(); }
  void execute(const LayerNormGradient::Buffers& b, void* workspace, void* stream) const override {
    KernelKey key = key_;
    if (!in_fours(DType::kF32, {b.x, b.dy, b.dx}) || !in_fours(p_.dtype, {b.rounded})) key.wide = 0;
    auto* parts = static_cast<float*>(workspace);
    const int64_t n = ctas(b.rows);
    const NormGradientParams params{b.x, b.weight, b.dy, b.dx, b.rounded, parts, static_cast<int>(b.rows), static_cast<float>(p_.epsilon)};
    gpu_.launch(key, n, kOpsThreads, 0, &params, stream);
    join_.run(gpu_, parts, n, 2 * p_.width, b.dweight, b.dbias, p_.width, stream);
  }

 private:
  static int64_t ctas(int64_t rows) { return std::min(kMostNormCtas, pieces(rows, kRowsOfNormCta)); }

  const LayerNormGradient p_;
  const Gpu gpu_;
  const JoinSums join_;
  KernelKey key_;
  core::WorkspaceLayout layout_;
};

class CudaEmbeddingGradient final : public Kernel<EmbeddingGradient> {
 public:
  CudaEmbeddingGradient(const EmbeddingGradient& p, const Device& device) : p_(p), gpu_(device), key_(gpu_.key_of(KernelKind::kEmbeddingGradient)) {
    gpu_.load(key_);
  }
  void execute(const EmbeddingGradient::Buffers& b, void*, void* stream) const override {
    add(b, b.ids, b.dtokens, p_.vocab, stream);
    if (p_.positions > 0) add(b, b.position, b.dpositions, p_.positions, stream);
  }

 private:
  void add(const EmbeddingGradient::Buffers& b, const int32_t* ids, float* to, int64_t entries, void* stream) const {
    const bool wide = p_.width % 4 == 0 && in_fours(DType::kF32, {b.dx, to});
    const EmbeddingGradientParams params{ids,         b.dx, to, static_cast<int>(b.rows), static_cast<int>(p_.width), static_cast<int>(entries),
                                         wide ? 1 : 0};
    gpu_.launch(key_, b.rows, kOpsThreads, 0, &params, stream);
  }

  const EmbeddingGradient p_;
  const Gpu gpu_;
  const KernelKey key_;
};

class CudaRotary final : public Kernel<Rotary> {
 public:
  CudaRotary(const Rotary& p, const Device& device) : p_(p), gpu_(device), key_(gpu_.key_of(KernelKind::kRotary, p.dtype)) { gpu_.load(key_); }
  void execute(const Rotary::Buffers& b, void*, void* stream) const override {
    const RotaryParams params{b.x,
                              b.position,
                              p_.stride,
                              std::log2(p_.theta),
                              static_cast<int>(b.rows),
                              static_cast<int>(p_.nheads),
                              static_cast<int>(p_.headdim),
                              p_.back ? 1 : 0};
    gpu_.launch(key_, b.rows, kOpsThreads, 0, &params, stream);
  }

 private:
  const Rotary p_;
  const Gpu gpu_;
  const KernelKey key_;
};

class CudaDropout final : public Kernel<Dropout> {
 public:
  CudaDropout(const Dropout& p, const Device& device)
      : p_(p), gpu_(device), key_(gpu_.key_of(KernelKind::kDropout)), below_(static_cast<unsigned>(std::round(p.p * 65536))) {
    gpu_.load(key_);
  }
  void execute(const Dropout::Buffers& b, void*, void* stream) const override {
    const bool pairs = p_.width % 2 == 0 && lie_at(8, {b.x, b.add, b.out});
    const DropoutParams params{b.x,
                               b.add,
                               b.out,
                               b.seed,
                               b.stream,
                               reinterpret_cast<const unsigned long long*>(b.state),
                               b.place,
                               below_,
                               static_cast<float>(65536.0 / (65536 - below_)),
                               static_cast<int>(b.rows),
                               static_cast<int>(p_.width),
                               pairs ? 1 : 0};
    const int64_t tiles = pieces(b.rows, 16) * pieces(p_.width, 64);
    gpu_.launch(key_, pieces(tiles, kOpsThreads / 32), kOpsThreads, 0, &params, stream);
  }

 private:
  const Dropout p_;
  const Gpu gpu_;
  const KernelKey key_;
  const unsigned below_;
};

}  // namespace

std::unique_ptr<const Kernel<ColumnSums>> make(const ColumnSums& p, const Device& d) { return std::make_unique<CudaColumnSums>(p, d); }
std::unique_ptr<const Kernel<Activate>> make(const Activate& p, const Device& d) { return std::make_unique<CudaActivate>(p, d); }
std::unique_ptr<const Kernel<ActivationGradient>> make(const ActivationGradient& p, const Device& d) {
  return std::make_unique<CudaActivationGradient>(p, d);
}
std::unique_ptr<const Kernel<LayerNormGradient>> make(const LayerNormGradient& p, const Device& d) {
  return std::make_unique<CudaLayerNormGradient>(p, d);
}
std::unique_ptr<const Kernel<EmbeddingGradient>> make(const EmbeddingGradient& p, const Device& d) {
  return std::make_unique<CudaEmbeddingGradient>(p, d);
}
std::unique_ptr<const Kernel<Rotary>> make(const Rotary& p, const Device& d) { return std::make_unique<CudaRotary>(p, d); }
std::unique_ptr<const Kernel<Dropout>> make(const Dropout& p, const Device& d) { return std::make_unique<CudaDropout>(p, d); }

}  // namespace fattn::ops::cuda
