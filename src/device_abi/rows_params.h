// What the kernels of merge and rotary embeddings are told. Passed by value; include-free, used by the host too.
#pragma once

namespace fattn {

inline constexpr int kRowsThreads = 256;  // of a CTA
inline constexpr int kMergeParts = 24;    // as many as parameters have room for

// Elements between batch entries, rows and heads.
struct RowPlaces {
  long long batch, row, head;
};
// dtype: 1 fp32, 2 fp16, 3 bf16, as in fattn.h.
struct RowNumbers {
  void* data;  // null: there are none
  RowPlaces places;
  long long dtype;
};
struct RowLse {
  void* data;  // null: there are none
  RowPlaces places;
  long long wide;  // they are fp64, else fp32
};

struct MergePartParams {
  RowNumbers o;
  RowLse lse;
};
struct MergeParams {
  MergePartParams merged;  // outputs
  long long rows, seqlen, heads;
  int headdim, nparts;
  MergePartParams parts[kMergeParts];
};
struct MergeBackwardParams {
  RowNumbers dout;
  RowLse dlse;
  long long rows, seqlen, heads;
  int headdim, nparts, want_dlse;
  MergePartParams parts[kMergeParts];
  MergePartParams gradients[kMergeParts];  // outputs
};
static_assert(sizeof(MergeBackwardParams) <= 4096);  // what a kernel may be told

struct RotaryRowParams {
  RowNumbers x, y, cos, sin;  // of cos and sin `row` alone
  const int* cu_seqlens;      // null: x is not packed
  const void* offsets;        // null: `offset`
  long long cu_seqlens_stride, offsets_stride, offset;
  long long seqlen, heads, positions;
  int headdim, half, sequences, wide_offsets, interleaved, inverse;
};

}  // namespace fattn
