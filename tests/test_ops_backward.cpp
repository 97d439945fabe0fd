// The operations of training: the reference beside slopes, every instruction set and dtype beside the reference, the same bits on one thread and on
// more.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "device/cpu_info.h"
#include "fattn/error.hpp"
#include "ops/training.h"
#include "ops_array.h"

namespace {

using namespace fattn::ops;
using fattn::DType;
using fattn::Isa;
using fattn::core::cpu_info;
using fattn::test::Array;
using fattn::test::unit_of;

const Device kExact{Place::kReference};

template <class Problem>
void run(const Problem& problem, const Device& device, const typename Problem::Buffers& buffers) {
  const Plan<Problem> plan(problem, device);
  const Array workspace(DType::kF32, plan.workspace_bytes() / 4 + 1);
  plan.execute(buffers, workspace.as<void>());
}

// Each element within `allowed` of the largest one, and the rounding of its own dtype.
void expect_close(const Array& got, const Array& expected, double allowed, const char* what) {
  double scale = 0;
  for (size_t i = 0; i < expected.count; ++i) scale = std::max(scale, std::abs(expected.at(i)));
  ASSERT_GT(scale, 0) << what;
  for (size_t i = 0; i < got.count; ++i) {
    const double error = std::abs(got.at(i) - expected.at(i));
    ASSERT_TRUE(error <= allowed * scale + 2 * unit_of(got.dtype) * std::abs(expected.at(i)))
        << what << " " << i << ": " << got.at(i) << ", not " << expected.at(i) << ", scale " << scale;
  }
}

// The gradient of f at x along a direction, which is `gradient` times it.
void expect_slope(const Array& x, const Array& gradient, const std::function<double(const Array&)>& f, double allowed, const char* what) {
  const Array direction(DType::kF32, x.count, 99);
  Array above(x), below(x);
  double predicted = 0, size = 0;
  for (size_t i = 0; i < x.count; ++i) {
    above.set(i, x.at(i) + 1e-2 * direction.at(i));
    below.set(i, x.at(i) - 1e-2 * direction.at(i));
    predicted += gradient.at(i) * (above.at(i) - below.at(i)) / 2e-2;
    size += gradient.at(i) * gradient.at(i);
  }
  const double slope = (f(above) - f(below)) / 2e-2;
  EXPECT_TRUE(std::abs(slope - predicted) <= allowed * std::sqrt(size)) << what << " " << slope << " " << predicted;
}
double dot(const Array& a, const Array& b) {
  double sum = 0;
  for (size_t i = 0; i < a.count; ++i) sum += a.at(i) * b.at(i);
  return sum;
}

TEST(OpsBackwardSmall, ActivationsAreSlopes) {
  const int64_t n = 65;
  const Array x(DType::kF32, n, 1, 2), dy(DType::kF32, n, 2);
  for (const Activation activation : {Activation::kGeluTanh, Activation::kGelu}) {
    const Array dx(DType::kF32, n);
    run(ActivationGradient{1, n, DType::kF32, activation}, kExact, {1, x.as<void>(), dy.as<void>(), dx.as<void>()});
    const auto f = [&](const Array& at) {
      const Array y(DType::kF32, n);
      run(Activate{1, n, DType::kF32, activation}, kExact, {1, at.as<void>(), y.as<void>()});
      return dot(y, dy);
    };
    expect_slope(x, dx, f, 1e-3, "activation");
  }
}

TEST(OpsBackwardSmall, LayerNormIsASlope) {
  const int64_t rows = 5, width = 23;
  const Array x(DType::kF32, rows * width, 1, 3), dy(DType::kF32, rows * width, 2), weight(DType::kF32, width, 3), bias(DType::kF32, width, 4);
  const Array dx(DType::kF32, rows * width), dweight(DType::kF32, width), dbias(DType::kF32, width);
  run(LayerNormGradient{rows, width}, kExact,
      {rows, x.as<float>(), weight.as<void>(), dy.as<float>(), dx.as<float>(), dweight.as<float>(), dbias.as<float>()});
  const auto f = [&](const Array& x_at, const Array& weight_at, const Array& bias_at) {
    const Array y(DType::kF32, rows * width);
    run(LayerNorm{rows, width}, kExact, {rows, x_at.as<float>(), nullptr, nullptr, weight_at.as<void>(), bias_at.as<void>(), y.as<void>()});
    return dot(y, dy);
  };
  expect_slope(
      x, dx, [&](const Array& at) { return f(at, weight, bias); }, 1e-3, "x");
  expect_slope(
      weight, dweight, [&](const Array& at) { return f(x, at, bias); }, 1e-3, "weight");
  expect_slope(
      bias, dbias, [&](const Array& at) { return f(x, weight, at); }, 1e-3, "bias");
}

TEST(OpsBackwardSmall, CrossEntropyIsASlope) {
  const int64_t rows = 7, width = 11, vocab = 29;
  const Array x(DType::kF32, rows * width, 1), weight(DType::kF32, vocab * width, 2), dx(DType::kF32, rows * width),
      dweight(DType::kF32, vocab * width);
  const int32_t target[] = {3, -1, 28, 0, 5, 5, 11};
  const CrossEntropyGradient p{rows, width, vocab};
  const auto f = [&](const Array& x_at, const Array& weight_at) {
    const Array loss(DType::kF32, rows);
    run(p, kExact, {rows, x_at.as<void>(), weight_at.as<void>(), target, loss.as<float>()});
    double sum = 0;
    for (size_t i = 0; i < loss.count; ++i) sum += 0.25 * loss.at(i);
    return sum;
  };
  const Array loss(DType::kF32, rows), largest(DType::kF32, rows);
  run(p, kExact, {rows, x.as<void>(), weight.as<void>(), target, loss.as<float>(), largest.as<float>(), 0.25, dx.as<float>(), dweight.as<float>()});
  expect_slope(
      x, dx, [&](const Array& at) { return f(at, weight); }, 1e-3, "x");
  expect_slope(
      weight, dweight, [&](const Array& at) { return f(x, at); }, 1e-3, "weight");
}

using Way = std::tuple<Isa, DType>;
class OpsBackwardSmall : public testing::TestWithParam<Way> {
 protected:
  void SetUp() override {
    if (isa() != Isa::kAuto && !cpu_info().available(isa())) GTEST_SKIP() << "this processor has no " << name_of(isa());
  }
  Isa isa() const { return std::get<0>(GetParam()); }
  DType dtype() const { return std::get<1>(GetParam()); }
  Device device(int threads) const { return {Place::kCpu, isa(), threads}; }

  // call(device, outputs) by the reference, and on one thread and on three; `outputs` come as they are given.
  template <class Call>
  void compare(std::vector<Array> outputs, double allowed, const char* what, const Call& call) {
    std::vector<Array> exact(outputs), one(outputs), three(outputs);
    call(kExact, exact);
    call(device(1), one);
    call(device(3), three);
    for (size_t i = 0; i < outputs.size(); ++i) {
      expect_close(one[i], exact[i], allowed, what);
      EXPECT_EQ(std::memcmp(one[i].as<char>(), three[i].as<char>(), one[i].bytes), 0) << what << " " << i << " on three threads";
    }
  }
  // Of a sum of n products in fp32, whose parts are of either sign, beside the largest of many such sums.
  static double of_sum(int64_t n) { return 4 * unit_of(DType::kF32) * std::sqrt(static_cast<double>(n)); }
};

TEST_P(OpsBackwardSmall, Product) {
  for (const auto& size : {std::tuple<int64_t, int64_t, int64_t>{1, 1, 1}, {7, 65, 33}, {130, 70, 401}, {259, 300, 40}, {20, 530, 30}}) {
    const int64_t m = std::get<0>(size), n = std::get<1>(size), k = std::get<2>(size);
    for (const bool a_turned : {false, true})
      for (const bool b_turned : {false, true})
        for (const int way : {0, 1, 2}) {
          Product p{m, n, k, a_turned, b_turned, way == 1 ? DType::kF32 : dtype(), dtype(), way == 2 ? dtype() : DType::kF32, way == 0 ? 1 : 0.5};
          const Array a(p.a, static_cast<size_t>(m * k), 1), b(p.b, static_cast<size_t>(k * n), 2), bias(p.b, static_cast<size_t>(n), 3);
          const Array before(DType::kF32, static_cast<size_t>(m * n), 4);
          compare({p.c == DType::kF32 ? before : Array(p.c, before.count)}, of_sum(k + 2), "product", [&](const Device& on, std::vector<Array>& c) {
            const float* add = way == 0 ? c[0].as<float>() : way == 1 ? before.as<float>() : nullptr;
            run(p, on, {m, a.as<void>(), b.as<void>(), way == 1 || !a_turned ? bias.as<void>() : nullptr, add, c[0].as<void>()});
          });
        }
  }
  // Fewer rows, and a shorter inner dimension.
  const Array a(dtype(), 50 * 40, 1), b(dtype(), 50 * 30, 2);
  compare({Array(DType::kF32, 40 * 30)}, of_sum(21), "inner", [&](const Device& on, std::vector<Array>& c) {
    run(Product{40, 30, 50, true, false, dtype(), dtype()}, on, {40, a.as<void>(), b.as<void>(), nullptr, nullptr, c[0].as<void>(), 21});
  });
  compare({Array(DType::kF32, 13 * 30)}, of_sum(50), "rows", [&](const Device& on, std::vector<Array>& c) {
    run(Product{40, 30, 50, false, false, dtype(), dtype()}, on, {13, a.as<void>(), b.as<void>(), nullptr, nullptr, c[0].as<void>()});
  });
}

TEST_P(OpsBackwardSmall, ColumnSums) {
  for (const auto& size : {std::tuple<int64_t, int64_t>{1, 1}, {300, 67}, {5, 200}}) {
    const int64_t rows = std::get<0>(size), columns = std::get<1>(size);
    const Array x(dtype(), static_cast<size_t>(rows * columns), 1);
    compare({Array(DType::kF32, static_cast<size_t>(columns), 2)}, of_sum(rows), "sums", [&](const Device& on, std::vector<Array>& to) {
      run(ColumnSums{rows, columns, dtype()}, on, {rows, x.as<void>(), to[0].as<float>()});
    });
  }
}

TEST_P(OpsBackwardSmall, Activations) {
  const int64_t rows = 9, width = 35;
  Array x(dtype(), rows * width, 1, 3);
  const Array dy(dtype(), rows * width, 2);
  x.set(3, 100), x.set(4, -100), x.set(5, 3e4), x.set(6, -3e4), x.set(7, 0);
  for (const Activation activation : {Activation::kGeluTanh, Activation::kGelu}) {
    compare({Array(dtype(), x.count)}, 1e-7, "activation", [&](const Device& on, std::vector<Array>& y) {
      run(Activate{rows, width, dtype(), activation}, on, {rows, x.as<void>(), y[0].as<void>()});
    });
    // Beside a slope of 1, and a y of up to 3e4: each by itself.
    compare({Array(dtype(), x.count)}, 1e-6, "its gradient", [&](const Device& on, std::vector<Array>& dx) {
      run(ActivationGradient{rows, width, dtype(), activation}, on, {rows, x.as<void>(), dy.as<void>(), dx[0].as<void>()});
    });
    compare({Array(dtype(), x.count), dy}, 1e-6, "in place", [&](const Device& on, std::vector<Array>& both) {
      run(ActivationGradient{rows, width, dtype(), activation}, on, {rows, x.as<void>(), both[1].as<void>(), both[1].as<void>(), both[0].as<void>()});
    });
  }
  x.set(0, NAN);
  Array y(dtype(), x.count), dx(dy);
  run(ActivationGradient{rows, width, dtype()}, device(1), {rows, x.as<void>(), dx.as<void>(), dx.as<void>(), y.as<void>()});
  EXPECT_TRUE(std::isnan(y.at(0)) && std::isnan(dx.at(0)));
}

TEST_P(OpsBackwardSmall, LayerNormGradient) {
  for (const auto& size : {std::tuple<int64_t, int64_t>{1, 5}, {600, 77}, {19, 128}}) {
    const int64_t rows = std::get<0>(size), width = std::get<1>(size);
    const auto count = static_cast<size_t>(rows * width), w = static_cast<size_t>(width);
    const Array x(DType::kF32, count, 1, 3), dy(DType::kF32, count, 2), weight(dtype(), w, 3);
    compare({Array(DType::kF32, count, 4), Array(DType::kF32, w, 5), Array(DType::kF32, w, 6), Array(dtype(), count)}, of_sum(rows + width), "norm",
            [&](const Device& on, std::vector<Array>& d) {
              run(LayerNormGradient{rows, width, 1e-5, dtype()}, on,
                  {rows, x.as<float>(), weight.as<void>(), dy.as<float>(), d[0].as<float>(), d[1].as<float>(), d[2].as<float>(), d[3].as<void>()});
              Array rounded(dtype(), count);
              for (size_t i = 0; i < count; ++i) rounded.set(i, d[0].at(i));
              EXPECT_EQ(std::memcmp(rounded.as<void>(), d[3].as<void>(), rounded.bytes), 0);
            });
  }
}

TEST_P(OpsBackwardSmall, EmbeddingGradient) {
  const int64_t rows = 200, width = 131;
  std::vector<int32_t> ids, position;
  for (int32_t r = 0; r < rows; ++r) ids.push_back(r * r % 7), position.push_back(r % 50);
  const Array dx(DType::kF32, rows * width, 1);
  for (const int64_t positions : {0, 50})
    compare({Array(DType::kF32, 7 * width, 2), Array(DType::kF32, 50 * width, 3)}, of_sum(100), "embedding",
            [&](const Device& on, std::vector<Array>& d) {
              const EmbeddingGradient p{rows, width, 7, positions};
              run(p, on, {rows, ids.data(), position.data(), dx.as<float>(), d[0].as<float>(), d[1].as<float>()});
              std::vector<int32_t> bad(ids);
              bad[199] = 7;
              EXPECT_THROW(run(p, on, {rows, bad.data(), position.data(), dx.as<float>(), d[0].as<float>(), d[1].as<float>()}), fattn::Error);
            });
}

TEST_P(OpsBackwardSmall, Rotary) {
  const int64_t rows = 11, stride = 70;
  std::vector<int32_t> position;
  for (int32_t r = 0; r < rows; ++r) position.push_back(r * 31);
  const Array x(dtype(), rows * stride, 1);
  Array there(x);
  for (const bool back : {false, true}) {
    compare({x}, 1e-6, "rotary", [&](const Device& on, std::vector<Array>& y) {
      run(Rotary{rows, 3, 16, stride, dtype(), 10000, back}, on, {rows, y[0].as<void>(), position.data()});
    });
    run(Rotary{rows, 3, 16, stride, dtype(), 10000, back}, device(1), {rows, there.as<void>(), position.data()});
  }
  expect_close(there, x, 4 * unit_of(dtype()), "there and back");
}

TEST_P(OpsBackwardSmall, CrossEntropy) {
  for (const auto& size : {std::tuple<int64_t, int64_t, int64_t>{1, 3, 2}, {150, 31, 517}, {1100, 8, 300}}) {
    const int64_t rows = std::get<0>(size), width = std::get<1>(size), vocab = std::get<2>(size);
    const auto count = static_cast<size_t>(rows * width), weights = static_cast<size_t>(vocab * width);
    const Array x(dtype(), count, 1), weight(dtype(), weights, 2, 0.7);
    std::vector<int32_t> target;
    for (int64_t r = 0; r < rows; ++r) target.push_back(static_cast<int32_t>(r % 5 == 4 ? -1 : r * 7 % vocab));
    const auto n = static_cast<size_t>(rows);
    compare(
        {Array(DType::kF32, n), Array(DType::kF32, n), Array(DType::kF32, count), Array(DType::kF32, weights, 3)}, of_sum(rows + vocab), "loss",
        [&](const Device& on, std::vector<Array>& d) {
          run(CrossEntropyGradient{rows, width, vocab, dtype()}, on,
              {rows, x.as<void>(), weight.as<void>(), target.data(), d[0].as<float>(), d[1].as<float>(), 0.5, d[2].as<float>(), d[3].as<float>()});
        });
  }
  // What is not finite is seen.
  Array x(dtype(), 2 * 8, 1);
  const Array weight(dtype(), 40 * 8, 2), loss(DType::kF32, 2), largest(DType::kF32, 2), dx(DType::kF32, 16), dweight(DType::kF32, 320);
  x.set(9, INFINITY);
  const int32_t target[] = {1, 2}, bad[] = {1, 40};
  const CrossEntropyGradient p{2, 8, 40, dtype()};
  run(p, device(1), {2, x.as<void>(), weight.as<void>(), target, loss.as<float>(), largest.as<float>(), 1, dx.as<float>(), dweight.as<float>()});
  EXPECT_TRUE(std::isfinite(loss.at(0)) && std::isfinite(largest.at(0)));
  EXPECT_TRUE(std::isnan(loss.at(1)) && std::isnan(largest.at(1)) && !std::isfinite(dx.at(8)) && !std::isfinite(dweight.at(0)));
  EXPECT_THROW(run(p, device(1), {2, x.as<void>(), weight.as<void>(), bad, loss.as<float>()}), fattn::Error);
}

TEST_P(OpsBackwardSmall, Optimizer) {
  const size_t n = 40000 + 5;
  Array gradient(DType::kF32, n, 1);
  double sums[3] = {};
  int i = 0;
  for (const Device& on : {kExact, device(1), device(3)})
    run(SquareSum{static_cast<int64_t>(n)}, on, {static_cast<int64_t>(n), gradient.as<float>(), &sums[i++]});
  EXPECT_NEAR(sums[1], sums[0], 1e-12 * sums[0]);
  EXPECT_EQ(sums[1], sums[2]);
  Array v(DType::kF32, n, 4);
  for (size_t k = 0; k < n; ++k) v.set(k, v.at(k) * v.at(k));
  compare({Array(DType::kF32, n, 2), Array(DType::kF32, n, 3), v, Array(dtype(), n)}, 4 * unit_of(DType::kF32), "step",
          [&](const Device& on, std::vector<Array>& d) {
            AdamWStep::Buffers b{
                static_cast<int64_t>(n), gradient.as<float>(), d[0].as<float>(), d[1].as<float>(), d[2].as<float>(), d[3].as<void>(), 0.5};
            b.learning_rate = 0.01, b.weight_decay = 0.1, b.step = 3;
            run(AdamWStep{static_cast<int64_t>(n), dtype()}, on, b);
          });
  // A number that is none makes the sum one that is none.
  for (const double other : {1.0, static_cast<double>(INFINITY), static_cast<double>(NAN)})
    for (const Device& on : {kExact, device(2)}) {
      run(SquareSum{static_cast<int64_t>(n)}, on, {static_cast<int64_t>(n), gradient.as<float>(), &sums[0], &other});
      EXPECT_EQ(std::isfinite(sums[0]), std::isfinite(other));
    }
  gradient.set(n - 1, NAN);
  run(SquareSum{static_cast<int64_t>(n)}, device(2), {static_cast<int64_t>(n), gradient.as<float>(), &sums[0]});
  EXPECT_TRUE(std::isnan(sums[0]));
}

TEST_P(OpsBackwardSmall, SumsOfLosses) {
  const int32_t target[] = {3, -1, 0, 7};
  const float loss[] = {1, 100, 2, 4}, largest[] = {5, 50, 8, 6}, worse[] = {5, NAN, 8, 6}, bad[] = {NAN, 1, 9, 6};
  for (const Device& on : {kExact, device(2)}) {
    double sums[2] = {10, 7};
    run(LossSums{4}, on, {4, target, loss, largest, sums});
    EXPECT_EQ(sums[0], 17) << "rows without a target do not count";
    EXPECT_EQ(sums[1], 8);
    run(LossSums{4}, on, {2, target, loss, worse, sums});
    EXPECT_EQ(sums[0], 18);
    EXPECT_EQ(sums[1], 8);
    run(LossSums{4}, on, {4, target, loss, bad, sums});
    EXPECT_TRUE(std::isnan(sums[1]));
    run(LossSums{4}, on, {4, target, loss, largest, sums});
    EXPECT_TRUE(std::isnan(sums[1])) << "it stays";
  }
}

// The product of OpenBLAS where no instruction set is asked for, else of our panels.
INSTANTIATE_TEST_SUITE_P(Every, OpsBackwardSmall,
                         testing::Combine(testing::Values(Isa::kAuto, Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16, Isa::kNeon),
                                          testing::Values(DType::kF32, DType::kF16, DType::kBF16)),
                         [](const auto& way) { return std::string(name_of(std::get<0>(way.param))) + "_" + name_of(std::get<1>(way.param)); });

TEST(DropoutSmall, DropsWhatTheReferenceDrops) {
  for (const auto& size : {std::tuple<int64_t, int64_t>{1, 1}, {37, 131}}) {
    const int64_t rows = std::get<0>(size), width = std::get<1>(size);
    const auto count = static_cast<size_t>(rows * width);
    const Array x(DType::kF32, count, 1), add(DType::kF32, count, 2);
    for (const double p : {0.0, 0.1, 0.75})
      for (const bool adds : {false, true}) {
        Array out[] = {Array(DType::kF32, count), Array(DType::kF32, count), Array(DType::kF32, count)};
        int i = 0;
        for (const Device& on : {kExact, Device{Place::kCpu, Isa::kAuto, 1}, Device{Place::kCpu, Isa::kAuto, 3}})
          run(Dropout{rows, width, p}, on, {rows, x.as<float>(), adds ? add.as<float>() : nullptr, out[i++].as<float>(), 77, uint64_t{5} << 40});
        fattn::test::expect_near(out[1], out[0], 1e-6);
        EXPECT_EQ(std::memcmp(out[1].as<char>(), out[2].as<char>(), out[1].bytes), 0);
        size_t dropped = 0;
        for (size_t k = 0; k < count; ++k) dropped += out[0].at(k) == (adds ? add.at(k) : 0);
        EXPECT_NEAR(static_cast<double>(dropped) / static_cast<double>(count), p, count > 1 ? 0.03 : 1);
      }
  }
}

// Rows of a larger matrix that lie elsewhere, in any order, have what is dropped of them there.
TEST(DropoutSmall, RowsDropWhatTheirPlacesDrop) {
  const int64_t all = 70, width = 131;
  const Array x(DType::kF32, static_cast<size_t>(all * width), 1);
  const std::vector<int32_t> places{5, 6, 7, 8, 9, 31, 32, 69, 0, 16, 17, 18, 24, 40, 13, 13, 2, 61};
  const auto rows = static_cast<int64_t>(places.size());
  Array taken(DType::kF32, static_cast<size_t>(rows * width));
  const auto row_of = [&](const Array& from, int64_t row) { return from.as<float>() + row * width; };
  for (int64_t r = 0; r < rows; ++r) std::copy_n(row_of(x, places[static_cast<size_t>(r)]), width, row_of(taken, r));
  for (const Device& on : {kExact, Device{Place::kCpu, Isa::kAuto, 1}, Device{Place::kCpu, Isa::kAuto, 3}}) {
    Array whole(DType::kF32, x.count), part(DType::kF32, taken.count);
    run(Dropout{all, width, 0.5}, on, {all, x.as<float>(), nullptr, whole.as<float>(), 77, 9});
    run(Dropout{rows, width, 0.5}, on, {rows, taken.as<float>(), nullptr, part.as<float>(), 77, 9, nullptr, places.data()});
    for (int64_t r = 0; r < rows; ++r)
      EXPECT_EQ(std::memcmp(row_of(part, r), row_of(whole, places[static_cast<size_t>(r)]), static_cast<size_t>(width) * sizeof(float)), 0) << r;
  }
}

TEST(OpsTrainingErrors, SayWhatIsAllowed) {
  EXPECT_THROW((Plan<Product>(Product{1, 0, 5}, {})), fattn::Error);
  EXPECT_THROW((Plan<Product>(Product{1, 5, 5, false, false, DType::kF64}, {})), fattn::Error);
  EXPECT_THROW((Plan<Dropout>(Dropout{1, 5, 1.0}, {})), fattn::Error);
  EXPECT_THROW((Plan<Dropout>(Dropout{1, 5, NAN}, {})), fattn::Error);
  EXPECT_THROW((Plan<Rotary>(Rotary{1, 2, 3, 6}, {})), fattn::Error);
  EXPECT_THROW((Plan<Rotary>(Rotary{1, 2, 4, 7}, {})), fattn::Error);
  EXPECT_THROW((Plan<Activate>(Activate{1, 2, DType::kF32, Activation::kNone}, {})), fattn::Error);
  EXPECT_THROW((Plan<SquareSum>(SquareSum{0}, {})), fattn::Error);
}

}  // namespace
