// Do two strided views share an element? Exact for views with nested strides (all that tensor libraries make).
#pragma once

#include <cstdint>

namespace fattn::core {

struct Extent {
  int ndim = 0;
  int64_t shape[4] = {};
  int64_t strides[4] = {};  // elements, >= 0
  int64_t element_size = 0;
};

// Bytes from the first to one past the last element; 0 if the view is empty; -1 if that exceeds 2^63 - 1.
int64_t span_bytes(const Extent& extent);

// Does the view reach one element by two indices (as an expanded view does)? May say yes for exotic strides that do not.
bool overlaps_itself(const Extent& extent);

// May the two views share a byte? No is certain. Yes may be wrong only for views that interleave with different strides.
bool may_overlap(const void* a, const Extent& ea, const void* b, const Extent& eb);

}  // namespace fattn::core
