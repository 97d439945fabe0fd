// Rotary embeddings: the pairs of the first 2 * half dimensions of each head turn by the angles of the row's position. A CTA a row. A position that
// has no row of cos gives NaN; a row that belongs to none of the packed sequences is copied.
//
// Spec: kUnit, elements that a thread takes at once: 1 pair, or with 4 two neighbours' pairs, or four pairs of the halves.
#pragma once

#include "kernels/constants.h"
#include "kernels/rows/elements.h"

namespace fattn::rows {

// Which of the packed sequences a row belongs to: the first that ends behind it. p.sequences: none.
__device__ __forceinline__ int sequence_of(const RotaryRowParams& p, long long row) {
  int low = 0, high = p.sequences;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (p.cu_seqlens[(middle + 1) * p.cu_seqlens_stride] > row)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

// Rows of cos from this one on.
struct Position {
  long long at;
  bool none, bad;
};
__device__ __forceinline__ Position position_of(const RotaryRowParams& p, long long batch, long long row) {
  long long sequence = batch, place = row;
  if (p.cu_seqlens != nullptr) {
    sequence = sequence_of(p, row);
    if (sequence == p.sequences) return {0, true, false};
    place = row - p.cu_seqlens[sequence * p.cu_seqlens_stride];
  }
  long long offset = p.offset;
  if (p.offsets != nullptr) {
    const long long i = sequence * p.offsets_stride;
    offset = p.wide_offsets != 0 ? static_cast<const long long*>(p.offsets)[i] : static_cast<const int*>(p.offsets)[i];
  }
  const bool bad = place < 0 || offset < 0 || offset >= p.positions || place >= p.positions - offset;
  return {bad ? 0 : offset + place, false, bad};
}

__device__ __forceinline__ void turn(float& a, float& b, float cos, float sin) {
  const float first = a * cos - b * sin;
  b = a * sin + b * cos;
  a = first;
}

struct Angle {
  float cos, sin;
};
__device__ __forceinline__ Angle angle_of(const RotaryRowParams& p, const Position& position, int d) {
  if (position.bad) return {kNan, kNan};
  float cos[1], sin[1];
  load<1>(p.cos, position.at * p.cos.places.row + d, cos);
  load<1>(p.sin, position.at * p.sin.places.row + d, sin);
  return {cos[0], p.inverse != 0 ? -sin[0] : sin[0]};
}

template <class Spec>
__device__ __forceinline__ void rotary(const RotaryRowParams& p) {
  constexpr int kUnit = Spec::kUnit;
  const Row row{static_cast<long long>(blockIdx.x) / p.seqlen, static_cast<long long>(blockIdx.x) % p.seqlen, 0};
  const Position position = position_of(p, row.batch, row.row);
  const long long x = offset_of(p.x.places, row), y = offset_of(p.y.places, row);
  const int turned = position.none ? 0 : p.half;
  const int units = p.interleaved != 0 && kUnit == 4 ? turned / 2 : turned / kUnit;  // of a head
  for (long long i = threadIdx.x; i < p.heads * units; i += kRowsThreads) {
    const long long head = i / units;
    const int unit = static_cast<int>(i % units);
    const long long from = x + head * p.x.places.head, to = y + head * p.y.places.head;
    if (p.interleaved != 0) {
      if constexpr (kUnit == 4) {
        float four[4];
        load<4>(p.x, from + unit * 4, four);
        const Angle one = angle_of(p, position, unit * 2), other = angle_of(p, position, unit * 2 + 1);
        turn(four[0], four[1], one.cos, one.sin);
        turn(four[2], four[3], other.cos, other.sin);
        store<4>(p.y, to + unit * 4, four);
        continue;
      }
    }
    const long long first = p.interleaved != 0 ? unit * 2 : unit * kUnit, second = p.interleaved != 0 ? first + 1 : first + p.half;
    float a[kUnit], b[kUnit];
    load<kUnit>(p.x, from + first, a);
    load<kUnit>(p.x, from + second, b);
#pragma unroll
    for (int k = 0; k < kUnit; ++k) {
      const Angle angle = angle_of(p, position, unit * kUnit + k);
      turn(a[k], b[k], angle.cos, angle.sin);
    }
    store<kUnit>(p.y, to + first, a);
    store<kUnit>(p.y, to + second, b);
  }
  const int rest = p.headdim - 2 * turned;
  if (rest == 0 || p.x.data == p.y.data) return;
  for (long long i = threadIdx.x; i < p.heads * rest; i += kRowsThreads) {
    const long long head = i / rest, column = 2 * turned + i % rest;
    const long long from = x + head * p.x.places.head + column, to = y + head * p.y.places.head + column;
    if (p.x.dtype == kF32)
      static_cast<float*>(p.y.data)[to] = static_cast<const float*>(p.x.data)[from];
    else
      static_cast<unsigned short*>(p.y.data)[to] = static_cast<const unsigned short*>(p.x.data)[from];
  }
}

}  // namespace fattn::rows
