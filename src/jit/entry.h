// One compiled kernel as bytes: what the disk cache and the pack file hold. The bytes carry their own checksum.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "jit/key.h"

namespace fattn::core::jit {

struct Entry {
  Digest key{};
  NvrtcVersion version;
  int arch = 0;
  bool arch_specific = false;
  std::string name;         // Request::entry
  std::string description;  // the comment that Request::source begins with
  Resources resources;
  double seconds = 0;  // of the compilation
  std::string log, image;
};

std::string encode(const Entry& entry);
// Nothing, and why, if the bytes are not what encode() wrote, to the last bit.
std::optional<Entry> decode(std::string_view bytes, std::string& why);

inline constexpr int64_t kMaxEntryFileBytes = int64_t{64} << 20;

}  // namespace fattn::core::jit
