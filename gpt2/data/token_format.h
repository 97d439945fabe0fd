// How a token file lies on disk (docs/GPT2.md, "Token files"). Everything is little endian.
//
//   16 bytes      "FATTNTOK", version, 0
//   ids           of 2 or 4 bytes, then zeros up to a multiple of 8
//   documents     8 bytes each: the token with which it begins; the first is 0, they rise
//   spans         2 x 8 bytes each: tokens [begin, end) that are no targets (prompts); they rise and do not touch
//   checksums     8 bytes for each block of `block_bytes` of all that is above, the last one shorter
//   trailer       128 bytes: what is in the file
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace fattn::gpt2 {

struct TokenTrailer {
  uint64_t tokens = 0, documents = 0, spans = 0;
  uint64_t block_bytes = 1 << 20;
  uint64_t text_bytes = 0;      // of the text that the tokens stand for
  uint64_t vocabulary = 0;      // fingerprint of the tokenizer's vocabulary
  uint64_t table_checksum = 0;  // of the table of checksums: two files with the same one are the same
  uint64_t largest_at = 0;      // the first place of the largest id
  uint32_t vocab_size = 0, largest_id = 0, end_of_text = 0;
  uint32_t id_bytes = 2;
  uint32_t shard = 0;  // files of a set are numbered from 0
  bool last = true;    // of its set

  static constexpr size_t kBytes = 128, kFrontBytes = 16;
  static constexpr uint64_t kMostTokens = uint64_t{1} << 40;

  // Where the parts begin, and the size of the whole file.
  uint64_t documents_at() const { return kFrontBytes + (tokens * id_bytes + 7) / 8 * 8; }
  uint64_t spans_at() const { return documents_at() + 8 * documents; }
  uint64_t table_at() const { return spans_at() + 16 * spans; }
  uint64_t blocks() const { return (table_at() + block_bytes - 1) / block_bytes; }
  uint64_t trailer_at() const { return table_at() + 8 * blocks(); }
  uint64_t file_bytes() const { return trailer_at() + kBytes; }

  void encode(uint8_t* to) const;  // kBytes
  // Throws Error without the file's name: no token file, another version, damaged, sizes that cannot be.
  static TokenTrailer decode(const uint8_t* from, uint64_t file_bytes);
  static void encode_front(uint8_t* to);  // kFrontBytes
};

}  // namespace fattn::gpt2
