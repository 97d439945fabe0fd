// Conversions, and inputs from a counter-based generator.
#include "measure/convert.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "fattn/system.hpp"

namespace fattn::measure {
namespace {

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Steele, Lea, Flood: Fast splittable pseudorandom number generators (2014).
uint64_t splitmix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// Number 2 * pair and 2 * pair + 1 of a stream (Box and Muller 1958).
void normal_pair(uint64_t key, uint64_t pair, double& first, double& second) {
  const uint64_t bits = splitmix64(key + pair);
  const double u = (static_cast<double>(bits >> 32) + 0.5) * 0x1p-32, angle = static_cast<double>(bits & 0xFFFFFFFFu) * (0x1p-32 * 6.283185307179586);
  const double radius = std::sqrt(-2 * std::log(u));
  first = radius * std::cos(angle);
  second = radius * std::sin(angle);
}

void store(void* data, DType dtype, int64_t i, double value) {
  switch (dtype) {
    case DType::kF64: static_cast<double*>(data)[i] = value; break;
    case DType::kF32: static_cast<float*>(data)[i] = static_cast<float>(value); break;
    case DType::kBF16: static_cast<uint16_t*>(data)[i] = to_bf16(static_cast<float>(value)); break;
    case DType::kF16: static_cast<uint16_t*>(data)[i] = to_fp16(static_cast<float>(value)); break;
    default: break;
  }
}

}  // namespace

uint16_t to_bf16(float value) {
  const uint32_t bits = bits_of(value);
  if (std::isnan(value)) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

double from_bf16(uint16_t bits) { return static_cast<double>(float_of(static_cast<uint32_t>(bits) << 16)); }

uint16_t to_fp16(float value) {
  const uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000u;
  const float magnitude = float_of(bits & 0x7FFFFFFFu);
  if (std::isnan(value)) return static_cast<uint16_t>(sign | 0x7E00u);
  if (magnitude >= 65520.0F) return static_cast<uint16_t>(sign | 0x7C00u);  // rounds beyond the largest, 65504
  if (magnitude < 0x1p-14F)  // subnormal: adding 0.5 leaves the value as a multiple of 2^-24 in the low bits, rounded
    return static_cast<uint16_t>(sign | (bits_of(magnitude + 0.5F) - bits_of(0.5F)));
  const uint32_t m = bits & 0x7FFFFFFFu;
  return static_cast<uint16_t>(sign | ((m + 0xFFFu + ((m >> 13) & 1u) - (112u << 23)) >> 13));
}

double from_fp16(uint16_t bits) {
  const double sign = bits & 0x8000u ? -1 : 1;
  const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
  if (exponent == 31) return fraction ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
  return sign * (exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24));
}

double load(const void* data, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kF64: return static_cast<const double*>(data)[i];
    case DType::kF32: return static_cast<double>(static_cast<const float*>(data)[i]);
    case DType::kBF16: return from_bf16(static_cast<const uint16_t*>(data)[i]);
    case DType::kF16: return from_fp16(static_cast<const uint16_t*>(data)[i]);
    default: break;
  }
  return std::numeric_limits<double>::quiet_NaN();
}

void fill_normal(void* data, DType dtype, int64_t count, uint64_t seed, uint64_t stream) {
  const uint64_t key = splitmix64(seed ^ splitmix64(stream));
  auto fill = [&](int64_t first_pair, int64_t last_pair) {
    for (int64_t p = first_pair; p < last_pair; ++p) {
      double a, b;
      normal_pair(key, static_cast<uint64_t>(p), a, b);
      store(data, dtype, 2 * p, a);
      if (2 * p + 1 < count) store(data, dtype, 2 * p + 1, b);
    }
  };
  const int64_t pairs = (count + 1) / 2;
  const int64_t threads = std::clamp<int64_t>(pairs / 65536, 1, std::max(1, cpu_info().usable_threads));
  std::vector<std::thread> others;
  for (int64_t t = 1; t < threads; ++t) others.emplace_back(fill, pairs * t / threads, pairs * (t + 1) / threads);
  fill(0, pairs / threads);
  for (std::thread& other : others) other.join();
}

Inputs make_inputs(const ProblemSpec& s, bool grad) {
  Inputs inputs;
  uint64_t stream = 0;
  auto make = [&](int64_t bytes) {
    Pages pages(static_cast<size_t>(bytes));
    fill_normal(pages.data(), s.dtype, bytes / static_cast<int64_t>(size_of(s.dtype)), s.seed, stream++);
    return pages;
  };
  inputs.q = make(s.q_bytes());
  inputs.k = make(s.k_bytes());
  inputs.v = make(s.v_bytes());
  if (grad) inputs.dout = make(s.o_bytes());
  inputs.scores = make_score_pages(s);
  return inputs;
}

double max_difference(const void* a, const void* b, DType dtype, int64_t count) {
  double largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double difference = std::fabs(load(a, dtype, i) - load(b, dtype, i));
    if (!std::isfinite(difference)) return std::numeric_limits<double>::infinity();
    largest = std::max(largest, difference);
  }
  return largest;
}

bool all_finite(const void* data, DType dtype, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    if (!std::isfinite(load(data, dtype, i))) return false;
  return true;
}

}  // namespace fattn::measure
