// Scalar conversions between fp32 and the 16-bit formats, round to nearest even, NaN kept. `static`, because units built
// for other instruction sets include this too, and the linker must not share their copies.
#pragma once

#include <stdint.h>

namespace fattn::core {

static inline float bf16_to_float(uint16_t h) { return __builtin_bit_cast(float, static_cast<uint32_t>(h) << 16); }

static inline uint16_t float_to_bf16(float f) {
  const auto bits = __builtin_bit_cast(uint32_t, f);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);  // quiet NaN
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline float f16_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t magnitude = h & 0x7fffu;
  if (magnitude >= 0x7c00u) return __builtin_bit_cast(float, sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);  // Inf, NaN
  // A subnormal number is so many times 2^-24; of others the exponent, shifted into place, is 112 too small. No step is subnormal in fp32.
  const float value = magnitude < 0x400u ? static_cast<float>(magnitude) * 0x1p-24f : __builtin_bit_cast(float, (magnitude << 13) + (112u << 23));
  return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, value) | sign);
}

static inline uint16_t float_to_f16(float f) {
  const auto bits = __builtin_bit_cast(uint32_t, f);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);   // NaN
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds beyond 65504: Inf
  if (magnitude < 0x38800000u) {                                               // subnormal in fp16: adding 0.5 rounds at 2^-24
    const float rounded = __builtin_bit_cast(float, magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (__builtin_bit_cast(uint32_t, rounded) - 0x3f000000u));
  }
  const uint32_t odd = (magnitude >> 13) & 1u;
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
}

}  // namespace fattn::core
