// The 16-bit formats: the library's conversions against the definition of the formats, for every pattern and around
// every rounding boundary.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "shared/half.h"
#include "testing/numbers.h"

namespace fattn::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

float widened(DType dtype, uint16_t bits) { return dtype == DType::kF16 ? core::f16_to_float(bits) : core::bf16_to_float(bits); }
uint16_t narrowed(DType dtype, float x) { return dtype == DType::kF16 ? core::float_to_f16(x) : core::float_to_bf16(x); }

class HalfSmall : public ::testing::TestWithParam<DType> {};

TEST_P(HalfSmall, WidensEveryPatternExactly) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto pattern = static_cast<uint16_t>(bits);
    const double expected = load(GetParam(), &pattern, 0);
    const float got = widened(GetParam(), pattern);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(got)) << bits;
    } else {
      ASSERT_EQ(got, expected) << bits;
      ASSERT_EQ(std::signbit(got), std::signbit(expected)) << bits;
    }
  }
}

TEST_P(HalfSmall, NarrowsBackToTheSamePattern) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float x = widened(GetParam(), static_cast<uint16_t>(bits));
    if (!std::isnan(x)) {
      ASSERT_EQ(narrowed(GetParam(), x), bits);
    }
  }
}

// Numbers on, just below and just above every boundary between two neighbours of the format.
TEST_P(HalfSmall, RoundsToNearestEven) {
  for (uint32_t bits = 0; bits < 0x8000; ++bits) {
    const float low = widened(GetParam(), static_cast<uint16_t>(bits)), high = widened(GetParam(), static_cast<uint16_t>(bits + 1));
    if (!std::isfinite(low)) break;
    const float middle =
        std::isfinite(high) ? static_cast<float>((static_cast<double>(low) + high) / 2) : low + static_cast<float>(ulp(GetParam(), low)) / 2;
    for (float x : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, kInfinity), low, std::nextafter(low, kInfinity)})
      for (float signed_x : {x, -x}) {
        uint16_t expected = 0;
        store(GetParam(), &expected, 0, signed_x);
        ASSERT_EQ(narrowed(GetParam(), signed_x), expected) << signed_x;
      }
  }
}

TEST_P(HalfSmall, KeepsNanAndOverflowsToInfinity) {
  for (uint32_t bits : {0x7f800001u, 0x7fc00000u, 0xff800001u, 0x7fffffffu, 0xffffffffu, 0x7f80ffffu})
    EXPECT_TRUE(std::isnan(widened(GetParam(), narrowed(GetParam(), std::bit_cast<float>(bits))))) << bits;
  EXPECT_EQ(widened(GetParam(), narrowed(GetParam(), kInfinity)), kInfinity);
  EXPECT_EQ(widened(GetParam(), narrowed(GetParam(), -kInfinity)), -kInfinity);
  EXPECT_EQ(widened(GetParam(), narrowed(GetParam(), std::numeric_limits<float>::max())), kInfinity);
}

INSTANTIATE_TEST_SUITE_P(Every, HalfSmall, ::testing::Values(DType::kF16, DType::kBF16), [](const auto& p) { return std::string(name_of(p.param)); });

TEST(NumbersSmall, KnownValues) {
  EXPECT_EQ(round_to(DType::kF16, 65519.0), 65504.0);
  EXPECT_EQ(round_to(DType::kF16, 65520.0), HUGE_VAL);
  EXPECT_EQ(round_to(DType::kF16, 0x1p-25), 0.0);  // half of the smallest subnormal: to even
  EXPECT_EQ(round_to(DType::kF16, 0x1.8p-25), 0x1p-24);
  EXPECT_EQ(round_to(DType::kBF16, 1.00390625), 1.0);  // 1 + 2^-8: a tie, to even
  EXPECT_EQ(round_to(DType::kBF16, 1.01171875), 1.015625);
  EXPECT_EQ(ulp(DType::kF32, 1.0), 0x1p-23);
  EXPECT_EQ(ulp(DType::kF16, 1.0), 0x1p-10);
  EXPECT_EQ(ulp(DType::kBF16, 0.75), 0x1p-8);
  EXPECT_EQ(ulp(DType::kF16, 0.0), 0x1p-24);
}

}  // namespace
}  // namespace fattn::testing
