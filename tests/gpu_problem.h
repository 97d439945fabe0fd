// Problems in device memory for tests and searches that need a GPU.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "fattn/attention.hpp"
#include "fattn/device.hpp"
#include "testing/cases.h"

namespace fattn::test {

using testing::Case;

inline Case shape(DType dtype, int64_t batch, int64_t seqlen_q, int64_t seqlen_k, int64_t nheads, int64_t nheads_k, int64_t headdim, bool causal) {
  Case c;
  c.name = "gpu";
  c.dtype = dtype;
  c.batch = batch;
  c.seqlen_q = seqlen_q;
  c.seqlen_k = seqlen_k;
  c.nheads = nheads;
  c.nheads_k = nheads_k;
  c.headdim = c.headdim_v = headdim;
  c.causal = causal;
  c.seed = 7;
  return c;
}

inline Options on_cuda(const Case& c) {
  Options options;
  options.causal = c.causal;
  options.window_left = c.window_left;
  options.window_right = c.window_right;
  options.softcap = c.softcap;
  options.backend = Backend::kCuda;
  return options;
}

// Contiguous tensors of a forward problem in device memory, `skew` elements into their allocations.
struct DeviceForward {
  std::vector<cuda::Buffer> memory;
  ForwardTensors t;

  explicit DeviceForward(const Case& c, int64_t skew = 0) {
    const auto make = [&](DType dtype, std::initializer_list<int64_t> dims) {
      const Tensor view(nullptr, dtype, dims);
      const size_t bytes = static_cast<size_t>(view.size() + skew) * size_of(dtype);
      memory.emplace_back(0, bytes);
      memory.back().fill(0x3c);  // small finite numbers in fp16 and bf16
      return view.on(Device::kCuda, 0, static_cast<char*>(memory.back().get()) + static_cast<size_t>(skew) * size_of(dtype));
    };
    t.q = make(c.dtype, {c.batch, c.seqlen_q, c.nheads, c.headdim});
    t.k = make(c.dtype, {c.batch, c.seqlen_k, c.nheads_k, c.headdim});
    t.v = make(c.dtype, {c.batch, c.seqlen_k, c.nheads_k, c.headdim_v});
    t.o = make(c.dtype, {c.batch, c.seqlen_q, c.nheads, c.headdim_v});
    t.lse = make(DType::kF32, {c.batch, c.nheads, c.seqlen_q});
  }

  // Of a batch of one: the same memory as rows of packed sequences.
  void pack() {
    for (Tensor* x : {&t.q, &t.k, &t.v, &t.o})
      *x = Tensor(nullptr, x->dtype(), {x->shape(1), x->shape(2), x->shape(3)}).on(Device::kCuda, 0, x->data());
    t.lse = Tensor(nullptr, DType::kF32, {t.lse.shape(1), t.lse.shape(2)}).on(Device::kCuda, 0, t.lse.data());
  }
};

// Lists of numbers in device memory, each at an offset of its own.
class DeviceLists {
 public:
  explicit DeviceLists(size_t bytes) : memory_(0, bytes) {}
  Tensor put(const std::vector<int32_t>& values, size_t offset) {
    memory_.copy_from(values.data(), 4 * values.size(), nullptr, offset);
    return Tensor(nullptr, DType::kI32, {static_cast<int64_t>(values.size())}).on(Device::kCuda, 0, static_cast<char*>(memory_.get()) + offset);
  }

 private:
  cuda::Buffer memory_;
};

inline std::vector<uint16_t> halves(const Tensor& tensor, int64_t first, int64_t count) {
  std::vector<uint16_t> host(static_cast<size_t>(count));
  check(fattn_cuda_copy(0, FATTN_COPY_TO_HOST, host.data(), static_cast<const uint16_t*>(tensor.data()) + first, 2 * host.size(), nullptr));
  return host;
}

inline float float_of_bf16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

inline float float_of_f16(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  if (exponent == 31) return std::nanf("");  // none is expected
  const float magnitude = std::ldexp(static_cast<float>(exponent == 0 ? fraction : fraction + 1024), std::max(exponent, 1) - 25);
  return bits & 0x8000 ? -magnitude : magnitude;
}

// Inf and NaN anywhere give NaN.
inline std::vector<float> numbers(const Tensor& tensor) {
  if (tensor.dtype() == DType::kF32) {
    std::vector<float> host(static_cast<size_t>(tensor.size()));
    check(fattn_cuda_copy(0, FATTN_COPY_TO_HOST, host.data(), tensor.data(), 4 * host.size(), nullptr));
    return host;
  }
  const auto to_float = tensor.dtype() == DType::kF16 ? float_of_f16 : float_of_bf16;
  const std::vector<uint16_t> bits = halves(tensor, 0, tensor.size());
  std::vector<float> out(bits.size());
  std::transform(bits.begin(), bits.end(), out.begin(), to_float);
  return out;
}

// Numbers of either sign up to about 2, none of them like its neighbours.
inline void fill_with_noise(const Tensor& tensor, uint32_t seed) {
  if (tensor.dtype() == DType::kF32) {
    std::vector<float> host(static_cast<size_t>(tensor.size()));
    uint32_t state = seed * 2654435761u + 1;
    for (float& value : host) {
      state = state * 1664525u + 1013904223u;
      value = static_cast<float>(state >> 8) * 0x1p-22f - 2.0f;
    }
    check(fattn_cuda_copy(0, FATTN_COPY_TO_DEVICE, tensor.data(), host.data(), 4 * host.size(), nullptr));
    return;
  }
  std::vector<uint16_t> host(static_cast<size_t>(tensor.size()));
  const uint32_t largest = 0x4000, smallest = tensor.dtype() == DType::kF16 ? 0x2c00 : 0x3d80;
  uint32_t state = seed * 2654435761u + 1;
  for (uint16_t& value : host) {
    state = state * 1664525u + 1013904223u;
    value = static_cast<uint16_t>((state & 0x8000) | (smallest + (state >> 16) % (largest - smallest)));
  }
  check(fattn_cuda_copy(0, FATTN_COPY_TO_DEVICE, tensor.data(), host.data(), 2 * host.size(), nullptr));
}

// The largest difference over the largest magnitude, or over 1 if that is less (a gradient may be nothing but rounding errors); NaN if there is one.
inline double difference(const Tensor& a, const Tensor& b) {
  const std::vector<float> x = numbers(a), y = numbers(b);
  double most = 0, magnitude = 1;
  for (size_t i = 0; i < x.size(); ++i) {
    if (x[i] == y[i]) continue;  // also lse of rows that see no key: -Inf
    const double d = std::abs(static_cast<double>(x[i]) - static_cast<double>(y[i]));
    if (!std::isfinite(d)) return std::nan("");
    most = std::max(most, d);
    magnitude = std::max(magnitude, std::abs(static_cast<double>(y[i])));
  }
  return most / magnitude;
}

}  // namespace fattn::test
