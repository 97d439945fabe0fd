// Writes token files: a set of them in one folder, each whole or not at all.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "files/whole_file.h"
#include "gpt2/data/token_format.h"
#include "gpt2/tokenizer/tokenizer.h"

namespace fattn::gpt2 {

// What tokens mean: said in every file.
struct TokenVocabulary {
  uint32_t size = 0;
  Token end_of_text = 0;
  uint64_t fingerprint = 0;
};
// Of a tokenizer. Throws Error if it has no <|endoftext|>.
TokenVocabulary vocabulary_of(const Tokenizer& tokenizer);
// Of its tokens and their ids.
uint64_t fingerprint_of(const Vocabulary& vocabulary);

// One file. Throws std::runtime_error where it cannot be written.
class TokenFileWriter {
 public:
  TokenFileWriter(const std::string& path, const TokenVocabulary& vocabulary, uint32_t shard);

  void begin_document();
  void append(const Token* ids, size_t count, bool targets, uint64_t text_bytes);
  void publish(bool last);  // at least one token

  uint64_t tokens() const { return trailer_.tokens; }

 private:
  void write(const void* data, size_t bytes);
  void end_block();

  files::WholeFile file_;
  TokenTrailer trailer_;
  std::vector<uint8_t> block_;  // not yet written
  std::vector<uint64_t> documents_, spans_, table_;
  std::vector<uint16_t> narrow_;
};

// Files 00000.tokens, 00001.tokens, ... of a folder. A document is never divided between two.
class TokenSetWriter {
 public:
  // The folder is made with the first token. `shard_tokens`: a file ends with the document that reaches it.
  TokenSetWriter(std::string folder, const TokenVocabulary& vocabulary, uint64_t shard_tokens);

  // The next tokens of the document at hand; `targets`: something learns to foretell them.
  void append(const Token* ids, size_t count, bool targets, uint64_t text_bytes);
  // A document without tokens is none. `whole`: the end of the text follows, as a target.
  void end_document(bool whole = true);
  void finish();  // publishes the last file

  uint64_t tokens() const { return tokens_; }
  uint64_t documents() const { return documents_; }
  uint64_t targets() const { return targets_; }
  uint64_t text_bytes() const { return text_bytes_; }
  uint64_t file_bytes() const { return file_bytes_; }
  uint32_t files() const { return files_; }

 private:
  void close(bool last);
  std::string path_of(uint32_t shard) const;

  const std::string folder_;
  const TokenVocabulary vocabulary_;
  const uint64_t shard_tokens_;
  std::unique_ptr<TokenFileWriter> file_;
  bool in_document_ = false;
  uint64_t tokens_ = 0, documents_ = 0, targets_ = 0, text_bytes_ = 0, file_bytes_ = 0;
  uint32_t files_ = 0;
};

}  // namespace fattn::gpt2
