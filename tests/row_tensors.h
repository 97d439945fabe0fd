// Tensors of any dtype and strides in memory of their own, for tests of merge and rotary embeddings. What lies between their elements is NaN, and is
// looked at afterwards.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "fattn/fattn.hpp"
#include "testing/numbers.h"
#include "testing/random.h"
#include "thrown.h"
#include "unit_of.h"

namespace fattn::test {

constexpr double kInf = std::numeric_limits<double>::infinity(), kNotANumber = std::numeric_limits<double>::quiet_NaN();

class RowTensor {
 public:
  RowTensor() = default;
  // `order`: dimensions from the outermost in memory to the innermost; `gap`: elements between the rows of the innermost.
  RowTensor(DType dtype, std::vector<int64_t> shape, std::vector<int> order, int64_t gap = 0) : dtype_(dtype), shape_(std::move(shape)) {
    strides_.resize(shape_.size());
    int64_t stride = 1;
    for (size_t i = order.size(); i-- > 0;) {
      const auto at = static_cast<size_t>(order[i]);
      strides_[at] = stride;
      stride = stride * std::max<int64_t>(shape_[at], 1) + (i + 1 == order.size() ? gap : 0);
    }
    elements_ = 1;
    for (size_t i = 0; i < shape_.size(); ++i) elements_ += std::max<int64_t>(shape_[i] - 1, 0) * strides_[i];
    memory_ = std::make_shared<std::vector<char>>(static_cast<size_t>(elements_ + 2 * kGuard) * size_of(dtype), '\xff');
  }
  RowTensor(DType dtype, const std::vector<int64_t>& shape) : RowTensor(dtype, shape, in_order(shape.size())) {}

  int64_t size() const {
    int64_t n = 1;
    for (const int64_t x : shape_) n *= x;
    return n;
  }
  DType dtype() const { return dtype_; }
  const std::vector<int64_t>& shape() const { return shape_; }
  void* data() const { return memory_->data() + kGuard * size_of(dtype_); }
  Tensor view() const {
    if (!memory_) return {};
    const auto& n = shape_;
    const auto& s = strides_;
    switch (n.size()) {
      case 1: return Tensor(data(), dtype_, {n[0]}, {s[0]});
      case 2: return Tensor(data(), dtype_, {n[0], n[1]}, {s[0], s[1]});
      case 3: return Tensor(data(), dtype_, {n[0], n[1], n[2]}, {s[0], s[1], s[2]});
      default: return Tensor(data(), dtype_, {n[0], n[1], n[2], n[3]}, {s[0], s[1], s[2], s[3]});
    }
  }
  // Element i in row-major order of the shape.
  double at(int64_t i) const { return read(place(i)); }
  void set(int64_t i, double x) const { write(place(i), x); }
  void fill(const std::function<double(int64_t)>& number) const {
    for (int64_t i = 0; i < size(); ++i) set(i, number(i));
  }
  void fill_normal(uint64_t seed, uint64_t stream, double scale = 1) const {
    const testing::Random random(seed, stream);
    fill([&](int64_t i) { return scale * random.normal(static_cast<uint64_t>(i)); });
  }
  // The same numbers in float64, dense.
  RowTensor wide() const {
    if (!memory_) return {};
    RowTensor w(DType::kF64, shape_);
    w.fill([&](int64_t i) { return at(i); });
    return w;
  }
  RowTensor empty_wide() const { return memory_ ? RowTensor(DType::kF64, shape_) : RowTensor(); }
  RowTensor copy() const {
    RowTensor c = *this;
    c.memory_ = std::make_shared<std::vector<char>>(*memory_);
    return c;
  }
  bool same_memory(const RowTensor& other) const { return memory_ == other.memory_; }
  bool same_bits(const RowTensor& other) const { return *memory_ == *other.memory_; }
  // Whether bytes outside of the elements are as they were.
  bool intact() const {
    std::vector<bool> own(memory_->size());
    const size_t bytes = size_of(dtype_);
    for (int64_t i = 0; i < size(); ++i)
      for (size_t b = 0; b < bytes; ++b) own[static_cast<size_t>(place(i) + kGuard) * bytes + b] = true;
    for (size_t i = 0; i < own.size(); ++i)
      if (!own[i] && (*memory_)[i] != '\xff') return false;
    return true;
  }

  // Of a matrix of one column: that.
  RowTensor column() const {
    RowTensor c = *this;
    c.shape_ = {shape_[0]};
    c.strides_ = {strides_[0]};
    return c;
  }

 private:
  static constexpr int64_t kGuard = 16;
  double read(int64_t place) const {
    if (dtype_ == DType::kI32) return static_cast<const int32_t*>(data())[place];
    if (dtype_ == DType::kI64) return static_cast<double>(static_cast<const int64_t*>(data())[place]);
    return testing::load(dtype_, data(), place);
  }
  void write(int64_t place, double x) const {
    if (dtype_ == DType::kI32)
      static_cast<int32_t*>(data())[place] = static_cast<int32_t>(x);
    else if (dtype_ == DType::kI64)
      static_cast<int64_t*>(data())[place] = static_cast<int64_t>(x);
    else
      testing::store(dtype_, data(), place, x);
  }
  static std::vector<int> in_order(size_t n) {
    std::vector<int> order;
    for (size_t i = 0; i < n; ++i) order.push_back(static_cast<int>(i));
    return order;
  }
  int64_t place(int64_t i) const {
    int64_t at = 0;
    for (size_t d = shape_.size(); d-- > 0;) {
      at += i % shape_[d] * strides_[d];
      i /= shape_[d];
    }
    return at;
  }
  DType dtype_ = DType::kF32;
  std::vector<int64_t> shape_, strides_;
  int64_t elements_ = 0;
  std::shared_ptr<std::vector<char>> memory_;
};

// Tensors in memory of a GPU, or of the stub of one, and back.
class DeviceTensors {
 public:
  Tensor put(const RowTensor& t) {
    const Tensor view = t.view();
    if (!view) return {};
    int64_t last = 0;
    for (int i = 0; i < view.ndim(); ++i) last += std::max<int64_t>(view.shape(i) - 1, 0) * view.stride(i);
    const size_t bytes = static_cast<size_t>(last + 1) * size_of(view.dtype());
    memory_.emplace_back(0, bytes);
    memory_.back().copy_from(view.data(), bytes);
    tensors_.push_back(t);  // shares its memory
    return view.on(Device::kCuda, 0, memory_.back().get());
  }
  void fetch() const {
    for (size_t i = 0; i < memory_.size(); ++i) memory_[i].copy_to(tensors_[i].data(), memory_[i].bytes());
  }

 private:
  std::vector<cuda::Buffer> memory_;
  std::vector<RowTensor> tensors_;
};

// Whether `got` is `expected` (in float64), but for sums of numbers up to `size` in fp32, and one rounding.
inline void expect_close(const RowTensor& got, const RowTensor& expected, double size, const std::string& what) {
  ASSERT_EQ(got.size(), expected.size());
  for (int64_t i = 0; i < got.size(); ++i) {
    const double g = got.at(i), e = expected.at(i);
    if (std::isnan(e) || std::isinf(e)) {
      ASSERT_TRUE(std::isnan(e) ? std::isnan(g) : g == e) << what << ", element " << i << ": " << g << ", not " << e;
      continue;
    }
    const double least = got.dtype() == DType::kF16 ? 0x1p-24 : 0x1p-126;
    const double allowed = 4e-6 * size + 1.001 * unit_of(got.dtype()) * std::abs(e) + least;
    ASSERT_TRUE(std::abs(g - e) <= allowed) << what << ", element " << i << ": " << g << ", not " << e << " +- " << allowed;
  }
  EXPECT_TRUE(got.intact()) << what << ": written between the elements";
}

inline void expect_message(const std::function<void()>& body, const std::string& part) {
  const std::string message = error_thrown_by(body);
  EXPECT_NE(message.find(part), std::string::npos) << "in: " << message << "\nnot: " << part;
}

// Instruction sets that can run here.
inline std::vector<Isa> isas_here() {
  std::vector<Isa> all;
  for (const Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16, Isa::kAmx, Isa::kNeon})
    if (available(cpu_info(), isa)) all.push_back(isa);
  return all;
}

}  // namespace fattn::test
