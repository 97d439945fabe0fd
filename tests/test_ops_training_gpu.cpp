// Products, losses and steps of training on a GPU against the reference in float64. Skipped without a device.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "fattn/error.hpp"
#include "gpu_fixture.h"
#include "ops/training.h"
#include "ops_array.h"
#include "ops_on_device.h"

namespace fattn {
namespace {

using namespace ops;
using test::Array;
using test::expect_near;
using test::kGpu;
using test::kReference;
using test::OnDevice;
using test::run;
using test::size;
using test::sums_error;
using test::twice;
using test::unit_of;
using test::with;

// The same numbers in fp32.
Array widened(const Array& x) {
  Array to(DType::kF32, x.count);
  for (size_t i = 0; i < x.count; ++i) to.set(i, x.at(i));
  return to;
}

class TrainingGpu : public test::CudaGpu, public testing::WithParamInterface<DType> {
 protected:
  DType dtype() const { return GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(Every, TrainingGpu, testing::Values(DType::kF32, DType::kF16, DType::kBF16),
                         [](const auto& one) { return std::string(name_of(one.param)); });
class TrainingAloneGpu : public test::CudaGpu {};

TEST_P(TrainingGpu, Product) {
  struct Shape {
    int64_t rows, columns, inner, used_inner;
  };
  for (const Shape& shape : {Shape{64, 96, 40, 40}, {17, 21, 33, 20}, {1, 7, 5, 5}, {130, 64, 256, 100}, {200, 72, 1, 1}}) {
    const int64_t rows = shape.rows, columns = shape.columns, inner = shape.inner, used = shape.used_inner;
    for (const int turns : {0, 1, 2, 3})
      for (const int mixed : {0, 1, 2}) {  // a, or b, in fp32
        if (mixed > 0 && (dtype() == DType::kF32 || turns == 3)) continue;
        for (const DType c : {DType::kF32, dtype()}) {
          Product p{rows, columns, inner, (turns & 1) != 0, (turns & 2) != 0, dtype(), dtype(), c, 0.5};
          const bool part = p.a_turned && !p.b_turned;
          // A factor in fp32 has numbers of the dtype: nothing is rounded.
          const auto factor = [&](bool single, int64_t n, unsigned seed, double deviation) {
            const Array numbers(dtype(), size(n), seed, deviation);
            return single ? widened(numbers) : numbers;
          };
          if (mixed == 1) p.a = DType::kF32;
          if (mixed == 2) p.b = DType::kF32;
          const Array a = factor(mixed == 1, rows * inner, 1, 1),
                      b = factor(mixed == 2, inner * columns, 2, 1 / std::sqrt(static_cast<double>(inner)));
          const Array bias = factor(mixed == 2, columns, 3, 1), add(DType::kF32, size(rows * columns), 4);
          const OnDevice da(a), db(b), dbias(bias), dadd(add);
          for (const int what : {0, 1, 2, 3}) {  // bias; add
            SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(columns) + " x " + std::to_string(inner) + ", turns " + std::to_string(turns) +
                         ", mixed " + std::to_string(mixed) + ", c " + name_of(c) + ", what " + std::to_string(what));
            const bool biased = (what & 1) != 0, added = (what & 2) != 0;
            Array expected(c, size(rows * columns)), got = expected;
            Product::Buffers given{rows,
                                   a.as<void>(),
                                   b.as<void>(),
                                   biased ? bias.as<void>() : nullptr,
                                   added ? add.as<float>() : nullptr,
                                   expected.as<void>(),
                                   part ? used : 0};
            run(p, kReference, given);
            twice({&got}, [&](const std::vector<OnDevice>& to) {
              run(p, kGpu, {rows, da.get(), db.get(), biased ? dbias.get() : nullptr, added ? dadd.as<float>() : nullptr, to[0].get(), given.inner});
            });
            expect_near(got, expected, sums_error(inner));
          }
        }
      }
  }
  // In place, and fewer rows than the plan's.
  const Product p{40, 24, 16, false, false, dtype(), dtype(), DType::kF32};
  const Array a(dtype(), 40 * 16, 1), b(dtype(), 16 * 24, 2);
  Array expected(DType::kF32, 40 * 24, 3), got = expected;
  run(p, kReference, {30, a.as<void>(), b.as<void>(), nullptr, expected.as<float>(), expected.as<void>()});
  const OnDevice da(a), db(b);
  twice({&got}, [&](const std::vector<OnDevice>& to) { run(p, kGpu, {30, da.get(), db.get(), nullptr, to[0].as<float>(), to[0].get()}); });
  expect_near(got, expected, 2e-5);
}

TEST_P(TrainingGpu, ProductSaysWhatItDoesNot) {
  if (dtype() == DType::kF32) return;
  const DType other = dtype() == DType::kF16 ? DType::kBF16 : DType::kF16;
  EXPECT_THROW(ops::Plan<Product>({4, 4, 4, false, false, dtype(), other, DType::kF32}, kGpu), Error);
  const ops::Plan<Product> plan({4, 4, 4, false, false, dtype(), dtype(), dtype()}, kGpu);
  const OnDevice x(Array(DType::kF32, 64)), room(Array(DType::kF32, plan.workspace_bytes() / 4 + 64));
  EXPECT_THROW(plan.execute({4, x.get(), x.get(), nullptr, nullptr, x.get(), 3}, room.get()), Error);
  EXPECT_THROW(plan.execute({4, x.get(), x.get(), nullptr, x.as<float>(), x.get()}, room.get()), Error);
}

TEST_P(TrainingGpu, CrossEntropyGradient) {
  struct Shape {
    int64_t rows, width, vocab, padded;
  };
  for (const Shape& shape : {Shape{99, 31, 2100, 0}, {99, 31, 2101, 2112}, {3, 64, 50257, 50304}, {40, 16, 3, 64}, {150, 4, 300001, 0}}) {
    const int64_t rows = shape.rows, width = shape.width, vocab = shape.vocab, entries = std::max(vocab, shape.padded);
    SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(width) + " x " + std::to_string(vocab));
    const CrossEntropyGradient p{rows, width, vocab, dtype(), shape.padded};
    const Array x(dtype(), size(rows * width), 1);
    Array weight(dtype(), size(entries * width), 2, 0.5);
    for (size_t i = size(vocab * width); i < size(entries * width); ++i) weight.set(i, 0);
    std::vector<int32_t> target(size(rows));
    for (int64_t r = 0; r < rows; ++r) target[size(r)] = static_cast<int32_t>(r * 7919 % vocab);
    target[0] = -1, target[1] = static_cast<int32_t>(vocab - 1), target[2] = 0;
    const double scale = 1 / static_cast<double>(rows);
    Array loss(DType::kF32, size(rows)), largest = loss, dx(DType::kF32, size(rows * width), 3), dweight(DType::kF32, size(entries * width), 4);
    for (size_t i = size(vocab * width); i < size(entries * width); ++i) dweight.set(i, 0);
    Array got_loss = loss, got_largest = loss, got_dx = dx, got_dweight = dweight;
    run(p, kReference,
        {rows, x.as<void>(), weight.as<void>(), target.data(), loss.as<float>(), largest.as<float>(), scale, dx.as<float>(), dweight.as<float>()});
    const OnDevice on_x(x), on_w(weight), on_target(target), on_scale(std::vector<double>{scale});
    twice({&got_loss, &got_largest, &got_dx, &got_dweight}, [&](const std::vector<OnDevice>& to) {
      run(p, kGpu,
          {rows, on_x.get(), on_w.get(), on_target.as<int32_t>(), to[0].as<float>(), to[1].as<float>(), 17, to[2].as<float>(), to[3].as<float>(),
           on_scale.as<double>()});
    });
    expect_near(got_loss, loss, 4e-5);
    expect_near(got_largest, largest, 4e-6);
    EXPECT_EQ(got_loss.at(0), 0);
    // Gradients of logits are rounded to the dtype: together they are at most 2 scale a row. The smallest numbers of fp16 are 2^-24 apart.
    const double rounded = dtype() == DType::kF32 ? 0 : unit_of(dtype());
    const double tiny = dtype() == DType::kF16 ? 0x1p-25 * static_cast<double>(vocab) : 0;
    expect_near(got_dx, dx, 4e-6 + (2 * scale * rounded + tiny) * 3);
    expect_near(got_dweight, dweight, 4e-6 + (rounded * 2 + 0x1p-25 * static_cast<double>(rows)) * 4);
    for (int64_t i = 0; i < width; ++i) EXPECT_EQ(got_dx.at(size(i)), 0) << "a row without a target";
    for (size_t i = size(vocab * width); i < size(entries * width); ++i) EXPECT_EQ(got_dweight.at(i), 0) << "padding";
    // The loss alone.
    Array alone(DType::kF32, size(rows));
    twice({&alone}, [&](const std::vector<OnDevice>& to) {
      run(p, kGpu, {rows, on_x.get(), on_w.get(), on_target.as<int32_t>(), to[0].as<float>(), nullptr, 1, nullptr, nullptr});
    });
    EXPECT_EQ(std::memcmp(alone.as<void>(), got_loss.as<void>(), alone.bytes), 0);
  }
}

TEST_P(TrainingGpu, CrossEntropyGradientOfWhatIsNoNumber) {
  const int64_t rows = 4, width = 8, vocab = 37;
  Array x(dtype(), size(rows * width), 1);
  x.set(size(width + 3), NAN);
  x.set(size(2 * width), INFINITY);
  const Array weight(dtype(), size(vocab * width), 2);
  const OnDevice on_x(x), on_w(weight), target(std::vector<int32_t>{3, 4, 5, static_cast<int32_t>(vocab)}), loss(Array(DType::kF32, 4)),
      largest(Array(DType::kF32, 4)), dx(Array(DType::kF32, size(rows * width))), dweight(Array(DType::kF32, size(vocab * width)));
  run(CrossEntropyGradient{rows, width, vocab, dtype()}, kGpu,
      {rows, on_x.get(), on_w.get(), target.as<int32_t>(), loss.as<float>(), largest.as<float>(), 1, dx.as<float>(), dweight.as<float>()});
  const std::vector<float> l = loss.numbers<float>(4), g = largest.numbers<float>(4), d = dx.numbers<float>(size(rows * width));
  EXPECT_TRUE(std::isfinite(l[0]) && !std::isfinite(l[1]) && !std::isfinite(l[2]) && std::isnan(l[3]));
  EXPECT_TRUE(std::isfinite(g[0]) && std::isnan(g[1]) && std::isnan(g[2]) && std::isfinite(g[3]));
  EXPECT_TRUE(std::isfinite(d[0]) && std::isnan(d[size(width)]) && std::isnan(d[size(2 * width)]) && std::isnan(d[size(3 * width)]));
  EXPECT_TRUE(std::isnan(dweight.numbers<float>(1)[0]));
}

TEST_F(TrainingAloneGpu, SquareSum) {
  for (const int64_t n : {int64_t{1}, int64_t{1000}, int64_t{1500003}})
    for (const size_t offset : {size_t{0}, size_t{1}}) {
      const SquareSum p{n};
      const Array x(DType::kF32, size(n) + offset, 1);
      double expected = 0;
      run(p, kReference, {n, x.as<float>() + offset, &expected});
      const OnDevice on_x(x);
      Array sum(DType::kF32, 2);
      twice({&sum}, [&](const std::vector<OnDevice>& to) { run(p, kGpu, {n, on_x.as<float>() + offset, to[0].as<double>()}); });
      double got = 0;
      std::memcpy(&got, sum.as<void>(), 8);
      EXPECT_TRUE(std::abs(got - expected) <= 0x1p-53 * static_cast<double>(n + 4) * expected) << got << ", not " << expected;
    }
  for (const double bad : {static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
    const OnDevice x(with(Array(DType::kF32, 70000, 1), 66666, bad)), to(std::vector<double>(1));
    run(SquareSum{70000}, kGpu, {70000, x.as<float>(), to.as<double>()});
    EXPECT_FALSE(std::isfinite(to.numbers<double>(1)[0]));
  }
}

TEST_F(TrainingAloneGpu, LossSums) {
  for (const int64_t rows : {1, 31, 1500, 40003}) {
    const Array loss(DType::kF32, size(rows), 1), largest(DType::kF32, size(rows), 2);
    std::vector<int32_t> target(size(rows));
    for (size_t r = 0; r < target.size(); ++r) target[r] = r % 5 == 3 ? -1 : static_cast<int32_t>(r % 100);
    double expected[2] = {3, 0.25};
    const LossSums p{rows};
    run(p, kReference, {rows, target.data(), loss.as<float>(), largest.as<float>(), expected});
    const OnDevice on_target(target), on_loss(loss), on_largest(largest);
    Array sums(DType::kF32, 4);
    const double begin[2] = {3, 0.25};
    std::memcpy(sums.as<void>(), begin, sizeof begin);
    twice({&sums}, [&](const std::vector<OnDevice>& to) {
      run(p, kGpu, {rows, on_target.as<int32_t>(), on_loss.as<float>(), on_largest.as<float>(), to[0].as<double>()});
    });
    double got[2];
    std::memcpy(got, sums.as<void>(), sizeof got);
    EXPECT_TRUE(std::abs(got[0] - expected[0]) <= 1e-12 * static_cast<double>(rows)) << rows;
    EXPECT_EQ(got[1], expected[1]) << rows;
  }
  const OnDevice target(std::vector<int32_t>{1, -1, 2}), loss(std::vector<float>{1, 2, 3}), bad(std::vector<float>{1, 2, NAN}),
      hidden(std::vector<float>{1, NAN, 4}), sums(std::vector<double>{0, 0});
  const auto add = [&](const OnDevice& largest) {
    run(LossSums{3}, kGpu, {3, target.as<int32_t>(), loss.as<float>(), largest.as<float>(), sums.as<double>()});
    return sums.numbers<double>(2);
  };
  EXPECT_EQ(add(hidden), (std::vector<double>{4, 4}));
  EXPECT_TRUE(std::isnan(add(bad)[1]));
  EXPECT_TRUE(std::isnan(add(hidden)[1])) << "NaN stays";
  EXPECT_EQ(sums.numbers<double>(1)[0], 12);
}

TEST_F(TrainingAloneGpu, SumsThatAreMadeNone) {
  const OnDevice x(Array(DType::kF32, 5000, 1)), to(std::vector<double>(1));
  for (const double other : {1.0, static_cast<double>(INFINITY), static_cast<double>(NAN)}) {
    const OnDevice finite(std::vector<double>{other});
    run(SquareSum{5000}, kGpu, {5000, x.as<float>(), to.as<double>(), finite.as<double>()});
    EXPECT_EQ(std::isfinite(to.numbers<double>(1)[0]), std::isfinite(other));
  }
}

TEST_P(TrainingGpu, AdamWStep) {
  for (const int64_t n : {int64_t{1}, int64_t{1003}, int64_t{5000001}})
    for (const int what : {0, 1, 2}) {  // numbers of the host; of the device; with clipping
      const AdamWStep p{n, dtype()};
      const size_t offset = what == 2 && n == 1003 ? 1 : 0;
      const auto all = size(n) + offset;
      const Array gradient(DType::kF32, all, 1);
      Array master(DType::kF32, all, 2), m(DType::kF32, all, 3, 0.1), v(DType::kF32, all), weight(dtype(), all);
      for (size_t i = 0; i < all; ++i) v.set(i, m.at(i) * m.at(i) + 0.01);
      Array got_master = master, got_m = m, got_v = v, got_weight = weight;
      AdamWStep::Buffers b{n, gradient.as<float>() + offset, master.as<float>() + offset, m.as<float>() + offset, v.as<float>() + offset};
      b.weight = weight.as<char>() + offset * size_of(dtype());
      b.scale = 0.25, b.learning_rate = 0.01, b.weight_decay = 0.1, b.step = what == 1 ? 100000 : 3;
      const AdamWStep::Changing changing{b.scale, b.learning_rate, b.step};
      double square_sum = 0;
      run(SquareSum{n}, kReference, {n, b.gradient, &square_sum});
      if (what == 2) b.square_sum = &square_sum, b.clip = 0.001;
      run(p, kReference, b);
      const OnDevice on_gradient(gradient), on_changing(std::vector<AdamWStep::Changing>{changing}), on_sum(std::vector<double>{square_sum});
      twice({&got_master, &got_m, &got_v, &got_weight}, [&](const std::vector<OnDevice>& to) {
        AdamWStep::Buffers d = b;
        d.gradient = on_gradient.as<float>() + offset;
        d.master = to[0].as<float>() + offset, d.m = to[1].as<float>() + offset, d.v = to[2].as<float>() + offset;
        d.weight = to[3].as<char>() + offset * size_of(dtype());
        if (what == 1) d.changing = on_changing.as<AdamWStep::Changing>(), d.scale = 9, d.learning_rate = 9, d.step = 1;
        if (what == 2) d.square_sum = on_sum.as<double>();
        run(p, kGpu, d);
      });
      expect_near(got_master, master, 1e-7);
      expect_near(got_m, m, 1e-8);
      expect_near(got_v, v, 1e-8);
      for (size_t i = offset; i < all; ++i) {  // the weight is the master, rounded once
        Array one(dtype(), 1);
        one.set(0, got_master.at(i));
        ASSERT_EQ(got_weight.at(i), one.at(0)) << i;
      }
      if (what != 2) continue;
      const OnDevice bad(std::vector<double>{NAN}), on_master(master), on_m(m), on_v(v);
      AdamWStep::Buffers d{n, on_gradient.as<float>() + offset, on_master.as<float>() + offset, on_m.as<float>() + offset, on_v.as<float>() + offset};
      d.learning_rate = 1, d.square_sum = bad.as<double>();
      run(p, kGpu, d);
      on_master.read(got_master);
      EXPECT_EQ(std::memcmp(got_master.as<void>(), master.as<void>(), master.bytes), 0) << "a step of what is not a number";
    }
}

}  // namespace
}  // namespace fattn
