// Operations on a GPU in tests: memory there, and a plan that is run once.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "fattn/device.hpp"
#include "ops/ops.h"
#include "ops_array.h"

namespace fattn::test {

inline const ops::Device kReference{ops::Place::kReference};
inline const ops::Device kGpu{ops::Place::kCuda};

// Memory of the device with what an array has, or with numbers.
class OnDevice {
 public:
  explicit OnDevice(const Array& array) : buffer_(0, array.bytes) { buffer_.copy_from(array.as<void>(), array.bytes); }
  template <class T>
  explicit OnDevice(const std::vector<T>& numbers) : buffer_(0, std::max<size_t>(1, numbers.size()) * sizeof(T)) {
    buffer_.copy_from(numbers.data(), numbers.size() * sizeof(T));
  }
  void read(Array& to) const { buffer_.copy_to(to.as<void>(), to.bytes); }
  template <class T>
  std::vector<T> numbers(size_t n) const {
    std::vector<T> to(n);
    buffer_.copy_to(to.data(), n * sizeof(T));
    return to;
  }
  void* get() const { return buffer_.get(); }
  template <class T>
  T* as() const {
    return static_cast<T*>(buffer_.get());
  }

 private:
  cuda::Buffer buffer_;
};

template <class Problem>
inline void run(const Problem& problem, const ops::Device& device, const typename Problem::Buffers& buffers) {
  const ops::Plan<Problem> plan(problem, device);
  if (device.place == ops::Place::kCuda) {
    cuda::Buffer workspace(0, plan.workspace_bytes() + 64);
    workspace.fill(0x7f);
    plan.execute(buffers, workspace.get());
    cuda::synchronize(0);
  } else {
    const Array workspace(DType::kF32, plan.workspace_bytes() / 4 + 1);
    plan.execute(buffers, workspace.as<void>());
  }
}

// What fp32 sums of n products of numbers of size 1 and 1 / sqrt(n) may be off by.
inline double sums_error(int64_t n) { return 4e-6 + 2e-8 * static_cast<double>(n); }

inline size_t size(int64_t n) { return static_cast<size_t>(n); }

inline Array with(const Array& x, size_t i, double number) {
  Array to = x;
  to.set(i, number);
  return to;
}

// call(copies) runs the operation on fresh copies of what it writes; a second run must have the same bits.
template <size_t kCount, class Call>
void twice(Array* const (&outputs)[kCount], const Call& call) {
  std::vector<Array> first;
  for (int turn = 0; turn < 2; ++turn) {
    std::vector<OnDevice> copies;
    copies.reserve(kCount);
    for (const Array* output : outputs) copies.emplace_back(*output);
    call(copies);
    for (size_t i = 0; i < kCount; ++i) {
      Array got = *outputs[i];
      copies[i].read(got);
      if (turn == 0)
        first.push_back(got);
      else
        EXPECT_EQ(std::memcmp(first[i].memory.get(), got.memory.get(), got.bytes), 0) << "output " << i << " of two runs";
    }
  }
  for (size_t i = 0; i < kCount; ++i) std::memcpy(outputs[i]->memory.get(), first[i].memory.get(), first[i].bytes);
}

}  // namespace fattn::test
