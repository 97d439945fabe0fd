// Token files read as one stream of tokens: those of folders and single files, checked to belong together.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gpt2/data/token_file.h"
#include "gpt2/tokenizer/vocabulary.h"

namespace fattn::gpt2 {

class TokenSet {
 public:
  // `paths`: token files, folders of them, or folders that `fattn gpt2 tokenize` made, of which `train` is read. Throws Error: none there, a file of
  // a set missing, damaged, another vocabulary.
  explicit TokenSet(const std::vector<std::string>& paths);

  uint64_t tokens() const { return begin_.back(); }
  uint64_t documents() const;
  uint64_t text_bytes() const;  // of the text that they stand for
  uint32_t vocab_size() const { return files_.front()->trailer().vocab_size; }
  uint64_t vocabulary() const { return files_.front()->trailer().vocabulary; }  // fingerprint, as fingerprint_of() gives it
  Token end_of_text() const { return static_cast<Token>(files_.front()->trailer().end_of_text); }
  // Depends on names, sizes and checksums of the files.
  uint64_t fingerprint() const;
  // Throws Error with the file and the place of an id that a model of this size has not.
  void require_fits(int64_t vocab_size) const;

  size_t files() const { return files_.size(); }
  TokenFile& file(size_t i) { return *files_[i]; }
  const TokenFile& file(size_t i) const { return *files_[i]; }
  // The file that has a token of the stream, and the token's place where that file begins.
  size_t file_of(uint64_t token) const;
  uint64_t file_begin(size_t i) const { return begin_[i]; }

 private:
  std::vector<std::unique_ptr<TokenFile>> files_;
  std::vector<uint64_t> begin_;  // of each file, and the end
};

// The token files that a path means, in their order. Throws Error if there are none.
std::vector<std::string> token_files_of(const std::string& path);
// Those for validation beside them: of the folder that `fattn gpt2 tokenize` made; empty if it has none.
std::vector<std::string> validation_files_of(const std::string& path);

}  // namespace fattn::gpt2
