// Opens a safetensors file and copies tensors out of it. Nothing in the file is trusted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "cli/safetensors/header.h"

namespace fattn::cli::safetensors {

// Memory aligned to 64 bytes, whatever the data's alignment in the file.
struct FreeDeleter {
  void operator()(void* p) const;
};
using Bytes = std::unique_ptr<std::byte[], FreeDeleter>;

// At least one byte, so that an empty tensor has an address. Throws std::bad_alloc.
Bytes allocate(uint64_t bytes);

// Which file a path leads to, to tell whether two paths lead to the same one.
struct FileIdentity {
  uint64_t device = 0, inode = 0;
  bool operator==(const FileIdentity& other) const { return device == other.device && inode == other.inode; }
};

class Reader {
 public:
  // Reads and checks the header. Throws FormatError with the file's name: missing, no regular file (a pipe is never
  // waited for), too short, or against the format.
  explicit Reader(const std::string& path);
  ~Reader();
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  const Header& header() const { return header_; }
  const TensorEntry* find(const std::string& name) const;  // null if the file has none
  Bytes read(const TensorEntry& tensor) const;             // throws FormatError if the file shrank meanwhile
  const FileIdentity& identity() const { return identity_; }

 private:
  void read_at(uint64_t offset, void* to, uint64_t bytes) const;

  std::string shown_;
  int fd_ = -1;
  FileIdentity identity_;
  uint64_t data_offset_ = 0;
  Header header_;
};

}  // namespace fattn::cli::safetensors
