// Memory that ends at a page which nobody may touch: one element read or written past the end stops the program.
#pragma once

#include <cstddef>
#include <utility>

namespace fattn::testing {

class Memory {
 public:
  Memory() = default;
  Memory(size_t bytes, unsigned char fill);  // throws std::bad_alloc
  ~Memory();
  Memory(Memory&& other) noexcept { swap(other); }
  Memory& operator=(Memory&& other) noexcept {
    Memory taken(std::move(other));
    swap(taken);
    return *this;
  }

  unsigned char* data() const { return data_; }  // aligned as far as `bytes` is: the end is what is placed
  size_t size() const { return size_; }

 private:
  void swap(Memory& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(mapped_, other.mapped_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }
  void* base_ = nullptr;
  size_t mapped_ = 0;
  unsigned char* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace fattn::testing
