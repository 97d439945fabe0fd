// The two passes of algorithm standard, E being the tensors' element (float, Half, Brain). Internal to backend/standard.
#pragma once

#include "backend/standard/layout.h"
#include "cpu/openblas.h"
#include "plan/plan.h"

namespace fattn::core {

// A tensor without elements may be null.
template <class T, class Void>
T* at_offset(Void* tensor, int64_t offset) {
  return tensor ? static_cast<T*>(tensor) + offset : nullptr;
}

// Of an output of the problem, whose element may be wider than E.
inline void* output_at(const Problem& p, void* tensor, int64_t offset) {
  return at_offset<char>(tensor, offset * static_cast<int64_t>(size_of(p.out_dtype())));
}

struct StandardCall {
  const Problem& p;
  const fattn_buffers& buffers;
  const Layout& at;
  const OpenBlas& blas;

  // The (seqlen_q, seqlen_k) matrix of a query head, at `offset` (Layout::weights or Layout::dscores).
  template <class E>
  E* head_matrix(size_t offset, int64_t b, int64_t h) const {
    return reinterpret_cast<E*>(static_cast<char*>(buffers.workspace) + offset) + (b * p.nheads + h) * p.seqlen_q * p.seqlen_k;
  }
  float* scratch(int worker) const {
    return reinterpret_cast<float*>(static_cast<char*>(buffers.workspace) + at.scratch + static_cast<size_t>(worker) * at.scratch_stride);
  }
};

// Task in [0, Layout::row_tasks): o, lse and weights of a block of rows.
template <class E>
void standard_forward_rows(const StandardCall& call, int64_t task, float* scratch);

// Task in [0, Layout::row_tasks): the matrices p and ds, and dq, of a block of rows.
template <class E>
void standard_backward_rows(const StandardCall& call, int64_t task, float* scratch);

// Task in [0, Layout::key_tasks), after all of the rows: dk and dv of a block of keys.
template <class E>
void standard_backward_keys(const StandardCall& call, int64_t task, float* scratch);

}  // namespace fattn::core
