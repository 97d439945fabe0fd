// What is done row by row: embedding, LayerNorm, keys and values into their cache.
#include <cmath>
#include <cstring>
#include <vector>

#include "ops/backends.h"
#include "ops/cpu/host.h"
#include "ops/norm_linear.h"
#include "shared/half.h"

namespace fattn::ops::cpu {
namespace {

// rows(begin, end) for all rows, some of them a task.
template <class Rows>
void by_rows(const Workers& workers, int64_t count, const Rows& rows) {
  workers.run(ceil_div(count, kRowsOfTask), [&](int64_t i, int) { rows(i * kRowsOfTask, std::min(count, (i + 1) * kRowsOfTask)); });
}

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

float read(const void* p, DType dtype, int64_t i) {
  if (dtype == DType::kF32) return static_cast<const float*>(p)[i];
  const uint16_t bits = static_cast<const uint16_t*>(p)[i];
  return dtype == DType::kF16 ? core::f16_to_float(bits) : core::bf16_to_float(bits);
}
void write(void* p, DType dtype, int64_t i, float x) {
  if (dtype == DType::kF32)
    static_cast<float*>(p)[i] = x;
  else
    static_cast<uint16_t*>(p)[i] = dtype == DType::kF16 ? core::float_to_f16(x) : core::float_to_bf16(x);
}

class CpuKeysValues final : public Kernel<KeysValues> {
 public:
  CpuKeysValues(const KeysValues& p, const Device& device) : p_(p), workers_(device) {
    for (int64_t d = 0; p.rotary && d < p.headdim / 2; ++d)
      frequencies_.push_back(std::pow(p.theta, -2.0 * static_cast<double>(d) / static_cast<double>(p.headdim)));
  }
  void execute(const KeysValues::Buffers& b, void*, void*) const override {
    const size_t size = size_of(p_.dtype);
    const int64_t q_width = p_.nheads * p_.headdim, width = p_.nheads_k * p_.headdim;
    by_rows(workers_, b.rows, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        char* q = bytes_at(b.qkv, r * (q_width + 2 * width), size);
        if (p_.rotary) turn(q, b.position[r]);  // q and k lie side by side
        const int64_t slot = b.slot ? b.slot[r] : r;
        std::memcpy(bytes_at(b.k, slot * width, size), bytes_at(static_cast<void*>(q), q_width, size), static_cast<size_t>(width) * size);
        std::memcpy(bytes_at(b.v, slot * width, size), bytes_at(static_cast<void*>(q), q_width + width, size), static_cast<size_t>(width) * size);
      }
    });
  }

 private:
  // Angles in float64: of a position of 100,000 fp32 has no more than two digits behind the point.
  void turn(void* heads, int32_t position) const {
    const int64_t half = p_.headdim / 2;
    for (int64_t d = 0; d < half; ++d) {
      const double angle = position * frequencies_[static_cast<size_t>(d)];
      const auto c = static_cast<float>(std::cos(angle)), s = static_cast<float>(std::sin(angle));
      for (int64_t h = 0; h < p_.nheads + p_.nheads_k; ++h) {
        const int64_t i = h * p_.headdim + d;
        const float x = read(heads, p_.dtype, i), y = read(heads, p_.dtype, i + half);
        write(heads, p_.dtype, i, x * c - y * s);
        write(heads, p_.dtype, i + half, y * c + x * s);
      }
    }
  }

  const KeysValues p_;
  const Workers workers_;
  std::vector<double> frequencies_;
};

}  // namespace

std::unique_ptr<const Kernel<Embedding>> make(const Embedding& p, const Device& device) { return std::make_unique<CpuEmbedding>(p, device); }
std::unique_ptr<const Kernel<LayerNorm>> make(const LayerNorm& p, const Device& device) { return std::make_unique<CpuLayerNorm>(p, device); }
std::unique_ptr<const Kernel<KeysValues>> make(const KeysValues& p, const Device& device) { return std::make_unique<CpuKeysValues>(p, device); }
std::unique_ptr<const Kernel<NormLinear>> make(const NormLinear& p, const Device& device) {
  return std::make_unique<NormThenLinear>(make(norm_of(p), device), make(p.linear, device), p.nheads > 0 ? make(keys_values_of(p), device) : nullptr);
}

}  // namespace fattn::ops::cpu
