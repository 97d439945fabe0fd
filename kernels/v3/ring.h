// A ring of buffers in shared memory that are filled and read in turn.
#pragma once

namespace fattn::v3 {

// A place in the ring, and the parity of the phase in which its "full" barrier is (its "empty" barrier: the other one).
template <int kSize>
struct Ring {
  unsigned stage = 0, parity = 0;
  __device__ __forceinline__ unsigned last() const { return stage == 0 ? kSize - 1 : stage - 1; }
  __device__ __forceinline__ void next() {
    if (++stage == kSize) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace fattn::v3
