// Counting sort of packed sequences' tiles: where buckets end.
#pragma once

namespace fattn::v3 {

// Of `counts` in shared memory, one of each thread of the CTA: the sum of those up to the thread's own, which takes its place.
template <int kThreads>
__device__ __forceinline__ int sum_up_to(int (&counts)[kThreads]) {
  const int thread = static_cast<int>(threadIdx.x);
  for (int step = 1; step < kThreads; step *= 2) {
    const int before = thread >= step ? counts[thread - step] : 0;
    __syncthreads();
    counts[thread] += before;
    __syncthreads();
  }
  return counts[thread];
}

}  // namespace fattn::v3
