// Which rows and which share of the keys a CTA has.
#pragma once

#include "device_abi/attention_params.h"
#include "device_abi/decode_work.h"
#include "kernels/decode/shape.h"

namespace fattn::decode {

// What a CTA computes at a time. Neighbours have the same keys of other heads, which lie side by side in memory.
struct Place {
  int batch, head_k, split, splits;
  int first_row, rows;  // of the key head's rows
};

// Whether sequences are shared by their lengths (shares.h). `split` of the place that place_of() gives is the CTA then, of those of a key head.
template <class Spec>
inline constexpr bool kShares = requires {
  Spec::kShares;
};

template <class Spec>
__device__ __forceinline__ Place place_of(const AttentionParams& p, const DecodeWork& work) {
  int index = static_cast<int>(blockIdx.x);
  Place place;
  place.head_k = index % p.nheads_k;
  index /= p.nheads_k;
  place.first_row = index % work.row_tiles * Shape<Spec>::kRows;
  index /= work.row_tiles;
  place.split = index % work.splits;
  place.splits = work.splits;
  place.batch = index / work.splits;
  place.rows = min(Shape<Spec>::kRows, work.rows - place.first_row);
  return place;
}

// The first element of row `row` of the key head's, in q, o or lse.
__device__ __forceinline__ long long row_offset(const AttentionParams& p, const TensorStrides& strides, int batch, int head_k, int row) {
  const int query = row / p.group, head = head_k * p.group + row % p.group;
  return batch * strides.batch + query * strides.row + head * strides.head;
}

}  // namespace fattn::decode
