// Training's passes over rows on a GPU against the reference in float64. Skipped without a device.
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
using test::twice;
using test::with;

struct Matrix {
  int64_t rows, columns;
};

class TrainingRowsGpu : public test::CudaGpu, public testing::WithParamInterface<DType> {
 protected:
  DType dtype() const { return GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(Every, TrainingRowsGpu, testing::Values(DType::kF32, DType::kF16, DType::kBF16),
                         [](const auto& one) { return std::string(name_of(one.param)); });
class TrainingRowsAloneGpu : public test::CudaGpu {};

TEST_P(TrainingRowsGpu, ColumnSums) {
  for (const Matrix& matrix : {Matrix{1, 1}, {300, 130}, {1000, 768}, {513, 77}, {3000, 4}}) {
    const int64_t rows = matrix.rows, columns = matrix.columns;
    for (const int64_t fewer : {int64_t{0}, rows / 2}) {
      const ColumnSums p{rows, columns, dtype()};
      const Array x(dtype(), size(rows * columns), 1);
      Array expected(DType::kF32, size(columns), 2), got = expected;
      run(p, kReference, {rows - fewer, x.as<void>(), expected.as<float>()});
      const OnDevice dx(x);
      twice({&got}, [&](const std::vector<OnDevice>& to) { run(p, kGpu, {rows - fewer, dx.get(), to[0].as<float>()}); });
      expect_near(got, expected, 1e-5 * std::sqrt(static_cast<double>(rows)));
    }
  }
  Array x(dtype(), 100 * 40, 1);
  x.set(57 * 40 + 3, NAN), x.set(99 * 40 + 39, INFINITY);
  const OnDevice dx(x), to(Array(DType::kF32, 40));
  run(ColumnSums{100, 40, dtype()}, kGpu, {100, dx.get(), to.as<float>()});
  const std::vector<float> sums = to.numbers<float>(40);
  EXPECT_TRUE(std::isnan(sums[3]) && std::isinf(sums[39]) && std::isfinite(sums[2]));
}

TEST_P(TrainingRowsGpu, Activation) {
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

TEST_P(TrainingRowsGpu, LayerNormGradient) {
  for (const Matrix& matrix : {Matrix{19, 768}, {700, 77}, {3, 1600}, {33, 5000}, {20, 2049}, {9, 4100}, {4500, 64}, {20, 4097}, {1, 4}}) {
    const int64_t rows = matrix.rows, width = matrix.columns;
    SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(width));
    const LayerNormGradient p{rows, width, 1e-5, dtype()};
    const Array x(DType::kF32, size(rows * width), 1, 2), weight(dtype(), size(width), 2), dy(DType::kF32, size(rows * width), 3);
    Array dx(DType::kF32, size(rows * width), 4), dweight(DType::kF32, size(width), 5), dbias = dweight;
    Array got_dx = dx, got_dweight = dweight, got_dbias = dbias, got_rounded(dtype(), size(rows * width));
    run(p, kReference, {rows, x.as<float>(), weight.as<void>(), dy.as<float>(), dx.as<float>(), dweight.as<float>(), dbias.as<float>()});
    const OnDevice on_x(x), on_w(weight), on_dy(dy);
    twice({&got_dx, &got_dweight, &got_dbias, &got_rounded}, [&](const std::vector<OnDevice>& to) {
      run(p, kGpu, {rows, on_x.as<float>(), on_w.get(), on_dy.as<float>(), to[0].as<float>(), to[1].as<float>(), to[2].as<float>(), to[3].get()});
    });
    expect_near(got_dx, dx, 2e-5);
    Array rounded = got_rounded;
    for (size_t i = 0; i < size(rows * width); ++i) rounded.set(i, got_dx.at(i));
    EXPECT_EQ(std::memcmp(rounded.as<void>(), got_rounded.as<void>(), rounded.bytes), 0);
    expect_near(got_dweight, dweight, 2e-5 * std::sqrt(static_cast<double>(rows)));
    expect_near(got_dbias, dbias, 1e-5 * std::sqrt(static_cast<double>(rows)));
  }
}

TEST_F(TrainingRowsAloneGpu, LayerNormGradientElsewhere) {  // rows that begin at no multiple of 16 bytes
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

TEST_F(TrainingRowsAloneGpu, EmbeddingGradient) {
  struct Shape {
    int64_t rows, width, vocab, positions;
  };
  for (const Shape& shape : {Shape{3000, 50, 400, 100}, {2100, 68, 30000, 0}, {1500, 1100, 3, 1500}, {1, 5, 9, 2}}) {
    const int64_t rows = shape.rows, width = shape.width, vocab = shape.vocab, positions = shape.positions;
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

TEST_P(TrainingRowsGpu, Rotary) {
  struct Heads {
    int64_t nheads, headdim, stride;
  };
  const std::vector<int32_t> position{0, 1, 100000, 77};
  for (const Heads& heads : {Heads{3, 64, 256}, {5, 6, 33}, {1, 700, 700}})
    for (const bool back : {false, true}) {
      const int64_t stride = heads.stride;
      const Rotary p{4, heads.nheads, heads.headdim, stride, dtype(), 10000, back};
      Array x(dtype(), size(4 * stride), 1), got = x;
      run(p, kReference, {4, x.as<void>(), position.data()});
      const OnDevice at(position);
      twice({&got}, [&](const std::vector<OnDevice>& to) { run(p, kGpu, {4, to[0].get(), at.as<int32_t>()}); });
      expect_near(got, x, 3e-6);
    }
}

TEST_F(TrainingRowsAloneGpu, Dropout) {
  const std::vector<uint64_t> state{123456789012345ull, 1ull << 40};
  const OnDevice on_state(state);
  for (const Matrix& matrix : {Matrix{40, 768}, {1, 77}, {33, 130}, {17, 62}, {70, 1}}) {
    const int64_t rows = matrix.rows, width = matrix.columns;
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
  }
  // In place, at addresses for single numbers.
  const Array x(DType::kF32, 33, 1);
  Array expected = x, got = x;
  run(Dropout{2, 16, 0.5}, kReference, {2, expected.as<float>() + 1, nullptr, expected.as<float>() + 1, 7, 5});
  twice({&got}, [&](const std::vector<OnDevice>& to) {
    run(Dropout{2, 16, 0.5}, kGpu, {2, to[0].as<float>() + 1, nullptr, to[0].as<float>() + 1, 7, 5});
  });
  expect_near(got, expected, 0);
  // Rows whose places are elsewhere.
  const std::vector<int32_t> places{5, 6, 7, 8, 9, 31, 32, 69, 0, 16, 17, 18, 24, 40, 13, 13, 2, 61};
  const OnDevice on_places(places);
  const auto rows = static_cast<int64_t>(places.size());
  for (const int64_t width : {130, 131}) {
    const Array ones(DType::kF32, size(rows * width), 1);
    Array dropped(DType::kF32, size(rows * width)), found = dropped;
    run(Dropout{rows, width, 0.5}, kReference, {rows, ones.as<float>(), nullptr, dropped.as<float>(), 7, 5, nullptr, places.data()});
    const OnDevice on_ones(ones);
    twice({&found}, [&](const std::vector<OnDevice>& to) {
      run(Dropout{rows, width, 0.5}, kGpu, {rows, on_ones.as<float>(), nullptr, to[0].as<float>(), 7, 5, nullptr, on_places.as<int32_t>()});
    });
    expect_near(found, dropped, 0);
  }
}

}  // namespace
}  // namespace fattn
