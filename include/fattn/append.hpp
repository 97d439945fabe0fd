// New keys and values into a cache, contiguous or paged, with rotary embeddings of them and of the queries: one pass or launch.
#pragma once

#include "fattn/rows.hpp"

namespace fattn {

// Where queries stand that are turned with new keys.
enum class QueryPositions : int32_t {
  kLast = FATTN_QUERIES_LAST,         // the last query where the last new key is, the others before it: as masks are aligned
  kFirst = FATTN_QUERIES_FIRST,       // the first query where the first new key is, the others behind it
  kTogether = FATTN_QUERIES_TOGETHER  // all where the first new key is
};

struct AppendOptions : RowOptions {
  int64_t cache_seqlen = 0;  // how many keys every sequence has before the call, without `cache_seqlens`
  Tensor cache_seqlens;      // (batch), int32 or int64: that of each sequence
  Tensor cu_seqlens_new;     // (batch + 1), int32: k and v are packed, and sequences begin there
  Tensor cache_batch_idx;    // (batch), int32 or int64: which entry of the caches is each sequence's
  Tensor block_table;        // (batch, columns), int32 or int64: the caches are pages, and these each sequence's
  Tensor cos, sin;           // (positions, rotary_dim / 2): new keys turn to their positions, by `interleaved` as in RotaryOptions
  bool interleaved = false;
  Tensor positions;     // (batch), int32 or int64: of each sequence's first new key; absent: its place in the cache
  Tensor q, q_out;      // (batch, seqlen_q, nheads, headdim), packed (total_q, nheads, headdim): queries that turn, too; q_out may be q
  Tensor cu_seqlens_q;  // (batch + 1), int32: q is packed
  QueryPositions q_positions = QueryPositions::kLast;
  Tensor seqused_k;  // output, (batch), int32: how many keys each sequence has after the call
  Tensor status;     // output, (2), int32: FATTN_LISTS_GOOD and 0, or which list is out of range and the first sequence where
};

// Writes k and v, (batch, seqlen_new, nheads_k, headdim or headdim_v), packed (total_new, nheads_k, ...), into k_cache and v_cache, (entries,
// longest, nheads_k, ...) or with block_table (pages, page_size, nheads_k, ...), behind the keys that each sequence has. Every tensor has a dtype of
// its own, fp32, fp16 or bf16. Throws Error where the host knows that a sequence has no room or two new keys have one place; fattn_append of fattn.h
// says what a GPU does by lists in its memory.
inline void append(const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache, const AppendOptions& options = {}) {
  auto p = detail::row_problem<fattn_append_problem>(options);
  p.interleaved = options.interleaved ? 1 : 0;
  p.q_positions = static_cast<int32_t>(options.q_positions);
  p.cache_seqlen = options.cache_seqlen;
  p.k = k.raw();
  p.v = v.raw();
  p.k_cache = k_cache.raw();
  p.v_cache = v_cache.raw();
  p.cache_seqlens = options.cache_seqlens.raw();
  p.cu_seqlens_new = options.cu_seqlens_new.raw();
  p.cache_batch_idx = options.cache_batch_idx.raw();
  p.block_table = options.block_table.raw();
  p.cos = options.cos.raw();
  p.sin = options.sin.raw();
  p.positions = options.positions.raw();
  p.q = options.q.raw();
  p.q_out = options.q_out.raw();
  p.cu_seqlens_q = options.cu_seqlens_q.raw();
  p.seqused_k = options.seqused_k.raw();
  p.status = options.status.raw();
  check(fattn_append(&p));
}

}  // namespace fattn
