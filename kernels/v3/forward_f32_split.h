// Before v3's forward pass in fp32: k and v are split into two fp16 (tile/split_tile.h), x * factor = high + low, once for all tiles of queries. A CTA
// takes a block of 64 keys of k or of v; shared/v3_f32_parts.h has the layout.
#pragma once

#include "kernels/ptx/dependent_launch.h"
#include "kernels/ptx/reduce_warp.h"
#include "kernels/tile/split_tile.h"
#include "shared/attention_params.h"
#include "shared/v3_f32_parts.h"

namespace fattn::v3 {

// Of the CTA's threads. `x`: not negative.
__device__ __forceinline__ float greatest_of_cta(float x) {
  constexpr int kWarps = kV3F32SplitThreads / 32;
  __shared__ float of_warp[kWarps];
  x = ptx::warp_max_nonnegative(x);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWarps; ++i) x = fmaxf(x, of_warp[i]);
  return x;
}

// The block of `rows` (or more than a block) rows at `source`. A thread takes units of 8 columns, a warp whole rows.
template <int kHeaddim, bool kAligned>
__device__ __forceinline__ void split_block(const float* source, long long row_stride, int rows, unsigned char* to, V3F32Factor* factor) {
  constexpr int kUnits = v3_f32_width(kHeaddim) / 8;  // of a row
  constexpr int kPasses = kV3F32Block * kUnits / kV3F32SplitThreads;
  static_assert(kPasses * kV3F32SplitThreads == kV3F32Block * kUnits);
  const int thread = static_cast<int>(threadIdx.x), unit = thread % kUnits;
  uint4 x[kPasses][2];
  float greatest = 0;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row = pass * (kV3F32SplitThreads / kUnits) + thread / kUnits;
    const float* from = source + row * row_stride + unit * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (kAligned) {
        const bool inside = row < rows && unit * 8 + half * 4 < kHeaddim;
        x[pass][half] = inside ? *reinterpret_cast<const uint4*>(from + 4 * half) : uint4{0, 0, 0, 0};
      } else {
        unsigned word[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const bool inside = row < rows && unit * 8 + half * 4 + e < kHeaddim;
          word[e] = inside ? __float_as_uint(from[4 * half + e]) : 0;
        }
        x[pass][half] = {word[0], word[1], word[2], word[3]};
      }
    }
  }
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) greatest = fmaxf(greatest, tile::greatest_of(x[pass][0], x[pass][1]));
  const tile::SplitFactor of_block(greatest_of_cta(greatest));
  if (thread == 0) *factor = {of_block.inverse, {0, 0, 0}};
  constexpr int kColumnBytes = kV3F32Block * 128, kTileBytes = v3_f32_block_bytes(kHeaddim) / 2;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row = pass * (kV3F32SplitThreads / kUnits) + thread / kUnits;
    const auto scaled = [&](unsigned bits) { return __uint_as_float(bits) * of_block.factor; };
    const uint4 a = x[pass][0], b = x[pass][1];
    uint4 high, low;
    tile::split2(scaled(a.x), scaled(a.y), high.x, low.x);
    tile::split2(scaled(a.z), scaled(a.w), high.y, low.y);
    tile::split2(scaled(b.x), scaled(b.y), high.z, low.z);
    tile::split2(scaled(b.z), scaled(b.w), high.w, low.w);
    unsigned char* const place = to + unit / 8 * kColumnBytes + row * 128 + ((unit % 8) ^ (row % 8)) * 16;
    *reinterpret_cast<uint4*>(place) = high;
    *reinterpret_cast<uint4*>(place + kTileBytes) = low;
  }
}

// The grid: blocks of k, then as many of v.
template <int kHeaddim, int kHeaddimV, bool kAligned>
__device__ __forceinline__ void split_keys_and_values(const AttentionParams& p, const V3F32Parts& parts) {
  ptx::let_kernel_after_come_up();
  const int of_each = p.batch * p.nheads_k * parts.blocks, index = static_cast<int>(blockIdx.x);
  const bool is_v = index >= of_each;
  const int number = is_v ? index - of_each : index, nth = number / parts.blocks, first = (number - nth * parts.blocks) * kV3F32Block;
  const int batch = nth / p.nheads_k, head = nth - batch * p.nheads_k;
  const TensorStrides& strides = is_v ? p.v_strides : p.k_strides;
  const float* const source = static_cast<const float*>(is_v ? p.v : p.k) + batch * strides.batch + head * strides.head + first * strides.row;
  const long long at = number;
  if (is_v)
    split_block<kHeaddimV, kAligned>(source, strides.row, p.seqlen_k - first, parts.v + at * v3_f32_block_bytes(kHeaddimV), parts.v_factors + at);
  else
    split_block<kHeaddim, kAligned>(source, strides.row, p.seqlen_k - first, parts.k + at * v3_f32_block_bytes(kHeaddim), parts.k_factors + at);
}

}  // namespace fattn::v3
