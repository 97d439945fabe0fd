// Decode of the CPU backend: few query rows (the heads of a group times a few queries) against a long range of keys, one
// chunk of a split-KV pass (Flash-Decoding, Dao et al. 2023). All rows share each read of K and V, which a task fetches in the order in which they
// lie in memory, a block of keys of all its heads at a time: V while it computes scores, K while it sums values. So it moves at the speed of memory.
#pragma once

#include "backend/cpu/decode_tiles.h"
#include "backend/cpu/dropout_words.h"
#include "backend/cpu/nonfinite.h"
#include "backend/cpu/pages.h"

namespace fattn::core::FATTN_ISA {

constexpr int64_t kFewRows = 2;

template <class Ops>
struct DecodeScratch {
  typedef typename Ops::Element Element;
  int64_t width, width_v;  // headdim and headdim_v, rounded up
  Element* q;              // [heads][rows][width]
  float* acc;              // [heads][rows][width_v]
  float* scores;           // [heads][rows][kDecodeBlock]
  Element* weights;        // [rows][kDecodeBlock], if they are not fp32
  Element* k;              // [kLanes][width], where K cannot be read in place
  Element* v;              // [kDecodeBlock][width_v], likewise
  // Where V holds an Inf or NaN at a pair that is hidden (nonfinite.h): its codes [kDecodeBlock][headdim_v], of the tensors' dtype; the kinds of
  // pairs [rows][kDecodeBlock] and sums of codes [rows][width_v].
  float *codes, *kinds, *sums;
  float *paged_k, *paged_v;  // of the tensors' dtype: rows of K and V that lie in several pages

  size_t lay_out(char* base, int64_t heads, int64_t rows, int headdim, int headdim_v, bool paged) {
    Scratch s{base};
    width = round_up(headdim, kStep<Ops>);
    width_v = round_up(headdim_v, kStep<Ops>);
    q = s.take<Element>(heads * rows * elements<Ops>(width));
    acc = s.take<float>(heads * rows * width_v);
    scores = s.take<float>(heads * rows * kDecodeBlock);
    weights = s.take<Element>(Ops::kPair == 1 ? 0 : rows * elements<Ops>(kDecodeBlock));
    k = s.take<Element>(kLanes * elements<Ops>(width));
    v = s.take<Element>(kDecodeBlock * elements<Ops>(width_v));
    codes = s.take<float>(kDecodeBlock * headdim_v);
    kinds = s.take<float>(rows * kDecodeBlock);
    sums = s.take<float>(rows * width_v);
    paged_k = s.take<float>(paged ? kLanes * copy_stride(headdim) : 0);
    paged_v = s.take<float>(paged ? kDecodeBlock * copy_stride(headdim_v) : 0);
    return s.used;
  }
};

// One key head of a task.
template <class T, class Ops>
struct DecodeHead {
  const T* q;
  KeyRows<T> k, v;
  float *max, *sum, *part;  // in the workspace: partial results
  typename Ops::Element* scratch_q;
  float *acc, *scores;

  DecodeHead(const DecodeTask& task, const DecodeScratch<Ops>& s, int64_t h)
      : q(static_cast<const T*>(task.q) + h * task.q_group_stride),
        k(KeyRows<T>::keys(task, h * task.k_head_stride)),
        v(KeyRows<T>::values(task, h * task.v_head_stride)),
        max(task.max + h * task.part_stride * task.rows),
        sum(task.sum + h * task.part_stride * task.rows),
        part(task.acc + h * task.part_stride * task.rows * task.headdim_v),
        scratch_q(s.q + h * task.rows * elements<Ops>(s.width)),
        acc(s.acc + h * task.rows * s.width_v),
        scores(s.scores + h * task.rows * kDecodeBlock) {}
};

template <class T, class Ops>
void begin_decode(const DecodeTask& task, const DecodeScratch<Ops>& s, const DecodeHead<T, Ops>& head) {
  const float sign = Scale(task.scale).sign;
  for (int64_t r = 0; r < task.rows; ++r) {
    const T* q = head.q + r / task.seqlen_q * task.q_head_stride + r % task.seqlen_q * task.q_stride;
    for (int64_t d = 0; d < s.width; d += kStep<Ops>)
      put_query(Ops{}, q + d, task.headdim - d, sign, head.scratch_q + (r * s.width + d) / Ops::kPair);
    for (int64_t d = 0; d < s.width_v; d += kLanes) store(head.acc + r * s.width_v + d, zero());
    head.max[r] = minus_infinity();
    head.sum[r] = 0.0f;
  }
}

// The query head that row r of key head h belongs to, counted from the task's first.
FATTN_INLINE int64_t head_of_row(const DecodeTask& task, int64_t h, int64_t r) { return h * (task.rows / task.seqlen_q) + r / task.seqlen_q; }

// Scores of the keys [key, key + n), n up to kLanes, of all rows: whole with what is added to them, and -Inf where they are hidden.
template <class T>
void add_row_terms(const DecodeTask& task, int64_t h, int64_t key, int64_t n, float* scores) {
  const ScoreInputs& in = task.inputs;
  const F32 scale = set1(task.softcap > 0 || !adds(in) ? 1.0f : static_cast<float>(Scale(task.scale).magnitude));
  for (int64_t r = 0; r < task.rows; ++r) {
    const int64_t head = head_of_row(task, h, r), query = r % task.seqlen_q;
    F32 term = zero();
    if (in.alibi_slopes) {
      const F32 away = sub(set1(static_cast<float>(query + in.shift - key)), lane_numbers());
      term = mul(set1(-in.alibi_slopes[head * in.alibi_head_stride]), max(away, sub(zero(), away)));
    }
    if (in.bias) {
      const int64_t at = head * in.bias_head_stride + query * in.bias_stride + key;
      term = add(term, in.bias_fp32 ? load_n(static_cast<const float*>(in.bias) + at, n) : load_n(static_cast<const T*>(in.bias) + at, n));
    }
    if (in.mask)
      term = where_equal(load_n(in.mask + head * in.mask_head_stride + query * in.mask_stride + key, n), zero(), set1(minus_infinity()), term);
    store(scores + r * kDecodeBlock, with_term(load(scores + r * kDecodeBlock), scale, term));
  }
}

// Drops weights of the block of keys at key0, a multiple of kDecodeBlock.
static inline void drop_row_weights(const DecodeTask& task, int64_t h, int64_t key0, float* scores) {
  static_assert(kDropoutBlock % kDecodeBlock == 0);
  const ScoreInputs& in = task.inputs;
  for (int64_t r = 0; r < task.rows; ++r)
    for (int call = 0; call < kDropoutCalls; ++call) {
      const int64_t query = r % task.seqlen_q;
      const Philox4 planes = dropout_planes(in.seed, in.stream + static_cast<uint64_t>(head_of_row(task, h, r)),
                                            dropout_query(static_cast<unsigned>(query)) + in.dropout_query,
                                            static_cast<unsigned>(key0 / kDropoutBlock), static_cast<unsigned>(call) + in.dropout_call);
      const unsigned kept = dropout_kept(planes, static_cast<unsigned>(in.dropout_below));
      for (int64_t i = 2 * call; i < kDecodeBlock; i += 8) {
        float* pair = scores + r * kDecodeBlock + i;
        if ((kept >> dropout_bit(query, key0 + i) & 1u) == 0) pair[0] = 0;
        if ((kept >> dropout_bit(query, key0 + i + 1) & 1u) == 0) pair[1] = 0;
      }
    }
}

// Scores of the keys [key0, key0 + keys), kLanes at a time.
template <class T, class Ops>
void block_scores(const DecodeTask& task, const DecodeScratch<Ops>& s, const DecodeHead<T, Ops>& head, int64_t h, int64_t key0, int64_t keys,
                  NextKeys<T>& next) {
  const F32 hidden = set1(minus_infinity());
  for (int64_t j = 0; j < keys; j += kLanes) {
    const int64_t n = keys - j < kLanes ? keys - j : kLanes;
    const Rows<T> k = head.k.side_by_side(key0 + j, n, task.headdim, reinterpret_cast<T*>(s.paged_k));
    next.refill();
    if (n == kLanes && task.headdim == s.width)
      score_keys<Ops>(head.scratch_q, task.rows, k.data, k.stride, s.width, head.scores + j, next.rows);
    else  // rows beyond the last key are 0, their scores are hidden below
      score_keys<Ops>(head.scratch_q, task.rows, copied(Ops{}, k.data, k.stride, n, task.headdim, kLanes, s.width, s.k), s.width, s.width,
                      head.scores + j, next.rows);
    if (task.softcap > 0) {
      const CappedScore score(Scale(task.scale).magnitude, task.softcap);
      for (int64_t r = 0; r < task.rows; ++r) {
        float* scores = head.scores + r * kDecodeBlock + j;
        store(scores, plus(score, shaped(score, load(scores)), zero()));
      }
    }
    if (adds(task.inputs) || task.inputs.mask) add_row_terms<T>(task, h, key0 + j, n, head.scores + j);
    if (const int32_t* ids = task.inputs.document_q) {
      const U32 key_ids = load_ids(task.inputs.document_k + key0 + j, n);
      for (int64_t r = 0; r < task.rows; ++r) {
        float* scores = head.scores + r * kDecodeBlock + j;
        store(scores, keep_same(load(scores), key_ids, set1_u32(static_cast<uint32_t>(ids[r % task.seqlen_q]))));
      }
    }
    // Row r sees the keys from its own beginning to its own end; lanes outside, and beyond the chunk, are hidden.
    const int64_t first = key0 + j, last_begin = task.seqlen_q - 1 + task.left_diagonal;
    if (first + kLanes <= task.key_end && first + kLanes <= task.diagonal && first >= last_begin) continue;
    for (int64_t r = 0; r < task.rows; ++r) {
      const int64_t query = r % task.seqlen_q, end = query + task.diagonal, begin = query + task.left_diagonal - first;
      const int64_t limit = (end < task.key_end ? end : task.key_end) - first;
      float* scores = head.scores + r * kDecodeBlock + j;
      if (limit < kLanes) store(scores, limit <= 0 ? hidden : keep_below(load(scores), static_cast<int>(limit), hidden));
      if (begin > 0) store(scores, begin >= kLanes ? hidden : keep_from(load(scores), static_cast<int>(begin), hidden));
    }
  }
}

// Scores become weights exp((score - max) |scale|), whole ones exp(score - max); what was summed so far is rescaled to the new maximum.
template <class T, class Ops>
void block_softmax(const DecodeTask& task, const DecodeScratch<Ops>& s, const DecodeHead<T, Ops>& head, int64_t keys) {
  const int64_t padded = round_up(keys, kLanes), width_v = s.width_v;
  const F32 factor = set1(Exponent(task).factor);
  for (int64_t r = 0; r < task.rows; ++r) {
    float* scores = head.scores + r * kDecodeBlock;
    F32 top = set1(head.max[r]);
    for (int64_t j = 0; j < padded; j += kLanes) top = max(top, load(scores + j));
    const float largest = largest_lane(top);
    const float safe = largest == minus_infinity() ? 0.0f : largest;
    float lanes[kLanes];
    store(lanes, exp2(mul(set1(head.max[r] - safe), factor)));
    const float alpha = lanes[0];
    F32 total = zero();
    for (int64_t j = 0; j < padded; j += kLanes) {
      const F32 p = exp2(mul(sub(load(scores + j), set1(safe)), factor));
      total = add(total, p);
      store(scores + j, p);
    }
    head.max[r] = largest;
    head.sum[r] = head.sum[r] * alpha + sum(total);
    if (alpha != 1.0f)
      for (int64_t d = 0; d < width_v; d += kLanes) store(head.acc + r * width_v + d, mul(load(head.acc + r * width_v + d), set1(alpha)));
  }
}

// The kinds of pairs of all rows with the keys [key, key + n) that their places let them see, from their weights, a row kDecodeBlock floats long;
// seen[j] is above 0 if key j counts for some row. Is a pair hidden?
template <class T>
bool kinds_of_rows(const DecodeTask& task, int64_t h, int64_t key, int64_t n, const float* weights, float* kinds, float* seen) {
  const ScoreInputs& in = task.inputs;
  const F32 hides = set1(minus_infinity()), some = set1(kSomeWeight), none = set1(kNoWeight), zeros = zero();
  F32 hidden = zeros;
  for (int64_t j = 0; j < n; j += kLanes) {
    const int64_t left = n - j;
    F32 counts = zeros;
    for (int64_t r = 0; r < task.rows; ++r) {
      const int64_t head = head_of_row(task, h, r), query = r % task.seqlen_q;
      F32 term = zeros;
      if (in.bias) {
        const int64_t at = head * in.bias_head_stride + query * in.bias_stride + key + j;
        term = in.bias_fp32 ? load_n(static_cast<const float*>(in.bias) + at, left) : load_n(static_cast<const T*>(in.bias) + at, left);
      }
      if (in.mask) {
        const F32 mask = left < kLanes ? load_n(in.mask + head * in.mask_head_stride + query * in.mask_stride + key + j, left)
                                       : load(in.mask + head * in.mask_head_stride + query * in.mask_stride + key + j);
        term = where_equal(mask, zeros, hides, term);
      }
      if (in.document_q) term = keep_same(term, load_ids(in.document_k + key + j, left), set1_u32(static_cast<uint32_t>(in.document_q[query])));
      const F32 kind = where_equal(term, hides, zeros, where_equal(load_n(weights + r * kDecodeBlock + j, left), zeros, none, some));
      F32 is_hidden = where_equal(kind, zeros, some, zeros);
      if (left < kLanes) is_hidden = keep_below(is_hidden, static_cast<int>(left), zeros);
      hidden = max(hidden, is_hidden);
      counts = max(counts, kind);
      store(kinds + r * kDecodeBlock + j, kind);
    }
    store(seen + j, counts);
  }
  return largest_lane(hidden) > 0;
}

// Does one of n keys that some row counts hold an Inf or NaN?
template <class T>
bool any_nonfinite_seen(const T* v, int64_t stride, int64_t n, int64_t headdim, const float* seen) {
  for (int64_t begin = 0, end; begin < n; begin = end) {
    end = begin + 1;
    if (!(seen[begin] > 0)) continue;
    while (end < n && seen[end] > 0) ++end;
    if (any_nonfinite(v + begin * stride, stride, end - begin, headdim)) return true;
  }
  return false;
}

// acc[0, kVecs) of columns += P times what is not finite in V, of the keys of n whose kind is above 0.
template <int kVecs, class T>
FATTN_INLINE void add_nonfinite_columns(const T* v, int64_t stride, int64_t n, int64_t columns, const float* p, const float* kinds, float* acc) {
  F32 sums[kVecs];
  FATTN_UNROLL
  for (int w = 0; w < kVecs; ++w) sums[w] = load(acc + w * kLanes);
  for (int64_t j = 0; j < n; ++j) {
    if (!(kinds[j] > 0)) continue;
    const F32 weight = set1(p[j]);
    FATTN_UNROLL
    for (int w = 0; w < kVecs; ++w) {
      const F32 x = kVecs == 1 ? load_n(v + j * stride, columns) : load(v + j * stride + w * kLanes);
      sums[w] = where_equal(sub(x, x), zero(), sums[w], fma(weight, x, sums[w]));
    }
  }
  FATTN_UNROLL
  for (int w = 0; w < kVecs; ++w) store(acc + w * kLanes, sums[w]);
}

// acc += P times what is not finite in V, of pairs that count, row by row. For few rows, which are not worth codes.
template <class T, class Ops>
__attribute__((noinline)) void add_nonfinite_rows(const DecodeTask& task, const DecodeScratch<Ops>& s, const Rows<T>& values, int64_t n,
                                                  const float* p, float* acc) {
  const T* const v = values.data;
  for (int64_t r = 0; r < task.rows; ++r) {
    const float *weights = p + r * kDecodeBlock, *kinds = s.kinds + r * kDecodeBlock;
    float* const to = acc + r * s.width_v;
    int64_t d = 0;
    for (; d + 4 * kLanes <= task.headdim_v; d += 4 * kLanes) add_nonfinite_columns<4>(v + d, values.stride, n, 0, weights, kinds, to + d);
    for (; d < task.headdim_v; d += kLanes) add_nonfinite_columns<1>(v + d, values.stride, n, task.headdim_v - d, weights, kinds, to + d);
  }
}

// acc += P V for the keys that every row sees; the few at the edges of the mask row by row, so that hidden ones meet no V. Where documents, bias or
// mask hide a pair, an Inf or NaN is left out of V and added afterwards.
template <class T, class Ops>
void block_values(const DecodeTask& task, const DecodeScratch<Ops>& s, const DecodeHead<T, Ops>& head, int64_t h, int64_t key0, int64_t keys,
                  NextKeys<T>& next) {
  const auto in_block = [&](int64_t key) { return key < key0 ? 0 : key - key0 < keys ? key - key0 : keys; };
  const int64_t end = in_block(task.diagonal), begin = in_block(task.seqlen_q - 1 + task.left_diagonal);
  const int64_t seen = begin < end ? begin : end, n = end - seen;  // keys [seen, end) are seen by every row
  const bool may_hide = hides(task.inputs) || task.inputs.document_q;
  const auto add_by_row = [&](int64_t from, int64_t to) {
    for (int64_t j = from; j < to; ++j) {
      const T* const values = head.v.at(key0 + j);
      for (int64_t r = 0; r < task.rows; ++r) {
        const int64_t query = r % task.seqlen_q;
        if (key0 + j < query + task.left_diagonal || key0 + j >= query + task.diagonal) continue;
        if (may_hide && is_hidden<T>(task.inputs, head_of_row(task, h, r), query, key0 + j)) continue;
        const F32 p = set1(head.scores[r * kDecodeBlock + j]);
        for (int64_t d = 0; d < s.width_v; d += kLanes) {
          float* acc = head.acc + r * s.width_v + d;
          store(acc, fma(p, load_n(values + d, task.headdim_v - d), load(acc)));
        }
      }
    }
  };
  const auto add_edges = [&] {
    add_by_row(0, seen);
    add_by_row(end, keys);
  };
  // Of `count` keys, whose weights begin at p.
  const auto add_some = [&](float* to, const float* p, const T* values, int64_t stride, int64_t count, auto finite) {
    constexpr bool kFinite = decltype(finite)::value;
    const auto* weights = weights_of(Ops{}, p, task.rows, count, s.weights);
    next.refill();
    if (task.headdim_v == s.width_v)
      add_values<Ops, kFinite>(weights, task.rows, values, stride, count, to, s.width_v, next.rows);
    else
      add_values<Ops, kFinite>(weights, task.rows, copied(Ops{}, values, stride, count, task.headdim_v, count, s.width_v, s.v), s.width_v, count, to,
                               s.width_v, next.rows);
  };
  if (!may_hide && head.v.in_long_runs(key0 + seen)) {  // page by page, which sums in the same order
    for (int64_t j = 0, count = 0; j < n; j += count) {
      count = head.v.run(key0 + seen + j, n - j);
      add_some(head.acc, head.scores + seen + j, head.v.at(key0 + seen + j), task.v_stride, count, Flag<false>{});
    }
    return add_edges();
  }
  const Rows<T> side_by_side = head.v.side_by_side(key0 + seen, n, task.headdim_v, reinterpret_cast<T*>(s.paged_v));
  const T* const v = side_by_side.data;
  const int64_t stride = side_by_side.stride;
  const auto add_to = [&](float* to, const float* p, const T* values, int64_t values_stride, auto finite) {
    add_some(to, p, values, values_stride, n, finite);
  };
  float counts[kDecodeBlock];
  const int64_t all = task.rows * s.width_v;
  if (!may_hide || !any_nonfinite(v, stride, n, task.headdim_v) || !kinds_of_rows<T>(task, h, key0 + seen, n, head.scores + seen, s.kinds, counts)) {
    add_to(head.acc, head.scores + seen, v, stride, Flag<false>{});
  } else if (const Sums so_far = what_sums_hold(head.acc, s.width_v, task.rows, task.headdim_v); so_far != Sums::kAllNan) {
    if (so_far == Sums::kSomeFinite) add_to(head.acc, head.scores + seen, v, stride, Flag<true>{});
    const bool some_seen = any_nonfinite_seen(v, stride, n, task.headdim_v, counts);
    if (some_seen && task.rows <= kFewRows) {
      add_nonfinite_rows<T, Ops>(task, s, side_by_side, n, head.scores + seen, head.acc);
    } else if (some_seen) {
      split_nonfinite(v, stride, n, task.headdim_v, false, static_cast<T*>(nullptr), reinterpret_cast<T*>(s.codes));
      for (int64_t i = 0; i < all; i += kLanes) store(s.sums + i, zero());
      add_to(s.sums, s.kinds, reinterpret_cast<const T*>(s.codes), task.headdim_v, Flag<false>{});
      for (int64_t i = 0; i < all; i += kLanes) add_decoded(s.sums + i, head.acc + i);
    }
  }
  add_edges();
}

template <class T, class Ops>
void decode_task(const DecodeTask& task) {
  DecodeScratch<Ops> s;
  s.lay_out(static_cast<char*>(task.scratch), task.heads, task.rows, task.headdim, task.headdim_v, task.pages.table != nullptr);
  const IdRange ids = task.inputs.document_q ? ids_of(task.inputs.document_q, 0, task.seqlen_q) : IdRange{};
  const auto keys_from = [&](int64_t key) { return task.key_end - key < kDecodeBlock ? task.key_end - key : kDecodeBlock; };
  // Of K or V, the rows of all heads.
  const auto rows_of = [&](const KeyRows<T>& from, int64_t head_stride, int headdim, int64_t key) {
    return NextKeys<T>(from, key, keys_from(key), (task.heads - 1) * head_stride + headdim);
  };
  for (int64_t h = 0; h < task.heads; ++h) begin_decode(task, s, DecodeHead<T, Ops>(task, s, h));
  for (int64_t key0 = task.key_begin; key0 < task.key_end; key0 += kDecodeBlock) {
    const int64_t keys = keys_from(key0);
    if (task.inputs.document_q && !may_meet(ids, ids_of(task.inputs.document_k, key0, key0 + keys))) continue;
    NextKeys<T> next_v = rows_of(KeyRows<T>::values(task), task.v_head_stride, task.headdim_v, key0);
    for (int64_t h = 0; h < task.heads; ++h) {
      const DecodeHead<T, Ops> head(task, s, h);
      block_scores(task, s, head, h, key0, keys, next_v);
      block_softmax(task, s, head, keys);
      if (task.inputs.dropout_below > 0) drop_row_weights(task, h, key0, head.scores);
    }
    NextKeys<T> next_k = rows_of(KeyRows<T>::keys(task), task.k_head_stride, task.headdim, key0 + keys);
    for (int64_t h = 0; h < task.heads; ++h) block_values(task, s, DecodeHead<T, Ops>(task, s, h), h, key0, keys, next_k);
  }
  for (int64_t h = 0; h < task.heads; ++h) {
    const DecodeHead<T, Ops> head(task, s, h);
    for (int64_t r = 0; r < task.rows; ++r)
      for (int64_t d = 0; d < task.headdim_v; d += kLanes)
        store_n(head.part + r * task.headdim_v + d, load(head.acc + r * s.width_v + d), task.headdim_v - d);
  }
}

template <class Ops>
size_t decode_scratch_bytes(const KernelShape& shape) {
  DecodeScratch<Ops> s;
  return s.lay_out(nullptr, shape.heads, shape.rows, shape.headdim, shape.headdim_v, shape.paged);
}

}  // namespace fattn::core::FATTN_ISA
