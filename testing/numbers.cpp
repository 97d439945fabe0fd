#include "testing/numbers.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace fattn::testing {
namespace {

struct Format {
  int precision;     // bits of the significand, the hidden one included
  int min_exponent;  // of the smallest normal number
  int max_exponent;  // of the largest finite number
};

constexpr Format format_of(DType dtype) {
  switch (dtype) {
    case DType::kF64: return {53, -1022, 1023};
    case DType::kF32: return {24, -126, 127};
    case DType::kF16: return {11, -14, 15};
    case DType::kBF16: return {8, -126, 127};
    default: return {};
  }
}

// A power of two, exactly. Of normal numbers by its bits: this and the next are called for every element that a test looks at.
double power_of_two(int exponent) {
  if (exponent < -1022 || exponent > 1023) return std::ldexp(1.0, exponent);
  return __builtin_bit_cast(double, static_cast<uint64_t>(exponent + 1023) << 52);
}

// That of a finite number other than 0, as std::ilogb.
int exponent_of(double x) {
  const int biased = static_cast<int>(__builtin_bit_cast(uint64_t, x) >> 52) & 0x7ff;
  return biased == 0 ? std::ilogb(x) : biased - 1023;
}

// A 16-bit pattern: sign, exponent, then precision - 1 bits of fraction.
double decode(Format f, uint16_t bits) {
  const int fraction_bits = f.precision - 1;
  const int fraction = bits & ((1 << fraction_bits) - 1);
  const int exponent = (bits & 0x7fff) >> fraction_bits;
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (exponent > f.max_exponent - f.min_exponent + 1)
    return fraction == 0 ? sign * std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  const int significand = exponent == 0 ? fraction : fraction + (1 << fraction_bits);
  return sign * significand * power_of_two((exponent == 0 ? 1 : exponent) - 1 + f.min_exponent - fraction_bits);
}

// `x` is a number of the format already.
uint16_t encode(Format f, double x) {
  const int fraction_bits = f.precision - 1;
  const int infinity = (f.max_exponent - f.min_exponent + 2) << fraction_bits;
  const int sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isnan(x)) return static_cast<uint16_t>(sign | infinity | (1 << (fraction_bits - 1)));
  if (std::isinf(x)) return static_cast<uint16_t>(sign | infinity);
  if (x == 0) return static_cast<uint16_t>(sign);
  const int exponent = exponent_of(x);
  if (exponent < f.min_exponent) return static_cast<uint16_t>(sign | static_cast<int>(std::fabs(x) * power_of_two(fraction_bits - f.min_exponent)));
  const int significand = static_cast<int>(std::fabs(x) * power_of_two(fraction_bits - exponent));
  return static_cast<uint16_t>(sign | (((exponent - f.min_exponent) << fraction_bits) + significand));
}

}  // namespace

double ulp(DType dtype, double x) {
  const Format f = format_of(dtype);
  const int exponent = x == 0 || !std::isfinite(x) ? f.min_exponent : std::max(exponent_of(x), f.min_exponent);
  return power_of_two(exponent - (f.precision - 1));
}

double round_to(DType dtype, double x) {
  if (!std::isfinite(x) || x == 0 || dtype == DType::kF64) return x;
  if (dtype == DType::kF32) return static_cast<float>(x);
  const Format f = format_of(dtype);
  const double unit = ulp(dtype, x);
  const double rounded = std::nearbyint(x / unit) * unit;  // exact but for the rounding: unit is a power of two
  const double largest = (2 - power_of_two(1 - f.precision)) * power_of_two(f.max_exponent);
  if (std::fabs(rounded) > largest) return std::copysign(std::numeric_limits<double>::infinity(), x);
  return std::copysign(rounded, x);
}

double load(DType dtype, const void* array, int64_t i) {
  switch (dtype) {
    case DType::kF64: return static_cast<const double*>(array)[i];
    case DType::kF32: return static_cast<const float*>(array)[i];
    case DType::kF16:
    case DType::kBF16: return decode(format_of(dtype), static_cast<const uint16_t*>(array)[i]);
    case DType::kI32: return static_cast<const int32_t*>(array)[i];
    case DType::kU8: return static_cast<const uint8_t*>(array)[i];
    case DType::kI64: return static_cast<double>(static_cast<const int64_t*>(array)[i]);
  }
  return std::numeric_limits<double>::quiet_NaN();
}

void store(DType dtype, void* array, int64_t i, double x) {
  switch (dtype) {
    case DType::kF64: static_cast<double*>(array)[i] = x; return;
    case DType::kF32: static_cast<float*>(array)[i] = static_cast<float>(x); return;
    case DType::kF16:
    case DType::kBF16: static_cast<uint16_t*>(array)[i] = encode(format_of(dtype), round_to(dtype, x)); return;
    case DType::kI32: static_cast<int32_t*>(array)[i] = static_cast<int32_t>(x); return;
    case DType::kU8: static_cast<uint8_t*>(array)[i] = static_cast<uint8_t>(x); return;
    case DType::kI64: static_cast<int64_t*>(array)[i] = static_cast<int64_t>(x); return;
  }
}

}  // namespace fattn::testing
