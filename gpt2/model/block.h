// Memory that is asked for once; of the host aligned to 256 bytes, and in large pages where it is large, so that reading it is not slowed by their
// table.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "gpt2/model/memory_space.h"

namespace fattn::gpt2 {

class Block {
 public:
  Block() = default;
  // Not zeroed. Throws Error, which says what it was for.
  Block(size_t bytes, const std::string& what, const MemorySpace& space = {});

  std::byte* at(size_t offset) const { return begin_ + offset; }
  size_t size() const { return size_; }
  // What the host gives for so many bytes: whole pages, where they are many. Less than that: it is no number.
  static size_t taken(size_t bytes);

 private:
  struct Free {
    void operator()(std::byte* p) const;
  };
  std::unique_ptr<std::byte, Free> bytes_;
  cuda::Buffer on_gpu_;
  std::byte* begin_ = nullptr;
  size_t size_ = 0;
};

// Numbers that the host writes and operations read: on a GPU there are two of them.
class Inputs {
 public:
  Inputs() = default;
  Inputs(size_t bytes, const std::string& what, const MemorySpace& space);
  std::byte* host(size_t offset) const { return host_.at(offset); }
  std::byte* at(size_t offset) const { return space_.on_gpu() ? device_.at(offset) : host_.at(offset); }
  // What the host has written of [offset, offset + bytes).
  void send(size_t offset, size_t bytes) const {
    if (space_.on_gpu()) space_.upload(device_.at(offset), host_.at(offset), bytes);
  }

 private:
  MemorySpace space_;
  Block host_, device_;
};

// Where pieces of a block will lie. Throws Error if their sum is no address.
class BlockLayout {
 public:
  static constexpr size_t kPiece = 64, kWorkspace = 256;  // what they are aligned to
  size_t add(size_t bytes, size_t alignment = kPiece);
  size_t total() const { return total_; }

 private:
  size_t total_ = 0;
};

}  // namespace fattn::gpt2
