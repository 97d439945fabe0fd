// What fuzzers of the C ABI share: the fuzzer's bytes as fields of a problem.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "fattn/fattn.h"

inline void require(bool condition) {
  if (!condition) std::abort();
}

// Hands out the fuzzer's bytes; zeros when they are used up.
class Bytes {
 public:
  // Of `odds` fields one is anything.
  Bytes(const uint8_t* data, size_t size, int odds) : data_(data), size_(size), odds_(odds) {}
  uint8_t byte() { return at_ < size_ ? data_[at_++] : 0; }
  template <class T>
  T raw() {
    T value{};
    for (size_t i = 0; i < sizeof value; ++i) reinterpret_cast<uint8_t*>(&value)[i] = byte();
    return value;
  }
  // Mostly `usual`, sometimes anything: a problem with one odd field gets further than one that is odd all over.
  template <class T>
  T mostly(T usual) {
    return byte() % odds_ == odds_ - 1 ? raw<T>() : usual;
  }

 private:
  const uint8_t* data_;
  size_t size_, at_ = 0;
  int odds_;
};

inline int64_t element_size(int32_t dtype) {
  switch (dtype) {
    case FATTN_F64:
    case FATTN_I64: return 8;
    case FATTN_F32:
    case FATTN_I32: return 4;
    case FATTN_F16:
    case FATTN_BF16: return 2;
    case FATTN_U8: return 1;
    default: return 0;
  }
}
