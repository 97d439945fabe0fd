// Rotary embeddings: the pairs of the first 2 * half dimensions of each head turn by the angles of the row's position. A CTA a row. A position that
// has no row of cos gives NaN; a row that belongs to none of the packed sequences is copied.
//
// Spec: kUnit, elements that a thread takes at once: 1 pair, or with 4 two neighbours' pairs, or four pairs of the halves.
#pragma once

#include "kernels/rows/turn.h"

namespace fattn::rows {

__device__ __forceinline__ Position position_of(const RotaryRowParams& p, long long batch, long long row) {
  long long sequence = batch, place = row;
  if (p.cu_seqlens != nullptr) {
    sequence = sequence_of(p.cu_seqlens, p.cu_seqlens_stride, p.sequences, row);
    if (sequence == p.sequences) return {0, true, false};
    place = row - p.cu_seqlens[sequence * p.cu_seqlens_stride];
  }
  long long offset = p.offset;
  if (p.offsets != nullptr) {
    const long long i = sequence * p.offsets_stride;
    offset = p.wide_offsets != 0 ? static_cast<const long long*>(p.offsets)[i] : static_cast<const int*>(p.offsets)[i];
  }
  const bool bad = place < 0 || offset < 0 || offset >= p.angles.positions || place >= p.angles.positions - offset;
  return {bad ? 0 : offset + place, false, bad};
}

template <class Spec>
__device__ __forceinline__ void rotary(const RotaryRowParams& p) {
  const auto seqlen = static_cast<unsigned>(p.seqlen);  // below 2^31, as CTAs are
  const Row row{blockIdx.x / seqlen, blockIdx.x % seqlen, 0};
  move_heads<Spec::kUnit>(p.x, p.y, {offset_of(p.x.places, row), offset_of(p.y.places, row), static_cast<unsigned>(p.heads)}, p.headdim, p.angles,
                          position_of(p, row.batch, row.row));
}

}  // namespace fattn::rows
