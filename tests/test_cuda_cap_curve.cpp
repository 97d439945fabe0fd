// Softcap's tanh of fifth degree in v3's forward pass (kernels/score.h), as the host runs it.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "emulated/device.h"
//
#include "kernels/score.h"

namespace fattn {
namespace {

// A product of q and k, its exponent by the curve, and what it should be, both in natural units.
struct Point {
  double score, found, wanted;
  bool inside;
};

Point at(const CapCurve& curve, double softmax_scale, double softcap, float product) {
  float s = product, t = 0;
  int inside = -1;
  curve.exponents(s, t, 0, inside);
  const double score = static_cast<double>(product) * softmax_scale;
  return {score, static_cast<double>(s) / kLog2e, softcap * std::tanh(score / softcap), inside < 0};
}

CapCurve curve_of(double softmax_scale, double softcap) {
  return {static_cast<float>(kTanhUnit * softmax_scale / softcap), static_cast<float>(softcap * kLog2e)};
}

// Up to its bound the error is kCurveError of a weight, besides fp32's roundings of a score; relative to a score 1e-6 and these.
TEST(CapCurveSmall, IsAsExactAsItSays) {
  for (const double softcap : {5.0, 15.0, 30.0, 50.0, 100.0, 1e4})
    for (const double softmax_scale : {0.125, 0.0884, -0.3, 7.0, 1.1e-7 * softcap}) {
      SCOPED_TRACE(std::to_string(softcap) + ", " + std::to_string(softmax_scale));
      const CapCurve curve = curve_of(softmax_scale, softcap);
      const double bound = std::sqrt(-static_cast<double>(curve.minus_most));  // of a product
      ASSERT_GT(bound, 0);
      for (int i = -2000; i <= 2000; ++i) {
        const Point p = at(curve, softmax_scale, softcap, static_cast<float>(bound * i / 2001));
        ASSERT_TRUE(p.inside) << p.score;
        ASSERT_NEAR(p.found, p.wanted, 1e-5 + 4e-7 * std::fabs(p.wanted)) << p.score;
        if (softcap >= 30) {
          ASSERT_NEAR(p.found, p.wanted, 1.8e-6 * std::fabs(p.wanted) + 1e-12) << p.score;
        }
      }
      for (const double beyond : {1.001, 2.0, 1e3}) {
        EXPECT_FALSE(at(curve, softmax_scale, softcap, static_cast<float>(bound * beyond)).inside);
        EXPECT_FALSE(at(curve, softmax_scale, softcap, static_cast<float>(-bound * beyond)).inside);
      }
      EXPECT_TRUE(std::isnan(at(curve, softmax_scale, softcap, std::nanf("")).found));
    }
}

// The scores that documents name, and three quarters of their square, from which a tile's capped scores are tanh itself.
TEST(CapCurveSmall, ReachesAsFarAsItSays) {
  for (const auto& [softcap, score] : {std::pair{15.0, 4.90}, {30.0, 8.87}, {50.0, 13.74}}) {
    const CapCurve curve = curve_of(0.125, softcap);
    EXPECT_NEAR(std::sqrt(-static_cast<double>(curve.minus_most)) * 0.125, score, 0.01);
    const double capped = softcap * std::tanh(score / softcap);
    EXPECT_TRUE(curve.reaches(static_cast<float>(0.86 * capped * kLog2e)));
    EXPECT_FALSE(curve.reaches(static_cast<float>(0.87 * capped * kLog2e)));
    EXPECT_TRUE(curve.reaches(-1e30f));
  }
}

}  // namespace
}  // namespace fattn
