// Messages from parts: numbers as std::ostream writes them, whatever the locale.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <sstream>
#include <string>
#include <string_view>

#include "shared/text.h"

namespace {

using fattn::core::text;

template <class Number>
std::string streamed(Number x) {
  std::ostringstream out;
  out.imbue(std::locale::classic());
  out << x;
  return out.str();
}

TEST(TextSmall, Parts) {
  enum { kSeven = 7 };
  const std::string owned = "owned";
  const char array[] = "array";
  const char* const pointer = "pointer";
  EXPECT_EQ(text(), "");
  EXPECT_EQ(text(owned, '/', array, '/', pointer, '/', std::string_view("view, cut").substr(0, 4)), "owned/array/pointer/view");
  EXPECT_EQ(text(true, false, kSeven), "107");
  EXPECT_EQ(text(static_cast<const void*>(nullptr), " ", reinterpret_cast<void*>(uintptr_t{0xabc0})), "0x0 0xabc0");
}

TEST(TextSmall, NumbersAsAStreamWritesThem) {
  for (const int64_t x : {int64_t{0}, int64_t{-1}, std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()})
    EXPECT_EQ(text(x), streamed(x));
  EXPECT_EQ(text(std::numeric_limits<uint64_t>::max(), int16_t{-5}, uint32_t{5}), "18446744073709551615-55");
  constexpr double kInfinity = std::numeric_limits<double>::infinity(), kNaN = std::numeric_limits<double>::quiet_NaN();
  for (const double x : {0.0, -0.0, 1.0, 0.1, 1e5, 1e6, 123456.5, 1234567.0, 1e-4, 1e-5, 1e300, 5e-324, kInfinity, -kInfinity, kNaN})
    EXPECT_EQ(text(x), streamed(x));
  EXPECT_EQ(text(0.5f, " ", 1e-7f), "0.5 1e-07");
  std::mt19937_64 random(1);
  for (int i = 0; i < 20000; ++i) {
    const double x = std::ldexp(static_cast<double>(random()), static_cast<int>(random() % 200) - 130);
    ASSERT_EQ(text(x), streamed(x));
  }
}

}  // namespace
