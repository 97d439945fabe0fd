// What is done row by row: embedding, LayerNorm, keys and values into their cache.
#include <cstring>

#include "ops/backends.h"
#include "ops/cpu/host.h"
#include "ops/cpu/turn.h"
#include "ops/norm_linear.h"

namespace fattn::ops::cpu {
namespace {

class CpuEmbedding final : public Kernel<Embedding> {
 public:
  CpuEmbedding(const Embedding& p, const Device& device) : p_(p), kernels_(kernels_of(device)), workers_(device) {}
  void execute(const Embedding::Buffers& b, void*, void*) const override {
    check_rows(p_, b);
    const size_t size = size_of(p_.dtype);
    by_rows(workers_, b.rows, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        kernels_.embed_row(kernel_dtype(p_.dtype), bytes_at(b.token_table, b.ids[r] * p_.width, size),
                           p_.positions > 0 ? bytes_at(b.position_table, b.position[r] * p_.width, size) : nullptr, p_.width, b.out + r * p_.width);
    });
  }

 private:
  const Embedding p_;
  const OpsKernels& kernels_;
  const Workers workers_;
};

class CpuLayerNorm final : public Kernel<LayerNorm> {
 public:
  CpuLayerNorm(const LayerNorm& p, const Device& device) : p_(p), kernels_(kernels_of(device)), workers_(device) {}
  void execute(const LayerNorm::Buffers& b, void*, void*) const override {
    const size_t size = size_of(p_.dtype);
    by_rows(workers_, b.rows, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const int64_t from = b.select ? b.select[r] : r;
        kernels_.norm_row(kernel_dtype(p_.dtype), {b.x + from * p_.width, p_.add ? bytes_at(b.delta, r * p_.width, size) : nullptr, b.weight, b.bias,
                                                   bytes_at(b.y, r * p_.width, size), p_.width, static_cast<float>(p_.epsilon), p_.add});
      }
    });
  }

 private:
  const LayerNorm p_;
  const OpsKernels& kernels_;
  const Workers workers_;
};

class CpuKeysValues final : public Kernel<KeysValues> {
 public:
  CpuKeysValues(const KeysValues& p, const Device& device)
      : p_(p), workers_(device), turn_(p.rotary ? p.nheads + p.nheads_k : 0, p.rotary ? p.headdim : 0, p.dtype, p.theta) {}
  void execute(const KeysValues::Buffers& b, void*, void*) const override {
    const size_t size = size_of(p_.dtype);
    const int64_t q_width = p_.nheads * p_.headdim, width = p_.nheads_k * p_.headdim;
    by_rows(workers_, b.rows, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        char* q = bytes_at(b.qkv, r * (q_width + 2 * width), size);
        if (p_.rotary) turn_(q, b.position[r]);  // q and k lie side by side
        const int64_t slot = b.slot ? b.slot[r] : r;
        std::memcpy(bytes_at(b.k, slot * width, size), bytes_at(static_cast<void*>(q), q_width, size), static_cast<size_t>(width) * size);
        std::memcpy(bytes_at(b.v, slot * width, size), bytes_at(static_cast<void*>(q), q_width + width, size), static_cast<size_t>(width) * size);
      }
    });
  }

 private:
  const KeysValues p_;
  const Workers workers_;
  const Turn turn_;
};

}  // namespace

std::unique_ptr<const Kernel<Embedding>> make(const Embedding& p, const Device& device) { return std::make_unique<CpuEmbedding>(p, device); }
std::unique_ptr<const Kernel<LayerNorm>> make(const LayerNorm& p, const Device& device) { return std::make_unique<CpuLayerNorm>(p, device); }
std::unique_ptr<const Kernel<KeysValues>> make(const KeysValues& p, const Device& device) { return std::make_unique<CpuKeysValues>(p, device); }
std::unique_ptr<const Kernel<NormLinear>> make(const NormLinear& p, const Device& device) {
  return std::make_unique<NormThenLinear>(make(norm_of(p), device), make(p.linear, device), p.nheads > 0 ? make(keys_values_of(p), device) : nullptr);
}

}  // namespace fattn::ops::cpu
