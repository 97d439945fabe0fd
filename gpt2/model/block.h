// Memory that is asked for once: aligned to 64 bytes, and in large pages where it is large, so that reading it is not slowed by their table.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace fattn::gpt2 {

class Block {
 public:
  Block() = default;
  // Not zeroed. Throws Error, which says what it was for.
  Block(size_t bytes, const std::string& what);

  std::byte* at(size_t offset) const { return bytes_.get() + offset; }
  size_t size() const { return size_; }

 private:
  struct Free {
    void operator()(std::byte* p) const;
  };
  std::unique_ptr<std::byte, Free> bytes_;
  size_t size_ = 0;
};

// Where pieces of a block will lie. Throws Error if their sum is no address.
class BlockLayout {
 public:
  size_t add(size_t bytes);
  size_t total() const { return total_; }

 private:
  size_t total_ = 0;
};

}  // namespace fattn::gpt2
