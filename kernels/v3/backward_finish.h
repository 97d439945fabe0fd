// Backward on Hopper, last kernel: dq = softmax_scale * dq_accum, in the tensors' dtype and with their strides, of the heads that the main kernel has
// not converted itself (v3/backward_ring.h).
//
// A CTA takes one block of queries of one head; if the main kernel met Inf or NaN, it looks through some of what that has converted, too. A row
// without a gradient (device_abi/lowest.h) gets 0 whatever was added up for it: 0 * -inf, where k holds -inf, is NaN.
// Spec: Element, Mask, Score, kHeaddim as in v3/backward_shape.h; kBlockN of the main kernel.
#pragma once

#include "device_abi/lowest.h"
#include "kernels/constants.h"
#include "kernels/ptx/convert.h"
#include "kernels/ptx/dependent_launch.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/v3/backward_fragments.h"
#include "kernels/v3/backward_schedule.h"
#include "kernels/v3/backward_store.h"
#include "kernels/v3/operand_tile.h"

namespace fattn::v3 {

template <class Spec>
struct BackwardFinish {
  using Element = typename Spec::Element;
  using Mask = typename Spec::Mask;
  using Tile = OperandTile<kV3BackwardRows, Spec::kHeaddim>;  // swizzled, so that neither writing nor reading it has conflicts
  static constexpr bool kPacked = kPairOf<Spec>.packed, kRing = ring_of<Spec>();
  using Block = QueryBlock<kPacked>;
  static constexpr int kGroups = Spec::kHeaddim / 8;  // of 8 columns
  static constexpr int kAtOnce = 16;                  // loads in flight: enough, and 64 registers

  static __device__ __forceinline__ float factor(const AttentionParams& call) { return gradient_factor<kPairOf<Spec>>(call, true); }

  // Counted over the batch, the first head whose dq is in the accumulators.
  static __device__ __forceinline__ int first_head(const AttentionParams& call, const V3BackwardWork& work) {
    if constexpr (!kRing) return 0;
    return max(0, call.batch * call.nheads_k - 2 * work.generation) * call.group;
  }
  static __device__ __forceinline__ Block block_of(const AttentionParams& call, const V3BackwardWork& work) {
    if constexpr (Mask::kBegins && !kPacked && !kRing) return query_block_of_window(call, work);
    return query_block<kPacked>(call, work, gridDim.x - 1 - blockIdx.x, first_head(call, work));
  }
  static __device__ __forceinline__ long long accum_block(const BackwardCall& p, const Block& at) {
    if constexpr (!kRing)
      return at.entry.first_block(p, at.head) + at.row / kV3BackwardRows;
    else
      return ring_block(p, at.entry.batch, at.head) + at.row / kV3BackwardRows;
  }

  // The block's dq between shared memory and its tensor, 8 columns of a row at a time: use(shared address, row, first column).
  template <class Use>
  static __device__ __forceinline__ void for_each_octet(const BackwardCall& p, const Block& at, unsigned shared, Use use) {
    constexpr int kLanes = kGroups & -kGroups;  // neighbours of a row: the largest power of two that divides it
    const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < kV3BackwardRows * kGroups / kV3FinishThreads; ++i) {
      const int in_part = i * kV3FinishThreads + thread;
      const int part = in_part / (kV3BackwardRows * kLanes), in_rows = in_part % (kV3BackwardRows * kLanes);
      const unsigned from_row = static_cast<unsigned>(in_rows / kLanes), group = static_cast<unsigned>(part * kLanes + in_rows % kLanes);
      const int to_row = at.row + static_cast<int>(from_row), column = static_cast<int>(group) * 8;
      if (to_row >= at.rows(p.call) || column >= p.work.columns) continue;
      use(shared + group / 8 * Tile::kColumnBytes + from_row * 128 + (group % 8 ^ from_row % 8) * 16, to_row, column);
    }
  }
  static __device__ __forceinline__ unsigned short* dq_of(const AttentionParams& call, const Block& at) {
    return static_cast<unsigned short*>(call.dq) + at.entry.in_tensor() * call.dq_strides.batch + at.head * call.dq_strides.head +
           at.entry.first_query() * call.dq_strides.row;
  }
  static __device__ __forceinline__ void store(const BackwardCall& p, const Block& at, unsigned shared) {
    const AttentionParams& call = p.call;
    unsigned short* const dq = dq_of(call, at);
    const float* const lse =
        call.lse + at.entry.in_tensor() * call.lse_strides.batch + at.head * call.lse_strides.head + at.entry.first_query() * call.lse_strides.row;
    for_each_octet(p, at, shared, [&](unsigned from, int row, int column) {
      uint4 x = ptx::ld_shared_16(from);
      if (lse[row * call.lse_strides.row] < kLowestLse) x = uint4{0, 0, 0, 0};
      *reinterpret_cast<uint4*>(dq + row * call.dq_strides.row + column) = x;
    });
  }

  static __device__ __forceinline__ void convert(const BackwardCall& p, const Block& at, unsigned shared) {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, first_row = thread / 32 * 16;
    const float4* const accum =
        reinterpret_cast<const float4*>(p.call.dq_accum + accum_block(p, at) * (kV3BackwardRows * static_cast<long long>(Spec::kHeaddim)));
    // A thread has, as in wgmma's accumulators, two columns of rows lane / 4 and 8 further of its warp's 16.
    const unsigned row = static_cast<unsigned>(first_row + lane / 4), word = static_cast<unsigned>(lane % 4 * 4);
#pragma unroll
    for (int begin = 0; begin < kGroups; begin += kAtOnce) {
      float4 x[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce && begin + i < kGroups; ++i) x[i] = __ldcs(accum + (begin + i) * kV3FinishThreads + thread);
#pragma unroll
      for (int i = 0; i < kAtOnce && begin + i < kGroups; ++i) {
        const unsigned group = static_cast<unsigned>(begin + i);
        const unsigned to = shared + group / 8 * Tile::kColumnBytes + row * 128 + (group % 8 ^ row % 8) * 16 + word;
        ptx::st_shared_4(to, ptx::pack2<Element>(x[i].x * factor(p.call), x[i].y * factor(p.call)));
        ptx::st_shared_4(to + 8 * 128, ptx::pack2<Element>(x[i].z * factor(p.call), x[i].w * factor(p.call)));
      }
    }
    __syncthreads();
    store(p, at, shared);
  }

  // A block that the main kernel has converted, which met Inf or NaN.
  static __device__ __forceinline__ void look_again(const BackwardCall& p, const Block& at, unsigned shared) {
    const unsigned short* const dq = dq_of(p.call, at);
    bool finite = true;
    for_each_octet(p, at, shared, [&](unsigned to, int row, int column) {
      const uint4 x = *reinterpret_cast<const uint4*>(dq + row * p.call.dq_strides.row + column);
      ptx::st_shared_16(to, x);
      for (const unsigned two : {x.x, x.y, x.z, x.w}) finite = finite && ptx::fma2<Element>(two, 0, 0) == 0;
    });
    if (!__syncthreads_and(finite)) store(p, at, shared);
  }

  static __device__ __forceinline__ void run(const BackwardCall& p, unsigned shared) {
    if constexpr (kPacked) ptx::let_kernel_after_come_up();  // kernels/sequence_rest.h
    const Block at = block_of(p.call, p.work);
    ptx::wait_for_kernel_before();
    if (kPacked && at.rows(p.call) == 0) return;
    convert(p, at, shared);
    if constexpr (kRing) {
      if (p.work.finished[0] == 0) return;
#pragma unroll 1
      for (unsigned block = blockIdx.x; block < static_cast<unsigned>(first_head(p.call, p.work) * p.work.row_blocks); block += gridDim.x) {
        __syncthreads();
        look_again(p, query_block<false>(p.call, p.work, block), shared);
      }
    }
  }
};

template <class Spec>
__device__ __forceinline__ void backward_finish(const BackwardCall& p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  BackwardFinish<Spec>::run(p, ptx::shared_address(memory));
}

}  // namespace fattn::v3
