// The operations of training on a GPU against the reference in float64. Skipped without a device.
#include <gtest/gtest.h>

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
using test::unit;

size_t size(int64_t n) { return static_cast<size_t>(n); }

// The same numbers in fp32.
Array widened(const Array& x) {
  Array to(DType::kF32, x.count);
  for (size_t i = 0; i < x.count; ++i) to.set(i, x.at(i));
  return to;
}
Array with(const Array& x, size_t i, double number) {
  Array to = x;
  to.set(i, number);
  return to;
}

// fill(device's pointers) runs the operation on fresh copies of what it writes; a second run must have the same bits.
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

// What fp32 sums of n products of numbers of size 1 and 1 / sqrt(n) may be off by.
double sums_error(int64_t n) { return 4e-6 + 2e-8 * static_cast<double>(n); }

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
  for (const auto& [rows, columns, inner, used] : {Shape{64, 96, 40, 40}, {17, 21, 33, 20}, {1, 7, 5, 5}, {130, 64, 256, 100}, {200, 72, 1, 1}})
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

TEST_P(TrainingGpu, ColumnSums) {
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{1, 1}, {300, 130}, {1000, 768}, {513, 77}, {3000, 4}})
    for (const int64_t fewer : {int64_t{0}, rows / 2}) {
      const ColumnSums p{rows, columns, dtype()};
      const Array x(dtype(), size(rows * columns), 1);
      Array expected(DType::kF32, size(columns), 2), got = expected;
      run(p, kReference, {rows - fewer, x.as<void>(), expected.as<float>()});
      const OnDevice dx(x);
      twice({&got}, [&](const std::vector<OnDevice>& to) { run(p, kGpu, {rows - fewer, dx.get(), to[0].as<float>()}); });
      expect_near(got, expected, 1e-5 * std::sqrt(static_cast<double>(rows)));
    }
  Array x(dtype(), 100 * 40, 1);
  x.set(57 * 40 + 3, NAN), x.set(99 * 40 + 39, INFINITY);
  const OnDevice dx(x), to(Array(DType::kF32, 40));
  run(ColumnSums{100, 40, dtype()}, kGpu, {100, dx.get(), to.as<float>()});
  const std::vector<float> sums = to.numbers<float>(40);
  EXPECT_TRUE(std::isnan(sums[3]) && std::isinf(sums[39]) && std::isfinite(sums[2]));
}

TEST_P(TrainingGpu, Activation) {
  for (const int64_t width : {int64_t{3072}, int64_t{77}})
    for (const Activation activation : {Activation::kGeluTanh, Activation::kGelu}) {
      const int64_t rows = 5, n = rows * width;
      Array x(dtype(), size(n), 1, 3);
      const Array dy(dtype(), size(n), 2);
      for (const double number : {0.0, -0.0, 40.0, -40.0, 1e-4, 3e4, -3e4, 8.0, -8.0})
        x.set(size(number == 0 ? 0 : std::abs(std::lround(number)) % 77), number);
      Array y(dtype(), size(n)), dx = y, again = y, got_y = y, got_dx = y, got_again = y;
      run(Activate{rows, width, dtype(), activation}, kReference, {rows, x.as<void>(), y.as<void>()});
      run(ActivationGradient{rows, width, dtype(), activation}, kReference, {rows, x.as<void>(), dy.as<void>(), dx.as<void>(), again.as<void>()});
      const OnDevice on_x(x), on_dy(dy);
      twice({&got_y, &got_dx, &got_again}, [&](const std::vector<OnDevice>& to) {
        run(Activate{rows, width, dtype(), activation}, kGpu, {rows, on_x.get(), to[0].get()});
        run(ActivationGradient{rows, width, dtype(), activation}, kGpu, {rows, on_x.get(), on_dy.get(), to[1].get(), to[2].get()});
      });
      expect_near(got_y, y, 2e-6);
      expect_near(got_dx, dx, 8e-6);
      EXPECT_EQ(std::memcmp(got_again.as<void>(), got_y.as<void>(), got_y.bytes), 0) << "made once more";
      // In place, and without the activation.
      Array in_place = dy;
      twice({&in_place}, [&](const std::vector<OnDevice>& to) {
        run(ActivationGradient{rows, width, dtype(), activation}, kGpu, {rows, on_x.get(), to[0].get(), to[0].get(), nullptr});
      });
      EXPECT_EQ(std::memcmp(in_place.as<void>(), got_dx.as<void>(), got_dx.bytes), 0);
      const OnDevice bad(with(x, 9, NAN)), out(y);
      run(Activate{rows, width, dtype(), activation}, kGpu, {rows, bad.get(), out.get()});
      out.read(got_y);
      EXPECT_TRUE(std::isnan(got_y.at(9)));
    }
}

TEST_P(TrainingGpu, LayerNormGradient) {
  for (const auto& [rows, width] :
       {std::pair<int64_t, int64_t>{19, 768}, {700, 77}, {3, 1600}, {33, 5000}, {20, 2049}, {9, 4100}, {4500, 64}, {20, 4097}, {1, 4}}) {
    SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(width));
    const LayerNormGradient p{rows, width, 1e-5, dtype()};
    const Array x(DType::kF32, size(rows * width), 1, 2), weight(dtype(), size(width), 2), dy(DType::kF32, size(rows * width), 3);
    Array dx(DType::kF32, size(rows * width), 4), dweight(DType::kF32, size(width), 5), dbias = dweight;
    Array got_dx = dx, got_dweight = dweight, got_dbias = dbias;
    run(p, kReference, {rows, x.as<float>(), weight.as<void>(), dy.as<float>(), dx.as<float>(), dweight.as<float>(), dbias.as<float>()});
    const OnDevice on_x(x), on_w(weight), on_dy(dy);
    twice({&got_dx, &got_dweight, &got_dbias}, [&](const std::vector<OnDevice>& to) {
      run(p, kGpu, {rows, on_x.as<float>(), on_w.get(), on_dy.as<float>(), to[0].as<float>(), to[1].as<float>(), to[2].as<float>()});
    });
    expect_near(got_dx, dx, 2e-5);
    expect_near(got_dweight, dweight, 2e-5 * std::sqrt(static_cast<double>(rows)));
    expect_near(got_dbias, dbias, 1e-5 * std::sqrt(static_cast<double>(rows)));
  }
}

TEST_F(TrainingAloneGpu, LayerNormGradientElsewhere) {  // rows that begin at no multiple of 16 bytes
  const int64_t rows = 11, width = 96;
  const LayerNormGradient p{rows, width};
  const Array x(DType::kF32, size(rows * width + 1), 1), weight(DType::kF32, size(width), 2), dy(DType::kF32, size(rows * width + 1), 3);
  Array dx(DType::kF32, size(rows * width + 1)), dweight(DType::kF32, size(width)), dbias = dweight, got = dx, got_w = dweight, got_b = dbias;
  run(p, kReference, {rows, x.as<float>() + 1, weight.as<void>(), dy.as<float>() + 1, dx.as<float>() + 1, dweight.as<float>(), dbias.as<float>()});
  const OnDevice on_x(x), on_w(weight), on_dy(dy);
  twice({&got, &got_w, &got_b}, [&](const std::vector<OnDevice>& to) {
    run(p, kGpu, {rows, on_x.as<float>() + 1, on_w.get(), on_dy.as<float>() + 1, to[0].as<float>() + 1, to[1].as<float>(), to[2].as<float>()});
  });
  expect_near(got, dx, 2e-5);
  expect_near(got_w, dweight, 1e-4);
  // What is not a number is seen.
  const OnDevice bad(with(x, 5, NAN)), on_dx(dx), on_dw(dweight), on_db(dbias);
  run(p, kGpu, {rows, bad.as<float>() + 1, on_w.get(), on_dy.as<float>() + 1, on_dx.as<float>() + 1, on_dw.as<float>(), on_db.as<float>()});
  on_dx.read(got);
  on_dw.read(got_w);
  EXPECT_TRUE(std::isnan(got.at(1)) && std::isnan(got_w.at(0)) && std::isfinite(got.at(1 + size(width))));
}

TEST_F(TrainingAloneGpu, EmbeddingGradient) {
  struct Shape {
    int64_t rows, width, vocab, positions;
  };
  for (const auto& [rows, width, vocab, positions] : {Shape{3000, 50, 400, 100}, {2100, 68, 30000, 0}, {1500, 1100, 3, 1500}, {1, 5, 9, 2}}) {
    std::vector<int32_t> ids(size(rows)), position(size(rows));
    for (int64_t r = 0; r < rows; ++r) {
      // Some ids are frequent, most are not.
      const int64_t n = r * 7919 % 1009;
      ids[size(r)] = static_cast<int32_t>(n % 3 == 0 ? 1 % vocab : n * n % vocab);
      position[size(r)] = positions > 0 ? static_cast<int32_t>(r % positions) : 0;
    }
    const EmbeddingGradient p{rows, width, vocab, positions};
    const Array dx(DType::kF32, size(rows * width), 1);
    Array tokens(DType::kF32, size(vocab * width), 2), places(DType::kF32, size(std::max<int64_t>(1, positions) * width), 3);
    Array got_tokens = tokens, got_places = places;
    run(p, kReference, {rows, ids.data(), position.data(), dx.as<float>(), tokens.as<float>(), places.as<float>()});
    const OnDevice on_ids(ids), on_position(position), on_dx(dx);
    twice({&got_tokens, &got_places}, [&](const std::vector<OnDevice>& to) {
      run(p, kGpu, {rows, on_ids.as<int32_t>(), on_position.as<int32_t>(), on_dx.as<float>(), to[0].as<float>(), to[1].as<float>()});
    });
    expect_near(got_tokens, tokens, 2e-4);
    expect_near(got_places, places, 1e-4);
  }
  // Out of range: nowhere, and the others are there.
  const std::vector<int32_t> ids{2, 5, -1, 2};
  const Array dx(DType::kF32, 4 * 3, 1);
  const OnDevice on_ids(ids), on_dx(dx), to(Array(DType::kF32, 5 * 3));
  run(EmbeddingGradient{4, 3, 5, 0}, kGpu, {4, on_ids.as<int32_t>(), nullptr, on_dx.as<float>(), to.as<float>(), nullptr});
  const std::vector<float> got = to.numbers<float>(15);
  for (size_t i = 0; i < 15; ++i) EXPECT_EQ(got[i], i / 3 == 2 ? dx.as<float>()[i - 6] + dx.as<float>()[i + 3] : 0.0f) << i;
}

TEST_P(TrainingGpu, Rotary) {
  const std::vector<int32_t> position{0, 1, 100000, 77};
  for (const auto& [nheads, headdim, stride] : {std::tuple<int64_t, int64_t, int64_t>{3, 64, 256}, {5, 6, 33}, {1, 700, 700}})
    for (const bool back : {false, true}) {
      const Rotary p{4, nheads, headdim, stride, dtype(), 10000, back};
      Array x(dtype(), size(4 * stride), 1), got = x;
      run(p, kReference, {4, x.as<void>(), position.data()});
      const OnDevice at(position);
      twice({&got}, [&](const std::vector<OnDevice>& to) { run(p, kGpu, {4, to[0].get(), at.as<int32_t>()}); });
      expect_near(got, x, 3e-6);
    }
}

TEST_F(TrainingAloneGpu, Dropout) {
  const std::vector<uint64_t> state{123456789012345ull, 1ull << 40};
  const OnDevice on_state(state);
  for (const auto& [rows, width] : {std::pair<int64_t, int64_t>{40, 768}, {1, 77}, {33, 130}, {17, 62}, {70, 1}})
    for (const double probability : {0.0, 0.1, 0.5, 0.99})
      for (const int what : {0, 1, 2, 3}) {  // added; numbers in memory
        const Dropout p{rows, width, probability};
        const Array x(DType::kF32, size(rows * width), 1), add(DType::kF32, size(rows * width), 2);
        Array expected(DType::kF32, size(rows * width)), got = expected;
        const bool added = (what & 1) != 0, there = (what & 2) != 0;
        run(p, kReference, {rows, x.as<float>(), added ? add.as<float>() : nullptr, expected.as<float>(), 7, 5, there ? state.data() : nullptr});
        const OnDevice on_x(x), on_add(add);
        twice({&got}, [&](const std::vector<OnDevice>& to) {
          run(p, kGpu,
              {rows, on_x.as<float>(), added ? on_add.as<float>() : nullptr, to[0].as<float>(), 7, 5, there ? on_state.as<uint64_t>() : nullptr});
        });
        for (size_t i = 0; i < got.count; ++i)
          ASSERT_EQ(got.at(i) == (added ? add.at(i) : 0), expected.at(i) == (added ? add.at(i) : 0)) << i << " is dropped by one of them";
        expect_near(got, expected, 1e-7 / (1 - probability));
      }
  // In place, at addresses for single numbers.
  const Array x(DType::kF32, 33, 1);
  Array expected = x, got = x;
  run(Dropout{2, 16, 0.5}, kReference, {2, expected.as<float>() + 1, nullptr, expected.as<float>() + 1, 7, 5});
  twice({&got}, [&](const std::vector<OnDevice>& to) {
    run(Dropout{2, 16, 0.5}, kGpu, {2, to[0].as<float>() + 1, nullptr, to[0].as<float>() + 1, 7, 5});
  });
  expect_near(got, expected, 0);
}

TEST_P(TrainingGpu, CrossEntropyGradient) {
  struct Shape {
    int64_t rows, width, vocab;
  };
  for (const auto& [rows, width, vocab] : {Shape{99, 31, 2100}, {3, 64, 50257}, {40, 16, 3}, {150, 4, 300001}}) {
    SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(width) + " x " + std::to_string(vocab));
    const CrossEntropyGradient p{rows, width, vocab, dtype()};
    const Array x(dtype(), size(rows * width), 1), weight(dtype(), size(vocab * width), 2, 0.5);
    std::vector<int32_t> target(size(rows));
    for (int64_t r = 0; r < rows; ++r) target[size(r)] = static_cast<int32_t>(r * 7919 % vocab);
    target[0] = -1, target[1] = static_cast<int32_t>(vocab - 1), target[2] = 0;
    const double scale = 1 / static_cast<double>(rows);
    Array loss(DType::kF32, size(rows)), largest = loss, dx(DType::kF32, size(rows * width), 3), dweight(DType::kF32, size(vocab * width), 4);
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
    const double rounded = dtype() == DType::kF32 ? 0 : unit(dtype());
    const double tiny = dtype() == DType::kF16 ? 0x1p-25 * static_cast<double>(vocab) : 0;
    expect_near(got_dx, dx, 4e-6 + (2 * scale * rounded + tiny) * 3);
    expect_near(got_dweight, dweight, 4e-6 + (rounded * 2 + 0x1p-25 * static_cast<double>(rows)) * 4);
    for (int64_t i = 0; i < width; ++i) EXPECT_EQ(got_dx.at(size(i)), 0) << "a row without a target";
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
