// The header has been checked against the file's size, so that every tensor lies within the map.
#include "files/safetensors/mapped.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

namespace fattn::files::safetensors {

MappedFile::MappedFile(const std::string& path) : reader_(path) {
  void* map = mmap(nullptr, reader_.file().size(), PROT_READ, MAP_PRIVATE, reader_.file().descriptor(), 0);
  if (map == MAP_FAILED) throw FormatError("cannot map '" + reader_.file().shown() + "' into memory: " + std::strerror(errno));
  map_ = static_cast<std::byte*>(map);
}

MappedFile::~MappedFile() { munmap(map_, reader_.file().size()); }

}  // namespace fattn::files::safetensors
