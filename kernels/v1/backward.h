// Attention backward, FlashAttention as it was published in 2022 (Dao et al., Algorithm 4): a CTA has one key head, its outer loop is over blocks of
// keys and values, whose dk and dv it keeps, its inner loop over blocks of queries, whose dq it reads from global memory and writes back. What it
// does with a block of keys is v2's, which is the same algorithm but for the parallelism: there each block of keys is a CTA's. Rows come with lse in
// place of m and l, which is all that P needs of them; rowsum(dout o) is taken before (kernels/v2/backward_prepare.h).
#pragma once

#include "kernels/v2/backward.h"

namespace fattn::v1 {

template <class Spec>
__device__ __forceinline__ void backward(const AttentionParams& p) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const int blocks =
      (p.seqlen_k + Spec::kTile.block_n - 1) / Spec::kTile.block_n;  // heads_per_section is 1: a head's tiles have neighbouring numbers
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    if (block > 0) __syncthreads();
    v2::Backward<Spec>(p, ptx::shared_address(shared_memory), static_cast<int>(blockIdx.x) * blocks + block).run();
  }
}

}  // namespace fattn::v1
