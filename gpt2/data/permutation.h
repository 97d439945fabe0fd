// A random order of n things that is computed, not kept: a Feistel network over the next power of four, walked until it hits one of the n.
#pragma once

#include <cstdint>

namespace fattn::gpt2 {

// A number that looks random, from another one (the finaliser of SplitMix64; Steele, Lea, Flood 2014).
inline uint64_t scrambled(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

class Permutation {
 public:
  Permutation(uint64_t n, uint64_t seed) : n_(n), seed_(seed) {
    while (half_bits_ < 32 && (uint64_t{1} << 2 * half_bits_) < n) ++half_bits_;
  }
  // Of i < n; every number below n is given once.
  uint64_t operator()(uint64_t i) const {
    do i = walked(i);
    while (i >= n_);
    return i;
  }

 private:
  uint64_t walked(uint64_t i) const {
    const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
    uint64_t left = i >> half_bits_, right = i & mask;
    for (uint64_t round = 0; round < 4; ++round) {
      const uint64_t next = left ^ (scrambled(seed_ ^ scrambled(right << 3 | round)) & mask);
      left = right;
      right = next;
    }
    return left << half_bits_ | right;
  }

  uint64_t n_, seed_;
  int half_bits_ = 1;
};

}  // namespace fattn::gpt2
