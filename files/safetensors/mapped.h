// A safetensors file whose tensors are read where they lie, without a copy.
#pragma once

#include <cstddef>
#include <string>

#include "files/safetensors/reader.h"

namespace fattn::files::safetensors {

class MappedFile {
 public:
  // Checks the header as Reader does, then maps the whole file. Throws FormatError. A file that another program cuts while it is mapped
  // ends this program when it reads there: replace files by a rename instead of writing into them.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const Reader& reader() const { return reader_; }
  // As aligned as it is in the file, which promises nothing.
  const std::byte* data(const TensorEntry& tensor) const { return map_ + reader_.data_offset() + tensor.begin; }

 private:
  Reader reader_;
  std::byte* map_ = nullptr;
};

}  // namespace fattn::files::safetensors
