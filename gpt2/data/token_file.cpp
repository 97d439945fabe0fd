// The trailer and the table of checksums are checked first; what they vouch for is believed once its block has been read.
#include "gpt2/data/token_file.h"

#include <algorithm>
#include <cstring>

#include "files/checksum.h"
#include "gpt2/error.h"

namespace fattn::gpt2 {
namespace {

TokenTrailer read_trailer(const files::InputFile& file) {
  if (file.size() < TokenTrailer::kFrontBytes + TokenTrailer::kBytes)
    throw Error("it is no token file: it has " + std::to_string(file.size()) + " bytes");
  uint8_t bytes[TokenTrailer::kBytes];
  file.read_at(file.size() - sizeof bytes, bytes, sizeof bytes);
  return TokenTrailer::decode(bytes, file.size());
}

// Errors of files as errors of this layer.
files::InputFile opened(const std::string& path) {
  try {
    return files::InputFile(path);
  } catch (const files::FileError& e) {
    throw Error(e.what());
  }
}

}  // namespace

TokenFile::TokenFile(const std::string& path) : file_(opened(path)) {
  try {
    trailer_ = read_trailer(file_);
  } catch (const std::runtime_error& e) {
    throw Error("'" + file_.shown() + "': " + e.what());
  }
  try {
    map_.emplace(file_);
  } catch (const files::FileError& e) {
    throw Error(e.what());
  }
  // Every part begins at a multiple of 8.
  documents_ = reinterpret_cast<const uint64_t*>(bytes() + trailer_.documents_at());
  spans_ = reinterpret_cast<const Span*>(bytes() + trailer_.spans_at());
  table_ = reinterpret_cast<const uint64_t*>(bytes() + trailer_.table_at());
  if (files::xxh64(table_, 8 * trailer_.blocks()) != trailer_.table_checksum) damaged("its table of checksums is");
  checked_.resize(trailer_.blocks());
  check_lists();
}

void TokenFile::damaged(const std::string& what) const {
  throw Error("'" + file_.shown() + "' is damaged: " + what + " not what was written; make it again by `fattn gpt2 tokenize`, or copy it again");
}

void TokenFile::check_lists() {
  check_bytes(0, TokenTrailer::kFrontBytes);
  check_bytes(trailer_.documents_at(), trailer_.table_at());
  bool fine = documents_[0] == 0 && documents_[trailer_.documents - 1] < trailer_.tokens;
  for (uint64_t i = 1; i < trailer_.documents && fine; ++i) fine = documents_[i - 1] < documents_[i];
  uint64_t end = 0;
  for (uint64_t i = 0; i < trailer_.spans && fine; ++i) {
    fine = (i == 0 || spans_[i].begin > end) && spans_[i].begin < spans_[i].end && spans_[i].end <= trailer_.tokens;
    end = spans_[i].end;
  }
  if (!fine)
    throw Error("'" + file_.shown() + "': its lists of documents and prompts do not rise within its tokens; make it again by `fattn gpt2 tokenize`");
}

void TokenFile::check_bytes(uint64_t begin, uint64_t end) {
  if (begin == end) return;
  for (uint64_t block = begin / trailer_.block_bytes; block <= (end - 1) / trailer_.block_bytes; ++block)
    if (!checked_[block]) check_block(block);
}

void TokenFile::check_block(uint64_t block) {
  const uint64_t begin = block * trailer_.block_bytes, end = std::min(begin + trailer_.block_bytes, trailer_.table_at());
  if (files::xxh64(bytes() + begin, end - begin) != table_[block])
    damaged("bytes " + std::to_string(begin) + " to " + std::to_string(end - 1) + " (block " + std::to_string(block + 1) + " of " +
            std::to_string(trailer_.blocks()) + ") are");
  checked_[block] = true;
  // Ids are what was written, but perhaps more than was said.
  const uint64_t ids_end = TokenTrailer::kFrontBytes + trailer_.tokens * trailer_.id_bytes;
  uint32_t largest = 0;
  const auto look = [&](const auto* ids, uint64_t count) {
    for (uint64_t i = 0; i < count; ++i) largest = std::max<uint32_t>(largest, ids[i]);
  };
  const uint64_t first = std::max<uint64_t>(begin, TokenTrailer::kFrontBytes), last = std::min(end, ids_end);
  if (first >= last) return;
  if (trailer_.id_bytes == 2)
    look(reinterpret_cast<const uint16_t*>(bytes() + first), (last - first) / 2);
  else
    look(reinterpret_cast<const uint32_t*>(bytes() + first), (last - first) / 4);
  if (largest > trailer_.largest_id)
    throw Error("'" + file_.shown() + "' has the id " + std::to_string(largest) + " in block " + std::to_string(block + 1) +
                ", but its trailer says that " + std::to_string(trailer_.largest_id) + " is the largest; make it again by `fattn gpt2 tokenize`");
}

void TokenFile::check_all() { check_bytes(0, trailer_.table_at()); }

void TokenFile::read(uint64_t begin, uint64_t count, int32_t* to) {
  const uint64_t width = trailer_.id_bytes, at = TokenTrailer::kFrontBytes + begin * width;
  check_bytes(at, at + count * width);
  if (width == 2)
    std::copy_n(reinterpret_cast<const uint16_t*>(bytes() + at), count, to);
  else
    std::memcpy(to, bytes() + at, count * width);
}

uint64_t TokenFile::document_of(uint64_t token) const {
  return static_cast<uint64_t>(std::upper_bound(documents_, documents_ + trailer_.documents, token) - documents_) - 1;
}

uint64_t TokenFile::first_span(uint64_t token) const {
  return static_cast<uint64_t>(std::upper_bound(spans_, spans_ + trailer_.spans, token, [](uint64_t t, const Span& span) { return t < span.end; }) -
                               spans_);
}

}  // namespace fattn::gpt2
