// Backward, algorithm v2, first kernel: row_sum = rowsum(dO * O) in fp32, less the gradient of lse if there is one, and zeros for what the main
// kernel adds to.
//
// A CTA takes kPrepareRows queries of one head. Spec: as in backward.h or backward_f32.h; Element may be float.
#pragma once

#include "device_abi/attention_params.h"
#include "device_abi/backward_f32_layout.h"
#include "device_abi/backward_layout.h"
#include "kernels/constants.h"
#include "kernels/pair.h"
#include "kernels/ptx/convert.h"
#include "kernels/ptx/warp.h"
#include "kernels/v2/workspace.h"

namespace fattn::v2 {

// Elements in memory, and as fp32.
template <class Element>
struct Stored {
  using Type = unsigned short;
  static __device__ __forceinline__ float value(Type x) { return ptx::to_float<Element>(x); }
};
template <>
struct Stored<float> {
  using Type = float;
  static __device__ __forceinline__ float value(float x) { return x; }
};

template <class Spec>
class BackwardPrepare {
  using Bits = typename Stored<typename Spec::Element>::Type;
  static constexpr int kWidth = Spec::kTile.width, kHeaddimV = Spec::kHeaddimV;
  static constexpr PairFeatures kPair = kPairOf<Spec>;
  static constexpr int lanes_of(int columns) { return columns <= 1 ? 1 : 2 * lanes_of((columns + 1) / 2); }
  static constexpr int kLanes = lanes_of((kHeaddimV + 7) / 8);  // of a row; each takes 8 columns
  static constexpr int kRowStep = kPrepareThreads / kLanes;

  // The sum over 8 columns from `column` on.
  __device__ static float dot8(const Bits* a, const Bits* b, int column) {
    float sum = 0;
    if constexpr (Spec::kAligned && is_same<Bits, float>) {
#pragma unroll
      for (int c = column; c < column + 8; c += 4) {
        if (c >= kHeaddimV) break;
        const float4 x = *reinterpret_cast<const float4*>(a + c), y = *reinterpret_cast<const float4*>(b + c);
        sum = fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, fmaf(x.x, y.x, sum))));
      }
    } else if constexpr (Spec::kAligned) {
      if (column < kHeaddimV) {
        const uint4 x = *reinterpret_cast<const uint4*>(a + column), y = *reinterpret_cast<const uint4*>(b + column);
        const unsigned xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum += ptx::low_float<typename Spec::Element>(xs[i]) * ptx::low_float<typename Spec::Element>(ys[i]);
          sum += ptx::high_float<typename Spec::Element>(xs[i]) * ptx::high_float<typename Spec::Element>(ys[i]);
        }
      }
    } else {
      for (int c = column; c < column + 8 && c < kHeaddimV; ++c) {
        sum += Stored<typename Spec::Element>::value(a[c]) * Stored<typename Spec::Element>::value(b[c]);
      }
    }
    return sum;
  }

 public:
  __device__ static void run(const AttentionParams& call) {
    const int thread = static_cast<int>(threadIdx.x);
    const int row_blocks = (call.seqlen_q + kPrepareRows - 1) / kPrepareRows;
    const int block = static_cast<int>(blockIdx.x) % row_blocks;
    const long long batch_head = static_cast<int>(blockIdx.x) / row_blocks;
    const long long batch = batch_head / call.nheads, head = batch_head % call.nheads;
    const auto& p = backward_params<kPair, kWidth, Spec::kTile.block_m, Bits>(call, batch);  // behind a sequence's last row there is nothing to do
    const long long first = static_cast<long long>(block) * kPrepareRows;

    const long long head_size = dq_accum_head(p.seqlen_q, kWidth), begin = first * kWidth;
    float4* accum = reinterpret_cast<float4*>(p.dq_accum + workspace_accum<kPair, kWidth>(p, batch_head, head, head_size));
    const long long end = min(begin + kPrepareRows * kWidth, head_size) / 4;
    const float zero = first_sum<kPair>(p, static_cast<int>(batch));
    for (long long i = begin / 4 + thread; i < end; i += kPrepareThreads) accum[i] = float4{zero, zero, zero, zero};

    const Bits* o = static_cast<const Bits*>(p.o) + batch * p.o_strides.batch + head * p.o_strides.head;
    const Bits* dout = static_cast<const Bits*>(p.dout) + batch * p.dout_strides.batch + head * p.dout_strides.head;
    float* row_sum = p.row_sum + workspace_rows<kPair>(p, batch_head, head);
#pragma unroll
    for (int i = 0; i < (kPrepareRows + kRowStep - 1) / kRowStep; ++i) {
      const int in_block = i * kRowStep + thread / kLanes;
      const long long row = first + in_block;
      const bool exists = in_block < kPrepareRows && row < p.seqlen_q;
      float sum = 0;
      if (exists) sum = dot8(o + row * p.o_strides.row, dout + row * p.dout_strides.row, thread % kLanes * 8);
#pragma unroll
      for (int distance = kLanes / 2; distance > 0; distance /= 2) sum += ptx::shfl_xor(sum, distance);
      if constexpr (kPair.dlse)
        if (exists && thread % kLanes == 0) sum -= dlse_of_row(p, static_cast<int>(batch), static_cast<int>(head), row);
      if (exists && thread % kLanes == 0) row_sum[row] = sum;
    }

    if constexpr (Spec::kDeterministic) {  // the ticket, then a turn for each block of queries
      constexpr int kBlockM = Spec::kTile.block_m;
      const long long count = kPair.packed ? 1 + static_cast<long long>(workspace_blocks<kPair, kBlockM>(call)) * call.nheads
                                           : 1 + static_cast<long long>(p.batch) * p.nheads * ((p.seqlen_q + kBlockM - 1) / kBlockM);
      for (long long i = static_cast<long long>(blockIdx.x) * kPrepareThreads + thread; i < count;
           i += static_cast<long long>(gridDim.x) * kPrepareThreads) {
        call.dq_semaphore[i] = 0;
      }
    }
  }
};

template <class Spec>
__device__ __forceinline__ void backward_prepare(const AttentionParams& p) {
  BackwardPrepare<Spec>::run(p);
}

}  // namespace fattn::v2
