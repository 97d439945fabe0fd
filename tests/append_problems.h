// Problems of append with tensors of their own, random ones of any kind, and what they come to by plain indexing in float64.
#pragma once

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "row_problems.h"

namespace fattn::test {

struct Append {
  RowTensor k, v, k_cache, v_cache, cache_seqlens, cu_seqlens_new, cache_batch_idx, block_table, cos, sin, positions, q, q_out, cu_seqlens_q,
      seqused_k, status;
  AppendOptions options;

  // With each tensor as `view` gives it.
  template <class View>
  void run(const View& view, const RowOptions& way = {}) const {
    AppendOptions all = options;
    static_cast<RowOptions&>(all) = way;
    all.cache_seqlens = view(cache_seqlens);
    all.cu_seqlens_new = view(cu_seqlens_new);
    all.cache_batch_idx = view(cache_batch_idx);
    all.block_table = view(block_table);
    all.cos = view(cos);
    all.sin = view(sin);
    all.positions = view(positions);
    all.q = view(q);
    all.q_out = q_out.view().data() == q.view().data() ? all.q : view(q_out);
    all.cu_seqlens_q = view(cu_seqlens_q);
    all.seqused_k = view(seqused_k);
    all.status = view(status);
    append(view(k), view(v), view(k_cache), view(v_cache), all);
  }
  void run(const RowOptions& way = {}) const {
    run([](const RowTensor& t) { return t.view(); }, way);
  }
  // The same in float64.
  Append wide() const {
    Append w = *this;
    for (RowTensor* t : {&w.k, &w.v, &w.k_cache, &w.v_cache, &w.cos, &w.sin, &w.q}) *t = t->wide();
    w.q_out = q_out.empty_wide();
    w.seqused_k = seqused_k.view() ? seqused_k.copy() : RowTensor();
    w.status = status.view() ? status.copy() : RowTensor();
    return w;
  }
  // With outputs of its own.
  Append copy() const {
    Append c = *this;
    c.k_cache = k_cache.copy(), c.v_cache = v_cache.copy();
    for (RowTensor* t : {&c.q_out, &c.seqused_k, &c.status})
      if (t->view()) *t = t->copy();
    return c;
  }
};

inline int64_t whole(const RowTensor& list, int64_t i) { return static_cast<int64_t>(list.at(i)); }

// Row r of all rows, (rows, heads, headdim), to row `to` of another tensor; turned to a position, if that is not negative.
inline void move_row(const Append& a, const RowTensor& x, int64_t r, const RowTensor& y, int64_t to, int64_t position) {
  const int64_t heads = x.shape()[x.shape().size() - 2], n = x.shape().back(), half = a.cos.view() ? a.cos.shape()[1] : 0;
  for (int64_t h = 0; h < heads; ++h) {
    const int64_t from = (r * heads + h) * n, first = (to * heads + h) * n;
    for (int64_t d = 0; d < n; ++d) y.set(first + d, x.at(from + d));
    for (int64_t d = 0; position >= 0 && d < half; ++d) {
      const int64_t one = a.options.interleaved ? 2 * d : d, other = a.options.interleaved ? one + 1 : d + half;
      const double cos = a.cos.at(position * half + d), sin = a.sin.at(position * half + d);
      y.set(first + one, x.at(from + one) * cos - x.at(from + other) * sin);
      y.set(first + other, x.at(from + one) * sin + x.at(from + other) * cos);
    }
  }
}

// `a` has float64 alone. Its outputs are written.
inline void append_by_indexing(const Append& a) {
  const bool packed = static_cast<bool>(a.cu_seqlens_new.view()), packed_q = static_cast<bool>(a.cu_seqlens_q.view());
  const int64_t batch = packed ? a.cu_seqlens_new.size() - 1 : a.k.shape()[0], rows = a.k_cache.shape()[1];
  if (a.q.view())  // rows of no sequence are as they were
    for (int64_t i = 0; i < a.q.size(); ++i) a.q_out.set(i, a.q.at(i));
  for (int64_t n = 0; n < batch; ++n) {
    const int64_t begin = packed ? whole(a.cu_seqlens_new, n) : n * a.k.shape()[1];
    const int64_t count = packed ? whole(a.cu_seqlens_new, n + 1) - begin : a.k.shape()[1];
    const int64_t length = a.cache_seqlens.view() ? whole(a.cache_seqlens, n) : a.options.cache_seqlen;
    const int64_t first = a.positions.view() ? whole(a.positions, n) : length;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = length + i;
      int64_t to = (a.cache_batch_idx.view() ? whole(a.cache_batch_idx, n) : n) * rows + at;
      if (a.block_table.view()) to = whole(a.block_table, n * a.block_table.shape()[1] + at / rows) * rows + at % rows;
      move_row(a, a.k, begin + i, a.k_cache, to, a.cos.view() ? first + i : -1);
      move_row(a, a.v, begin + i, a.v_cache, to, -1);
    }
    if (a.seqused_k.view()) a.seqused_k.set(n, static_cast<double>(length + count));
    if (!a.q.view()) continue;
    const int64_t begin_q = packed_q ? whole(a.cu_seqlens_q, n) : n * a.q.shape()[1];
    const int64_t count_q = packed_q ? whole(a.cu_seqlens_q, n + 1) - begin_q : a.q.shape()[1];
    for (int64_t i = 0; i < count_q; ++i) {
      int64_t position = first;
      if (a.options.q_positions == QueryPositions::kFirst) position += i;
      if (a.options.q_positions == QueryPositions::kLast) position += count - count_q + i;
      move_row(a, a.q, begin_q + i, a.q_out, begin_q + i, position);
    }
  }
  if (a.status.view()) a.status.fill([](int64_t) { return 0.0; });
}

// A problem of any kind from a number.
inline Append random_append(uint64_t seed) {
  const testing::Random random(seed, 7);
  uint64_t drawn = 0;
  const auto draw = [&](int64_t n) { return static_cast<int64_t>(random.uniform(drawn++) * static_cast<double>(n)); };
  constexpr int64_t kHeaddims[] = {1, 2, 6, 8, 33, 64, 128, 576}, kPositions = 40;
  const int64_t batch = 1 + draw(3), seqlen_new = draw(6), seqlen_q = 1 + draw(5), heads_k = 1 + draw(3), heads = 1 + draw(5);
  const int64_t headdim = kHeaddims[draw(8)], headdim_v = draw(2) == 0 ? headdim : kHeaddims[draw(8)];
  const bool packed = draw(3) == 0, packed_q = draw(3) == 0, paged = draw(2) == 0, fours = draw(2) == 0;
  const auto gap = [&] { return draw(2) * (fours ? 4 : 5); };
  const auto rows = [&](DType dtype, int64_t entries, int64_t length, int64_t of_heads, int64_t width) {
    return RowTensor(dtype, {entries, length, of_heads, width}, draw(2) == 0 ? std::vector{0, 1, 2, 3} : std::vector{0, 2, 1, 3}, gap());
  };
  const auto index = [&](const std::vector<int64_t>& numbers) { return list(draw(2) == 0 ? DType::kI32 : DType::kI64, numbers, draw(2)); };
  const auto dtype = [&] { return kDtypes[draw(3)]; };
  Append a;
  // How many new keys and queries each sequence has, and where packed ones begin. Rows behind the last are nobody's.
  std::vector<int64_t> news, queries, first{0}, first_q{0};
  for (int64_t n = 0; n < batch; ++n) {
    news.push_back(packed ? draw(seqlen_new + 1) : seqlen_new), queries.push_back(packed_q ? draw(seqlen_q + 1) : seqlen_q);
    first.push_back(first.back() + news.back()), first_q.push_back(first_q.back() + queries.back());
  }
  const DType one = dtype(), other = dtype();
  const auto of_new = [&](DType of, int64_t width) {
    return packed ? RowTensor(of, {batch * seqlen_new + 1, heads_k, width}, {0, 1, 2}, gap()) : rows(of, batch, seqlen_new, heads_k, width);
  };
  a.k = of_new(one, headdim), a.v = of_new(other, headdim_v);
  if (packed) a.cu_seqlens_new = list(DType::kI32, first, draw(2));
  std::vector<int64_t> lengths(static_cast<size_t>(batch), 6 + draw(10));
  const bool has_lengths = draw(4) != 0;
  for (int64_t& length : lengths) length = has_lengths ? draw(20) : lengths[0];
  if (has_lengths)
    a.cache_seqlens = index(lengths);
  else
    a.options.cache_seqlen = lengths[0];
  const DType k_dtype = draw(2) == 0 ? one : dtype(), v_dtype = draw(2) == 0 ? other : dtype();
  int64_t entries = batch, longest = 25;
  if (paged) {
    longest = 1 + draw(7);
    const int64_t columns = 25 / longest + 1;
    std::vector<int64_t> pages(static_cast<size_t>(batch * columns + 3));
    std::iota(pages.begin(), pages.end(), 0);
    for (size_t i = pages.size(); i-- > 1;) std::swap(pages[i], pages[static_cast<size_t>(draw(static_cast<int64_t>(i) + 1))]);
    entries = static_cast<int64_t>(pages.size());
    a.block_table =
        RowTensor(draw(2) == 0 ? DType::kI32 : DType::kI64, {batch, columns}, draw(2) == 0 ? std::vector{0, 1} : std::vector{1, 0}, draw(2));
    a.block_table.fill([&](int64_t i) {  // behind the new keys, and before them, may be anything
      const int64_t n = i / columns, column = i % columns, length = lengths[static_cast<size_t>(n)], end = length + news[static_cast<size_t>(n)];
      const bool read = length < end && length / longest <= column && column <= (end - 1) / longest;
      return static_cast<double>(read ? pages[static_cast<size_t>(i)] : -1);
    });
  } else if (draw(2) == 0) {
    entries = batch + 2;
    std::vector<int64_t> whose;
    for (int64_t n = 0; n < batch; ++n) whose.push_back((n * 2 + 1) % entries);
    a.cache_batch_idx = index(whose);
  }
  a.k_cache = rows(k_dtype, entries, longest, heads_k, headdim), a.v_cache = rows(v_dtype, entries, longest, heads_k, headdim_v);
  const auto number = [&](const RowTensor& t, uint64_t stream) { t.fill_normal(seed, stream); };
  number(a.k, 1), number(a.v, 2), number(a.k_cache, 3), number(a.v_cache, 4);
  if (draw(2) == 0) a.seqused_k = list(DType::kI32, std::vector<int64_t>(static_cast<size_t>(batch), 77), draw(2));
  if (draw(2) == 0) a.status = list(DType::kI32, {7, 7}, draw(2));
  if (draw(4) == 0) return a;
  const int64_t half = draw(2) == 0 ? headdim / 2 : draw(headdim / 2 + 1);
  a.options.interleaved = draw(2) == 0;
  a.cos = RowTensor(dtype(), {kPositions, half}, {0, 1}, draw(2) * 3), a.sin = RowTensor(dtype(), {kPositions, half}, {0, 1}, draw(2) * 3);
  number(a.cos, 5), number(a.sin, 6);
  // The first queries of a sequence may not stand before position 0.
  a.options.q_positions = static_cast<QueryPositions>(draw(3));
  bool enough = true;
  for (size_t n = 0; n < lengths.size(); ++n) enough = enough && lengths[n] + news[n] >= queries[n];
  if (!enough || draw(3) == 0) {
    std::vector<int64_t> positions;
    for (int64_t n = 0; n < batch; ++n) positions.push_back(6 + draw(20));
    a.positions = index(positions);
  }
  if (draw(5) == 0) return a;
  const DType third = dtype();
  const auto of_q = [&] {
    return packed_q ? RowTensor(third, {batch * seqlen_q + 2, heads, headdim}, {0, 1, 2}, gap()) : rows(third, batch, seqlen_q, heads, headdim);
  };
  a.q = of_q();
  number(a.q, 8);
  a.q_out = draw(3) == 0 ? a.q : of_q();
  if (packed_q) a.cu_seqlens_q = list(DType::kI32, first_q, draw(2));
  return a;
}

// `got` has run, `expected` in float64 by plain indexing; `before` are the caches as they were.
inline void expect_appended(const Append& got, const Append& expected, const std::string& what) {
  expect_close(got.k_cache, expected.k_cache, 3, "k_cache, " + what);
  expect_close(got.v_cache, expected.v_cache, 0, "v_cache, " + what);
  if (got.q.view()) expect_close(got.q_out, expected.q_out, 3, "q_out, " + what);
  for (const auto& [list, wanted] : {std::pair{&got.seqused_k, &expected.seqused_k}, {&got.status, &expected.status}})
    for (int64_t i = 0; list->view() && i < list->size(); ++i) ASSERT_EQ(list->at(i), wanted->at(i)) << what;
}

// Packed sequences of new keys and queries whose lists may be of any numbers around those allowed. Rows are 1, 2, ... , caches -1, and nothing
// changes when it turns.
inline Append any_offsets(uint64_t seed) {
  const testing::Random random(seed, 8);
  uint64_t drawn = 0;
  const auto draw = [&](int64_t n) { return static_cast<int64_t>(random.uniform(drawn++) * static_cast<double>(n)); };
  const int64_t batch = 1 + draw(9), rows = 1 + draw(12);
  std::vector<int64_t> offsets{0};
  for (int64_t n = 0; n < batch; ++n) offsets.push_back(draw(rows + 1));
  std::sort(offsets.begin(), offsets.end());
  for (int64_t wrong = draw(4); wrong > 0; --wrong) offsets[static_cast<size_t>(draw(batch + 1))] = draw(rows + 4) - 1;
  Append a;
  a.k = RowTensor(DType::kF32, {rows, 1, 2}), a.v = RowTensor(DType::kF32, {rows, 1, 2}), a.q = RowTensor(DType::kF32, {rows, 1, 2});
  a.k_cache = RowTensor(DType::kF32, {batch, rows, 1, 2}), a.v_cache = RowTensor(DType::kF32, {batch, rows, 1, 2});
  a.q_out = RowTensor(DType::kF32, {rows, 1, 2}), a.cos = RowTensor(DType::kF32, {rows, 1}), a.sin = RowTensor(DType::kF32, {rows, 1});
  for (const RowTensor& t : {a.k, a.v, a.q}) t.fill([](int64_t i) { return static_cast<double>(1 + i / 2); });
  for (const RowTensor& t : {a.k_cache, a.v_cache}) t.fill([](int64_t) { return -1.0; });
  a.cos.fill([](int64_t) { return 1.0; }), a.sin.fill([](int64_t) { return 0.0; });
  a.cu_seqlens_new = list(DType::kI32, offsets), a.cu_seqlens_q = list(DType::kI32, offsets, draw(2));
  a.seqused_k = list(DType::kI32, std::vector<int64_t>(static_cast<size_t>(batch), 77)), a.status = list(DType::kI32, {9, 9});
  return a;
}
// Of such a problem that has run: a sequence has all the keys that are counted and its queries, or nothing is written of it and its queries are NaN.
// All have all of a list that is good.
inline void expect_all_or_nothing(const Append& a, const std::string& what) {
  const int64_t batch = a.seqused_k.size(), rows = a.k.shape()[0];
  const auto offset = [&](int64_t n) { return whole(a.cu_seqlens_new, n); };
  bool good = offset(0) == 0 && offset(batch) <= rows, complete = true;
  std::vector<bool> turned(static_cast<size_t>(rows), false);
  for (int64_t n = 0; n < batch; ++n) {
    good = good && offset(n) <= offset(n + 1);
    const int64_t used = whole(a.seqused_k, n);
    complete = complete && used >= 0;
    if (used >= 0) {
      ASSERT_EQ(used, offset(n + 1) - offset(n)) << what;
    }
    for (int64_t i = 0; i < rows; ++i) {
      const double expected = i < used ? static_cast<double>(1 + offset(n) + i) : -1.0;
      ASSERT_EQ(a.k_cache.at(2 * (n * rows + i)), expected) << what << ", sequence " << n << ", key " << i;
      ASSERT_EQ(a.v_cache.at(2 * (n * rows + i)), expected) << what << ", sequence " << n << ", value " << i;
      if (i < used) turned[static_cast<size_t>(offset(n) + i)] = true;
    }
  }
  for (int64_t i = 0; i < rows; ++i) {  // rows behind the last offset are nobody's, and copied
    const double is = a.q_out.at(2 * i), copied = static_cast<double>(1 + i);
    if (turned[static_cast<size_t>(i)] || (good && i >= offset(batch)))
      ASSERT_EQ(is, copied) << what << ", query " << i;
    else
      ASSERT_TRUE(std::isnan(is) || (i >= offset(batch) && is == copied)) << what << ", query " << i << " is " << is;
  }
  ASSERT_EQ(complete, good) << what;
  ASSERT_EQ(a.status.at(0) == 0, good) << what;
}

}  // namespace fattn::test
