// Results over parts of the keys become that over all of them: lse = log(sum(exp(lse_i))), o = sum(exp(lse_i - lse) o_i). And the gradients of that.
//
// A warp a row; a lane reads its columns of every part before it writes them, and lse is written when all lanes have read it, so that the result may
// be one of the parts. Spec: kUnit, columns that a lane takes at once.
#pragma once

#include "kernels/constants.h"
#include "kernels/ptx/warp.h"
#include "kernels/rows/elements.h"

namespace fattn::rows {

// The sum of exponentials of a row, relative to the greatest lse.
struct Shares {
  double top;   // 0 where no part sees the row
  float total;  // 0 there

  __device__ __forceinline__ Shares(const MergePartParams* parts, int nparts, const Row& row) : top(-kInfinity), total(0) {
    if (parts[0].lse.data == nullptr) {  // a sum: every share is 1
      top = 0, total = 1;
      return;
    }
    for (int i = 0; i < nparts; ++i) top = fmax(top, lse_of(parts[i].lse, row));
    if (top == -kInfinity) top = 0;
    for (int i = 0; i < nparts; ++i) total += expf(static_cast<float>(lse_of(parts[i].lse, row) - top));
  }
  __device__ __forceinline__ static double lse_of(const RowLse& lse, const Row& row) {
    if (lse.data == nullptr) return 0;
    const long long i = offset_of(lse.places, row);
    return lse.wide != 0 ? static_cast<const double*>(lse.data)[i] : static_cast<const float*>(lse.data)[i];
  }
  __device__ __forceinline__ float of(double lse) const { return expf(static_cast<float>(lse - top)) / (total == 0 ? 1.0f : total); }
  // The whole row's.
  __device__ __forceinline__ void store_lse(const RowLse& to, const Row& row) const {
    if (to.data == nullptr) return;
    const double lse = total == 0 ? -static_cast<double>(kInfinity) : top + static_cast<double>(logf(total));
    const long long i = offset_of(to.places, row);
    if (to.wide != 0)
      static_cast<double*>(to.data)[i] = lse;
    else
      static_cast<float*>(to.data)[i] = static_cast<float>(lse);
  }
};

template <class Spec>
__device__ __forceinline__ void merge(const MergeParams& p) {
  constexpr int kUnit = Spec::kUnit;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const long long i = static_cast<long long>(blockIdx.x) * (kRowsThreads / 32) + static_cast<int>(threadIdx.x) / 32;
  if (i >= p.rows) return;
  const Row row = row_of(i, p.rows, p.seqlen, p.heads);
  const Shares shares(p.parts, p.nparts, row);
  const long long to = offset_of(p.merged.o.places, row);
#pragma unroll 1
  for (int column = lane * kUnit; column < p.headdim; column += 32 * kUnit) {
    float sums[kUnit] = {};
    for (int part = 0; part < p.nparts; ++part) {
      const MergePartParams& from = p.parts[part];
      const double lse = Shares::lse_of(from.lse, row);
      if (lse == -kInfinity) continue;
      const float weight = shares.of(lse);
      float x[kUnit];
      load<kUnit>(from.o, offset_of(from.o.places, row) + column, x);
#pragma unroll
      for (int k = 0; k < kUnit; ++k) sums[k] = fmaf(x[k], weight, sums[k]);
    }
    store<kUnit>(p.merged.o, to + column, sums);
  }
  ptx::warp_sync();
  if (lane == 0) shares.store_lse(p.merged.lse, row);
}

// What a lane has of dout o_i.
template <int kUnit>
__device__ __forceinline__ float dot_of_lane(const RowNumbers& dout, const RowNumbers& o, const Row& row, int lane, int headdim) {
  float sum = 0;
#pragma unroll 1
  for (int column = lane * kUnit; column < headdim; column += 32 * kUnit) {
    float a[kUnit], b[kUnit];
    load<kUnit>(dout, offset_of(dout.places, row) + column, a);
    load<kUnit>(o, offset_of(o.places, row) + column, b);
#pragma unroll
    for (int k = 0; k < kUnit; ++k) sum = fmaf(a[k], b[k], sum);
  }
  return sum;
}

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x += ptx::shfl_xor(x, distance);
  return x;
}

template <class Spec>
__device__ __forceinline__ void merge_backward(const MergeBackwardParams& p) {
  constexpr int kUnit = Spec::kUnit;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const long long i = static_cast<long long>(blockIdx.x) * (kRowsThreads / 32) + static_cast<int>(threadIdx.x) / 32;
  if (i >= p.rows) return;
  const Row row = row_of(i, p.rows, p.seqlen, p.heads);
  const Shares shares(p.parts, p.nparts, row);
  float with_o = 0;  // dout o
  if (p.want_dlse != 0) {
    for (int part = 0; part < p.nparts; ++part) {
      const double lse = Shares::lse_of(p.parts[part].lse, row);
      if (lse != -kInfinity) with_o = fmaf(shares.of(lse), dot_of_lane<kUnit>(p.dout, p.parts[part].o, row, lane, p.headdim), with_o);
    }
    with_o = sum_of_warp(with_o);
  }
  const float dlse = static_cast<float>(Shares::lse_of(p.dlse, row));
  for (int part = 0; part < p.nparts; ++part) {
    const MergePartParams& to = p.gradients[part];
    const double lse = Shares::lse_of(p.parts[part].lse, row);
    const bool hidden = lse == -kInfinity;
    const float weight = hidden ? 0.0f : shares.of(lse);
    if (to.o.data != nullptr)
#pragma unroll 1
      for (int column = lane * kUnit; column < p.headdim; column += 32 * kUnit) {
        float x[kUnit];
        load<kUnit>(p.dout, offset_of(p.dout.places, row) + column, x);
#pragma unroll
        for (int k = 0; k < kUnit; ++k) x[k] = hidden ? 0.0f : x[k] * weight;
        store<kUnit>(to.o, offset_of(to.o.places, row) + column, x);
      }
    if (to.lse.data == nullptr) continue;
    const float with_part = hidden ? 0.0f : sum_of_warp(dot_of_lane<kUnit>(p.dout, p.parts[part].o, row, lane, p.headdim));
    if (lane == 0) static_cast<float*>(to.lse.data)[offset_of(to.lse.places, row)] = hidden ? 0.0f : weight * (dlse + (with_part - with_o));
  }
}

}  // namespace fattn::rows
