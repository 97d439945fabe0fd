// Backward, algorithm v2, last kernel: dq = softmax_scale * dq_accum, in the tensors' dtype and with their strides.
//
// A warp takes 16 queries x 32 columns. A row without a gradient (device_abi/lowest.h) gets 0 whatever was added up for it: 0 * -inf, where k holds
// -inf, is NaN. Spec: as in backward.h.
#pragma once

#include "device_abi/attention_params.h"
#include "device_abi/backward_layout.h"
#include "device_abi/lowest.h"
#include "kernels/constants.h"
#include "kernels/ptx/convert.h"
#include "kernels/ptx/special_registers.h"
#include "kernels/ptx/warp.h"
#include "kernels/v2/dq_accum.h"
#include "kernels/v2/store_pair.h"
#include "kernels/v2/workspace.h"

namespace fattn::v2 {

template <class Spec>
class BackwardFinish {
  using Bits = unsigned short;
  static constexpr int kWidth = Spec::kTile.width, kHeaddim = Spec::kHeaddim, kColumnGroups = kWidth / 32;
  static constexpr PairFeatures kPair = kPairOf<Spec>;

  // Among four neighbouring lanes: lane i gives x[j] to lane j and gets its x[i] as x[j].
  __device__ static void transpose(unsigned (&x)[4], int lane) {
#pragma unroll
    for (int distance = 1; distance <= 2; distance *= 2) {
      const bool upper = lane & distance;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i & distance) continue;
        const unsigned got = ptx::shfl_xor(upper ? x[i] : x[i + distance], distance);
        (upper ? x[i] : x[i + distance]) = got;
      }
    }
  }

  __device__ static bool has_gradient(const AttentionParams& p, long long batch, long long head, long long row) {
    return !(p.lse[batch * p.lse_strides.batch + head * p.lse_strides.head + row * p.lse_strides.row] < kLowestLse);
  }

  // Two columns of each of four blocks of 8 that a lane holds, of rows lane / 4 and 8 below.
  __device__ static void store_fp32(const AttentionParams& p, const float4 (&x)[4], long long batch, long long head, long long first_row,
                                    int first_column, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const long long row = first_row + lane / 4 + 8 * half;
      if (row >= p.seqlen_q) continue;
      float* const dq = static_cast<float*>(p.dq) + batch * p.dq_strides.batch + head * p.dq_strides.head + row * p.dq_strides.row;
      const bool counts = has_gradient(p, batch, head, row);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float low = counts ? (half == 0 ? x[i].x : x[i].z) * p.softmax_scale : 0.0f;
        const float high = counts ? (half == 0 ? x[i].y : x[i].w) * p.softmax_scale : 0.0f;
        store_pair<kHeaddim, Spec::kAligned>(dq, first_column + 8 * i + lane % 4 * 2, low, high, true);
      }
    }
  }

 public:
  __device__ static void run(const AttentionParams& call) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const long long row_blocks = dq_accum_blocks(call.seqlen_q);
    const long long unit = static_cast<long long>(blockIdx.x) * (kFinishThreads / 32) + ptx::warp_id();
    const int column_group = static_cast<int>(unit % kColumnGroups);
    const long long block = unit / kColumnGroups, batch_head = block / row_blocks, first_row = block % row_blocks * kDqAccumRows;
    if (batch_head >= static_cast<long long>(call.batch) * call.nheads) return;
    const long long batch = batch_head / call.nheads, head = batch_head % call.nheads;
    const auto& p = backward_params<kPair, kWidth, kDqAccumRows>(call, batch);
    if (kPair.packed && first_row >= p.seqlen_q) return;

    const float* accum = p.dq_accum + workspace_accum<kPair, kWidth>(p, batch_head, head, dq_accum_head(p.seqlen_q, kWidth)) + first_row * kWidth +
                         column_group * 32 * kDqAccumRows;
    float4 x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = read_dq(accum + 128 * i, lane);
    if constexpr (kPair.fp32_out) return store_fp32(p, x, batch, head, first_row, column_group * 32, lane);
    // A lane holds two columns of each of four blocks of 8, of rows lane / 4 and 8 below; it gets one block's 8 columns.
    unsigned rows[2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      rows[0][i] = ptx::pack2<typename Spec::Element>(x[i].x * p.softmax_scale, x[i].y * p.softmax_scale);
      rows[1][i] = ptx::pack2<typename Spec::Element>(x[i].z * p.softmax_scale, x[i].w * p.softmax_scale);
    }
    const int column = column_group * 32 + lane % 4 * 8;
    Bits* dq = static_cast<Bits*>(p.dq) + batch * p.dq_strides.batch + head * p.dq_strides.head + column;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      transpose(rows[half], lane);
      const long long row = first_row + lane / 4 + 8 * half;
      if (row >= p.seqlen_q || column >= kHeaddim) continue;
      if (!has_gradient(p, batch, head, row)) {
#pragma unroll
        for (unsigned& pair : rows[half]) pair = 0;
      }
      if constexpr (Spec::kAligned) {
        *reinterpret_cast<uint4*>(dq + row * p.dq_strides.row) = uint4{rows[half][0], rows[half][1], rows[half][2], rows[half][3]};
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (column + e < kHeaddim) dq[row * p.dq_strides.row + e] = static_cast<Bits>(rows[half][e / 2] >> (e % 2 * 16));
        }
      }
    }
  }
};

template <class Spec>
__device__ __forceinline__ void backward_finish(const AttentionParams& p) {
  BackwardFinish<Spec>::run(p);
}

}  // namespace fattn::v2
