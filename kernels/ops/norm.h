// LayerNorm of a row by a warp: its numbers are read once and stay in registers.
//
// Spec: Element (of weight, bias, delta and y), kIn (width), kAdd, kDependent.
#pragma once

#include "device_abi/ops_params.h"
#include "kernels/ops/element.h"
#include "kernels/ptx/dependent_launch.h"
#include "kernels/ptx/warp.h"

namespace fattn::ops {

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x += ptx::shfl_xor(x, mask);
  return x;
}

// Numbers of a row that a lane has: fours of neighbours, or single ones where rows are not made of fours. Rows of more than kMost are read again.
template <int kIn>
struct RowOfWarp {
  static constexpr int kStep = kIn % 4 == 0 ? 4 : 1;
#if __CUDA_ARCH__ >= 900
  static constexpr int kMost = 4096;
#else
  static constexpr int kMost = 1024;  // where ptxas gives a thread half of its registers
#endif
  static constexpr bool kHeld = kIn <= (kStep == 4 ? kMost : kMost / 4);
  static constexpr int kSteps = (kIn + 32 * kStep - 1) / (32 * kStep);

  // body(step, place of its first number), of this lane.
  template <class Body>
  __device__ static void each(int lane, const Body& body) {
    if constexpr (kHeld) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int at = (i * 32 + lane) * kStep;
        if (kIn % (32 * kStep) == 0 || at < kIn) body(i, at);
      }
    } else {
#pragma unroll 2
      for (int at = lane * kStep; at < kIn; at += 32 * kStep) body(0, at);
    }
  }
};

// Weight and bias of a lane's numbers; kEarly: read before the row is there, where registers hold them.
template <class Element, int kIn, bool kEarly>
struct NormWeights {
  using Row = RowOfWarp<kIn>;
  static constexpr bool kAhead = kEarly && Row::kStep == 4 && Row::kHeld && Row::kSteps <= 13;
  Four<Element> weight[kAhead ? Row::kSteps : 1], bias[kAhead ? Row::kSteps : 1];
  const void *from_weight, *from_bias;

  __device__ NormWeights(int lane, const void* w, const void* b) : from_weight(w), from_bias(b) {
    if constexpr (!kAhead) {
      constexpr int kLine = 128;  // bytes; so that they are in the L2 cache at least
      for (int at = lane * kLine; at < kIn * static_cast<int>(sizeof(Bits<Element>)); at += 32 * kLine) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(w) + at));
        asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(b) + at));
      }
    }
    if constexpr (kAhead)
      Row::each(lane, [&](int i, int at) {
        weight[i] = load4<Element>(w, at);
        bias[i] = load4<Element>(b, at);
      });
  }
  __device__ float4 weights(int i, int at) const { return kAhead ? numbers_of<Element>(weight[i]) : read4<Element>(from_weight, at); }
  __device__ float4 biases(int i, int at) const { return kAhead ? numbers_of<Element>(bias[i]) : read4<Element>(from_bias, at); }
};

// take(place, normalised number) of every number of row x, which is read by read_x(place) in fours (float4) or single ones (float).
template <class Element, int kIn, class Norm, class Read, class Take>
__device__ __forceinline__ void normalise_row(int lane, float epsilon, const Norm& norm, const Read& read_x, const Take& take) {
  using Row = RowOfWarp<kIn>;
  constexpr float kShare = 1.0f / kIn;
  if constexpr (Row::kStep == 4) {
    float4 held[Row::kHeld ? Row::kSteps : 1];
    const auto number = [&](int i, int at) { return Row::kHeld ? held[i] : read_x(at); };
    float sum = 0, squares = 0;
    Row::each(lane, [&](int i, int at) {
      const float4 x = read_x(at);
      if constexpr (Row::kHeld) held[i] = x;
      sum += (x.x + x.y) + (x.z + x.w);
    });
    const float mean = warp_sum(sum) * kShare;
    Row::each(lane, [&](int i, int at) {
      const float4 x = number(i, at);
      // Written out, so that every kernel has the same roundings; fours apart from each other, so that none waits for the one before.
      const float first = fmaf(x.y - mean, x.y - mean, (x.x - mean) * (x.x - mean));
      const float last = fmaf(x.w - mean, x.w - mean, (x.z - mean) * (x.z - mean));
      squares += first + last;
    });
    const float scale = 1.0f / sqrtf(fmaf(warp_sum(squares), kShare, epsilon));
    Row::each(lane, [&](int i, int at) {
      const float4 x = number(i, at), w = norm.weights(i, at), b = norm.biases(i, at);
      take(at, float4{fmaf((x.x - mean) * scale, w.x, b.x), fmaf((x.y - mean) * scale, w.y, b.y), fmaf((x.z - mean) * scale, w.z, b.z),
                      fmaf((x.w - mean) * scale, w.w, b.w)});
    });
  } else {
    float held[Row::kHeld ? Row::kSteps : 1];
    const auto number = [&](int i, int at) { return Row::kHeld ? held[i] : read_x(at); };
    float sum = 0, squares = 0;
    Row::each(lane, [&](int i, int at) {
      const float x = read_x(at);
      if constexpr (Row::kHeld) held[i] = x;
      sum += x;
    });
    const float mean = warp_sum(sum) * kShare;
    Row::each(lane, [&](int i, int at) {
      const float x = number(i, at) - mean;
      squares = fmaf(x, x, squares);
    });
    const float scale = 1.0f / sqrtf(fmaf(warp_sum(squares), kShare, epsilon));
    Row::each(lane, [&](int i, int at) {
      take(at, fmaf((number(i, at) - mean) * scale, read<Element>(norm.from_weight, at), read<Element>(norm.from_bias, at)));
    });
  }
}

template <int kIn>
__device__ __forceinline__ auto reader_of(const float* x) {
  return [x](int at) {
    if constexpr (RowOfWarp<kIn>::kStep == 4)
      return *reinterpret_cast<const float4*>(x + at);
    else
      return x[at];
  };
}

template <class Element>
__device__ __forceinline__ void put(void* y, long long at, float4 x) {
  write4<Element>(y, at, x);
}
template <class Element>
__device__ __forceinline__ void put(void* y, long long at, float x) {
  write<Element>(y, at, x);
}

// The kernel: a warp a row.
template <class Spec>
__device__ __forceinline__ void norm(const NormParams& p) {
  using Element = typename Spec::Element;
  using Row = RowOfWarp<Spec::kIn>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(blockIdx.x) * (kOpsThreads / 32) + static_cast<int>(threadIdx.x) / 32;
  if constexpr (Spec::kDependent) {
    ptx::let_kernel_after_come_up();
    ptx::wait_for_kernel_before();
  }
  if (row >= p.rows) return;
  float* x = p.x + static_cast<long long>(p.select ? p.select[row] : row) * Spec::kIn;
  if constexpr (Spec::kAdd) {
    const long long begin = static_cast<long long>(row) * Spec::kIn;
    Row::each(lane, [&](int, int at) {
      if constexpr (Row::kStep == 4) {
        const float4 a = *reinterpret_cast<const float4*>(x + at), d = read4<Element>(p.delta, begin + at);
        *reinterpret_cast<float4*>(x + at) = float4{a.x + d.x, a.y + d.y, a.z + d.z, a.w + d.w};
      } else {
        x[at] += read<Element>(p.delta, begin + at);
      }
    });
  }
  normalise_row<Element, Spec::kIn>(lane, p.epsilon, NormWeights<Element, Spec::kIn, false>(lane, p.weight, p.bias), reader_of<Spec::kIn>(x),
                                    [&](int at, auto y) { put<Element>(p.y, static_cast<long long>(row) * Spec::kIn + at, y); });
}

}  // namespace fattn::ops
