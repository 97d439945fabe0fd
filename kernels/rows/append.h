// New keys and values go into a cache behind what is there, keys and queries turned to their positions: two CTAs a row of new keys and values, one a
// row of queries, and one for what lists say if that is asked for. Nothing is written by a number that is out of range.
//
// Spec: kUnit, as of rotary embeddings; kDependent, if there: the kernel comes up while the one before it ends, and the one after it while it runs.
#pragma once

#include "kernels/ptx/dependent_launch.h"
#include "kernels/ptx/warp.h"
#include "kernels/rows/turn.h"

namespace fattn::rows {

__device__ __forceinline__ long long number_at(const RowList& list, long long i, long long otherwise) {
  if (list.data == nullptr) return otherwise;
  return list.wide != 0 ? static_cast<const long long*>(list.data)[i * list.stride] : static_cast<const int*>(list.data)[i * list.stride];
}

// A sequence's rows of packed ones, or of its entry. `bad`: its list is out of range, or gives some of them to another sequence.
struct OwnRows {
  long long begin, count;
  bool bad;
};
__device__ __forceinline__ OwnRows rows_of(const AppendRows& rows, long long n, long long batch) {
  if (rows.cu_seqlens == nullptr) return {0, rows.rows, false};
  const long long begin = rows.cu_seqlens[n * rows.cu_seqlens_stride], end = rows.cu_seqlens[(n + 1) * rows.cu_seqlens_stride];
  bool good = (n > 0 ? begin >= 0 : begin == 0) && begin <= end && end <= rows.all;
  if (begin < end) good = good && has_all(rows.cu_seqlens, rows.cu_seqlens_stride, static_cast<int>(batch), static_cast<int>(n), begin, end);
  return {begin, end - begin, !good};
}

// Whose row it is, and which of its rows. `sequence` is -1 where it is nobody's.
struct Member {
  long long sequence, nth;
};
__device__ __forceinline__ Member member_of(const AppendRows& rows, const Row& row, long long batch) {
  if (rows.cu_seqlens == nullptr) return {row.batch, row.row};
  const int n = sequence_of(rows.cu_seqlens, rows.cu_seqlens_stride, static_cast<int>(batch), row.row);
  if (n == batch) return {-1, 0};
  return {n, row.row - rows.cu_seqlens[n * rows.cu_seqlens_stride]};
}
__device__ __forceinline__ Row row_of(const AppendRows& rows, unsigned i) {
  const auto each = static_cast<unsigned>(rows.rows);  // below 2^31, as CTAs are
  return {i / each, i % each, 0};
}

// What lists say of a sequence's new keys.
struct NewKeys {
  long long length, count, entry, position;  // position: of the first one
  int code;                                  // 0, or as FATTN_LIST_... of fattn.h
};
__device__ __forceinline__ NewKeys new_keys_of(const AppendParams& p, long long n) {
  const OwnRows rows = rows_of(p.of_new, n, p.batch);
  const long long length = number_at(p.lengths, n, p.length), entry = number_at(p.entries, n, n);
  NewKeys keys{length, rows.count, entry, number_at(p.positions, n, length), 0};
  if (rows.bad)
    keys.code = 2;
  else if (length < 0 || rows.count > p.room || length > p.room - rows.count)
    keys.code = 3;
  else if (p.paged == 0 && (entry < 0 || entry >= p.cache_entries))
    keys.code = 5;
  return keys;
}

// Of a key below p.room, which is below 2^31 with a table.
__device__ __forceinline__ unsigned column_of(const AppendParams& p, long long key) {
  return static_cast<unsigned>(key) / static_cast<unsigned>(p.cache_rows);
}
__device__ __forceinline__ long long page_of(const AppendParams& p, long long n, long long column) {
  const long long i = n * p.table.stride + column * p.table_column_stride;
  return p.table.wide != 0 ? static_cast<const long long*>(p.table.data)[i] : static_cast<const int*>(p.table.data)[i];
}
__device__ __forceinline__ bool is_page(const AppendParams& p, long long page) { return 0 <= page && page < p.cache_entries; }
// Of the pages that new keys go to every `threads`th one, from `thread` on; of keys with code 0.
__device__ __forceinline__ bool are_pages(const AppendParams& p, long long n, const NewKeys& keys, int thread, int threads) {
  if (p.paged == 0 || keys.count == 0) return true;
  const long long last = column_of(p, keys.length + keys.count - 1);
  bool good = true;
  for (long long column = column_of(p, keys.length) + thread; column <= last; column += threads) good = good && is_page(p, page_of(p, n, column));
  return good;
}

__device__ __forceinline__ bool is_position(const AppendParams& p, long long first, long long nth) {
  return 0 <= first && first < p.angles.positions && nth < p.angles.positions - first;
}
// Of the first query; with wrapping numbers, far behind all positions.
__device__ __forceinline__ long long query_position(const AppendParams& p, const NewKeys& keys, long long queries) {
  if (p.queries_last == 0) return keys.position;
  return static_cast<long long>(static_cast<unsigned long long>(keys.position) + static_cast<unsigned long long>(keys.count - queries));
}

template <int kUnit>
__device__ __forceinline__ void append_row(const AppendParams& p, unsigned i, bool value) {
  const Row row = row_of(p.of_new, i);
  const Member at = member_of(p.of_new, row, p.batch);
  if (at.sequence < 0 || at.nth < 0) return;
  const NewKeys keys = new_keys_of(p, at.sequence);
  if (keys.code != 0) return;
  Row place{keys.entry, keys.length + at.nth, 0};
  if (p.paged != 0) {
    const unsigned column = column_of(p, place.row);
    place.batch = page_of(p, at.sequence, column);
    if (!is_page(p, place.batch)) return;
    place.row -= column * p.cache_rows;
  }
  const bool bad = !is_position(p, keys.position, at.nth);
  const Position position{bad ? 0 : keys.position + at.nth, p.turns == 0 || value, bad};
  const RowNumbers &from = value ? p.v : p.k, &to = value ? p.v_cache : p.k_cache;
  move_heads<kUnit>(from, to, {offset_of(from.places, row), offset_of(to.places, place), static_cast<unsigned>(p.of_new.heads)},
                    value ? p.headdim_v : p.headdim, p.angles, position);
}

template <int kUnit>
__device__ __forceinline__ void turn_query(const AppendParams& p, unsigned i) {
  const Row row = row_of(p.of_q, i);
  const Member at = member_of(p.of_q, row, p.batch);
  Position position{0, at.sequence < 0, false};
  if (at.sequence >= 0) {
    const OwnRows own = rows_of(p.of_q, at.sequence, p.batch);
    const NewKeys keys = new_keys_of(p, at.sequence);
    const long long first = query_position(p, keys, own.count), nth = p.queries_together != 0 ? 0 : at.nth;
    const bool good = keys.code == 0 && !own.bad && at.nth >= 0 && is_position(p, first, nth);
    position.bad = !ptx::vote_all(good && are_pages(p, at.sequence, keys, static_cast<int>(threadIdx.x) % 32, 32));
    if (!position.bad) position.at = first + nth;
  }
  const RowOfHeads heads{offset_of(p.q.places, row), offset_of(p.q_out.places, row), static_cast<unsigned>(p.of_q.heads)};
  if (!position.bad) return move_heads<kUnit>(p.q, p.q_out, heads, p.headdim, p.angles, position);
  float nan[kUnit];
#pragma unroll
  for (int k = 0; k < kUnit; ++k) nan[k] = kNan;
  const unsigned units = static_cast<unsigned>(p.headdim) / kUnit;
  for (unsigned j = threadIdx.x; j < heads.heads * units; j += kRowsThreads)
    store<kUnit>(p.q_out, heads.to + j / units * p.q_out.places.head + j % units * kUnit, nan);
}

// Which list of a sequence is out of range, the first in the order of the codes.
__device__ __forceinline__ int code_of(const AppendParams& p, long long n, const NewKeys& keys) {
  const OwnRows queries = rows_of(p.of_q, n, p.batch);
  if (queries.bad) return 1;
  if (keys.code != 0) return keys.code;
  if (!are_pages(p, n, keys, 0, 1)) return 4;
  if (p.turns == 0) return 0;
  if (keys.count > 0 && !is_position(p, keys.position, keys.count - 1)) return 6;
  const long long last = p.queries_together != 0 ? 0 : queries.count - 1;
  return queries.count > 0 && !is_position(p, query_position(p, keys, queries.count), last) ? 6 : 0;
}

__device__ __forceinline__ void say_lists(const AppendParams& p) {
  const int thread = static_cast<int>(threadIdx.x);
  if (p.seqused_k != nullptr)
    for (long long n = thread; n < p.batch; n += kRowsThreads) {
      const NewKeys keys = new_keys_of(p, n);
      const bool good = keys.code == 0 && are_pages(p, n, keys, 0, 1);
      p.seqused_k[n * p.seqused_k_stride] = good ? static_cast<int>(keys.length + keys.count) : -1;
    }
  if (p.status == nullptr || thread >= 32) return;
  constexpr unsigned long long kCodes = 8;
  unsigned long long first = ~0ull;  // kCodes times the sequence, and the code
  for (long long n = thread; n < p.batch && first == ~0ull; n += 32)
    if (const int code = code_of(p, n, new_keys_of(p, n)); code != 0)
      first = kCodes * static_cast<unsigned long long>(n) + static_cast<unsigned long long>(code);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const unsigned low = ptx::shfl_xor(static_cast<unsigned>(first), distance), high = ptx::shfl_xor(static_cast<unsigned>(first >> 32), distance);
    const unsigned long long other = static_cast<unsigned long long>(high) << 32 | low;
    first = other < first ? other : first;
  }
  if (thread != 0) return;
  p.status[0] = first == ~0ull ? 0 : static_cast<int>(first % kCodes);
  p.status[p.status_stride] = first == ~0ull ? 0 : static_cast<int>(first / kCodes);
}

template <class Spec>
__device__ __forceinline__ void append(const AppendParams& p) {
  if constexpr (requires { Spec::kDependent; }) {
    ptx::let_kernel_after_come_up();
    ptx::wait_for_kernel_before();
  }
  const unsigned cta = blockIdx.x, of_new = 2 * static_cast<unsigned>(p.of_new.all);
  if (cta < of_new) return append_row<Spec::kUnit>(p, cta / 2, cta % 2 != 0);
  if (cta < of_new + p.of_q.all) return turn_query<Spec::kUnit>(p, cta - of_new);
  say_lists(p);
}

}  // namespace fattn::rows
