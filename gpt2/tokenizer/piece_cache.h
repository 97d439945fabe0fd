// Remembers the tokens of short pieces of text: most of what is read was read before.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "gpt2/tokenizer/vocabulary.h"

namespace fattn::gpt2 {

// A table in which each piece has one place, which the last that came there holds. Pieces of up to 8 * kWords - 1 bytes.
template <int kWords, int kTokens>
class PieceCache {
 public:
  static constexpr size_t kMostBytes = 8 * kWords - 1;

  struct Key {
    uint64_t words[kWords];  // the bytes, zeros, and in the last byte their number
  };
  struct alignas(64) Entry {
    Key key = {};
    Token tokens[kTokens];
    uint32_t count = 0;
  };

  explicit PieceCache(int bits) : entries_(size_t{1} << bits), shift_(64 - bits) {}

  // `readable` bytes may be read from `piece` on, at least as many as it has.
  static Key key_of(const uint8_t* piece, size_t bytes, size_t readable) {
    Key key = {};
    if (readable >= sizeof(Key)) {
      std::memcpy(&key, piece, sizeof(Key));
      for (int i = 0; i < kWords; ++i) {
        const int64_t rest = static_cast<int64_t>(bytes) - 8 * i;
        const uint64_t mask = rest >= 8 ? ~uint64_t{0} : rest <= 0 ? 0 : (uint64_t{1} << (8 * rest)) - 1;
        key.words[i] &= mask;
      }
    } else {
      std::memcpy(&key, piece, bytes);
    }
    key.words[kWords - 1] |= static_cast<uint64_t>(bytes) << 56;
    return key;
  }

  Entry& place(const Key& key) {
    uint64_t hash = key.words[kWords - 1];
    for (int i = 0; i + 1 < kWords; ++i) hash = (hash ^ key.words[i]) * 0x9e3779b97f4a7c15u + (hash >> 29);
    hash ^= hash >> 32;
    return entries_[hash * 0xd6e8feb86659fd93u >> shift_];
  }
  static bool holds(const Entry& entry, const Key& key) {
    uint64_t different = 0;
    for (int i = 0; i < kWords; ++i) different |= entry.key.words[i] ^ key.words[i];
    return different == 0;
  }

 private:
  std::vector<Entry> entries_;
  int shift_;
};

}  // namespace fattn::gpt2
