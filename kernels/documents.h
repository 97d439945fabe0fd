// Ids of documents, block by block: what lies outside of the range found here has no pair that the ids let see each other. Ids of any order are
// taken; sorted ones give ranges without gaps, and what is outside of them costs no more than reading their ids.
#pragma once

#include "kernels/ptx/special_registers.h"
#include "kernels/ptx/warp.h"

namespace fattn {

// Places [begin, end).
struct IdRange {
  int begin, end;
};

// The places among others[from], ..., others[to - 1] from the first to the last id that is neither below nor above all of own[0], ..., own[count -
// 1]; begin is end if there is none. All kThreads threads of a CTA together; `slots` are four numbers of shared memory, which may be used for
// something else when the CTA has gone through one more barrier.
template <int kThreads>
__device__ __forceinline__ IdRange common_range(const int* own, int count, const int* others, int from, int to, int* slots) {
  constexpr int kLeast = -0x7fffffff - 1, kMost = 0x7fffffff;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) slots[0] = kMost, slots[1] = kLeast, slots[2] = kMost, slots[3] = kLeast;
  __syncthreads();
  int least = kMost, most = kLeast;
  for (int i = thread; i < count; i += kThreads) least = min(least, own[i]), most = max(most, own[i]);
  const auto share = [&](int* slot, int low, int high) {
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      low = min(low, static_cast<int>(ptx::shfl_xor(static_cast<unsigned>(low), lanes)));
      high = max(high, static_cast<int>(ptx::shfl_xor(static_cast<unsigned>(high), lanes)));
    }
    if (thread % 32 == 0) {
      atomicMin(slot, low);
      atomicMax(slot + 1, high);
    }
    __syncthreads();
  };
  share(slots, least, most);
  least = slots[0], most = slots[1];
  int first = kMost, last = kLeast;
#pragma unroll 8
  for (int i = from + thread; i < to; i += kThreads) {
    const bool common = least <= others[i] && others[i] <= most;
    first = common ? min(first, i) : first;
    last = common ? i : last;
  }
  share(slots + 2, first, last);
  return slots[2] <= slots[3] ? IdRange{slots[2], slots[3] + 1} : IdRange{from, from};
}

}  // namespace fattn
