// Rotary embeddings: every instruction set and dtype against the reference in float64, that against complex numbers.
#include <gtest/gtest.h>

#include <cmath>
#include <complex>
#include <string>
#include <vector>

#include "row_problems.h"

namespace fattn {
namespace {

using namespace test;

TEST(RotarySmall, EveryInstructionSetIsAsTheReferenceInFloat64) {
  for (uint64_t seed = 0; seed < 80; ++seed) {
    const Rotary r = random_rotary(seed), wide = r.wide();
    wide.run();
    for (const Isa isa : isas_here()) {
      RowOptions way;
      way.cpu_isa = isa;
      r.run(way);
      expect_close(r.y, wide.y, 3, std::string(name_of(isa)) + ", seed " + std::to_string(seed));
      if (HasFatalFailure()) return;
    }
    RowOptions reference;
    reference.backend = Backend::kReference;
    r.run(reference);
    expect_close(r.y, wide.y, 0, "the reference");
    Rotary in_place = r;
    in_place.y = in_place.x = r.x.copy();
    in_place.run();
    r.run();
    for (int64_t i = 0; i < r.y.size(); ++i) ASSERT_EQ(in_place.y.at(i), r.y.at(i)) << "in place, seed " << seed;
  }
}

// Turning is multiplication by e^(i angle) of the pairs as complex numbers, and the inverse undoes it.
TEST(RotarySmall, PairsAreComplexNumbers) {
  for (const bool interleaved : {false, true}) {
    Rotary r{RowTensor(DType::kF64, {2, 5, 3, 10}),
             RowTensor(DType::kF64, {2, 5, 3, 10}),
             RowTensor(DType::kF64, {20, 4}),
             RowTensor(DType::kF64, {20, 4}),
             list(DType::kI64, {3, 15}),
             {},
             {}};
    r.x.fill_normal(3, 3);
    const auto angle = [](int64_t position, int64_t d) { return static_cast<double>(position) * std::pow(10000.0, -static_cast<double>(d) / 4); };
    r.cos.fill([&](int64_t i) { return std::cos(angle(i / 4, i % 4)); });
    r.sin.fill([&](int64_t i) { return std::sin(angle(i / 4, i % 4)); });
    r.options.interleaved = interleaved;
    r.run();
    for (int64_t row = 0; row < 10; ++row)
      for (int64_t h = 0; h < 3; ++h) {
        const int64_t first = (row * 3 + h) * 10;
        for (int64_t d = 0; d < 4; ++d) {
          const int64_t a = first + (interleaved ? 2 * d : d), b = interleaved ? a + 1 : a + 4;
          const std::complex<double> before(r.x.at(a), r.x.at(b));
          const std::complex<double> after = before * std::polar(1.0, angle((row < 5 ? 3 : 15) + row % 5, d));
          EXPECT_NEAR(r.y.at(a), after.real(), 1e-14);
          EXPECT_NEAR(r.y.at(b), after.imag(), 1e-14);
        }
        for (int64_t d = 8; d < 10; ++d) EXPECT_EQ(r.y.at(first + d), r.x.at(first + d));
      }
    const RowTensor x = r.x.copy();
    r.x = r.y;
    r.y = RowTensor(DType::kF64, {2, 5, 3, 10});
    r.options.inverse = true;
    r.run();
    for (int64_t i = 0; i < x.size(); ++i) EXPECT_NEAR(r.y.at(i), x.at(i), 1e-14);
  }
}

// Each packed sequence is as if it were alone, and rows of none are copied.
TEST(RotarySmall, PackedSequencesAreAsIfAlone) {
  const std::vector<int64_t> first{0, 3, 3, 4, 9}, offsets{5, 0, 11, 2};
  Rotary r{RowTensor(DType::kF32, {11, 2, 6}),
           RowTensor(DType::kF32, {11, 2, 6}),
           RowTensor(DType::kF32, {20, 3}),
           RowTensor(DType::kF32, {20, 3}),
           list(DType::kI64, offsets),
           list(DType::kI32, first, 1),
           {}};
  r.x.fill_normal(1, 1), r.cos.fill_normal(1, 2), r.sin.fill_normal(1, 3);
  for (const Backend backend : {Backend::kCpu, Backend::kReference}) {
    RowOptions way;
    way.backend = backend;
    r.run(way);
    for (size_t n = 0; n + 1 < first.size(); ++n) {
      const int64_t begin = first[n], rows = first[n + 1] - begin;
      Rotary alone{RowTensor(DType::kF32, {1, rows, 2, 6}), RowTensor(DType::kF32, {1, rows, 2, 6}), r.cos, r.sin, {}, {}, {}};
      alone.options.offset = offsets[n];
      alone.x.fill([&](int64_t i) { return r.x.at(begin * 12 + i); });
      alone.run(way);
      for (int64_t i = 0; i < rows * 12; ++i) EXPECT_EQ(r.y.at(begin * 12 + i), alone.y.at(i)) << "sequence " << n << ", element " << i;
    }
    for (int64_t i = 9 * 12; i < 11 * 12; ++i) EXPECT_EQ(r.y.at(i), r.x.at(i));
  }
}

// The gradient of x is `inverse` of that of y: (dy, R x) = (R^T dy, x).
TEST(RotarySmall, TheInverseIsTheGradient) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Rotary r = random_rotary(seed).wide();
    r.options.inverse = false;
    r.run();
    const RowTensor dy(DType::kF64, r.x.shape());
    dy.fill_normal(seed, 9);
    Rotary back = r;
    back.x = dy;
    back.y = RowTensor(DType::kF64, r.x.shape());
    back.options.inverse = true;
    back.run();
    double forward = 0, backward = 0;
    for (int64_t i = 0; i < dy.size(); ++i) {
      forward += dy.at(i) * r.y.at(i);
      backward += back.y.at(i) * r.x.at(i);
    }
    EXPECT_NEAR(forward, backward, 1e-10);
  }
}

TEST(RotarySmall, ThreadsChangeNoBit) {
  Rotary r;
  r.x = RowTensor(DType::kBF16, {3, 211, 8, 64}), r.y = RowTensor(DType::kBF16, {3, 211, 8, 64});
  r.cos = RowTensor(DType::kF32, {300, 32}), r.sin = RowTensor(DType::kF32, {300, 32});
  r.x.fill_normal(1, 1), r.cos.fill_normal(1, 2), r.sin.fill_normal(1, 3);
  RowOptions way;
  way.num_threads = 1;
  r.run(way);
  const RowTensor one = r.y.copy();
  way.num_threads = 5;
  r.y.fill([](int64_t) { return 0.0; });
  r.run(way);
  EXPECT_TRUE(r.y.same_bits(one));
}

// Where no pairs turn, cos and sin are empty: their strides are of any size, and y is x.
TEST(RotarySmall, StridesOfEmptyAnglesDoNotMatter) {
  Rotary r;
  r.x = RowTensor(DType::kF32, {2, 3, 4, 8}), r.y = RowTensor(DType::kF32, {2, 3, 4, 8});
  r.x.fill_normal(1, 1);
  const Tensor none(nullptr, DType::kF32, {10, 0}, {int64_t{1} << 62, 1});
  for (const Backend backend : {Backend::kCpu, Backend::kReference}) {
    RotaryOptions options;
    options.backend = backend;
    r.y.fill([](int64_t) { return 0.0; });
    rotary(r.x.view(), none, none, r.y.view(), options);
    EXPECT_TRUE(r.y.same_bits(r.x));
  }
}

TEST(RotarySmall, BadInputIsRefusedInWords) {
  Rotary good;
  good.x = RowTensor(DType::kF16, {2, 3, 4, 8}), good.y = RowTensor(DType::kF16, {2, 3, 4, 8});
  good.cos = RowTensor(DType::kF32, {10, 4}), good.sin = RowTensor(DType::kF16, {10, 4});
  for (const RowTensor& t : {good.x, good.cos, good.sin}) t.fill_normal(1, 1);
  good.run();
  const auto with = [&](const std::function<void(Rotary&)>& change, const std::string& part, const RowOptions& way = {}) {
    Rotary r = good;
    change(r);
    expect_message([&] { r.run(way); }, part);
  };
  with([](Rotary& r) { r.x = {}; }, "invalid_argument: x is absent; this call needs it");
  with([](Rotary& r) { r.x = RowTensor(DType::kF16, {6, 4, 8}); }, "x has 3 dimensions; allowed: 4 (batch, seqlen, nheads, headdim)");
  with([](Rotary& r) { r.cu_seqlens = list(DType::kI32, {0, 3}); }, "x has 4 dimensions; allowed: 3 (total, nheads, headdim) of packed sequences");
  with([](Rotary& r) { r.y = RowTensor(DType::kF32, {2, 3, 4, 8}); }, "y is fp32 but x is fp16; they share one dtype");
  with([](Rotary& r) { r.y = RowTensor(DType::kF16, {2, 3, 4, 9}); }, "y has the shape (2, 3, 4, 9); expected (2, 3, 4, 8), the shape of x");
  with([](Rotary& r) { r.cos = RowTensor(DType::kBF16, {10, 4}); }, "cos is bf16; allowed: x's dtype, fp16, or fp32");
  with([](Rotary& r) { r.sin = RowTensor(DType::kF32, {9, 4}); }, "sin has the shape (9, 4); expected (10, 4), the shape of cos");
  with(
      [](Rotary& r) {
        r.cos = r.sin = RowTensor(DType::kF32, {10, 5});
      },
      "cos has the shape (10, 5), a rotary_dim of 2 * 5, and headdim is 8; rotary_dim is at most headdim");
  with([](Rotary& r) { r.options.offset = 8; },
       "offset is 8, for a sequence of 3 rows; cos has 10 rows, so that allowed are 0 to 7. Make cos and sin for more positions");
  with([](Rotary& r) { r.options.offset = -1; }, "offset is -1, for a sequence of 3 rows");
  with(
      [](Rotary& r) {
        r.offsets = list(DType::kI32, {0, 8});
      },
      "offsets[1] is 8, for a sequence of 3 rows; cos has 10 rows, so that allowed are 0 to 7");
  with([](Rotary& r) { r.offsets = list(DType::kI64, {int64_t{1} << 40, 0}); }, "offsets[0] is 1099511627776");
  with([](Rotary& r) { r.cos = r.sin = RowTensor(DType::kF32, {2, 4}); }, "cos has 2 rows, fewer than the sequence. Make cos and sin");
  with([](Rotary& r) { r.offsets = list(DType::kF32, {0, 0}); }, "offsets has the dtype fp32 (1); allowed: int32 (5), int64 (7)");
  with([](Rotary& r) { r.offsets = list(DType::kI32, {0}); }, "offsets has the shape (1); expected (2), from x's batch");
  with([](Rotary& r) { r.offsets = list(DType::kI32, {0, 0}), r.options.offset = 1; }, "offset is 1, and offsets are given; leave one of them out");
  with([](Rotary& r) { r.x = r.y = RowTensor(DType::kF16, {1, 1, 1, 577}); }, "headdim of x is 577; allowed: 1 to 576");
  Rotary packed = good;
  packed.x = RowTensor(DType::kF16, {6, 4, 8}), packed.y = RowTensor(DType::kF16, {6, 4, 8});
  const auto lists = [&](const std::vector<int64_t>& first, const std::vector<int64_t>& offsets, const std::string& part) {
    packed.cu_seqlens = list(DType::kI32, first);
    packed.offsets = offsets.empty() ? RowTensor() : list(DType::kI32, offsets);
    expect_message([&] { packed.run(); }, part);
  };
  lists({0, 2, 6}, {}, "nothing was thrown");
  lists({1, 2, 6}, {}, "cu_seqlens[0] is 1; it must be 0");
  lists({0, 4, 3}, {}, "cu_seqlens[2] is 3; allowed: 4, where its sequence begins, to 6, the rows of x");
  lists({0, 4, 7}, {}, "cu_seqlens[2] is 7; allowed: 4");
  lists({0, 2, 6}, {8, 6}, "nothing was thrown");
  lists({0, 2, 6}, {8, 7}, "offsets[1] is 7, for a sequence of 4 rows");
  lists({0, 2, 6}, {8}, "offsets has the shape (1); expected (2), an offset for each sequence");
  lists({0, 0}, {1000}, "nothing was thrown");

  const auto call = [&](const Tensor& x, const Tensor& y, const std::string& part) {
    expect_message([&] { rotary(x, good.cos.view(), good.sin.view(), y); }, part);
  };
  call(good.x.view(), Tensor(nullptr, DType::kF16, {2, 3, 4, 8}), "y is a null pointer, but its shape has elements");
  call(good.x.view(), Tensor(static_cast<char*>(good.x.data()) + 16, DType::kF16, {2, 3, 4, 8}),
       "y overlaps x in memory; allowed: memory of its own, or");
  call(good.x.view(), Tensor(good.cos.data(), DType::kF16, {2, 3, 4, 8}, {0, 0, 0, 1}),
       "y is an output whose strides reach one element by two indices");
  RowOptions way;
  way.backend = Backend::kCuda;
  with([](Rotary&) {}, "unsupported: backend cuda computes in device memory", way);
  fattn_rotary_problem p{};
  EXPECT_EQ(fattn_rotary(nullptr), FATTN_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(fattn_rotary(&p), FATTN_ERROR_ABI);
  p.struct_size = sizeof p;
  EXPECT_EQ(fattn_rotary(&p), FATTN_ERROR_ABI);
  p.abi_version = FATTN_ABI_VERSION;
  p.interleaved = 2;
  EXPECT_EQ(fattn_rotary(&p), FATTN_ERROR_INVALID_ARGUMENT);
  EXPECT_STREQ(fattn_last_error(), "interleaved is 2; allowed: 0, 1");
}

}  // namespace
}  // namespace fattn
