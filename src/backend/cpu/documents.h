// Document ids: a query sees the keys of its own document. Blocks of keys without a document in common with the rows are skipped, blocks of one
// document are computed as without ids, and in what is left the pairs of different documents are hidden.
#pragma once

#include "backend/cpu/id_range.h"
#include "backend/cpu/kernels.h"

namespace fattn::core::FATTN_ISA {

using core::IdRange;
using core::ids_of;
using core::may_meet;
FATTN_INLINE bool is_one(IdRange a) { return a.least == a.most; }
FATTN_INLINE bool are_one(IdRange a, IdRange b) { return a.least == a.most && b.least == b.most && a.least == b.least; }
FATTN_INLINE bool holds(IdRange range, int32_t id) { return range.least <= id && id <= range.most; }

// How many of the up to `most` rows before `end` a tile takes: those of the last document, if they fill a vector at least.
static inline int64_t rows_of_one(const int32_t* end, int64_t most) {
  int64_t rows = 1;
  while (rows < most && end[-1 - rows] == end[-1]) ++rows;
  return rows < kLanes ? most : rows;
}

// What rows of the ids `rows` need of the keys [begin, end): from the first to the last that may be of their documents.
struct KeyRange {
  int64_t begin, end;
};
static inline KeyRange keys_of(IdRange rows, const int32_t* ids, int64_t begin, int64_t end) {
  constexpr int64_t kStep = 64;  // ids looked at together, as vectors
  while (begin + kStep <= end && !may_meet(rows, ids_of(ids, begin, begin + kStep))) begin += kStep;
  while (begin + kStep <= end && !may_meet(rows, ids_of(ids, end - kStep, end))) end -= kStep;
  while (begin < end && !holds(rows, ids[begin])) ++begin;
  while (begin < end && !holds(rows, ids[end - 1])) --end;
  return {begin, end};
}

// The first n of kLanes ids, the rest 0.
FATTN_INLINE U32 load_ids(const int32_t* ids, int64_t n) {
  uint32_t some[kLanes] = {};
  for (int64_t i = 0; i < n && i < kLanes; ++i) some[i] = static_cast<uint32_t>(ids[i]);
  return load_u32(some);
}
// x where two ids are the same, else -Inf.
FATTN_INLINE F32 keep_same(F32 x, U32 a, U32 b) {
  const F32 hidden = set1(minus_infinity());
  return where_equal(keep_not_below(hidden, xor_u32(a, b), set1_u32(1)), hidden, hidden, x);
}

// Scores, or what is added to them, of a tile: -Inf in pairs of different documents; largest[w] = max(largest[w], the rest).
template <int kVecs>
__attribute__((noinline)) void hide_documents(const ScoreInputs& in, const TilePlace& at, float* scores, F32* largest) {
  U32 rows[kVecs];
  F32 top[kVecs];
  for (int w = 0; w < kVecs; ++w) {
    rows[w] = load_ids(in.document_q + at.row + w * kLanes, at.rows - w * kLanes);
    top[w] = largest[w];
  }
  for (int64_t key = 0; key < at.keys; ++key) {
    const U32 id = set1_u32(static_cast<uint32_t>(in.document_k[at.key + key]));
    FATTN_UNROLL
    for (int w = 0; w < kVecs; ++w) {
      float* to = scores + (key * kVecs + w) * kLanes;
      const F32 s = keep_same(load(to), rows[w], id);
      top[w] = max(top[w], s);
      store(to, s);
    }
  }
  for (int w = 0; w < kVecs; ++w) largest[w] = top[w];
}

}  // namespace fattn::core::FATTN_ISA
