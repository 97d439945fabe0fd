#include "testing/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <new>

namespace fattn::testing {

Memory::Memory(size_t bytes, unsigned char fill) : size_(bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t used = (bytes + page - 1) / page * page;
  mapped_ = used + page;
  void* base = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) throw std::bad_alloc();
  base_ = base;
  auto* guard = static_cast<unsigned char*>(base) + used;
  if (mprotect(guard, page, PROT_NONE) != 0) {
    munmap(base, mapped_);
    throw std::bad_alloc();
  }
  data_ = guard - bytes;
  std::memset(data_, fill, bytes);
}

Memory::~Memory() {
  if (base_) munmap(base_, mapped_);
}

}  // namespace fattn::testing
