// What the v3 backward kernels are told about one call besides AttentionParams and tensor maps. Passed by value; include-free, used by the host too.
#pragma once

namespace fattn {

// Queries are taken in blocks of this many; a block's share of the workspace is whole even if the queries end inside it.
inline constexpr int kV3BackwardRows = 64;
inline constexpr int kV3PrepareThreads = 256, kV3FinishThreads = 128;  // of a CTA, which takes one block of queries of one head

struct V3BackwardWork {
  // Workspace, with AttentionParams::row_sum and dq_accum: (batch, nheads, row_blocks * 64), lse in units of log2; +inf where there is no row, or it
  // has no gradient (device_abi/lowest.h), so that its weights are 0. row_sum has the same shape. dq_accum: (batch * nheads or ring_heads,
  // row_blocks, columns / 8, 128 threads, 4), as the threads of a warpgroup hold a block of 64 rows. Packed sequences have no batch there: a head has
  // the blocks of all, packed_block_of() says where.
  float* lse_log2;
  int* nonfinite;          // flags of each block of queries: what of it is Inf or NaN (kernels/v3/backward_watch.h)
  int looks_at_q;          // whether lse does not tell: with softcap an Inf in q leaves it finite
  int columns, columns_v;  // headdim and headdim_v; the specialisation may be wider
  int row_blocks;          // of queries, of one head
  int key_tiles;           // of one key head
  // Where dq is converted early (kernels/v3/backward_ring.h): query heads that have a place in dq_accum at once, one after another,
  int ring_heads;
  int generation;  // key heads that take their places together,
  int* finished;   // and flags: whether a dq with Inf or NaN was converted by the main kernel; and the CTAs of each generation that are done
};

}  // namespace fattn
