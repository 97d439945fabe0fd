// The gradient of LayerNorm. A CTA takes every n-th row, and keeps the sums of its rows for weight and bias until the end: in registers, or for long
// rows in its own part of memory. Parts are joined by join_sums().
//
// Spec: Element (of the weight), kIn (width), kWide (rows are read in fours), kDependent.
#pragma once

#include "device_abi/training_params.h"
#include "kernels/ops/begin.h"
#include "kernels/ops/wide.h"
#include "kernels/ptx/warp.h"

namespace fattn::ops {

// Of several numbers at once, the same in all threads.
template <int kCount>
__device__ __forceinline__ void cta_sums(float (&x)[kCount], float (&shared)[kCount][kOpsThreads / 32]) {
  constexpr int kWarps = kOpsThreads / 32;
#pragma unroll
  for (int i = 0; i < kCount; ++i)
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) x[i] += ptx::shfl_xor(x[i], mask);
  __syncthreads();
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) shared[i][threadIdx.x / 32] = x[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    x[i] = shared[i][threadIdx.x % kWarps];
#pragma unroll
    for (int mask = kWarps / 2; mask > 0; mask /= 2) x[i] += ptx::shfl_xor(x[i], mask);
  }
}

// Numbers of a row that a thread of a CTA has.
template <int kIn, bool kWide>
struct RowOfCta {
  static constexpr int kUnit = kWide ? 4 : 1;
  static constexpr int kSteps = (kIn + kOpsThreads * kUnit - 1) / (kOpsThreads * kUnit);
  static constexpr bool kHeld = kSteps * kUnit <= 16;
  static constexpr int kRoom = kHeld ? kSteps : 1;

  // body(step, place)
  template <class Body>
  __device__ static void each(const Body& body) {
    if constexpr (kHeld) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int at = (i * kOpsThreads + static_cast<int>(threadIdx.x)) * kUnit;
        if (kIn % (kOpsThreads * kUnit) == 0 || at < kIn) body(i, at);
      }
    } else {
      for (int at = static_cast<int>(threadIdx.x) * kUnit; at < kIn; at += kOpsThreads * kUnit) body(0, at);
    }
  }
};

template <class Spec>
__device__ __forceinline__ void norm_gradient(const NormGradientParams& p) {
  using Row = RowOfCta<Spec::kIn, Spec::kWide>;
  constexpr int kUnit = Row::kUnit, kIn = Spec::kIn;
  constexpr float kShare = 1.0f / kIn;
  using Numbers = float[Row::kRoom][kUnit];
  __shared__ float shared_sum[1][kOpsThreads / 32], shared_sums[3][kOpsThreads / 32];
  begin_kernel<Spec::kDependent>();
  float* const own_weight = p.parts + static_cast<long long>(blockIdx.x) * 2 * kIn;
  float* const own_bias = own_weight + kIn;
  // Those of this CTA's rows so far. The weight need not lie at an address for fours: one by one.
  [[maybe_unused]] Numbers dweight = {}, dbias = {}, weight;
  const auto read_weight = [&](int at, float(&to)[kUnit]) {
#pragma unroll
    for (int k = 0; k < kUnit; ++k) to[k] = read<typename Spec::Element>(p.weight, at + k);
  };
  if constexpr (Row::kHeld) Row::each([&](int i, int at) { read_weight(at, weight[i]); });

  for (long long row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const float *x_row = p.x + row * kIn, *dy_row = p.dy + row * kIn;
    float* dx_row = p.dx + row * kIn;
    [[maybe_unused]] Numbers x, dy, dx;
    if constexpr (Row::kHeld)
      Row::each([&](int i, int at) {
        read_unit<float>(x_row, at, x[i]);
        read_unit<float>(dy_row, at, dy[i]);
        read_unit<float>(dx_row, at, dx[i]);
      });
    // take(step, place, x, dy, weight)
    const auto each = [&](const auto& take) {
      Row::each([&](int i, int at) {
        if constexpr (Row::kHeld) {
          take(i, at, x[i], dy[i], weight[i]);
        } else {
          float own_x[kUnit], own_dy[kUnit], own_w[kUnit];
          read_unit<float>(x_row, at, own_x);
          read_unit<float>(dy_row, at, own_dy);
          read_weight(at, own_w);
          take(i, at, own_x, own_dy, own_w);
        }
      });
    };
    float sum[1] = {};
    each([&](int, int, const float(&a)[kUnit], const float(&)[kUnit], const float(&)[kUnit]) {
#pragma unroll
      for (int k = 0; k < kUnit; ++k) sum[0] += a[k];
    });
    cta_sums(sum, shared_sum);
    const float mean = sum[0] * kShare;
    float sums[3] = {};  // of (x - mean)^2, dy w, dy w (x - mean)
    each([&](int, int, const float(&a)[kUnit], const float(&g)[kUnit], const float(&w)[kUnit]) {
#pragma unroll
      for (int k = 0; k < kUnit; ++k) {
        const float apart = a[k] - mean, dn = g[k] * w[k];
        sums[0] = fmaf(apart, apart, sums[0]);
        sums[1] += dn;
        sums[2] = fmaf(dn, apart, sums[2]);
      }
    });
    cta_sums(sums, shared_sums);
    const float scale = 1.0f / sqrtf(fmaf(sums[0], kShare, p.epsilon));
    const float dmean = sums[1] * kShare, dot = sums[2] * kShare * scale;
    each([&](int i, int at, const float(&a)[kUnit], const float(&g)[kUnit], const float(&w)[kUnit]) {
      float old[kUnit], of_weight[kUnit], of_bias[kUnit];
      if constexpr (!Row::kHeld) {
        read_unit<float>(dx_row, at, old);
        if (row != blockIdx.x) {
          read_unit<float>(own_weight, at, of_weight);
          read_unit<float>(own_bias, at, of_bias);
        } else {
#pragma unroll
          for (int k = 0; k < kUnit; ++k) of_weight[k] = of_bias[k] = 0;
        }
      }
#pragma unroll
      for (int k = 0; k < kUnit; ++k) {
        const float n = (a[k] - mean) * scale, change = (fmaf(g[k], w[k], -dmean) - n * dot) * scale;
        if constexpr (Row::kHeld) {
          dx[i][k] += change;
          dweight[i][k] = fmaf(g[k], n, dweight[i][k]);
          dbias[i][k] += g[k];
        } else {
          old[k] += change;
          of_weight[k] = fmaf(g[k], n, of_weight[k]);
          of_bias[k] += g[k];
        }
      }
      const long long whole_at = row * kIn + at;
      if constexpr (Row::kHeld) {
        write_unit<float>(dx_row, at, dx[i]);
        if (p.rounded) write_unit<typename Spec::Element>(p.rounded, whole_at, dx[i]);
      } else {
        if (p.rounded) write_unit<typename Spec::Element>(p.rounded, whole_at, old);
        write_unit<float>(dx_row, at, old);
        write_unit<float>(own_weight, at, of_weight);
        write_unit<float>(own_bias, at, of_bias);
      }
    });
  }
  if constexpr (Row::kHeld)
    Row::each([&](int i, int at) {
      write_unit<float>(own_weight, at, dweight[i]);
      write_unit<float>(own_bias, at, dbias[i]);
    });
}

}  // namespace fattn::ops
