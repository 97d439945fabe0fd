// Opens a safetensors file and copies tensors out of it. Nothing in the file is trusted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "files/input_file.h"
#include "files/safetensors/header.h"

namespace fattn::files::safetensors {

// Memory aligned to 64 bytes, whatever the data's alignment in the file.
struct FreeDeleter {
  void operator()(void* p) const;
};
using Bytes = std::unique_ptr<std::byte[], FreeDeleter>;

// At least one byte, so that an empty tensor has an address. Throws std::bad_alloc.
Bytes allocate(uint64_t bytes);

class Reader {
 public:
  // Reads and checks the header. Throws FormatError with the file's name: missing, no regular file (a pipe is never
  // waited for), too short, or against the format.
  explicit Reader(const std::string& path);

  const Header& header() const { return header_; }
  const TensorEntry* find(const std::string& name) const;  // null if the file has none
  Bytes read(const TensorEntry& tensor) const;             // throws FormatError if the file shrank meanwhile
  // A part of a tensor, counted in bytes from its first one; the same error.
  void read_part(const TensorEntry& tensor, uint64_t offset, void* to, uint64_t bytes) const;
  const InputFile& file() const { return file_; }
  const FileIdentity& identity() const { return file_.identity(); }
  uint64_t data_offset() const { return data_offset_; }  // of the first byte after the header

 private:
  InputFile file_;
  uint64_t data_offset_ = 0;
  Header header_;
};

}  // namespace fattn::files::safetensors
