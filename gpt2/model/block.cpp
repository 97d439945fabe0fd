// An allocation may fail, and is said by name.
#include "gpt2/model/block.h"

#include <sys/mman.h>

#include <cstdlib>
#include <limits>

#include "gpt2/error.h"

namespace fattn::gpt2 {
namespace {
constexpr size_t kLarge = size_t{2} << 20;
}

void Block::Free::operator()(std::byte* p) const { std::free(p); }

Block::Block(size_t bytes, const std::string& what) : size_(bytes) {
  const size_t alignment = bytes >= 2 * kLarge ? kLarge : 64;
  const size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  void* p = rounded < bytes ? nullptr : std::aligned_alloc(alignment, rounded ? rounded : alignment);
  if (!p) throw Error("no memory for " + what + ": " + std::to_string(bytes) + " bytes; use a smaller batch, context or chunk, or a 16-bit dtype");
#ifdef MADV_HUGEPAGE
  if (alignment == kLarge) (void)madvise(p, rounded, MADV_HUGEPAGE);
#endif
  bytes_.reset(static_cast<std::byte*>(p));
}

size_t BlockLayout::add(size_t bytes) {
  const size_t begin = total_;
  size_t rounded = 0;
  if (__builtin_add_overflow(bytes, size_t{63}, &rounded) || __builtin_add_overflow(total_, rounded / 64 * 64, &total_) ||
      total_ > static_cast<size_t>(std::numeric_limits<int64_t>::max()))
    throw Error("batch times context needs more bytes than 64-bit numbers count; use smaller ones");
  return begin;
}

}  // namespace fattn::gpt2
