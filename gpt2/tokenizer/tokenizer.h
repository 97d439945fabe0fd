// GPT-2's tokenizer: byte-level BPE with the ids of Hugging Face's `tokenizers`.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "gpt2/tokenizer/added_tokens.h"
#include "gpt2/tokenizer/vocabulary.h"

namespace fattn::gpt2 {

// What the files say, ready for use; never changes, so that threads can share it.
class Tokenizer {
 public:
  explicit Tokenizer(VocabularySource source);  // throws Error
  // From a folder with tokenizer.json, or vocab.json and merges.txt, or one *.tiktoken file; or from one of these files. Throws Error.
  static Tokenizer load(const std::string& path);

  const Vocabulary& vocabulary() const { return vocabulary_; }
  const AddedTokens& first_added() const { return first_; }
  const AddedTokens& second_added() const { return second_; }
  bool adds_prefix_space() const { return add_prefix_space_; }
  // Where two parts of a text may be read apart from each other; tokens that reach over white space leave no such place.
  bool can_be_cut() const { return !first_.touches_space() && !second_.touches_space(); }

 private:
  Vocabulary vocabulary_;
  AddedTokens first_, second_;  // those that are looked for behind the others are Hugging Face's "normalized" ones
  bool add_prefix_space_;
};

// Text to tokens, with a cache of its own: one for each thread. The tokenizer must outlive it.
class Encoder {
 public:
  // `special_as_text`: text that reads like a special token is text.
  explicit Encoder(const Tokenizer& tokenizer, bool special_as_text = false);
  ~Encoder();
  Encoder(const Encoder&) = delete;
  Encoder& operator=(const Encoder&) = delete;

  // Appends the tokens of a text; what is no UTF-8 is read as U+FFFD.
  void encode(std::string_view text, std::vector<Token>& to);
  std::vector<Token> encode(std::string_view text);

  // The same for a text that comes in parts of any length: tokens are appended as soon as nothing that follows can change them.
  void feed(std::string_view part, std::vector<Token>& to);
  void finish(std::vector<Token>& to);

 private:
  struct Caches;
  void encode_valid(std::string_view text, bool begins, std::vector<Token>& to);
  void encode_between(std::string_view text, bool begins, std::vector<Token>& to);
  void encode_plain(std::string_view text, std::vector<Token>& to);
  void merge_piece(std::string_view piece, std::vector<Token>& to);

  const Tokenizer& tokenizer_;
  const bool special_as_text_;
  std::unique_ptr<Caches> caches_;
  std::vector<Part> parts_, inner_parts_;
  std::string repaired_, prefixed_;
  std::string waiting_bytes_, waiting_;  // of feed(): a character that is cut; text whose tokens may change
  size_t searched_ = 0;                  // so far there is no place in waiting_ to cut
  bool began_ = false;
};

// Tokens to text, as they come: never splits a character. What is no UTF-8 becomes U+FFFD. The tokenizer must outlive it.
class Decoder {
 public:
  explicit Decoder(const Tokenizer& tokenizer, bool skip_special = false) : tokenizer_(tokenizer), skip_special_(skip_special) {}

  // Appends what is whole by now. Throws Error for an id that no token has.
  void feed(Token id, std::string& to);
  // What is left of a character that was never finished.
  void finish(std::string& to);

 private:
  const Tokenizer& tokenizer_;
  const bool skip_special_;
  std::string waiting_;
};

std::string decode(const Tokenizer& tokenizer, const std::vector<Token>& ids, bool skip_special = false);

}  // namespace fattn::gpt2
