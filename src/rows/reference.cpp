// Merge, rotary embeddings and append in float64, written to be read: what the other backends are compared with.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "fattn/types.hpp"
#include "rows/append.h"
#include "rows/rows.h"
#include "shared/half.h"

namespace fattn::core::rows::reference {
namespace {

double load(const fattn_tensor& t, int64_t i) {
  switch (static_cast<DType>(t.dtype)) {
    case DType::kF64: return static_cast<const double*>(t.data)[i];
    case DType::kF32: return static_cast<const float*>(t.data)[i];
    case DType::kF16: return f16_to_float(static_cast<const uint16_t*>(t.data)[i]);
    default: return bf16_to_float(static_cast<const uint16_t*>(t.data)[i]);
  }
}

void store(const fattn_tensor& t, int64_t i, double x) {
  switch (static_cast<DType>(t.dtype)) {
    case DType::kF64: static_cast<double*>(t.data)[i] = x; return;
    case DType::kF32: static_cast<float*>(t.data)[i] = static_cast<float>(x); return;
    case DType::kF16: static_cast<uint16_t*>(t.data)[i] = float_to_f16(static_cast<float>(x)); return;
    default: static_cast<uint16_t*>(t.data)[i] = float_to_bf16(static_cast<float>(x)); return;
  }
}

using Vector = std::vector<double>;

Vector load_row(const fattn_tensor& t, const Row& r, int n) {
  Vector x(static_cast<size_t>(n));
  const int64_t at = offset_of(places_of_rows(t), r);
  for (size_t d = 0; d < x.size(); ++d) x[d] = load(t, at + static_cast<int64_t>(d));
  return x;
}
void store_row(const fattn_tensor& t, const Row& r, const Vector& x) {
  const int64_t at = offset_of(places_of_rows(t), r);
  for (size_t d = 0; d < x.size(); ++d) store(t, at + static_cast<int64_t>(d), x[d]);
}
double load_lse(const fattn_tensor& t, const Row& r) { return load(t, offset_of(places_of_lse(t), r)); }
void store_lse(const fattn_tensor& t, const Row& r, double x) { store(t, offset_of(places_of_lse(t), r), x); }

double dot(const Vector& a, const Vector& b) {
  double sum = 0;
  for (size_t d = 0; d < a.size(); ++d) sum += a[d] * b[d];
  return sum;
}

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A row's log-sum-exp over all parts, and the share of each of them. A part that saw no key has none, even where no part did.
struct Shares {
  double lse = -kInfinity;
  Vector weight;
  std::vector<bool> hidden;
};
Shares shares_of(const fattn_merge_problem& p, const Row& r) {
  Vector lse;
  Shares s;
  if (p.parts[0].lse.ndim == 0) return {0, Vector(static_cast<size_t>(p.nparts), 1.0), std::vector<bool>(static_cast<size_t>(p.nparts))};
  double top = -kInfinity;
  for (int i = 0; i < p.nparts; ++i) {
    lse.push_back(load_lse(p.parts[i].lse, r));
    s.hidden.push_back(lse.back() == -kInfinity);
    if (!s.hidden.back()) top = std::max(top, lse.back());
  }
  double total = 0;
  for (size_t i = 0; i < lse.size(); ++i) total += s.hidden[i] ? 0 : std::exp(lse[i] - top);
  for (size_t i = 0; i < lse.size(); ++i) s.weight.push_back(s.hidden[i] ? 0 : std::exp(lse[i] - top) / total);
  if (total != 0) s.lse = top + std::log(total);
  return s;
}

void merge_row(const fattn_merge_problem& p, const Row& r, int n) {
  const Shares s = shares_of(p, r);
  Vector o(static_cast<size_t>(n), 0.0);
  for (int i = 0; i < p.nparts; ++i) {
    if (s.hidden[static_cast<size_t>(i)]) continue;
    const Vector part = load_row(p.parts[i].o, r, n);
    for (size_t d = 0; d < o.size(); ++d) o[d] += s.weight[static_cast<size_t>(i)] * part[d];
  }
  store_row(p.o, r, o);
  if (p.lse.ndim != 0) store_lse(p.lse, r, s.lse);
}

// o = sum(w_i o_i) and lse = log(sum(exp(lse_i))) with w_i = exp(lse_i - lse): dw_i / dlse_j = w_i ((i == j) - w_j).
void merge_row_backward(const fattn_merge_problem& p, const Row& r, int n) {
  const Shares s = shares_of(p, r);
  const Vector dout = load_row(p.dout, r, n);
  const double dlse = p.dlse.ndim != 0 ? load_lse(p.dlse, r) : 0;
  Vector with_part(static_cast<size_t>(p.nparts), 0.0);  // dout o_i
  double with_o = 0;                                     // dout o
  for (int i = 0; i < p.nparts; ++i) {
    const auto at = static_cast<size_t>(i);
    if (s.hidden[at]) continue;
    with_part[at] = dot(dout, load_row(p.parts[i].o, r, n));
    with_o += s.weight[at] * with_part[at];
  }
  for (int i = 0; i < p.nparts; ++i) {
    const auto at = static_cast<size_t>(i);
    const bool hidden = s.hidden[at];
    if (p.parts[i].dout.ndim != 0) {
      Vector dpart(static_cast<size_t>(n), 0.0);
      for (size_t d = 0; !hidden && d < dpart.size(); ++d) dpart[d] = s.weight[at] * dout[d];
      store_row(p.parts[i].dout, r, dpart);
    }
    if (p.parts[i].dlse.ndim != 0) store_lse(p.parts[i].dlse, r, hidden ? 0 : s.weight[at] * (dlse + with_part[at] - with_o));
  }
}

// Whose pairs turn, and by what.
struct Angles {
  const fattn_tensor &cos, &sin;
  int half;
  bool interleaved, inverse;
};
void turn(Vector& x, const Angles& a, int64_t position) {
  for (int d = 0; d < a.half; ++d) {
    const double cos = load(a.cos, position * a.cos.strides[0] + d);
    const double sin = load(a.sin, position * a.sin.strides[0] + d) * (a.inverse ? -1 : 1);
    double& first = x[static_cast<size_t>(a.interleaved ? 2 * d : d)];
    double& second = x[static_cast<size_t>(a.interleaved ? 2 * d + 1 : d + a.half)];
    const double one = first, other = second;
    first = one * cos - other * sin;
    second = one * sin + other * cos;
  }
}

}  // namespace

void merge(const fattn_merge_problem& problem, const MergeSizes& sizes, bool backward) {
  for (int64_t i = 0; i < sizes.batch * sizes.seqlen * sizes.heads; ++i)
    (backward ? merge_row_backward : merge_row)(problem, row_of(sizes, i), sizes.headdim);
}

void rotary(const fattn_rotary_problem& p, const RotarySizes& sizes) {
  const Angles angles{p.cos, p.sin, sizes.half, p.interleaved != 0, p.inverse != 0};
  for (int64_t b = 0; b < sizes.batch; ++b)
    for (int64_t i = 0; i < sizes.seqlen; ++i) {
      const int64_t position = position_of(p, b, i);
      for (int64_t h = 0; h < sizes.heads; ++h) {
        Vector x = load_row(p.x, {b, i, h}, sizes.headdim);
        if (position >= 0) turn(x, angles, position);
        store_row(p.y, {b, i, h}, x);
      }
    }
}

void append(const fattn_append_problem& p, const AppendSizes& sizes) {
  const AppendLists lists(p, sizes);
  const Angles angles{p.cos, p.sin, sizes.half, p.interleaved != 0, false};
  for (int64_t b = 0; b < sizes.entries_new; ++b)
    for (int64_t i = 0; i < sizes.rows_new; ++i) {
      const AppendLists::Member at = AppendLists::member(p.cu_seqlens_new, b, i);
      if (at.sequence < 0) continue;
      const Row to = lists.place(at.sequence, at.nth);
      for (int64_t h = 0; h < sizes.heads_k; ++h) {
        Vector k = load_row(p.k, {b, i, h}, sizes.headdim);
        if (p.cos.ndim != 0) turn(k, angles, lists.position_of_key(at.sequence, at.nth));
        store_row(p.k_cache, {to.batch, to.row, h}, k);
        store_row(p.v_cache, {to.batch, to.row, h}, load_row(p.v, {b, i, h}, sizes.headdim_v));
      }
    }
  for (int64_t b = 0; b < sizes.entries_q; ++b)
    for (int64_t i = 0; i < sizes.rows_q; ++i) {
      const AppendLists::Member at = AppendLists::member(p.cu_seqlens_q, b, i);
      for (int64_t h = 0; h < sizes.heads; ++h) {
        Vector q = load_row(p.q, {b, i, h}, sizes.headdim);
        if (at.sequence >= 0) turn(q, angles, lists.position_of_query(at.sequence, at.nth));
        store_row(p.q_out, {b, i, h}, q);
      }
    }
  write_lists(p, sizes);
}

}  // namespace fattn::core::rows::reference
