// Arrays of operations in memory of the host, and how near two of them are.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>

#include "fattn/types.hpp"
#include "shared/half.h"
#include "unit_of.h"

namespace fattn::test {

// Elements in a dtype, aligned as workspaces are.
struct Array {
  Array(DType type, size_t n)
      : dtype(type), count(n), bytes((n * size_of(type) + 127) / 64 * 64), memory(static_cast<char*>(std::aligned_alloc(64, bytes))) {
    std::memset(memory.get(), 0, bytes);
  }
  Array(DType type, size_t n, unsigned seed, double scale = 1) : Array(type, n) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal(0, scale);
    for (size_t i = 0; i < n; ++i) set(i, normal(random));
  }
  Array(const Array& other) : Array(other.dtype, other.count) { std::memcpy(memory.get(), other.memory.get(), bytes); }
  void set(size_t i, double x) {
    const auto f = static_cast<float>(x);
    if (dtype == DType::kF32)
      reinterpret_cast<float*>(memory.get())[i] = f;
    else
      reinterpret_cast<uint16_t*>(memory.get())[i] = dtype == DType::kF16 ? fattn::core::float_to_f16(f) : fattn::core::float_to_bf16(f);
  }
  double at(size_t i) const {
    if (dtype == DType::kF32) return reinterpret_cast<const float*>(memory.get())[i];
    const uint16_t bits = reinterpret_cast<const uint16_t*>(memory.get())[i];
    return dtype == DType::kF16 ? fattn::core::f16_to_float(bits) : fattn::core::bf16_to_float(bits);
  }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(memory.get());
  }
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  DType dtype;
  size_t count, bytes;
  std::unique_ptr<char, Free> memory;
};

// `allowed` of a result of size `scale`: rounding of the sums, and of the result.
inline void expect_near(const Array& got, const Array& expected, double allowed) {
  for (size_t i = 0; i < got.count; ++i) {
    const double error = std::abs(got.at(i) - expected.at(i));
    ASSERT_TRUE(error <= allowed + 2 * unit_of(got.dtype) * std::abs(expected.at(i)))
        << "element " << i << ": " << got.at(i) << ", not " << expected.at(i);
  }
}

}  // namespace fattn::test
