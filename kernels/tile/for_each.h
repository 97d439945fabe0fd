// Loops whose index is a compile-time constant.
#pragma once

namespace fattn::tile {

template <int kValue>
struct Constant {
  static constexpr int value = kValue;
  constexpr __device__ operator int() const { return kValue; }
};

// Calls body(Constant<kBegin>{}), ..., body(Constant<kEnd - 1>{}).
template <int kBegin, int kEnd, class Body>
__device__ __forceinline__ void for_each(Body&& body) {
  if constexpr (kBegin < kEnd) {
    body(Constant<kBegin>{});
    for_each<kBegin + 1, kEnd>(body);
  }
}

}  // namespace fattn::tile
