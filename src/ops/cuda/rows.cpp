// What is a pass over rows: embedding, LayerNorm, keys and values into their cache.
#include <cmath>

#include "device_abi/ops_params.h"
#include "ops/backends.h"
#include "ops/cuda/kernels.h"

namespace fattn::ops::cuda {
namespace {

class CudaEmbedding final : public Kernel<Embedding> {
 public:
  CudaEmbedding(const Embedding& p, const Device& device) : p_(p), gpu_(device), key_(gpu_.key_of(KernelKind::kEmbedding, p.dtype)) {
    gpu_.load(key_);
  }
  void execute(const Embedding::Buffers& b, void*, void* stream) const override {
    const EmbeddingParams params{b.ids,
                                 b.position,
                                 b.token_table,
                                 p_.positions > 0 ? b.position_table : nullptr,
                                 b.out,
                                 static_cast<int>(b.rows),
                                 static_cast<int>(p_.width),
                                 static_cast<int>(p_.vocab),
                                 static_cast<int>(p_.positions)};
    gpu_.launch(key_, b.rows, kOpsThreads, 0, &params, stream);
  }

 private:
  const Embedding p_;
  const Gpu gpu_;
  const KernelKey key_;
};

class CudaLayerNorm final : public Kernel<LayerNorm> {
 public:
  CudaLayerNorm(const LayerNorm& p, const Device& device) : p_(p), gpu_(device), key_(gpu_.key_of(KernelKind::kNorm, p.dtype)) {
    key_.in = static_cast<int32_t>(p.width);
    key_.add = p.add ? 1 : 0;
    gpu_.load(key_);
  }
  void execute(const LayerNorm::Buffers& b, void*, void* stream) const override {
    constexpr int64_t kRows = kOpsThreads / 32;  // of a CTA
    const NormParams params{b.x, b.delta, b.select, b.weight, b.bias, b.y, static_cast<int>(b.rows), static_cast<float>(p_.epsilon)};
    gpu_.launch(key_, (b.rows + kRows - 1) / kRows, kOpsThreads, 0, &params, stream);
  }

 private:
  const LayerNorm p_;
  const Gpu gpu_;
  KernelKey key_;
};

class CudaKeysValues final : public Kernel<KeysValues> {
 public:
  CudaKeysValues(const KeysValues& p, const Device& device) : p_(p), gpu_(device), key_(gpu_.key_of(KernelKind::kKeysValues, p.dtype)) {
    const auto whole = [&](int64_t elements) { return elements * static_cast<int64_t>(size_of(p.dtype)) % 16 == 0; };
    key_.rotary = p.rotary ? 1 : 0;
    key_.wide = whole(p.nheads * p.headdim) && whole(p.nheads_k * p.headdim) ? 1 : 0;
    gpu_.load(key_);
  }
  void execute(const KeysValues::Buffers& b, void*, void* stream) const override {
    const KeysValuesParams params{b.qkv,
                                  b.position,
                                  reinterpret_cast<const long long*>(b.slot),
                                  b.k,
                                  b.v,
                                  std::log2(p_.theta),
                                  static_cast<int>(b.rows),
                                  static_cast<int>(p_.nheads),
                                  static_cast<int>(p_.nheads_k),
                                  static_cast<int>(p_.headdim)};
    gpu_.launch(key_, b.rows, kOpsThreads, 0, &params, stream);
  }

 private:
  const KeysValues p_;
  const Gpu gpu_;
  KernelKey key_;
};

}  // namespace

std::unique_ptr<const Kernel<Embedding>> make(const Embedding& p, const Device& device) { return std::make_unique<CudaEmbedding>(p, device); }
std::unique_ptr<const Kernel<LayerNorm>> make(const LayerNorm& p, const Device& device) { return std::make_unique<CudaLayerNorm>(p, device); }
std::unique_ptr<const Kernel<KeysValues>> make(const KeysValues& p, const Device& device) { return std::make_unique<CudaKeysValues>(p, device); }

}  // namespace fattn::ops::cuda
