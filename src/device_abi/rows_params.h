// What the kernels of merge, rotary embeddings and append are told. Passed by value; include-free, used by the host too.
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

// By what the first 2 * half dimensions of a head turn. Of cos and sin `row` alone is a stride.
struct RowAngles {
  RowNumbers cos, sin;
  long long positions;
  int half, interleaved, inverse;
};
struct RotaryRowParams {
  RowNumbers x, y;
  RowAngles angles;
  const int* cu_seqlens;  // null: x is not packed
  const void* offsets;    // null: `offset`
  long long cu_seqlens_stride, offsets_stride, offset;
  long long seqlen, heads;
  int headdim, sequences, wide_offsets;
};

// A number for each sequence.
struct RowList {
  const void* data;  // null: there are none
  long long stride;
  long long wide;  // they are int64, else int32
};
// Rows of one entry of a tensor, of packed sequences all.
struct AppendRows {
  const int* cu_seqlens;  // null: an entry is a sequence
  long long cu_seqlens_stride;
  long long rows, all;  // of an entry; of all
  long long heads;
};
struct AppendParams {
  RowNumbers k, v, q;
  RowNumbers k_cache, v_cache, q_out;  // outputs; `batch` of the caches: entries, or pages
  RowAngles angles;
  AppendRows of_new, of_q;
  RowList lengths, entries, positions;
  RowList table;  // `stride`: between sequences. Without it `entries`
  long long table_column_stride;
  long long length;  // without `lengths`
  long long batch, cache_entries, cache_rows, room;
  int* seqused_k;  // output; null: there is none
  int* status;     // likewise
  long long seqused_k_stride, status_stride;
  int headdim, headdim_v, turns, queries_last, queries_together;
  int paged;  // there is a table, which may be without columns and memory
};
static_assert(sizeof(AppendParams) <= 4096);

}  // namespace fattn
