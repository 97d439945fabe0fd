// Weights from which dS is made on GPUs (kernels/fine_weights.h), as the host runs them.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "emulated/device.h"
//
#include "kernels/fine_weights.h"

namespace fattn {
namespace {

// Between `least` and 1, alike in number at each exponent.
std::vector<float> weights(float least) {
  std::mt19937 generator(7);
  std::uniform_real_distribution<float> exponent(std::log2(least), 0);
  std::vector<float> all(20000);
  for (float& weight : all) weight = std::exp2(exponent(generator));
  return all;
}

template <class Fine>
float sent(float weight) {
  const float low = Fine::low(Fine::encode(weight * Fine::kUnit, 0)) * Fine::kPart,
              high = Fine::high(Fine::encode(0, weight * Fine::kUnit)) * Fine::kPart;
  EXPECT_TRUE(low == high || (std::isnan(low) && std::isnan(high))) << weight;
  return low;
}

struct Errors {
  double largest = 0, squares = 0;
  void add(double error) {
    largest = std::max(largest, std::abs(error));
    squares += error * error;
  }
};

// Relative errors of the weights themselves, over those of rounding to the dtype; and how far they are rounded for dV, in units in the last place.
template <class Element, int kExponent>
void check(double largest, double rms, double last_places) {
  using Fine = FineWeights<Element, kExponent>;
  const int digits = is_same<Element, bf16> ? 7 : 10;
  Errors fine, plain, bias;
  double furthest = 0;
  const std::vector<float> all = weights(std::ldexp(1.0f, -14 - kExponent));
  for (const float weight : all) {
    fine.add(sent<Fine>(weight) / weight - 1.0);
    bias.largest += sent<Fine>(weight) / weight - 1.0;
    if (weight < 0x1p-14f) continue;  // subnormal in fp16
    plain.add(ptx::low_float<Element>(ptx::pack2<Element>(weight, 0)) / weight - 1.0);
    const unsigned pair = Fine::rounded(Fine::encode(0, weight * Fine::kUnit));
    EXPECT_EQ(pair & 0xffffu, 0u);
    furthest =
        std::max(furthest, std::abs(ptx::high_float<Element>(pair) - static_cast<double>(weight)) / std::ldexp(1.0, std::ilogb(weight) - digits));
  }
  EXPECT_LE(fine.largest, largest);
  EXPECT_GE(fine.largest, largest / 2);
  EXPECT_LE(std::sqrt(fine.squares / static_cast<double>(all.size())), rms);
  EXPECT_LE(std::abs(bias.largest / static_cast<double>(all.size())), rms / 20);
  EXPECT_GE(plain.largest, 1.7 * largest);
  EXPECT_LE(furthest, last_places);
}

TEST(FineWeightsSmall, HaveMoreDigitsThanTheDtype) {
  check<bf16, 10>(0x1p-11, 0x1p-11 * 0.43, 0.5 + 1.0 / 16);
  check<bf16, 15>(0x1p-11, 0x1p-11 * 0.43, 0.5 + 1.0 / 16);
  check<f16, 10>(0x1p-11 * 0.58, 0x1p-11 * 0.23, 0.5);
  check<f16, 15>(0x1p-11 * 0.58, 0x1p-11 * 0.23, 0.5);
}

TEST(FineWeightsSmall, AreRoundedAsTheDtypeWouldBe) {
  using Fine = FineWeights<f16, 10>;
  for (const float weight : weights(0x1p-14f)) EXPECT_EQ(Fine::rounded(Fine::encode(weight * Fine::kUnit, 0)), ptx::cvt_f16x2(weight, 0)) << weight;
  for (const float weight : {0.0f, 0x1p-14f, 1.0f, 63.0f})
    EXPECT_EQ(Fine::scaled(ptx::cvt_f16x2(weight * Fine::kUnit, 0)), ptx::cvt_f16x2(weight, 0));
}

template <class Fine>
void check_special() {
  EXPECT_EQ(sent<Fine>(0), 0);
  EXPECT_EQ(Fine::encode(0, 0), 0u);
  EXPECT_EQ(Fine::rounded(0), 0u);
  EXPECT_TRUE(std::isnan(sent<Fine>(std::numeric_limits<float>::quiet_NaN())));
  const unsigned hidden = Fine::encode(0.3f * Fine::kUnit, 0.7f * Fine::kUnit) & 0xffff0000u;  // one of two pairs
  EXPECT_EQ(Fine::low(hidden), 0);
  EXPECT_NEAR(Fine::high(hidden) * Fine::kPart, 0.7, 0.7 * 0x1p-11);
}

TEST(FineWeightsSmall, ZeroIsZeroAndNanIsNan) {
  check_special<FineWeights<bf16, 10>>();
  check_special<FineWeights<bf16, 15>>();
  check_special<FineWeights<f16, 10>>();
  check_special<FineWeights<f16, 15>>();
}

}  // namespace
}  // namespace fattn
