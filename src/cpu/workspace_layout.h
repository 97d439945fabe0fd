// Where the pieces of a workspace lie, found before there is any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>

#include "fattn/error.hpp"

namespace fattn::core {

// Grows a workspace piece by piece; every piece is aligned to 64 bytes. Refuses sizes beyond an address.
class WorkspaceLayout {
 public:
  size_t add(std::initializer_list<int64_t> factors) {
    const size_t begin = total_;
    size_t bytes = 1;
    for (int64_t f : factors)
      if (__builtin_mul_overflow(bytes, static_cast<size_t>(f), &bytes)) too_large();
    if (__builtin_add_overflow(bytes, size_t{63}, &bytes) || __builtin_add_overflow(total_, bytes / 64 * 64, &total_) ||
        total_ > static_cast<size_t>(std::numeric_limits<int64_t>::max()))
      too_large();
    return begin;
  }
  size_t total() const { return total_; }

 private:
  [[noreturn]] static void too_large() { throw Error(ErrorCode::kOutOfMemory, "the workspace would exceed 2^63 - 1 bytes; use a smaller problem"); }
  size_t total_ = 0;
};

}  // namespace fattn::core
