// Single pairs of a mask, wherever they are, and values that are not finite, in whichever column: what the CPU kernels look for by words and vectors.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "fattn/attention.hpp"
#include "testing/check.h"
#include "testing/random.h"
#include "testing/targets.h"
#include "testing/tensors.h"

namespace fattn::testing {
namespace {

// One head: inputs, a mask of all pairs, and outputs, dense.
struct OneHead {
  DType dtype;
  int64_t rows, keys, headdim, headdim_v;
  std::vector<uint8_t> mask = std::vector<uint8_t>(static_cast<size_t>(rows * keys), 1);
  std::vector<std::vector<double>> memory = {};  // as wide as any dtype

  Tensor tensor(int64_t length, int64_t width) {
    memory.emplace_back(static_cast<size_t>(length * width));
    return Tensor(memory.back().data(), dtype, {1, length, 1, width});
  }
  Tensor random(int64_t length, int64_t width, uint64_t stream) {
    Tensor t = tensor(length, width);
    const Random numbers(7, stream);
    Dense values(static_cast<size_t>(t.size()));
    for (size_t i = 0; i < values.size(); ++i) values[i] = numbers.normal(i);
    write(t, values);
    return t;
  }

  Tensor q = random(rows, headdim, 1), k = random(keys, headdim, 2), v = random(keys, headdim_v, 3), dout = random(rows, headdim_v, 4);
  Tensor o = tensor(rows, headdim_v), dq = tensor(rows, headdim), dk = tensor(keys, headdim), dv = tensor(keys, headdim_v);
  std::vector<float> lse_memory = std::vector<float>(static_cast<size_t>(rows));
  Tensor lse = Tensor(lse_memory.data(), DType::kF32, {1, 1, rows});

  void set(const Tensor& t, int64_t row, int64_t column, double value) const {
    Dense all = read(t);
    all[static_cast<size_t>(row * t.shape(3) + column)] = value;
    write(t, all);
  }
  uint8_t& shows(int64_t row, int64_t key) { return mask[static_cast<size_t>(row * keys + key)]; }

  void expect_right(const Target& target, const std::string& what) {
    Options options;
    options.backend = target.backend;
    options.cpu_isa = target.isa;
    ForwardTensors f{q, k, v, o, lse, {}};
    f.scores.mask = Tensor(mask.data(), DType::kU8, {1, 1, rows, keys});
    forward(f, options);
    BackwardTensors b{q, k, v, o, lse, dout, dq, dk, dv};
    b.scores = f.scores;
    backward(b, options);
    for (const std::vector<TensorVerdict>& verdicts : {verify(f, options), verify(b, options)})
      for (const TensorVerdict& verdict : verdicts) EXPECT_TRUE(verdict.pass) << name_of(target) << ", " << what << ": " << verdict.message;
  }
};

void on_every_instruction_set(DType dtype, const std::function<void(const Target&)>& test) {
  for (const Target& target : all_targets())
    if (target.backend == Backend::kCpu && target.algorithm == Algorithm::kV2 && why_unavailable(target, dtype).empty()) test(target);
}

class MasksSmall : public ::testing::TestWithParam<DType> {};

// 70 keys are words of 32, 32 and 6.
TEST_P(MasksSmall, OnePairIsHiddenOrShown) {
  on_every_instruction_set(GetParam(), [](const Target& target) {
    for (const bool shown : {false, true})
      for (int64_t key : {0, 7, 15, 16, 31, 32, 47, 63, 64, 69}) {
        OneHead head{GetParam(), 37, 70, 16, 16};
        if (shown) std::fill(head.mask.begin(), head.mask.end(), uint8_t{0});
        head.shows(5, key) = shown ? 128 : 0;  // any number but 0 shows
        head.expect_right(target, (shown ? "shown key " : "hidden key ") + std::to_string(key));
      }
  });
}

// In columns at the beginning, inside and at the end of rows that are no whole vectors. Row 20 sees the value, the others must not.
TEST_P(MasksSmall, InfiniteValuesOfHiddenKeysAreNotMet) {
  on_every_instruction_set(GetParam(), [](const Target& target) {
    for (int64_t headdim_v : {5, 20, 33, 72})
      for (int64_t column : {int64_t{0}, headdim_v / 2, headdim_v - 1})
        for (const double value : {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
          OneHead head{GetParam(), 37, 70, 16, headdim_v};
          head.set(head.v, 11, column, value);
          for (int64_t row = 0; row < 37; ++row) head.shows(row, 11) = row == 20 ? 1 : 0;
          head.expect_right(target, "column " + std::to_string(column) + " of " + std::to_string(headdim_v));
        }
  });
}

INSTANTIATE_TEST_SUITE_P(Every, MasksSmall, ::testing::Values(DType::kF32, DType::kBF16, DType::kF16),
                         [](const auto& each) { return std::string(name_of(each.param)); });

}  // namespace
}  // namespace fattn::testing
