// An append whose tensors fit together: its sizes, and what lists in host memory say of sequences, keys and queries.
#pragma once

#include <array>

#include "rows/lists.h"
#include "rows/rows.h"

namespace fattn::core::rows {

// Keys and queries of the rows of one entry of k and of q; of packed sequences all rows are one entry's.
struct AppendSizes {
  int64_t batch;                  // sequences
  int64_t entries_new, rows_new;  // of k and v
  int64_t entries_q, rows_q;
  int64_t heads_k, heads;
  int64_t cache_entries, cache_rows;  // entries and longest, or pages and page size
  int64_t room;                       // the most keys of a sequence
  int64_t positions;
  int headdim, headdim_v, half;  // half: pairs that turn; 0 without cos

  int64_t all_new() const { return entries_new * rows_new; }
  int64_t all_queries() const { return entries_q * rows_q; }
};

// The tensors of a problem by name, which may be absent.
struct Named {
  const char* name;
  const fattn_tensor* tensor;
};
std::array<Named, 11> inputs_of(const fattn_append_problem& problem);
std::array<Named, 5> outputs_of(const fattn_append_problem& problem);

// Throws Error. All that the lists do not say.
AppendSizes check_append(const fattn_append_problem& problem);
// Throws Error. What the lists say, where the host can read them; else what no list says.
void check_append_values(const fattn_append_problem& problem, const AppendSizes& sizes, bool readable);

// The lists of a problem in host memory.
class AppendLists {
 public:
  AppendLists(const fattn_append_problem& problem, const AppendSizes& sizes) : p_(problem), sizes_(sizes) {}

  int64_t length(int64_t n) const { return p_.cache_seqlens.ndim != 0 ? number_at(p_.cache_seqlens, n) : p_.cache_seqlen; }
  int64_t entry(int64_t n) const { return p_.cache_batch_idx.ndim != 0 ? number_at(p_.cache_batch_idx, n) : n; }
  int64_t page(int64_t n, int64_t column) const {
    const fattn_tensor& t = p_.block_table;
    const int64_t at = n * t.strides[0] + column * t.strides[1];
    return t.dtype == FATTN_I64 ? static_cast<const int64_t*>(t.data)[at] : static_cast<const int32_t*>(t.data)[at];
  }
  int64_t new_keys(int64_t n) const { return count(p_.cu_seqlens_new, n, sizes_.rows_new); }
  int64_t queries(int64_t n) const { return count(p_.cu_seqlens_q, n, sizes_.rows_q); }

  // Of the sequence's first new key, and of its first query.
  int64_t key_position(int64_t n) const { return p_.positions.ndim != 0 ? number_at(p_.positions, n) : length(n); }
  int64_t query_position(int64_t n) const {  // which wraps far behind all positions
    const auto first = static_cast<uint64_t>(key_position(n));
    return p_.q_positions == FATTN_QUERIES_LAST ? static_cast<int64_t>(first + static_cast<uint64_t>(new_keys(n) - queries(n))) : key_position(n);
  }

  // Which sequence a row belongs to, and which of its rows it is. `sequence` is -1 where it belongs to none.
  struct Member {
    int64_t sequence, nth;
  };
  static Member member(const fattn_tensor& cu_seqlens, int64_t entry, int64_t row) {
    if (cu_seqlens.ndim == 0) return {entry, row};
    const int64_t n = sequence_of(cu_seqlens, row);
    if (n == cu_seqlens.shape[0] - 1) return {-1, 0};
    return {n, row - number_at(cu_seqlens, n)};
  }
  // Where the nth new key of a sequence goes.
  Row place(int64_t n, int64_t nth) const {
    const int64_t at = length(n) + nth;
    if (p_.block_table.ndim == 0) return {entry(n), at, 0};
    return {page(n, at / sizes_.cache_rows), at % sizes_.cache_rows, 0};
  }
  int64_t position_of_key(int64_t n, int64_t nth) const { return key_position(n) + nth; }
  int64_t position_of_query(int64_t n, int64_t nth) const { return query_position(n) + (p_.q_positions == FATTN_QUERIES_TOGETHER ? 0 : nth); }

 private:
  static int64_t count(const fattn_tensor& cu_seqlens, int64_t n, int64_t otherwise) {
    return cu_seqlens.ndim != 0 ? number_at(cu_seqlens, n + 1) - number_at(cu_seqlens, n) : otherwise;
  }
  const fattn_append_problem& p_;
  const AppendSizes& sizes_;
};

// Outputs beside the rows: seqused_k and status.
void write_lists(const fattn_append_problem& problem, const AppendSizes& sizes);

namespace reference {
void append(const fattn_append_problem& problem, const AppendSizes& sizes);
}
namespace cpu {
void append(const fattn_append_problem& problem, const AppendSizes& sizes);
}
namespace cuda {
void append(const fattn_append_problem& problem, const AppendSizes& sizes);
}

}  // namespace fattn::core::rows
