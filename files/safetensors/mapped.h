// A safetensors file whose tensors are read where they lie, without a copy.
#pragma once

#include <cstddef>
#include <string>

#include "files/file_map.h"
#include "files/safetensors/reader.h"

namespace fattn::files::safetensors {

class MappedFile {
 public:
  // Checks the header as Reader does, then maps the whole file (file_map.h). Throws FormatError, or FileError if there is no room for the map.
  explicit MappedFile(const std::string& path) : reader_(path), map_(reader_.file()) {}

  const Reader& reader() const { return reader_; }
  // As aligned as it is in the file, which promises nothing.
  const std::byte* data(const TensorEntry& tensor) const {
    return reinterpret_cast<const std::byte*>(map_.data()) + reader_.data_offset() + tensor.begin;
  }

 private:
  Reader reader_;
  FileMap map_;  // of a header at least: never empty
};

}  // namespace fattn::files::safetensors
