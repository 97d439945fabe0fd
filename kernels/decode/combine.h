// Puts the splits of decode's rows together: a CTA a row, its warps take splits in turn.
//
// A specialisation is a struct with Element, kHeaddimV and kDependent (shape.h); kShares: sequences are shared by their lengths (shares.h).
#pragma once

#include "device_abi/decode_work.h"
#include "kernels/decode/merge.h"
#include "kernels/decode/visit.h"
#include "kernels/ptx/dependent_launch.h"
#include "kernels/ptx/special_registers.h"
#include "kernels/ptx/warp.h"

namespace fattn::decode {

inline constexpr int kCombineWarps = kDecodeCombineThreads / 32;

template <class Spec>
__device__ __forceinline__ void combine(const AttentionParams& p, const DecodeWork& work) {
  constexpr int kColumns = (Spec::kHeaddimV + 127) / 128;  // fours of columns that a lane has, 128 columns apart
  __shared__ float4 part[kCombineWarps][kColumns * 32];
  const int row = static_cast<int>(blockIdx.x) % work.rows, unit = static_cast<int>(blockIdx.x) / work.rows;  // unit: of (batch, key head)
  const auto [warp, lane] = ptx::thread_place();
  if constexpr (Spec::kDependent) {
    ptx::let_kernel_after_come_up();
    ptx::wait_for_kernel_before();
  }
  PartPlace first{unit, work.splits, 0};
  int splits = work.splits;
  if constexpr (kShares<Spec>) {
    const DecodeParts parts = work.parts[unit / p.nheads_k];
    if (parts.count == 1) return;  // whole, and written
    first = {unit % p.nheads_k, static_cast<int>(decode_parts(work.splits, p.batch)), parts.first};
    splits = parts.count;
  }
  const float2* stats = first.stats(work, row);
  const float* sums = first.sums(work, row, Spec::kHeaddimV);

  float shift = kInfinity, sum = 0;
  for (int split = lane; split < splits; split += 32) shift = fminf(shift, stats[split].x);
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) shift = fminf(shift, ptx::shfl_xor(shift, mask));
  for (int split = lane; split < splits; split += 32) sum = fmaf(stats[split].y, factor_of(stats[split].x, shift), sum);
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) sum += ptx::shfl_xor(sum, mask);

  float o[kColumns][4] = {};
#pragma unroll 4
  for (int split = warp; split < splits; split += kCombineWarps) {
    const float factor = factor_of(stats[split].x, shift);
    const float* from = sums + static_cast<long long>(split) * work.rows * Spec::kHeaddimV;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int column = i * 128 + lane * 4;
      if (column >= Spec::kHeaddimV) continue;
      const float4 x = *reinterpret_cast<const float4*>(from + column);
      o[i][0] = fmaf(x.x, factor, o[i][0]);
      o[i][1] = fmaf(x.y, factor, o[i][1]);
      o[i][2] = fmaf(x.z, factor, o[i][2]);
      o[i][3] = fmaf(x.w, factor, o[i][3]);
    }
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) part[warp][i * 32 + lane] = float4{o[i][0], o[i][1], o[i][2], o[i][3]};
  __syncthreads();
  const int four = static_cast<int>(threadIdx.x);
  if (four * 4 >= Spec::kHeaddimV) return;
  float total[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < kCombineWarps; ++i) {
    const float4 x = part[i][four];
    total[0] += x.x;
    total[1] += x.y;
    total[2] += x.z;
    total[3] += x.w;
  }
  store_row<Spec>(p, work, unit / p.nheads_k, unit % p.nheads_k, row, four * 4, total, shift, sum);
}

}  // namespace fattn::decode
