// Backward on Hopper, first kernel: row sums of dO * O, less the gradient of lse if there is one, lse in the units of the main kernel, and zeros for
// what that adds to first (NaN in a batch entry whose length is out of range).
//
// A CTA takes one block of queries of one head. Spec: Element; kHeaddim, kHeaddimV, kDeterministic as in v3/backward_shape.h.
#pragma once

#include "device_abi/attention_params.h"
#include "device_abi/lowest.h"
#include "device_abi/v3_backward_work.h"
#include "kernels/constants.h"
#include "kernels/pair.h"
#include "kernels/ptx/convert.h"
#include "kernels/ptx/dependent_launch.h"
#include "kernels/ptx/warp.h"
#include "kernels/v3/backward_schedule.h"
#include "kernels/v3/backward_watch.h"

namespace fattn::v3 {

template <class Spec>
struct BackwardPrepare {
  using Element = typename Spec::Element;
  static constexpr int lanes_of(int columns) { return columns <= 1 ? 1 : 2 * lanes_of((columns + 1) / 2); }
  static constexpr int kLanes = lanes_of(Spec::kHeaddimV / 8);  // of a row; each takes 8 columns
  static constexpr int kRowStep = kV3PrepareThreads / kLanes, kSteps = kV3BackwardRows / kRowStep;
  static_assert(kV3BackwardRows % kRowStep == 0);

  static constexpr bool kPacked = kPairOf<Spec>.packed;
  using Block = QueryBlock<kPacked>;

  static __device__ __forceinline__ uint4 load8(const void* tensor, const TensorStrides& s, const Block& at, int row, int column) {
    const auto* first = static_cast<const unsigned short*>(tensor) + at.entry.in_tensor() * s.batch + at.head * s.head;
    return __ldcs(reinterpret_cast<const uint4*>(first + (at.entry.first_query() + at.row + row) * s.row +
                                                 column));  // read here for the last time, or for long
  }
  static __device__ __forceinline__ float dot2(unsigned a, unsigned b, float sum) {
    sum = fmaf(ptx::low_float<Element>(a), ptx::low_float<Element>(b), sum);
    return fmaf(ptx::high_float<Element>(a), ptx::high_float<Element>(b), sum);
  }

  // In the workspace.
  static __device__ __forceinline__ long long first_row_of(const AttentionParams& call, const V3BackwardWork& work, const Block& at) {
    if constexpr (kPacked)
      return (static_cast<long long>(at.head) * work.row_blocks + at.entry.place) * kV3BackwardRows + at.row;
    else
      return (static_cast<long long>(at.entry.batch) * call.nheads + at.head) * work.row_blocks * kV3BackwardRows + at.row;
  }

  // The block's flags, by all threads, which tell what they have seen of dout. All of q is looked at; of packed sequences the rows of dout behind
  // this one's, too.
  static __device__ __forceinline__ int look_again(const AttentionParams& call, const V3BackwardWork& work, const Block& at, bool nonfinite_dout,
                                                   bool huge_dp) {
    unsigned of_q = 0, of_dout = 0;
    const auto look = [&](unsigned& nonfinite, const void* tensor, const TensorStrides& s, int columns, int begin, int end) {
#pragma unroll 1
      for (int unit = begin * (columns / 8) + static_cast<int>(threadIdx.x); unit < end * (columns / 8); unit += kV3PrepareThreads) {
        const uint4 x = load8(tensor, s, at, unit / (columns / 8), unit % (columns / 8) * 8);
        for (const unsigned pair : {x.x, x.y, x.z, x.w}) nonfinite = ptx::fma2<Element>(pair, 0, nonfinite);
      }
    };
    const int own = min(at.rows(call) - at.row, kV3BackwardRows), rows = min(at.entry.queries_behind(call) - at.row, kV3BackwardRows);
    look(of_q, call.q, call.q_strides, work.columns, 0, rows);
    look(of_dout, call.dout, call.dout_strides, work.columns_v, own, rows);
    int flags = __syncthreads_or(of_q != 0) ? kQueriesNonfinite : 0;
    if (__syncthreads_or(nonfinite_dout || of_dout != 0)) flags |= kDoutNonfinite;
    if (__syncthreads_or(huge_dp) || flags != 0) flags |= kDpNonfinite;
    return flags;
  }

  static __device__ __forceinline__ void run(const AttentionParams& call, const V3BackwardWork& work) {
    ptx::let_kernel_after_come_up();
    const int thread = static_cast<int>(threadIdx.x);
    const Block at = query_block<kPacked>(call, work, gridDim.x - 1 - blockIdx.x);
    if constexpr (kPacked) {
      if (Spec::kDeterministic && thread == 1 && blockIdx.x == 0) call.dq_semaphore[0] = 0;
      // A block that nobody has. All CTAs wait for the kernel before, which lists the main kernel's tiles: what waits for this one sees them too.
      if (at.rows(call) == 0) return ptx::wait_for_kernel_before();
    }
    const int rows = at.rows(call) - at.row, column = thread % kLanes * 8;
    uint4 o[kSteps], dout[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int row = i * kRowStep + thread / kLanes;
      const bool exists = row < rows && column < work.columns_v;
      o[i] = exists ? load8(call.o, call.o_strides, at, row, column) : uint4{0, 0, 0, 0};
      dout[i] = exists ? load8(call.dout, call.dout_strides, at, row, column) : uint4{0, 0, 0, 0};
    }

    const long long first = first_row_of(call, work, at);
    const float zero = first_sum<kPairOf<Spec>>(call, at.entry.batch);
    if (!ring_of<Spec>() || at.entry.batch * call.nheads + at.head < work.ring_heads) {  // the others come into places that they find empty
      float4* const accum = reinterpret_cast<float4*>(call.dq_accum + first * Spec::kHeaddim);
#pragma unroll
      for (int i = 0; i < kV3BackwardRows * Spec::kHeaddim / 4 / kV3PrepareThreads; ++i)
        accum[i * kV3PrepareThreads + thread] = float4{zero, zero, zero, zero};
    }
    if (ring_of<Spec>() && blockIdx.x == 0) {
      const int generations = (call.batch * call.nheads_k + work.generation - 1) / work.generation;
      for (int i = thread; i <= generations; i += kV3PrepareThreads) work.finished[i] = 0;
    }

    bool look_at_q = work.looks_at_q != 0 || (kPacked && rows < kV3BackwardRows);  // of packed sequences: behind the rows are another's
    if (thread < kV3BackwardRows) {
      float lse = -kInfinity;
      if (thread < rows)
        lse = call.lse[at.entry.in_tensor() * call.lse_strides.batch + at.head * call.lse_strides.head +
                       (at.entry.first_query() + at.row + thread) * call.lse_strides.row];
      work.lse_log2[first + thread] = lse < kLowestLse ? kInfinity : lse * kLog2e;
      look_at_q = look_at_q || (thread < rows && !(kLowestLse <= lse && lse < kInfinity));  // else all scores are finite, and q is
    }
    unsigned huge = 0, nonfinite = 0;
    bool finite_sums = true;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      float sum = dot2(o[i].x, dout[i].x, 0);
      sum = dot2(o[i].y, dout[i].y, sum);
      sum = dot2(o[i].z, dout[i].z, sum);
      sum = dot2(o[i].w, dout[i].w, sum);
      for (const unsigned pair : {dout[i].x, dout[i].y, dout[i].z, dout[i].w}) {
        huge |= huge_halves<Element>(pair);
        nonfinite = ptx::fma2<Element>(pair, 0, nonfinite);
      }
#pragma unroll
      for (int distance = kLanes / 2; distance > 0; distance /= 2) sum += ptx::shfl_xor(sum, distance);
      if constexpr (kPairOf<Spec>.dlse)
        if (const int row = i * kRowStep + thread / kLanes; thread % kLanes == 0 && row < rows)
          sum -= dlse_of_row(call, at.entry.in_tensor(), at.head, at.entry.first_query() + at.row + row);
      if constexpr (kPairOf<Spec>.dropout) sum /= pairs_of(call).dropout_scale;  // v3/backward_dropout.h says why
      if (thread % kLanes == 0) call.row_sum[first + i * kRowStep + thread / kLanes] = sum;
      finite_sums = finite_sums && fabsf(sum) < 0x1p120f;
    }
    int flags = 0;
    if (__syncthreads_or(look_at_q || (huge | nonfinite) != 0 || !finite_sums)) [[unlikely]]
      flags = look_again(call, work, at, nonfinite != 0, huge != 0 || !finite_sums);
    if (thread == 0) work.nonfinite[first / kV3BackwardRows] = flags;

    if constexpr (Spec::kDeterministic) {  // whose turn it is to add to the block; and, before all of them, the ticket
      if (thread == 0) call.dq_semaphore[1 + first / kV3BackwardRows] = 0;
      if (!kPacked && thread == 1 && blockIdx.x == 0) call.dq_semaphore[0] = 0;
    }
    if constexpr (kPacked) ptx::wait_for_kernel_before();
  }
};

template <class Spec>
__device__ __forceinline__ void backward_prepare(const AttentionParams& call, const V3BackwardWork& work) {
  BackwardPrepare<Spec>::run(call, work);
}

}  // namespace fattn::v3
