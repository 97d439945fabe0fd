// Tokens and merges of a byte-level BPE, checked once and laid out for speed.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace fattn::gpt2 {

using Token = int32_t;

struct Merge {
  Token left, right, result;
  uint32_t rank;  // the lowest is merged first
};

// A token that is found in text before anything else is done, as Hugging Face's AddedToken.
struct AddedToken {
  std::string content;
  Token id = 0;
  bool special = false;
  bool single_word = false;  // only between characters that are no part of words
  bool lstrip = false;       // takes the white space before it
  bool rstrip = false;       // and behind it
  bool normalized = false;   // looked for after the others
};

struct SourceToken {
  std::string bytes;
  Token id;
  bool in_text = true;  // its bytes may become it; false: its name has characters that stand for no byte
};

// What a tokenizer's files say.
struct VocabularySource {
  std::vector<SourceToken> tokens;
  std::vector<Merge> merges;  // where a pair appears twice the last one counts
  std::vector<AddedToken> added;
  bool add_prefix_space = false;  // before every text that begins with none
  bool whole_pieces = false;      // a piece that is a token is not merged from its bytes
};

class Vocabulary {
 public:
  static constexpr uint32_t kNoRank = 0x7fffffff;

  // Throws Error: an id twice or out of all proportion, a byte without a token, merges of tokens that are not there.
  explicit Vocabulary(const VocabularySource& source);

  // One more than the largest id.
  Token size() const { return static_cast<Token>(begin_.size()) - 1; }
  bool has(Token id) const { return id >= 0 && id < size() && known_[static_cast<size_t>(id)] != 0; }
  bool is_special(Token id) const { return has(id) && known_[static_cast<size_t>(id)] == 2; }
  // The bytes of a token that it has.
  std::string_view bytes(Token id) const {
    const auto i = static_cast<size_t>(id);
    return {bytes_.data() + begin_[i], begin_[i + 1] - begin_[i]};
  }
  size_t longest_token() const { return longest_; }

  Token of_byte(uint8_t byte) const { return of_byte_[byte]; }
  // Where whole pieces are tokens: that of exactly these bytes, or -1.
  Token whole_piece(std::string_view bytes) const;
  bool has_whole_pieces() const { return !by_bytes_.empty(); }

  struct Merged {
    Token result = -1;
    uint32_t rank = kNoRank;
  };
  Merged merged(Token left, Token right) const {
    const uint64_t key = key_of(left, right);
    for (size_t i = slot_of(key);; i = (i + 1) & mask_) {
      const Slot& slot = slots_[i];
      if (slot.key == key) return slot.merged;
      if (slot.key == kFree) return {};
    }
  }

 private:
  struct Slot {
    uint64_t key = kFree;
    Merged merged;
  };
  static constexpr uint64_t kFree = ~uint64_t{0};
  static uint64_t key_of(Token left, Token right) { return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right); }
  size_t slot_of(uint64_t key) const { return static_cast<size_t>(key * 0x9e3779b97f4a7c15u >> shift_) & mask_; }
  void lay_out(const VocabularySource& source);
  void add_merges(const std::vector<Merge>& merges);

  std::string bytes_;            // of all tokens, by id
  std::vector<uint32_t> begin_;  // of each id's, and the end
  std::vector<uint8_t> known_;   // 0: no such token, 1, 2: special
  size_t longest_ = 0;
  Token of_byte_[256];
  std::vector<Slot> slots_;
  size_t mask_ = 0;
  int shift_ = 0;
  std::unordered_map<std::string_view, Token> by_bytes_;  // views into bytes_
};

}  // namespace fattn::gpt2
