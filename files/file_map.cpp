#include "files/file_map.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

namespace fattn::files {

FileMap::FileMap(const InputFile& file) : size_(file.size()) {
  if (size_ == 0) return;  // nothing to map is an error of the system's
  void* map = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.descriptor(), 0);
  if (map == MAP_FAILED) throw FileError("cannot map '" + file.shown() + "' into memory: " + std::strerror(errno));
  data_ = static_cast<const uint8_t*>(map);
}

FileMap::~FileMap() {
  if (size_ > 0) munmap(const_cast<uint8_t*>(data_), size_);
}

}  // namespace fattn::files
