// How algorithm standard splits a problem into blocks, and where things lie in its workspace.
#pragma once

#include <cstddef>
#include <cstdint>

#include "problem/problem.h"

namespace fattn::core {

constexpr int64_t kMostOutputs = 128;  // rows or keys of a task

struct Layout {
  // A task is a block of rows of one query head, or (backward) a block of keys of one key head. Inside it the products
  // go over tiles of keys, or of rows.
  int64_t block_q = 0, block_k = 0, tile_q = 0, tile_k = 0;
  int64_t row_tasks = 0, key_tasks = 0;
  int workers = 0;

  // Bytes from the start of the workspace. The matrices are (batch, nheads, seqlen_q, seqlen_k), contiguous.
  size_t weights = 0;  // scores, then softmax weights
  size_t dscores = 0;  // backward
  size_t scratch = 0;  // workers' scratch, one after the other
  size_t scratch_stride = 0;
  size_t total = 0;

  // Floats from the start of a worker's scratch: fp32 copies of tensors that BLAS cannot read or write where they are
  // (16-bit ones; fp32 ones with strides that BLAS does not know), or of tiles with Inf and NaN, and rows.
  size_t block[2] = {};   // (block, headdim): q, dout
  size_t tile[2] = {};    // (tile, headdim): k, v; q, dout
  size_t scores[2] = {};  // (block, tile) of the two matrices
  size_t output[2] = {};  // (block, headdim): o; dq; dk, dv
  size_t score_row = 0;   // (seqlen_k)
  size_t row_values = 0;  // (block_q): lse forward, delta backward
  size_t line = 0;        // (headdim)
};

// Throws Error(kOutOfMemory) if the workspace exceeds 2^63 - 1 bytes.
Layout layout_of(const Problem& problem, int threads);

// Can BLAS use these fp32 rows where they are? Its leading dimension is a 32-bit integer, at least the width.
bool blas_can_use(int64_t stride, int64_t rows, int64_t width);

}  // namespace fattn::core
