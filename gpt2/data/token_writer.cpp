// Bytes are gathered into blocks, which get their checksums as they are written.
#include "gpt2/data/token_writer.h"

#include <cstdio>
#include <cstring>
#include <filesystem>

#include "files/checksum.h"
#include "files/printable.h"
#include "gpt2/error.h"

namespace fattn::gpt2 {

uint64_t fingerprint_of(const Vocabulary& vocabulary) {
  std::string all;
  for (Token id = 0; id < vocabulary.size(); ++id) {
    const std::string_view bytes = vocabulary.has(id) ? vocabulary.bytes(id) : std::string_view();
    for (const uint32_t number : {static_cast<uint32_t>(id), static_cast<uint32_t>(bytes.size())})
      all.append(reinterpret_cast<const char*>(&number), sizeof number);
    all += bytes;
  }
  return files::xxh64(all.data(), all.size());
}

TokenVocabulary vocabulary_of(const Tokenizer& tokenizer) {
  const std::vector<Token> end = Encoder(tokenizer).encode("<|endoftext|>");
  if (end.size() != 1)
    throw Error(
        "the tokenizer has no token <|endoftext|>, which divides documents; add it to added_tokens, or train one by `fattn gpt2 tokenizer train`");
  return {static_cast<uint32_t>(tokenizer.vocabulary().size()), end[0], fingerprint_of(tokenizer.vocabulary())};
}

TokenFileWriter::TokenFileWriter(const std::string& path, const TokenVocabulary& vocabulary, uint32_t shard) : file_(path) {
  trailer_.vocab_size = vocabulary.size;
  trailer_.end_of_text = static_cast<uint32_t>(vocabulary.end_of_text);
  trailer_.vocabulary = vocabulary.fingerprint;
  trailer_.id_bytes = vocabulary.size <= 65536 ? 2 : 4;
  trailer_.shard = shard;
  block_.reserve(trailer_.block_bytes);
  uint8_t front[TokenTrailer::kFrontBytes];
  TokenTrailer::encode_front(front);
  write(front, sizeof front);
}

void TokenFileWriter::write(const void* data, size_t bytes) {
  const auto* at = static_cast<const uint8_t*>(data);
  while (bytes > 0) {
    const size_t part = std::min<size_t>(bytes, trailer_.block_bytes - block_.size());
    block_.insert(block_.end(), at, at + part);
    at += part;
    bytes -= part;
    if (block_.size() == trailer_.block_bytes) end_block();
  }
}

void TokenFileWriter::end_block() {
  if (block_.empty()) return;
  table_.push_back(files::xxh64(block_.data(), block_.size()));
  file_.write(block_.data(), block_.size());
  block_.clear();
}

void TokenFileWriter::begin_document() { documents_.push_back(trailer_.tokens); }

void TokenFileWriter::append(const Token* ids, size_t count, bool targets, uint64_t text_bytes) {
  trailer_.text_bytes += text_bytes;
  if (count == 0) return;
  for (size_t i = 0; i < count; ++i)
    if (trailer_.tokens + i == 0 || static_cast<uint32_t>(ids[i]) > trailer_.largest_id) {
      trailer_.largest_id = static_cast<uint32_t>(ids[i]);
      trailer_.largest_at = trailer_.tokens + i;
    }
  if (!targets) {
    if (!spans_.empty() && spans_.back() == trailer_.tokens)
      spans_.back() += count;
    else
      spans_.insert(spans_.end(), {trailer_.tokens, trailer_.tokens + count});
  }
  if (trailer_.id_bytes == 2) {
    narrow_.assign(ids, ids + count);
    write(narrow_.data(), 2 * count);
  } else {
    write(ids, 4 * count);
  }
  trailer_.tokens += count;
}

void TokenFileWriter::publish(bool last) {
  trailer_.documents = documents_.size();
  trailer_.spans = spans_.size() / 2;
  trailer_.last = last;
  const uint64_t zeros = 0;
  write(&zeros, trailer_.documents_at() - TokenTrailer::kFrontBytes - trailer_.tokens * trailer_.id_bytes);
  write(documents_.data(), 8 * documents_.size());
  write(spans_.data(), 8 * spans_.size());
  end_block();
  trailer_.table_checksum = files::xxh64(table_.data(), 8 * table_.size());
  file_.write(table_.data(), 8 * table_.size());
  uint8_t bytes[TokenTrailer::kBytes];
  trailer_.encode(bytes);
  file_.write(bytes, sizeof bytes);
  file_.publish();
}

TokenSetWriter::TokenSetWriter(std::string folder, const TokenVocabulary& vocabulary, uint64_t shard_tokens)
    : folder_(std::move(folder)), vocabulary_(vocabulary), shard_tokens_(shard_tokens) {}

void TokenSetWriter::close(bool last) {
  file_->publish(last);
  file_.reset();
  std::error_code ignored;
  const uint64_t bytes = std::filesystem::file_size(path_of(files_ - 1), ignored);
  if (!ignored) file_bytes_ += bytes;
}

std::string TokenSetWriter::path_of(uint32_t shard) const {
  char name[32];
  std::snprintf(name, sizeof name, "/%05u.tokens", shard);
  return folder_ + name;
}

void TokenSetWriter::append(const Token* ids, size_t count, bool targets, uint64_t text_bytes) {
  if (count == 0) return;
  if (!in_document_) {
    if (file_ && file_->tokens() >= shard_tokens_) close(false);
    if (!file_) {
      std::error_code error;
      std::filesystem::create_directories(folder_, error);
      if (error) throw Error("the folder '" + files::printable(folder_) + "' cannot be made: " + error.message());
      file_ = std::make_unique<TokenFileWriter>(path_of(files_), vocabulary_, files_);
      ++files_;
    }
    file_->begin_document();
    in_document_ = true;
  }
  file_->append(ids, count, targets, text_bytes);
  tokens_ += count;
  text_bytes_ += text_bytes;
  if (targets) targets_ += count;
}

void TokenSetWriter::end_document(bool whole) {
  if (!in_document_) return;
  if (whole) append(&vocabulary_.end_of_text, 1, true, 0);
  in_document_ = false;
  ++documents_;
}

void TokenSetWriter::finish() {
  end_document();
  if (file_) close(true);
}

}  // namespace fattn::gpt2
