// The trailer has a checksum of its own; its sizes are checked against the file's before anything is added up.
#include "gpt2/data/token_format.h"

#include <bit>
#include <cstring>

#include "files/checksum.h"
#include "gpt2/error.h"

namespace fattn::gpt2 {
namespace {

static_assert(std::endian::native == std::endian::little, "numbers are copied as they lie in memory");

constexpr char kMagic[] = "FATTNTOK";
constexpr uint32_t kVersion = 1;
constexpr size_t kChecksumAt = TokenTrailer::kBytes - 8;

// Calls `each` for every field with its place, in one order for both directions.
template <class Trailer, class Each>
void for_fields(Trailer& t, const Each& each) {
  size_t at = 8;
  const auto field = [&](auto& number) {
    each(at, number);
    at += sizeof number;
  };
  field(t.tokens), field(t.documents), field(t.spans), field(t.block_bytes), field(t.text_bytes), field(t.vocabulary);
  field(t.table_checksum), field(t.largest_at);
  field(t.vocab_size), field(t.largest_id), field(t.end_of_text), field(t.id_bytes), field(t.shard);
}
constexpr size_t kVersionAt = 8 + 8 * 8 + 5 * 4, kLastAt = kVersionAt + 4;
static_assert(kLastAt + 4 <= kChecksumAt);

}  // namespace

void TokenTrailer::encode_front(uint8_t* to) {
  std::memset(to, 0, kFrontBytes);
  std::memcpy(to, kMagic, 8);
  std::memcpy(to + 8, &kVersion, sizeof kVersion);
}

void TokenTrailer::encode(uint8_t* to) const {
  std::memset(to, 0, kBytes);
  std::memcpy(to, kMagic, 8);
  for_fields(*this, [&](size_t at, const auto& number) { std::memcpy(to + at, &number, sizeof number); });
  std::memcpy(to + kVersionAt, &kVersion, sizeof kVersion);
  to[kLastAt] = last ? 1 : 0;
  const uint64_t sum = files::xxh64(to, kChecksumAt);
  std::memcpy(to + kChecksumAt, &sum, sizeof sum);
}

TokenTrailer TokenTrailer::decode(const uint8_t* from, uint64_t file_bytes) {
  if (std::memcmp(from, kMagic, 8) != 0) throw Error("it is no token file, or it breaks off; `fattn gpt2 tokenize` makes them");
  uint32_t version = 0;
  std::memcpy(&version, from + kVersionAt, sizeof version);
  uint64_t sum = 0;
  std::memcpy(&sum, from + kChecksumAt, sizeof sum);
  if (sum != files::xxh64(from, kChecksumAt)) throw Error("its last 128 bytes are damaged; make it again by `fattn gpt2 tokenize`");
  if (version != kVersion)
    throw Error("it has version " + std::to_string(version) + " of the format; this program reads version " + std::to_string(kVersion) +
                ": make it again by `fattn gpt2 tokenize`");
  TokenTrailer t;
  for_fields(t, [&](size_t at, auto& number) { std::memcpy(&number, from + at, sizeof number); });
  t.last = from[kLastAt] != 0;
  const bool block_fine = t.block_bytes >= 4096 && t.block_bytes <= (1 << 26) && std::has_single_bit(t.block_bytes);
  const bool ids_fine = (t.id_bytes == 4 && t.vocab_size <= INT32_MAX) || (t.id_bytes == 2 && t.vocab_size <= 65536);
  const bool counts_fine = t.tokens >= 1 && t.tokens <= kMostTokens && t.documents >= 1 && t.documents <= t.tokens && t.spans <= t.tokens;
  if (!block_fine || !ids_fine || !counts_fine || t.largest_id >= t.vocab_size || t.largest_at >= t.tokens || t.end_of_text >= t.vocab_size)
    throw Error("its trailer holds numbers that cannot be; make it again by `fattn gpt2 tokenize`");
  if (t.file_bytes() != file_bytes)
    throw Error("it has " + std::to_string(file_bytes) + " bytes, but its trailer says " + std::to_string(t.file_bytes()) +
                "; make it again by `fattn gpt2 tokenize`");
  return t;
}

}  // namespace fattn::gpt2
