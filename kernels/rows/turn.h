// A row of heads from one tensor to another, of a dtype of its own: the pairs of the first 2 * half dimensions turn on the way.
#pragma once

#include "kernels/constants.h"
#include "kernels/rows/elements.h"

namespace fattn::rows {

// A row of cos and sin. `none`: nothing turns; `bad`: there is no such row, and what turns is NaN.
struct Position {
  long long at;
  bool none, bad;
};

__device__ __forceinline__ void turn(float& a, float& b, float cos, float sin) {
  const float first = a * cos - b * sin;
  b = a * sin + b * cos;
  a = first;
}

struct Angle {
  float cos, sin;
};
__device__ __forceinline__ Angle angle_of(const RowAngles& angles, const Position& position, int d) {
  if (position.bad) return {kNan, kNan};
  float cos[1], sin[1];
  load<1>(angles.cos, position.at * angles.cos.places.row + d, cos);
  load<1>(angles.sin, position.at * angles.sin.places.row + d, sin);
  return {cos[0], angles.inverse != 0 ? -sin[0] : sin[0]};
}

// The first head of a row, in elements, and how many there are; their elements are fewer than 2^31, because divisions of 64 bits take several times
// as long as others.
struct RowOfHeads {
  long long from, to;
  unsigned heads;
};

template <int kUnit>
__device__ __forceinline__ void turn_heads(const RowNumbers& x, const RowNumbers& y, const RowOfHeads& row, const RowAngles& angles,
                                           const Position& position) {
  const unsigned half = static_cast<unsigned>(angles.half), units = angles.interleaved != 0 && kUnit == 4 ? half / 2 : half / kUnit;  // of a head
  for (unsigned i = threadIdx.x; i < row.heads * units; i += kRowsThreads) {
    const long long head = i / units;
    const int unit = static_cast<int>(i % units);
    const long long from = row.from + head * x.places.head, to = row.to + head * y.places.head;
    if (angles.interleaved != 0) {
      if constexpr (kUnit == 4) {
        float four[4];
        load<4>(x, from + unit * 4, four);
        const Angle one = angle_of(angles, position, unit * 2), other = angle_of(angles, position, unit * 2 + 1);
        turn(four[0], four[1], one.cos, one.sin);
        turn(four[2], four[3], other.cos, other.sin);
        store<4>(y, to + unit * 4, four);
        continue;
      }
    }
    const long long first = angles.interleaved != 0 ? unit * 2 : unit * kUnit, second = angles.interleaved != 0 ? first + 1 : first + angles.half;
    float a[kUnit], b[kUnit];
    load<kUnit>(x, from + first, a);
    load<kUnit>(x, from + second, b);
#pragma unroll
    for (int k = 0; k < kUnit; ++k) {
      const Angle angle = angle_of(angles, position, unit * kUnit + k);
      turn(a[k], b[k], angle.cos, angle.sin);
    }
    store<kUnit>(y, to + first, a);
    store<kUnit>(y, to + second, b);
  }
}

// Columns from `first` on, which keep their bits where both dtypes are one.
template <int kUnit>
__device__ __forceinline__ void copy_heads(const RowNumbers& x, const RowNumbers& y, const RowOfHeads& row, int first, int headdim) {
  const unsigned units = static_cast<unsigned>(headdim - first) / kUnit;
  for (unsigned i = threadIdx.x; i < row.heads * units; i += kRowsThreads) {
    const long long head = i / units, column = first + static_cast<int>(i % units * kUnit);
    const long long from = row.from + head * x.places.head + column, to = row.to + head * y.places.head + column;
    if (x.dtype == y.dtype)
      copy<kUnit>(x, from, y, to);
    else {
      float numbers[kUnit];
      load<kUnit>(x, from, numbers);
      store<kUnit>(y, to, numbers);
    }
  }
}

template <int kUnit>
__device__ __forceinline__ void move_heads(const RowNumbers& x, const RowNumbers& y, const RowOfHeads& row, int headdim, const RowAngles& angles,
                                           const Position& position) {
  const int turned = position.none ? 0 : 2 * angles.half;
  if (!position.none) turn_heads<kUnit>(x, y, row, angles, position);
  if (turned == headdim || x.data == y.data) return;
  if (headdim % kUnit == 0)  // as `turned` is
    copy_heads<kUnit>(x, y, row, turned, headdim);
  else
    copy_heads<1>(x, y, row, turned, headdim);
}

}  // namespace fattn::rows
