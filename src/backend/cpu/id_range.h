// Ranges of document ids, for the kernels of every instruction set and what calls them: internal to each translation unit, which has its own flags.
#pragma once

#include <stdint.h>

namespace fattn::core {

// The ids of some rows or keys lie in [least, most].
struct IdRange {
  int32_t least, most;
};
static inline IdRange ids_of(const int32_t* ids, int64_t begin, int64_t end) {
  IdRange range{INT32_MAX, INT32_MIN};
  for (int64_t i = begin; i < end; ++i) {
    range.least = ids[i] < range.least ? ids[i] : range.least;
    range.most = ids[i] > range.most ? ids[i] : range.most;
  }
  return range;
}
static inline bool may_meet(IdRange a, IdRange b) { return a.least <= b.most && b.least <= a.most; }

}  // namespace fattn::core
