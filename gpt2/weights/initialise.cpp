// Pairs of normal numbers (Box and Muller 1958) of uniform ones that are hashes of their place.
#include "gpt2/weights/initialise.h"

#include <cmath>

namespace fattn::gpt2 {
namespace {

// The finaliser of SplitMix64.
uint64_t mixed(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

uint64_t hash_of(const std::string& name) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : name) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
  return hash;
}

// In (0, 1].
double uniform(uint64_t key, uint64_t place) { return static_cast<double>((mixed(key + place * 0x9e3779b97f4a7c15u) >> 11) + 1) * 0x1p-53; }

}  // namespace

void initialise(const TensorSpec& tensor, const Config& config, uint64_t seed, int64_t begin, size_t count, float* to) {
  if (tensor.start == Start::kOne || tensor.start == Start::kZero) {
    for (size_t i = 0; i < count; ++i) to[i] = tensor.start == Start::kOne ? 1.0f : 0.0f;
    return;
  }
  constexpr double kTwoPi = 6.283185307179586;
  double scale = config.initializer_range;
  if (tensor.start == Start::kResidual) scale /= std::sqrt(2.0 * static_cast<double>(config.n_layer));
  const uint64_t key = mixed(seed ^ mixed(hash_of(tensor.name)));
  for (size_t i = 0; i < count;) {
    const auto place = static_cast<uint64_t>(begin) + i;
    const double radius = scale * std::sqrt(-2 * std::log(uniform(key, place | 1))), angle = kTwoPi * uniform(key, place & ~uint64_t{1});
    if (place % 2 == 0) {
      to[i++] = static_cast<float>(radius * std::cos(angle));
      if (i == count) break;
    }
    to[i++] = static_cast<float>(radius * std::sin(angle));
  }
}

}  // namespace fattn::gpt2
