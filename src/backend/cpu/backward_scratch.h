// What a task of the backward kernel (backward.h) has in memory beside its tensors.
#pragma once

#include "backend/cpu/dropout_words.h"

namespace fattn::core::FATTN_ISA {

// A block of scores and what becomes of them.
template <class Ops>
struct BlockScratch {
  using Element = typename Ops::Element;
  float *s, *ds;                  // [block_k][kTile]; P and dS replace S^T and dP^T
  Element *p_rows, *ds_rows;      // bf16 products: P^T and dS^T with pairs along the queries
  Element* ds_columns;            // bf16 products: dS^T with pairs along the keys
  float *terms, *score_gradient;  // [block_k][kTile]: what is added to capped scores; the gradient of that, where dS is not it
  uint32_t* words;                // which pairs a mask shows, then which weights stay
};

template <class T, class Ops>
struct BackwardScratch : BlockScratch<Ops> {
  using Element = typename Ops::Element;
  using Block = BlockScratch<Ops>;
  using Block::s, Block::ds, Block::p_rows, Block::ds_rows, Block::ds_columns, Block::terms, Block::score_gradient, Block::words;
  Element *k_rows, *v_rows, *k_columns;  // K and V of the task's keys, where they need a buffer
  float *dk, *dv;                        // [task_k][headdim rounded up]
  Element *q_lanes, *dout_lanes;         // [elements(headdim)][kTile], by lane_offset: operands of S^T and dP^T
  Element *q_columns, *dout_columns;     // [elements(kTile)][copy_stride(headdim)]: operands of dK and dV
  float* dq;                             // [headdim][kTile], by lane_offset
  // Where an operand holds an Inf or NaN at a pair that does not count, its two parts (nonfinite.h): rows as T, and as what they stand for.
  T *finite_rows, *code_rows;
  Element *q_finite, *q_codes, *dout_finite, *dout_codes, *k_finite, *k_codes;
  Element *kinds_rows, *kinds_columns;  // as p_rows and ds_columns
  float *hidden, *sums;                 // [block_k][kTile]: -Inf where a pair does not count; of codes

  size_t lay_out(char* base, int64_t task_k, int64_t block_k, int headdim, int headdim_v, bool inputs) {
    Scratch a{base};
    const int64_t width = round_up(headdim, kLanes), width_v = round_up(headdim_v, kLanes);
    k_rows = a.take<Element>(Operand<T, Ops>::row_buffer(task_k, headdim));
    v_rows = a.take<Element>(Operand<T, Ops>::row_buffer(task_k, headdim_v));
    k_columns = a.take<Element>(Ops::kPair == 1 ? 0 : Operand<T, Ops>::column_buffer(task_k, headdim));  // fp32: as k_rows
    dk = a.take<float>(task_k * width);
    dv = a.take<float>(task_k * width_v);
    q_lanes = a.take<Element>(elements<Ops>(headdim) * kTile);
    dout_lanes = a.take<Element>(elements<Ops>(headdim_v) * kTile);
    q_columns = a.take<Element>(elements<Ops>(kTile) * copy_stride(headdim));
    dout_columns = a.take<Element>(elements<Ops>(kTile) * copy_stride(headdim_v));
    dq = a.take<float>(static_cast<int64_t>(headdim) * kTile);
    const int64_t wide = headdim > headdim_v ? headdim : headdim_v, long_side = block_k > kTile ? block_k : kTile;
    finite_rows = a.take<T>(long_side * wide);
    code_rows = a.take<T>(long_side * wide);
    q_finite = a.take<Element>(elements<Ops>(kTile) * copy_stride(headdim));
    q_codes = a.take<Element>(elements<Ops>(kTile) * copy_stride(headdim));
    dout_finite = a.take<Element>(elements<Ops>(kTile) * copy_stride(headdim_v));
    dout_codes = a.take<Element>(elements<Ops>(kTile) * copy_stride(headdim_v));
    k_finite = a.take<Element>(elements<Ops>(block_k) * copy_stride(headdim));
    k_codes = a.take<Element>(elements<Ops>(block_k) * copy_stride(headdim));
    kinds_rows = a.take<Element>(block_k * elements<Ops>(kTile));
    kinds_columns = a.take<Element>(Ops::kPair == 1 ? 0 : elements<Ops>(block_k) * kTile);
    if (Ops::kPair == 1) kinds_columns = kinds_rows;
    hidden = a.take<float>(block_k * kTile);
    sums = a.take<float>(long_side * round_up(wide, kLanes));
    s = a.take<float>(block_k * kTile);
    ds = a.take<float>(block_k * kTile);
    if constexpr (Ops::kPair == 1) {
      p_rows = s;
      ds_rows = ds_columns = ds;
    } else {
      p_rows = a.take<Element>(block_k * elements<Ops>(kTile));
      ds_rows = a.take<Element>(block_k * elements<Ops>(kTile));
      ds_columns = a.take<Element>(elements<Ops>(block_k) * kTile);
    }
    const int64_t tile = inputs ? block_k * kTile : 0;
    terms = a.take<float>(tile);
    score_gradient = a.take<float>(tile);
    words = a.take<uint32_t>(inputs ? dropout_rows(block_k) * kTile : 0);
    return a.used;
  }
};

}  // namespace fattn::core::FATTN_ISA
