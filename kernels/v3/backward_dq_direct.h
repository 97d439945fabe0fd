// The warpgroup that computes dQ = dS K of each block of queries beside the roles of wide heads (v3/backward_roles.h). It adds dq to the fp32
// accumulator in global memory from its registers, 64 columns (of 96: 32) at a time: shared memory is full there, and one staging buffer, as
// v3/backward_dq.h would have it, makes each part wait for the copy of the one before.
#pragma once

#include "kernels/ptx/barrier.h"
#include "kernels/ptx/reduce_global.h"
#include "kernels/ptx/semaphore.h"
#include "kernels/ptx/wgmma.h"
#include "kernels/v3/backward_careful.h"
#include "kernels/v3/backward_schedule.h"
#include "kernels/v3/backward_shape.h"
#include "kernels/v3/backward_watch.h"
#include "kernels/v3/ring.h"

namespace fattn::v3 {

template <class Spec>
struct DirectQueryGradient {
  using Shape = BackwardShape<Spec>;
  using TileK = typename Shape::TileK;
  using TileDs = typename Shape::TileDs;
  using Element = typename Spec::Element;
  static constexpr int kWidth = Spec::kHeaddim;
  static constexpr int kColumns = kWidth % 64 == 0 ? 64 : 32, kParts = kWidth / kColumns;  // computed at once, so often
  static constexpr int kCarefulColumns = 16;                                               // at once; more want too many registers
  static constexpr int kBarrier = 1;                                                       // named, of this warpgroup
  static constexpr bool kWatches = Watch<Spec>::kWatches;
  static_assert(kWidth % kColumns == 0);

  const BackwardCall& p;
  const unsigned shared;
  const BackwardBarriers<Spec> barriers;
  const TilePlace tile;
  const int thread;

  int block;  // of queries, counted over all heads
  Ring<Shape::kStagesDs> ds;

  __device__ __forceinline__ DirectQueryGradient(const BackwardCall& params, unsigned shared_address, BackwardBarriers<Spec> of, TilePlace of_keys)
      : p(params),
        shared(shared_address),
        barriers(of),
        tile(of_keys),
        thread(static_cast<int>(threadIdx.x) % 128),
        block(of_keys.template first_block<Shape::kPacked, false>(params)) {}

  // Packed sequences whose offsets are out of range may share blocks, which then count too far.
  static __device__ __forceinline__ bool is_early(int turn, int own) { return Shape::kPacked ? turn < own : turn != own; }

  // Deterministic: each block of queries is added to in the order of the tiles of keys; whose turn it is, is counted in dq_semaphore.
  __device__ __forceinline__ int* turn() const { return p.call.dq_semaphore + 1 + block; }
  __device__ __forceinline__ void wait_turn() const {
    if (thread == 0)
      while (is_early(ptx::ld_acquire(turn()),
                      tiles_before<typename Spec::Mask, Shape::kBlockN>(p, tile.keys<Shape::kLengths, Shape::kPacked>(), tile.number(),
                                                                        block - tile.place_in_head<Shape::kPacked>())))
        __nanosleep(64);
    ptx::bar_sync(kBarrier, 128);
  }
  __device__ __forceinline__ void pass_turn() const {
    __threadfence();
    ptx::bar_sync(kBarrier, 128);
    if (thread == 0) ptx::red_add_release(turn(), 1);
  }

  // dS of the block was read for the last time, if this was the last part.
  __device__ __forceinline__ void give_back(int part) const {
    if (part == kParts - 1 && thread % 32 == 0) ptx::mbarrier_arrive(barriers.ds_empty(ds.stage));
  }
  // Where the thread adds the columns of the part.
  __device__ __forceinline__ float* place(int part) const {
    return p.call.dq_accum + static_cast<long long>(block) * (Shape::kBlockM * kWidth) + part * (Shape::kBlockM * kColumns) + 4 * thread;
  }
  template <int kCount>
  static __device__ __forceinline__ void add(const float (&dq)[kCount], float* to) {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) ptx::red_add_f32x4(to + 512 * i, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
  }
  // As multiply(), while k has Inf or NaN.
  __device__ __forceinline__ void multiply_part_carefully(int part) const {
    if (Spec::kDeterministic && part == 0) wait_turn();
    float* const to = place(part);
    FragmentPlace<TileK> k(shared + static_cast<unsigned>((kColumns == 64 ? part : part / 2) * TileK::kColumnBytes));
    if constexpr (kColumns != 64) k.first ^= static_cast<unsigned>(part % 2 * 64);
#pragma unroll 1
    for (int i = 0; i < kColumns; i += kCarefulColumns) {
      float columns[kCarefulColumns / 2];
      FragmentPlace<TileK> of = k;
      of.first ^= static_cast<unsigned>(2 * i);
      multiply_carefully<Element, TileDs>(columns, shared + Shape::kOffsetDs + ds.stage * TileDs::kBytes, of);
      add(columns, to + 64 * i);
    }
    give_back(part);
    if (Spec::kDeterministic && part == kParts - 1) pass_turn();
  }
  __device__ __forceinline__ void multiply(int part) const {
    float dq[kColumns / 2];
    const unsigned a = ptx::wgmma_descriptor(shared + Shape::kOffsetDs, TileDs::kColumnBytes) + ds.stage * (TileDs::kBytes / 16);
    const unsigned b =
        ptx::wgmma_descriptor(shared, TileK::kColumnBytes) +
        static_cast<unsigned>(kColumns == 64 ? part * (TileK::kColumnBytes / 16) : part / 2 * (TileK::kColumnBytes / 16) + part % 2 * 4);
    ptx::forget(dq);
    ptx::wgmma_fence();
    ptx::wgmma<Element, false, ptx::Major::kOther, ptx::Major::kOther>(dq, a, b);
#pragma unroll
    for (int step = 1; step < Shape::kBlockN / 16; ++step)
      ptx::wgmma<Element, true, ptx::Major::kOther, ptx::Major::kOther>(dq, a + static_cast<unsigned>(step * 128),
                                                                        b + static_cast<unsigned>(step * 128));
    ptx::wgmma_commit();
    float* const to = place(part);
    ptx::wgmma_wait<0>();
    ptx::pin(dq);
    give_back(part);
    if (Spec::kDeterministic && part == 0) wait_turn();
    add(dq, to);
    if (Spec::kDeterministic && part == kParts - 1) pass_turn();
  }

  __device__ __forceinline__ void run() {
    bool bad_keys = false;
    if constexpr (kWatches) bad_keys = Watch<Spec>{tile}.look(p, shared, barriers, thread);
    if (bad_keys)
      blocks<kWatches>();
    else
      blocks<false>();
    if (thread % 32 == 0) ptx::mbarrier_arrive(barriers.k_done());
  }
  // kCareful: k has Inf or NaN.
  template <bool kCareful>
  __device__ __forceinline__ void blocks() {
    int left = tile.blocks();
#pragma unroll 1
    for (int steps = tile.blocks() * p.call.group; steps > 0; --steps) {
      ptx::mbarrier_wait(barriers.ds_full(ds.stage), ds.parity);
#pragma unroll 1
      for (int part = 0; part < kParts; ++part) {
        if constexpr (kCareful)
          multiply_part_carefully(part);
        else
          multiply(part);
      }
      ds.next();
      ++block;
      if (--left == 0) {  // to the next query head, whose blocks follow
        left = tile.blocks();
        block += tile.blocks_between<typename Spec::Mask, Shape::kPacked>(p);
      }
    }
  }
};

}  // namespace fattn::v3
