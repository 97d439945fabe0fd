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

// The same in one register, for those who have none to spare.
template <int kSize>
struct TightRing {
  unsigned turn = 0;  // of 2 * kSize
  __device__ __forceinline__ unsigned stage() const { return turn >= kSize ? turn - kSize : turn; }
  __device__ __forceinline__ unsigned parity() const { return turn >= kSize; }
  __device__ __forceinline__ unsigned last() const { return stage() == 0 ? kSize - 1 : stage() - 1; }
  __device__ __forceinline__ void next() { turn = turn == 2 * kSize - 1 ? 0 : turn + 1; }
};

}  // namespace fattn::v3
