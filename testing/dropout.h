// Which weights dropout keeps, from docs/NUMERICS.md: written apart from the library's own (src/device_abi/dropout.h), so that each can check the
// other.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

namespace fattn::testing {

// Philox4x32-7 of Salmon, Moraes, Dror and Shaw (SC 2011).
inline std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 7; ++round) {
    const uint64_t first = uint64_t{0xD2511F53} * counter[0], second = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(second >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(second),
               static_cast<uint32_t>(first >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(first)};
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return counter;
}

struct Dropout {
  uint64_t seed = 0, offset = 0;
  double p = 0;

  // What becomes of a weight of 1.
  double kept(int64_t batch, int64_t nheads, int64_t head, int64_t query, int64_t key) const {
    const auto steps = static_cast<int>(std::lround(p * 65536));
    if (steps == 0) return 1;
    const uint64_t stream = offset + static_cast<uint64_t>(batch * nheads + head);
    const std::array<uint32_t, 4> words = philox4x32({static_cast<uint32_t>(stream), static_cast<uint32_t>(query / 16 * 8 + query % 8),
                                                      static_cast<uint32_t>(4 * (key / 64) + key % 8 / 2), static_cast<uint32_t>(stream >> 32)},
                                                     {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
    const auto digit = [&](int64_t place) {
      int x = 0;
      for (size_t m = 4; m-- > 0;) x = 2 * x + static_cast<int>(words[m] >> place % 32 & 1);
      return x;
    };
    const auto mixed = [&](int64_t place) { return digit(place) ^ digit(place + 5); };
    const int64_t place = query / 8 % 2 * 8 + key / 8 % 8 + 16 * (key % 2);
    const int number = 4096 * digit(place) + 256 * mixed(place + 8) + 16 * digit(place + 12) + mixed(place + 12);
    return number < steps ? 0 : 65536.0 / (65536 - steps);
  }
};

}  // namespace fattn::testing
