// Numbers of parts, as models count them.
#pragma once

#include <cstdint>

namespace fattn::lab {

inline int64_t parts_of(int64_t n, int64_t part) { return (n + part - 1) / part; }
inline int64_t rounded(int64_t n, int64_t to) { return parts_of(n, to) * to; }
inline double real(int64_t n) { return static_cast<double>(n); }

}  // namespace fattn::lab
