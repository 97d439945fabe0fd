// Dropout of a matrix: which elements stay is what attention's dropout says of query = row and key = column (src/device_abi/dropout.h).
#pragma once

#include "device_abi/dropout.h"
#include "device_abi/ops_params.h"
#include "device_abi/training_params.h"
#include "kernels/ops/begin.h"

namespace fattn::ops {

// Of a word of random bits a thread makes two rows, 8 apart, and of each 8 pairs of neighbours, 8 columns apart. A warp has 16 rows and 64 columns.
// Rows whose place is elsewhere have a word each.
inline constexpr int kDropoutRows = 16, kDropoutColumns = core::kDropoutBlock;

// Spec: kDependent. A warp a tile.
template <class Spec>
__device__ __forceinline__ void dropout(const DropoutParams& p) {
  begin_kernel<Spec::kDependent>();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const long long strips = (p.width + kDropoutColumns - 1) / kDropoutColumns;
  const long long tile = static_cast<long long>(blockIdx.x) * (kOpsThreads / 32) + threadIdx.x / 32;
  const long long first_row = tile / strips * kDropoutRows + lane / 4;
  if (first_row >= p.rows) return;
  const auto block = static_cast<unsigned>(tile % strips);
  const unsigned long long seed = p.state ? p.state[0] : p.seed, stream = p.stream + (p.state ? p.state[1] : 0);
  const auto word_of = [&](long long row) {
    return core::dropout_kept(
        core::dropout_planes(seed, stream, core::dropout_query(static_cast<unsigned>(row)), block, static_cast<unsigned>(lane) % 4), p.below);
  };
  unsigned word = p.place ? 0 : word_of(first_row);
  const long long first_column = static_cast<long long>(block) * kDropoutColumns + lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const long long row = first_row + half * 8;
    if (row >= p.rows) break;
    const long long place = p.place ? p.place[row] : row;
    if (p.place) word = word_of(place);
    const unsigned kept = word >> (place & 8);
    const auto result = [&](int n, int odd, float x, float add) { return (kept >> (n + odd * 16) & 1u) != 0 ? fmaf(x, p.scale, add) : add; };
    const long long at = row * p.width + first_column;
    if (p.pairs) {
      constexpr int kAtOnce = 4;
#pragma unroll
      for (int first = 0; first < 8; first += kAtOnce) {
        float2 x[kAtOnce], add[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int n = first + i;
          if (first_column + n * 8 >= p.width) continue;
          x[i] = *reinterpret_cast<const float2*>(p.x + at + n * 8);
          add[i] = p.add ? *reinterpret_cast<const float2*>(p.add + at + n * 8) : float2{0, 0};
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int n = first + i;
          if (first_column + n * 8 >= p.width) continue;
          *reinterpret_cast<float2*>(p.out + at + n * 8) = float2{result(n, 0, x[i].x, add[i].x), result(n, 1, x[i].y, add[i].y)};
        }
      }
    } else {
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd)
          if (first_column + n * 8 + odd < p.width) {
            const long long i = at + n * 8 + odd;
            p.out[i] = result(n, odd, p.x[i], p.add ? p.add[i] : 0.0f);
          }
    }
  }
}

}  // namespace fattn::ops
