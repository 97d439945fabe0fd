// Fuzzes the reader of token files: any bytes as a file give tokens that lie inside it, or an Error in printable text. Where the first byte is odd,
// the checksums are put right, so that what lies behind them is reached.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "files/checksum.h"
#include "files/printable.h"
#include "gpt2/data/token_file.h"
#include "gpt2/error.h"

namespace {

using fattn::gpt2::TokenFile;
using fattn::gpt2::TokenTrailer;

// A file in memory, opened by its name like any other.
class MemoryFile {
 public:
  explicit MemoryFile(const std::vector<uint8_t>& data) : fd_(memfd_create("fuzz", MFD_CLOEXEC)) {
    if (fd_ < 0 || write(fd_, data.data(), data.size()) != static_cast<ssize_t>(data.size())) std::abort();
  }
  ~MemoryFile() { close(fd_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  std::string path() const { return "/proc/self/fd/" + std::to_string(fd_); }

 private:
  int fd_;
};

void require(bool condition) {
  if (!condition) std::abort();
}

void put(std::vector<uint8_t>& file, size_t at, uint64_t number) { std::memcpy(file.data() + at, &number, sizeof number); }

// Of a file whose sizes agree; of others the trailer's alone.
void put_checksums_right(std::vector<uint8_t>& file) {
  const size_t trailer = file.size() - TokenTrailer::kBytes;
  const auto put_trailer = [&] { put(file, file.size() - 8, fattn::files::xxh64(file.data() + trailer, TokenTrailer::kBytes - 8)); };
  put_trailer();
  try {
    const TokenTrailer t = TokenTrailer::decode(file.data() + trailer, file.size());
    for (uint64_t i = 0; i < t.blocks(); ++i) {
      const uint64_t begin = i * t.block_bytes, end = std::min(begin + t.block_bytes, t.table_at());
      put(file, t.table_at() + 8 * i, fattn::files::xxh64(file.data() + begin, end - begin));
    }
    put(file, trailer + 8 + 6 * 8, fattn::files::xxh64(file.data() + t.table_at(), 8 * t.blocks()));
    put_trailer();
  } catch (const fattn::gpt2::Error&) {
  }
}

void check_accepted(TokenFile& file) {
  const TokenTrailer& t = file.trailer();
  std::vector<int32_t> ids(t.tokens);
  file.read(0, t.tokens, ids.data());
  for (const int32_t id : ids) require(id >= 0 && static_cast<uint32_t>(id) <= t.largest_id && t.largest_id < t.vocab_size);
  for (uint64_t i = 0; i < t.documents; ++i) {
    require(file.document_begin(i) < file.document_begin(i + 1));
    require(file.document_of(file.document_begin(i)) == i);
  }
  uint64_t behind = 0;
  file.for_spans(0, t.tokens, [&](uint64_t begin, uint64_t end) {
    require(begin >= behind && begin < end && end <= t.tokens);
    behind = end;
  });
  file.check_all();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  std::vector<uint8_t> bytes(data + 1, data + size);
  if (data[0] % 2 == 1 && bytes.size() >= TokenTrailer::kFrontBytes + TokenTrailer::kBytes) put_checksums_right(bytes);
  const MemoryFile memory(bytes);
  try {
    TokenFile file(memory.path());
    check_accepted(file);
  } catch (const fattn::gpt2::Error& error) {
    const std::string message = error.what();
    require(!message.empty() && message.size() < 5000 && fattn::files::printable(message, 5000) == message);
  }
  return 0;
}
