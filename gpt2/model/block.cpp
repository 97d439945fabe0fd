// An allocation may fail, and is said by name.
#include "gpt2/model/block.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "gpt2/error.h"

namespace fattn::gpt2 {
namespace {

constexpr size_t kLarge = size_t{2} << 20;
constexpr const char* kAdvice = "; use a smaller batch, context or chunk, or a 16-bit dtype";

size_t alignment_of(size_t bytes) { return bytes >= 2 * kLarge ? kLarge : BlockLayout::kWorkspace; }

}  // namespace

void Block::Free::operator()(std::byte* p) const { std::free(p); }

Block::Block(size_t bytes, const std::string& what, const MemorySpace& space) : size_(bytes) {
  if (space.on_gpu()) {
    try {
      on_gpu_ = cuda::Buffer(space.gpu(), bytes ? bytes : 1);
    } catch (const fattn::Error& error) {  // says how much was asked for, and how much is free
      if (error.code() != ErrorCode::kOutOfMemory) throw;
      throw Error(what + ": " + error.what() + kAdvice);
    }
    begin_ = static_cast<std::byte*>(on_gpu_.get());
    return;
  }
  const size_t alignment = alignment_of(bytes), rounded = taken(bytes);
  void* p = rounded < bytes ? nullptr : std::aligned_alloc(alignment, rounded);
  if (!p) throw Error("no memory for " + what + ": " + std::to_string(bytes) + " bytes" + kAdvice);
#ifdef MADV_HUGEPAGE
  if (alignment == kLarge) (void)madvise(p, rounded, MADV_HUGEPAGE);
#endif
  bytes_.reset(static_cast<std::byte*>(p));
  begin_ = bytes_.get();
}

size_t Block::taken(size_t bytes) {
  const size_t alignment = alignment_of(bytes);
  return std::max((bytes + alignment - 1) / alignment * alignment, alignment);
}

Inputs::Inputs(size_t bytes, const std::string& what, const MemorySpace& space) : space_(space), host_(bytes, what) {
  std::memset(host_.at(0), 0, bytes);
  if (space.on_gpu()) device_ = Block(bytes, what, space);
}

size_t BlockLayout::add(size_t bytes, size_t alignment) {
  const size_t begin = (total_ + alignment - 1) / alignment * alignment;
  size_t rounded = 0;
  if (__builtin_add_overflow(bytes, kPiece - 1, &rounded) || __builtin_add_overflow(begin, rounded / kPiece * kPiece, &total_) ||
      total_ > static_cast<size_t>(std::numeric_limits<int64_t>::max()))
    throw Error("batch times context needs more bytes than 64-bit numbers count; use smaller ones");
  return begin;
}

void MemorySpace::upload(void* to, const void* from, size_t bytes) const {
  if (on_gpu())
    fattn::check(fattn_cuda_copy(gpu(), FATTN_COPY_TO_DEVICE, to, from, bytes, stream()));
  else
    std::memcpy(to, from, bytes);
}
void MemorySpace::send(void* to, const void* from, size_t bytes) const {
  if (on_gpu())
    fattn::check(fattn_cuda_copy_async(gpu(), FATTN_COPY_TO_DEVICE, to, from, bytes, stream()));
  else
    std::memcpy(to, from, bytes);
}
void MemorySpace::download(void* to, const void* from, size_t bytes) const {
  if (on_gpu())
    fattn::check(fattn_cuda_copy(gpu(), FATTN_COPY_TO_HOST, to, from, bytes, stream()));
  else
    std::memcpy(to, from, bytes);
}
void MemorySpace::zero(void* to, size_t bytes) const {
  if (on_gpu())
    fattn::check(fattn_cuda_memset(gpu(), to, 0, bytes, stream()));
  else
    std::memset(to, 0, bytes);
}
void MemorySpace::wait() const {
  if (on_gpu()) stream_->synchronize();
}

}  // namespace fattn::gpt2
