// pread instead of mmap: a file that shrinks while it is read gives an error, not a bus error.
#include "cli/safetensors/reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>

#include "cli/sanitize.h"

namespace fattn::cli::safetensors {
namespace {

constexpr uint64_t kLengthBytes = 8;  // the header's length, little-endian, begins the file

// Regular files only; O_NONBLOCK, because opening a pipe would wait for its writer.
int open_regular(const std::string& path, const std::string& shown, struct stat& status) {
  const int fd = open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) throw FormatError("cannot open '" + shown + "': " + std::strerror(errno));
  if (fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) {
    close(fd);
    throw FormatError("'" + shown + "' is " + (S_ISDIR(status.st_mode) ? "a folder" : "no regular file") + "; give a safetensors file");
  }
  return fd;
}

}  // namespace

void FreeDeleter::operator()(void* p) const { std::free(p); }

Bytes allocate(uint64_t bytes) {
  if (bytes > SIZE_MAX / 2) throw std::bad_alloc();
  void* p = std::aligned_alloc(64, (std::max<uint64_t>(bytes, 1) + 63) / 64 * 64);
  if (!p) throw std::bad_alloc();
  return Bytes(static_cast<std::byte*>(p));
}

Reader::Reader(const std::string& path) : shown_(printable(path)) {
  struct stat status {};
  fd_ = open_regular(path, shown_, status);
  identity_ = {static_cast<uint64_t>(status.st_dev), static_cast<uint64_t>(status.st_ino)};
  try {
    const auto size = static_cast<uint64_t>(status.st_size);
    if (size < kLengthBytes)
      throw FormatError("it has " + std::to_string(size) + " bytes; a safetensors file begins with 8 bytes that hold its header's length");
    uint8_t length_bytes[kLengthBytes];
    read_at(0, length_bytes, kLengthBytes);
    uint64_t length = 0;
    for (uint64_t i = kLengthBytes; i-- > 0;) length = length << 8 | length_bytes[i];
    const uint64_t most = std::min(kMaxHeaderBytes, size - kLengthBytes);
    if (length < 2 || length > most)
      throw FormatError("its first 8 bytes claim a header of " + std::to_string(length) + " bytes; in this file of " + std::to_string(size) +
                        " bytes 2 to " + std::to_string(most) + " are possible. It was cut or is no safetensors file");
    std::string json(length, '\0');
    read_at(kLengthBytes, json.data(), length);
    data_offset_ = kLengthBytes + length;
    header_ = parse_header(json, size - data_offset_);
  } catch (const FormatError& e) {
    close(fd_);
    throw FormatError("'" + shown_ + "' is no valid safetensors file: " + e.what());
  } catch (...) {
    close(fd_);
    throw;
  }
}

Reader::~Reader() { close(fd_); }

const TensorEntry* Reader::find(const std::string& name) const {
  for (const TensorEntry& tensor : header_.tensors)
    if (tensor.name == name) return &tensor;
  return nullptr;
}

Bytes Reader::read(const TensorEntry& tensor) const {
  Bytes data = allocate(tensor.end - tensor.begin);
  read_at(data_offset_ + tensor.begin, data.get(), tensor.end - tensor.begin);
  return data;
}

void Reader::read_at(uint64_t offset, void* to, uint64_t bytes) const {
  char* at = static_cast<char*>(to);
  while (bytes > 0) {
    const ssize_t n = pread(fd_, at, std::min<uint64_t>(bytes, uint64_t{1} << 30), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw FormatError("cannot read '" + shown_ + "': " + std::strerror(errno));
    if (n == 0) throw FormatError("'" + shown_ + "' became shorter while it was read");
    at += n;
    offset += static_cast<uint64_t>(n);
    bytes -= static_cast<uint64_t>(n);
  }
}

}  // namespace fattn::cli::safetensors
