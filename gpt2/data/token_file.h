// A token file that is read where it lies: ids, where documents begin, and which tokens are no targets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "files/file_map.h"
#include "files/input_file.h"
#include "gpt2/data/token_format.h"

namespace fattn::gpt2 {

// Mapped: nothing is read until it is used. A file that another program cuts while it is mapped ends this program when it reads there: replace files
// by a rename.
class TokenFile {
 public:
  // Checks everything but the ids, which are checked block by block when they are first read. Throws Error.
  explicit TokenFile(const std::string& path);
  ~TokenFile() = default;
  TokenFile(const TokenFile&) = delete;
  TokenFile& operator=(const TokenFile&) = delete;

  const TokenTrailer& trailer() const { return trailer_; }
  const std::string& shown() const { return file_.shown(); }
  uint64_t tokens() const { return trailer_.tokens; }

  // Copies ids. The first time that a block is touched it is checked; one that is damaged is an Error that names the place. Not for several threads.
  void read(uint64_t begin, uint64_t count, int32_t* to);
  // Reads the whole file and checks it.
  void check_all();

  // The token with which a document begins; one more than the last is the number of tokens.
  uint64_t document_begin(uint64_t document) const { return document < trailer_.documents ? documents_[document] : trailer_.tokens; }
  // The document that a token belongs to.
  uint64_t document_of(uint64_t token) const;

  struct Span {
    uint64_t begin, end;
  };
  // Calls `each` for every span of tokens that are no targets in [begin, end), cut to it.
  template <class Each>
  void for_spans(uint64_t begin, uint64_t end, const Each& each) const {
    for (uint64_t i = first_span(begin); i < trailer_.spans && spans_[i].begin < end; ++i)
      each(spans_[i].begin < begin ? begin : spans_[i].begin, spans_[i].end > end ? end : spans_[i].end);
  }

 private:
  void check_bytes(uint64_t begin, uint64_t end);
  void check_block(uint64_t block);
  void check_lists();
  const uint8_t* bytes() const { return map_->data(); }
  [[noreturn]] void damaged(const std::string& what) const;
  uint64_t first_span(uint64_t token) const;

  files::InputFile file_;
  TokenTrailer trailer_;
  std::optional<files::FileMap> map_;  // once the trailer is known to be one
  const uint64_t* documents_ = nullptr;
  const Span* spans_ = nullptr;
  const uint64_t* table_ = nullptr;
  std::vector<bool> checked_;
};

}  // namespace fattn::gpt2
