// A tensor with memory of its own: rows of it, taken and put back, and random numbers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "fattn/fattn.hpp"
#include "testing/numbers.h"
#include "testing/random.h"

namespace fattn::testing {

// A contiguous tensor of a dtype in memory of its own.
struct Owned {
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  std::vector<char> memory;

  Owned() = default;
  Owned(DType of, std::vector<int64_t> sizes) : dtype(of), shape(std::move(sizes)), memory(static_cast<size_t>(size()) * size_of(of), 0x7f) {}
  int64_t size() const {
    int64_t n = 1;
    for (const int64_t x : shape) n *= x;
    return n;
  }
  Tensor view() const {
    if (shape.empty()) return {};
    const void* data = memory.data();
    const auto& n = shape;
    return n.size() == 4   ? Tensor(data, dtype, {n[0], n[1], n[2], n[3]})
           : n.size() == 3 ? Tensor(data, dtype, {n[0], n[1], n[2]})
           : n.size() == 2 ? Tensor(data, dtype, {n[0], n[1]})
                           : Tensor(data, dtype, {n[0]});
  }
  double get(int64_t i) const { return load(dtype, memory.data(), i); }
  void set(int64_t i, double x) { store(dtype, memory.data(), i, x); }
  void copy_row(int64_t to, const Owned& other, int64_t from, int64_t count) {
    const size_t size = size_of(dtype);
    std::copy_n(other.memory.data() + static_cast<size_t>(from) * size, static_cast<size_t>(count) * size,
                memory.data() + static_cast<size_t>(to) * size);
  }
  Owned as(DType other) const {
    Owned to(other, shape);
    for (int64_t i = 0; i < size(); ++i) to.set(i, get(i));
    return to;
  }
  // Positions of a dimension, in the order of the ranges.
  Owned rows(int dim, const std::vector<fattn_ring_range>& ranges) const {
    Owned to = *this;
    int64_t count = 0, outer = 1, inner = 1;
    for (const fattn_ring_range& r : ranges) count += r.count;
    for (int i = 0; i < dim; ++i) outer *= shape[static_cast<size_t>(i)];
    for (size_t i = static_cast<size_t>(dim) + 1; i < shape.size(); ++i) inner *= shape[i];
    const int64_t length = shape[static_cast<size_t>(dim)];
    to.shape[static_cast<size_t>(dim)] = count;
    to.memory.assign(static_cast<size_t>(to.size()) * size_of(dtype), 0x7f);
    for (int64_t n = 0; n < outer; ++n) {
      int64_t row = 0;
      for (const fattn_ring_range& r : ranges)
        for (int64_t i = 0; i < r.count; ++i, ++row) to.copy_row((n * count + row) * inner, *this, (n * length + r.first + i) * inner, inner);
    }
    return to;
  }
  // The way back: rows of `from` go where the ranges say.
  void put_rows(int dim, const std::vector<fattn_ring_range>& ranges, const Owned& from) {
    int64_t outer = 1, inner = 1;
    for (int i = 0; i < dim; ++i) outer *= shape[static_cast<size_t>(i)];
    for (size_t i = static_cast<size_t>(dim) + 1; i < shape.size(); ++i) inner *= shape[i];
    const int64_t length = shape[static_cast<size_t>(dim)], count = from.shape[static_cast<size_t>(dim)];
    for (int64_t n = 0; n < outer; ++n) {
      int64_t row = 0;
      for (const fattn_ring_range& r : ranges)
        for (int64_t i = 0; i < r.count; ++i, ++row) copy_row((n * length + r.first + i) * inner, from, (n * count + row) * inner, inner);
    }
  }
};

inline Owned normal(DType dtype, std::vector<int64_t> shape, uint64_t stream) {
  Owned t(dtype, std::move(shape));
  const Random random(7, stream);
  for (int64_t i = 0; i < t.size(); ++i) t.set(i, random.normal(static_cast<uint64_t>(i)));
  return t;
}

}  // namespace fattn::testing
