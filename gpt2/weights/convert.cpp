// On bits alone, so that every processor gives the same.
#include "gpt2/weights/convert.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace fattn::gpt2 {
namespace {

constexpr uint32_t kInfinity = 0x7f800000;

uint32_t from_bf16(uint16_t x) { return static_cast<uint32_t>(x) << 16; }

uint32_t from_f16(uint16_t x) {
  const uint32_t sign = (x & 0x8000u) << 16, exponent = x >> 10 & 31, fraction = x & 1023;
  if (exponent == 31) return sign | kInfinity | fraction << 13;
  if (exponent != 0) return sign | (exponent + 112) << 23 | fraction << 13;
  return sign | std::bit_cast<uint32_t>(static_cast<float>(fraction) * 0x1p-24f);  // exact
}

uint16_t to_bf16(uint32_t x) {
  if ((x & 0x7fffffff) > kInfinity) return static_cast<uint16_t>(x >> 16 | 0x40);  // a quiet NaN
  return static_cast<uint16_t>((x + 0x7fff + (x >> 16 & 1)) >> 16);
}

uint16_t to_f16(uint32_t x) {
  const uint32_t sign = x >> 16 & 0x8000, magnitude = x & 0x7fffffff;
  if (magnitude > kInfinity) return static_cast<uint16_t>(sign | 0x7e00 | (magnitude >> 13 & 1023));
  if (magnitude >= 0x47800000) return static_cast<uint16_t>(sign | 0x7c00);  // 2^16 and above
  if (magnitude >= 0x38800000) {                                             // 2^-14 and above; what rounds up to 2^16 becomes infinite by itself
    const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return static_cast<uint16_t>(sign | ((rounded - 0x38000000) >> 13));
  }
  // Subnormal: 0.5 has the place value 2^-24 in its last bit, so that adding it rounds to one, of ties to the even one.
  const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
  return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000));
}

bool is_infinite(uint16_t x, DType dtype) { return dtype == DType::kF16 ? (x & 0x7fff) == 0x7c00 : (x & 0x7fff) == 0x7f80; }

}  // namespace

bool convert(const void* from, DType from_dtype, void* to, DType to_dtype, size_t n) {
  if (from_dtype == to_dtype) {
    if (n > 0) std::memcpy(to, from, n * size_of(to_dtype));
    return true;
  }
  constexpr size_t kBlock = 1024;
  uint32_t wide[kBlock];
  bool fits = true;
  for (size_t begin = 0; begin < n; begin += kBlock) {
    const size_t count = std::min(kBlock, n - begin);
    if (from_dtype == DType::kF32) {
      std::memcpy(wide, static_cast<const uint32_t*>(from) + begin, count * sizeof(uint32_t));
    } else {
      const auto* narrow = static_cast<const uint16_t*>(from) + begin;
      for (size_t i = 0; i < count; ++i) wide[i] = from_dtype == DType::kF16 ? from_f16(narrow[i]) : from_bf16(narrow[i]);
    }
    if (to_dtype == DType::kF32) {
      std::memcpy(static_cast<uint32_t*>(to) + begin, wide, count * sizeof(uint32_t));
      continue;
    }
    auto* narrow = static_cast<uint16_t*>(to) + begin;
    for (size_t i = 0; i < count; ++i) {
      narrow[i] = to_dtype == DType::kF16 ? to_f16(wide[i]) : to_bf16(wide[i]);
      fits &= !is_infinite(narrow[i], to_dtype) || (wide[i] & 0x7fffffff) == kInfinity;
    }
  }
  return fits;
}

}  // namespace fattn::gpt2
