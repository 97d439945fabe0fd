// SHA-256 (FIPS 180-4), for keys and checksums.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace fattn::core::jit {

using Digest = std::array<uint8_t, 32>;

class Sha256 {
 public:
  void add(const void* data, size_t bytes);
  // A string with its length before it, so that two lists of strings never run into the same bytes.
  void add_field(std::string_view text);
  Digest finish();  // once, at the end

 private:
  void block(const uint8_t* data);

  std::array<uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> rest_{};  // bytes that do not fill a block yet
  uint64_t total_ = 0;              // bytes added
};

Digest sha256(std::string_view text);
std::string hex(const Digest& digest);

}  // namespace fattn::core::jit
