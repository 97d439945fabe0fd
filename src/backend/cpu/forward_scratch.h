// What a task of the forward kernel (forward.h) has in memory beside its tensors.
#pragma once

#include "backend/cpu/dropout_words.h"
#include "backend/cpu/pages.h"

namespace fattn::core::FATTN_ISA {

// The state of one tile of query rows: Q^T, O^T and the running row maximum and sum.
template <class Ops>
struct ForwardTile {
  typename Ops::Element* q;  // [elements(headdim)][kTile], by lane_offset
  float* o;                  // [headdim_v][kTile], likewise
  float *largest, *sum;      // [kTile]
};

template <class T, class Ops>
struct ForwardScratch {
  using Element = typename Ops::Element;
  ForwardTile<Ops> tiles[16];
  Element *k, *v;    // K and V of a block, where they need a buffer
  float* scores;     // S^T of a panel; P^T replaces it for fp32 products
  Element* weights;  // P^T of a panel
  uint32_t* words;   // which pairs a mask shows; which of P^T stay
  // Where V holds an Inf or NaN at a pair that a mask hides: V in two parts (nonfinite.h), as T and where they need a buffer, and of a panel what is
  // hidden, the kinds of pairs, and sums of codes.
  T *finite_rows, *code_rows;
  T *paged_k, *paged_v;  // rows of a block that lie in several pages
  Element *finite, *codes, *kinds;
  float *hidden, *sums;
  uint32_t* marks;  // of codes

  static constexpr int64_t kMaxTiles = 16;
  // Lays the pieces out from base; returns the bytes used.
  size_t lay_out(char* base, int64_t rows, int64_t block_k, int headdim, int headdim_v, bool inputs, bool paged) {
    Scratch s{base};
    const int64_t n = (rows + kTile - 1) / kTile;
    for (int64_t t = 0; t < n && t < kMaxTiles; ++t) {
      tiles[t].q = s.take<Element>(elements<Ops>(headdim) * kTile);
      tiles[t].o = s.take<float>(static_cast<int64_t>(headdim_v) * kTile);
      tiles[t].largest = s.take<float>(kTile);
      tiles[t].sum = s.take<float>(kTile);
    }
    k = s.take<Element>(Operand<T, Ops>::row_buffer(block_k, headdim));
    v = s.take<Element>(Operand<T, Ops>::column_buffer(block_k, headdim_v));
    scores = s.take<float>(block_k * kPanel);
    weights = Ops::kPair == 1 ? reinterpret_cast<Element*>(scores) : s.take<Element>(elements<Ops>(block_k) * kPanel);
    words = s.take<uint32_t>(inputs ? dropout_rows(block_k) * kPanel : 0);
    finite_rows = s.take<T>(block_k * headdim_v);
    code_rows = s.take<T>(block_k * headdim_v);
    finite = s.take<Element>(Operand<T, Ops>::column_buffer(block_k, headdim_v));
    codes = s.take<Element>(Operand<T, Ops>::column_buffer(block_k, headdim_v));
    kinds = s.take<Element>(elements<Ops>(block_k) * kPanel);
    hidden = s.take<float>(block_k * kPanel);
    sums = s.take<float>(headdim_v * kPanel);
    marks = s.take<uint32_t>(elements<Ops>(block_k));
    paged_k = s.take<T>(paged ? block_k * copy_stride(headdim) : 0);
    paged_v = s.take<T>(paged ? block_k * copy_stride(headdim_v) : 0);
    return s.used;
  }
};

}  // namespace fattn::core::FATTN_ISA
