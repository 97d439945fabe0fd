// The warpgroup that computes dQ = dS K of each block of queries and adds it to the fp32 accumulator in global memory: 64 columns at a time through
// shared memory, added there by the copy engine while the next are multiplied.
#pragma once

#include "kernels/ptx/async_proxy.h"
#include "kernels/ptx/barrier.h"
#include "kernels/ptx/bulk_copy.h"
#include "kernels/ptx/semaphore.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/ptx/special_registers.h"
#include "kernels/ptx/tensor_copy.h"
#include "kernels/ptx/warp.h"
#include "kernels/ptx/wgmma.h"
#include "kernels/v3/backward_careful.h"
#include "kernels/v3/backward_dropout.h"
#include "kernels/v3/backward_load.h"
#include "kernels/v3/backward_ring.h"
#include "kernels/v3/backward_schedule.h"
#include "kernels/v3/backward_shape.h"
#include "kernels/v3/backward_watch.h"
#include "kernels/v3/ring.h"

namespace fattn::v3 {

template <class Spec>
struct QueryGradient {
  using Shape = BackwardShape<Spec>;
  using TileK = typename Shape::TileK;
  using TileDs = typename Shape::TileDs;
  using Element = typename Spec::Element;
  static constexpr int kWidth = Spec::kHeaddim;
  static constexpr int kWhole = kWidth / 64, kRest = kWidth % 64;  // parts of 64 columns, and a narrower one
  static constexpr int kParts = kWhole + (kRest > 0);
  static constexpr int kBarrier = 1;  // named, of this warpgroup
  static constexpr bool kRing = ring_of<Spec>();
  static constexpr bool kWatches = Watch<Spec>::kWatches;
  static constexpr int kCarefulColumns = 16;  // at once; more want too many registers
  static_assert(kRest == 0 || kRest == 32);

  const BackwardCall& p;
  const unsigned shared;
  const BackwardBarriers<Spec> barriers;
  const TilePlace tile;
  const int thread;

  int block;               // of queries, counted over all heads
  int pending_block = -1;  // of the part that is in shared memory; negative: none is
  unsigned staging = 0;    // the buffer for the next part
  Ring<Shape::kStagesDs> ds;

  __device__ __forceinline__ QueryGradient(const BackwardCall& params, unsigned shared_address, BackwardBarriers<Spec> of, TilePlace of_keys)
      : p(params),
        shared(shared_address),
        barriers(of),
        tile(of_keys),
        thread(static_cast<int>(threadIdx.x) % 128),
        block(of_keys.template first_block<Shape::kPacked, kRing>(params)) {}

  __device__ __forceinline__ unsigned staging_of(unsigned buffer) const { return shared + Shape::kOffsetStaging + buffer * Shape::kStagingBytes; }

  // Packed sequences whose offsets are out of range may share blocks, which then count too far.
  static __device__ __forceinline__ bool is_early(int turn, int own) { return Shape::kPacked ? turn < own : turn != own; }

  // One thread. Deterministic: each block of queries is added to in the order of the tiles of keys; whose turn it is, is counted in dq_semaphore.
  __device__ __forceinline__ int* turn() const { return p.call.dq_semaphore + 1 + pending_block; }
  __device__ __forceinline__ void wait_turn() const {
    while (is_early(ptx::ld_acquire(turn()),
                    tiles_before<typename Spec::Mask, Shape::kBlockN>(p, tile.keys<Shape::kLengths, Shape::kPacked>(), tile.number(),
                                                                      pending_block - tile.place_in_head<Shape::kPacked>())))
      __nanosleep(64);
    ptx::async_proxy_fence_all();  // what others added is before what this thread's copies add
  }
  __device__ __forceinline__ void pass_turn() const {
    ptx::bulk_wait<0>();
    ptx::async_proxy_fence_all();
    __threadfence();
    ptx::red_add_release(turn(), 1);
  }

  // What was staged last, part `part` of its block, goes to global memory; when this returns, the buffer that is next in turn is free.
  template <int kColumns>
  __device__ __forceinline__ void flush(int part) const {
    ptx::async_proxy_fence();
    if (thread == 0) ptx::bulk_wait_read<0>();
    ptx::bar_sync(kBarrier, 128);
    if (thread == 0) {
      if (Spec::kDeterministic && part == 0) wait_turn();
      float* const to = p.call.dq_accum + static_cast<long long>(pending_block) * (Shape::kBlockM * kWidth) + part * (Shape::kBlockM * 64);
      ptx::bulk_add_f32(to, staging_of(Spec::kStagings == 2 ? staging ^ 1 : 0), 4 * Shape::kBlockM * kColumns);
      ptx::bulk_commit();
      if (Spec::kDeterministic && part == kParts - 1) pass_turn();
    }
  }

  // dS of the block was read for the last time, if this was the last part.
  __device__ __forceinline__ void give_back(int part) const {
    if (part == kParts - 1 && thread % 32 == 0) ptx::mbarrier_arrive(barriers.ds_empty(ds.stage));
  }
  __device__ __forceinline__ void wait_for_staging() const {
    if constexpr (Spec::kStagings == 1) {
      if (thread == 0) ptx::bulk_wait_read<0>();
      ptx::bar_sync(kBarrier, 128);
    }
  }
  // Columns of dq to the staging buffer, from the `first`th 8 of the part on.
  template <int kCount>
  __device__ __forceinline__ void stage(const float (&dq)[kCount], int first) const {
    const unsigned to = staging_of(staging) + static_cast<unsigned>(16 * thread + 2048 * first);
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i)
      ptx::st_shared_16(to + static_cast<unsigned>(2048 * i), uint4{__float_as_uint(dq[4 * i]), __float_as_uint(dq[4 * i + 1]),
                                                                    __float_as_uint(dq[4 * i + 2]), __float_as_uint(dq[4 * i + 3])});
  }
  __device__ __forceinline__ void staged() {
    pending_block = block;
    if constexpr (Spec::kStagings == 2) staging ^= 1;
  }

  // As multiply(), while k has Inf or NaN.
  template <int kColumns, int kPending>
  __device__ __forceinline__ void multiply_part_carefully(int part) {
    if (pending_block >= 0) flush<kPending>(part == 0 ? kParts - 1 : part - 1);
    wait_for_staging();
#pragma unroll 1
    for (int i = 0; i < kColumns; i += kCarefulColumns) {
      float columns[kCarefulColumns / 2];
      FragmentPlace<TileK> k(shared + static_cast<unsigned>(part * TileK::kColumnBytes));
      k.first ^= static_cast<unsigned>(2 * i);
      multiply_carefully<Element, TileDs>(columns, shared + Shape::kOffsetDs + ds.stage * TileDs::kBytes, k);
      stage(columns, i / 8);
    }
    give_back(part);
    staged();
  }
  // kColumns columns of dq from column 64 * part on; meanwhile the kPending columns before are flushed, if there are any.
  template <int kColumns, int kPending>
  __device__ __forceinline__ void multiply(int part) {
    float dq[kColumns / 2];
    const unsigned a = ptx::wgmma_descriptor(shared + Shape::kOffsetDs, TileDs::kColumnBytes) + ds.stage * (TileDs::kBytes / 16);
    const unsigned b = ptx::wgmma_descriptor(shared, TileK::kColumnBytes) + static_cast<unsigned>(part * (TileK::kColumnBytes / 16));
    ptx::forget(dq);
    ptx::wgmma_fence();
    ptx::wgmma<Element, false, ptx::Major::kOther, ptx::Major::kOther>(dq, a, b);
#pragma unroll
    for (int step = 1; step < Shape::kBlockN / 16; ++step)
      ptx::wgmma<Element, true, ptx::Major::kOther, ptx::Major::kOther>(dq, a + static_cast<unsigned>(step * 128),
                                                                        b + static_cast<unsigned>(step * 128));
    ptx::wgmma_commit();
    if (pending_block >= 0) flush<kPending>(part == 0 ? kParts - 1 : part - 1);
    ptx::wgmma_wait<0>();
    ptx::pin(dq);
    give_back(part);
    wait_for_staging();
    stage(dq, 0);
    staged();
  }
  template <int kColumns, int kPending, bool kCareful>
  __device__ __forceinline__ void multiply_part(int part) {
    if constexpr (kCareful)
      multiply_part_carefully<kColumns, kPending>(part);
    else
      multiply<kColumns, kPending>(part);
  }

  // kCareful: k has Inf or NaN.
  template <bool kCareful>
  __device__ __forceinline__ void multiply_block() {
    if constexpr (kRest == 0) {
#pragma unroll 1
      for (int part = 0; part < kParts; ++part) multiply_part<64, 64, kCareful>(part);
    } else {
      static_assert(kRest == 0 || kWhole == 1);
      multiply_part<64, kRest, kCareful>(0);
      multiply_part<kRest, 64, kCareful>(1);
    }
  }

  __device__ __forceinline__ void run() {
    BackwardLoader<Spec> loader(p, shared, barriers);
    if constexpr (!Spec::kOwnLoader)
      if (thread == 0) loader.begin(tile);
    if constexpr (kWatches)
      if (Watch<Spec>{tile}.look(p, shared, barriers, thread)) {  // of its own, so that ptxas holds nothing in registers for both
        const TilePlace of{ptx::opaque(tile.address)};
        QueryGradient(p, ptx::opaque(shared), {ptx::opaque(barriers.first)}, of).template add_all<true>(loader);
        return;
      }
    add_all<false>(loader);
  }
  template <bool kCareful>
  __device__ __forceinline__ void add_all(BackwardLoader<Spec>& loader) {
    if constexpr (Shape::kDropout && !Spec::kOwnLoader) {
      blocks_making_bits<kCareful>(loader);
      finish();
      if (thread == 0) ptx::bulk_wait<0>();
    } else {
      EarlierHead<Spec> earlier(p, tile);
      if constexpr (kRing) earlier.begin();
      blocks<kCareful>(loader, earlier);
      finish();
      if constexpr (kRing)
        earlier.finish();
      else if (thread == 0)
        ptx::bulk_wait<0>();
    }
  }
  template <bool kCareful>
  __device__ __forceinline__ void blocks(BackwardLoader<Spec>& loader, EarlierHead<Spec>& earlier) {
    int left = tile.blocks();
#pragma unroll 1
    for (int steps = tile.blocks() * p.call.group; steps > 0; --steps) {
      ptx::mbarrier_wait(barriers.ds_full(ds.stage), ds.parity);
      if constexpr (!Spec::kOwnLoader)
        if (thread == 0) loader.next();  // v3/backward_load.h, run_behind_ds(), says why now
      if constexpr (kRing) earlier.convert_another();
      if constexpr (kRing && kCareful) earlier.convert();  // no registers for both
      multiply_block<kCareful>();
      if constexpr (kRing && !kCareful) earlier.convert();
      ds.next();
      ++block;
      if (--left == 0) {  // to the next query head, whose blocks follow
        left = tile.blocks();
        block += tile.blocks_between<typename Spec::Mask, Shape::kPacked>(p);
      }
    }
  }
  // The same with dropout, where loads are this warpgroup's too: its other warps make the bits, one block ahead.
  template <bool kCareful>
  __device__ __forceinline__ void blocks_making_bits(BackwardLoader<Spec>& loader) {
    static_assert(!kRing);
    const KeptBits<Spec> bits{shared, barriers};
    typename KeptBits<Spec>::Made made(p, tile);
    const int steps = ptx::uniform(tile.blocks()) * p.call.group, of_head = ptx::uniform(tile.blocks());
    const int own = ptx::warp_id() % 4;
    const bool makes = 1 <= own && own <= Shape::kKeyGroups;
    if (makes) bits.make_next(p, tile, made, 0);
    int left = of_head;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      if (makes && step + 1 < steps) bits.make_next(p, tile, made, step + 1);
      ptx::mbarrier_wait(barriers.ds_full(ds.stage), ds.parity);
      if (thread == 0) loader.next();
      multiply_block<kCareful>();
      ds.next();
      ++block;
      if (--left == 0) {
        left = of_head;
        block += ptx::uniform(tile.blocks_between<typename Spec::Mask, Shape::kPacked>(p));
      }
    }
  }
  __device__ __forceinline__ void finish() {
    if (thread % 32 == 0) ptx::mbarrier_arrive(barriers.k_done());
    flush<kRest == 0 ? 64 : kRest>(kParts - 1);
  }
};

}  // namespace fattn::v3
