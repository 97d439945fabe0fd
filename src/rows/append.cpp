// An append: who computes it, and on the CPU in one pass over new keys, new values and queries.
#include "rows/append.h"

#include <algorithm>
#include <cstring>

#include "rows/checks.h"
#include "rows/workers.h"

namespace fattn::core::rows {

void append(const fattn_append_problem& problem) {
  const AppendSizes sizes = check_append(problem);
  const Backend backend = backend_for(problem.backend, problem.k);
  if (backend == Backend::kCpu) choose_isa(static_cast<Isa>(problem.cpu_isa), detected_cpu());
  check_append_values(problem, sizes, backend != Backend::kCuda);
  switch (backend) {
    case Backend::kReference: return reference::append(problem, sizes);
    case Backend::kCuda: return cuda::append(problem, sizes);
    default: return cpu::append(problem, sizes);
  }
}

void write_lists(const fattn_append_problem& g, const AppendSizes& sizes) {
  const AppendLists lists(g, sizes);
  if (g.seqused_k.ndim != 0)
    for (int64_t n = 0; n < sizes.batch; ++n)
      static_cast<int32_t*>(g.seqused_k.data)[n * g.seqused_k.strides[0]] = static_cast<int32_t>(lists.length(n) + lists.new_keys(n));
  if (g.status.ndim != 0)
    for (int64_t i = 0; i < 2; ++i) static_cast<int32_t*>(g.status.data)[i * g.status.strides[0]] = 0;
}

namespace cpu {
namespace {

int64_t bytes_of(const fattn_tensor& t, int64_t elements) { return elements * static_cast<int64_t>(size_of(static_cast<DType>(t.dtype))); }
char* element(const fattn_tensor& t, int64_t i) { return t.data ? static_cast<char*>(t.data) + bytes_of(t, i) : nullptr; }

// The heads of a row, from one tensor to another.
struct Move {
  const fattn_tensor* from;
  const fattn_tensor* to;
  Row row, place;
  int64_t heads;
  int headdim;
  int64_t position;  // -1: they do not turn
};

void move_row(const fattn_append_problem& g, const AppendSizes& sizes, const RowKernels& kernels, const Move& m) {
  const Places from = places_of_rows(*m.from), to = places_of_rows(*m.to);
  const char* const x = element(*m.from, offset_of(from, m.row));
  char* const y = element(*m.to, offset_of(to, m.place));
  const bool turns = m.position >= 0 && sizes.half > 0;
  if (!turns && m.from->dtype == m.to->dtype && from.head == m.headdim && to.head == m.headdim) {
    if (x != y) std::memcpy(y, x, static_cast<size_t>(bytes_of(*m.to, m.heads * m.headdim)));
    return;
  }
  kernels.rotary({.x = x,
                  .y = y,
                  .cos = turns ? element(g.cos, m.position * g.cos.strides[0]) : nullptr,
                  .sin = turns ? element(g.sin, m.position * g.sin.strides[0]) : nullptr,
                  .x_head_stride = from.head,
                  .y_head_stride = to.head,
                  .heads = m.heads,
                  .headdim = m.headdim,
                  .half = turns ? sizes.half : 0,
                  .dtype = m.from->dtype,
                  .y_dtype = m.to->dtype,
                  .cos_dtype = g.cos.dtype,
                  .sin_dtype = g.sin.dtype,
                  .interleaved = g.interleaved != 0,
                  .inverse = false});
}

}  // namespace

void append(const fattn_append_problem& g, const AppendSizes& sizes) {
  const RowKernels& kernels = kernels_of(choose_isa(static_cast<Isa>(g.cpu_isa), detected_cpu()));
  const AppendLists lists(g, sizes);
  // Rows without heads are nothing, and may be as many as no memory has; as may heads, where there are no rows.
  const int64_t new_rows = sizes.heads_k > 0 ? sizes.all_new() : 0, queries = sizes.heads > 0 ? sizes.all_queries() : 0;
  constexpr int64_t kManyHeads = 1 << 20;
  const auto new_row = [&](int64_t i, bool value) {
    const Row row{i / sizes.rows_new, i % sizes.rows_new, 0};
    const AppendLists::Member at = AppendLists::member(g.cu_seqlens_new, row.batch, row.row);
    if (at.sequence < 0) return;
    const int64_t position = g.cos.ndim != 0 && !value ? lists.position_of_key(at.sequence, at.nth) : -1;
    move_row(g, sizes, kernels,
             {value ? &g.v : &g.k, value ? &g.v_cache : &g.k_cache, row, lists.place(at.sequence, at.nth), sizes.heads_k,
              value ? sizes.headdim_v : sizes.headdim, position});
  };
  const auto query = [&](int64_t i) {
    const Row row{i / sizes.rows_q, i % sizes.rows_q, 0};
    const AppendLists::Member at = AppendLists::member(g.cu_seqlens_q, row.batch, row.row);
    move_row(g, sizes, kernels,
             {&g.q, &g.q_out, row, row, sizes.heads, sizes.headdim, at.sequence < 0 ? -1 : lists.position_of_query(at.sequence, at.nth)});
  };
  const int64_t row_bytes = 2 * std::max(bytes_of(g.k, std::min(sizes.heads_k, kManyHeads) * std::max(sizes.headdim, sizes.headdim_v)),
                                         g.q.ndim != 0 ? bytes_of(g.q, std::min(sizes.heads, kManyHeads) * sizes.headdim) : 0);
  by_rows(g, "append", 2 * new_rows + queries, row_bytes, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) i < 2 * new_rows ? new_row(i / 2, i % 2 != 0) : query(i - 2 * new_rows);
  });
  write_lists(g, sizes);
}

}  // namespace cpu

}  // namespace fattn::core::rows
