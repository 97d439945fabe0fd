// A file's bytes where they lie, mapped while this lives.
#pragma once

#include <cstdint>

#include "files/input_file.h"

namespace fattn::files {

class FileMap {
 public:
  // The whole of a file, which may be empty. Throws FileError. A file that another program cuts while it is mapped ends this program when it reads
  // there: replace files by a rename instead of writing into them.
  explicit FileMap(const InputFile& file);
  ~FileMap();
  FileMap(const FileMap&) = delete;
  FileMap& operator=(const FileMap&) = delete;

  const uint8_t* data() const { return data_; }
  uint64_t size() const { return size_; }

 private:
  const uint64_t size_;
  const uint8_t* data_ = nullptr;
};

}  // namespace fattn::files
