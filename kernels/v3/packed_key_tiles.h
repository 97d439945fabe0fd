// Before a v3 backward pass over packed sequences: the list of their tiles of keys, sequence after sequence, those with most queries first, whose
// tiles take longest. The host does not know the lengths. Of a sequence the tiles come in the order of the keys, on which a deterministic pass
// counts. Keys that no sequence uses (kLengths) have no tiles: kernels/sequence_rest.h fills their gradients with 0.
//
// One CTA. The order of sequences as long is any, and no result depends on it.
#pragma once

#include "device_abi/v3_backward_work.h"
#include "device_abi/v3_packed_tiles.h"
#include "kernels/ptx/dependent_launch.h"
#include "kernels/ptx/special_registers.h"
#include "kernels/ptx/warp.h"
#include "kernels/sequence.h"
#include "kernels/v3/bucket_sums.h"

namespace fattn::v3 {

template <int kBlockN, bool kLengths>
struct PackedKeyTiles {
  static constexpr int kBuckets = kV3PackThreads;  // of sequences, by number of queries

  static __device__ __forceinline__ int tiles_of(const Sequence& at) { return (at.k.count + kBlockN - 1) / kBlockN; }
  static __device__ __forceinline__ int bucket_of(const PairParams& p, const Sequence& at) {
    const int most = p.seqlen_q / kV3BackwardRows + 2, blocks = (at.q.count + kV3BackwardRows - 1) / kV3BackwardRows;
    return kBuckets - 1 - (most <= kBuckets ? blocks : static_cast<int>(static_cast<long long>(blocks) * kBuckets / most));
  }
  // Nothing is there of a sequence behind the last.
  static __device__ __forceinline__ Sequence sequence_at(const PairParams& p, int n) {
    return n < p.batch ? given_sequence<kLengths>(p, n) : Sequence{{0, 0}, {0, 0}};
  }

  static __device__ __forceinline__ void run(const PairParams& p, const V3BackwardWork& work) {
    ptx::let_kernel_after_come_up();
    __shared__ int first[kBuckets], all;  // counts; then where each bucket begins; and how many tiles there are
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
    first[thread] = 0;
    __syncthreads();
    for (int n = thread; n < p.batch; n += kV3PackThreads) {
      const Sequence at = given_sequence<kLengths>(p, n);
      atomicAdd(&first[bucket_of(p, at)], tiles_of(at));
    }
    __syncthreads();
    const int count = first[thread];
    const int until = sum_up_to<kBuckets>(first);
    __syncthreads();
    first[thread] = until - count;
    if (thread == kBuckets - 1) all = until;
    __syncthreads();
    // The list is full where sequences have rows in common: where offsets are out of range, or several use the same keys.
    const int most = work.key_tiles;
    V3PackedTile* const tiles = static_cast<V3PackedTile*>(p.tiles);
    for (int none = all + thread; none < most; none += kV3PackThreads) tiles[none] = {-1, 0, 0, 0, 0, 0, {}};
    // A thread finds the place of a sequence, its warp writes the tiles.
    const auto write = [&](const Sequence& own, int warps) {
      const int own_place = tiles_of(own) > 0 ? atomicAdd(&first[bucket_of(p, own)], tiles_of(own)) : 0;
#pragma unroll 1
      for (int from = 0; from < 32; ++from) {
        const auto of = [&](int x) { return static_cast<int>(ptx::shfl(static_cast<unsigned>(x), from)); };
        const Sequence at{{of(own.q.begin), of(own.q.count)}, {of(own.k.begin), of(own.k.count)}};
        const int place = of(own_place);
        for (int nth = lane; nth < min(tiles_of(at), most - place); nth += 32)
          tiles[place + nth] = {nth * kBlockN, warps + from, at.q.begin, at.q.count, at.k.begin, at.k.count, {}};
      }
    };
    for (int warps = thread - lane; warps < p.batch; warps += kV3PackThreads) {
      write(sequence_at(p, warps + lane), warps);
    }
  }
};

template <int kBlockN, bool kLengths>
__device__ __forceinline__ void packed_key_tiles(const PairParams& p, const V3BackwardWork& work) {
  PackedKeyTiles<kBlockN, kLengths>::run(p, work);
}

}  // namespace fattn::v3
