#include "testing/standard_model.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "testing/dropout.h"
#include "testing/numbers.h"

namespace fattn::testing {
namespace {

// Rounds to the dtype without leaving Real; numbers.h has the slow and obvious way, a test compares the two.
template <class Real>
Real rounded(DType, Real x) {
  return x;
}
template <>
float rounded<float>(DType dtype, float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (dtype == DType::kF32 || magnitude >= 0x7f800000u) return x;
  if (dtype == DType::kBF16) return std::bit_cast<float>((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
  // Below 2^-14 fp16 is a fixed-point format with steps of 2^-24, as fp32 is around 0.75.
  if (magnitude < 0x38800000u) return std::copysign((std::fabs(x) + 0.75f) - 0.75f, x);
  const auto y = std::bit_cast<float>((bits + 0xfffu + ((bits >> 13) & 1u)) & 0xffffe000u);
  return std::fabs(y) > 65504.0f ? std::copysign(std::numeric_limits<float>::infinity(), x) : y;
}

// What is added to a score makes no Inf of a finite one: that would hide the pair.
template <class Real>
Real rounded_sum(DType dtype, Real x) {
  const Real y = rounded<Real>(dtype, x);
  return std::isfinite(x) && !std::isfinite(y) ? std::copysign(dtype == DType::kF16 ? Real{65504} : Real(0x1.fep127), x) : y;
}

template <class Real>
using Matrix = std::vector<Real>;  // row-major, one head

// One head of a dense (batch, seqlen, heads, headdim) tensor, as (seqlen, headdim) or transposed.
template <class Real>
Matrix<Real> head(const Dense& x, int64_t b, int64_t h, int64_t seqlen, int64_t heads, int64_t headdim, bool transposed) {
  Matrix<Real> m(static_cast<size_t>(seqlen * headdim));
  for (int64_t i = 0; i < seqlen; ++i)
    for (int64_t d = 0; d < headdim; ++d)
      m[static_cast<size_t>(transposed ? d * seqlen + i : i * headdim + d)] =
          static_cast<Real>(x[static_cast<size_t>(((b * seqlen + i) * heads + h) * headdim + d)]);
  return m;
}

// to[j] += sum over d of x[d] * columns[d][j] for j < n, d in order.
template <class Real>
void add_product(Real* to, int64_t n, const Real* x, int64_t headdim, const Real* columns, int64_t stride) {
  for (int64_t d = 0; d < headdim; ++d) {
    const Real factor = x[d];
    const Real* column = columns + d * stride;
    for (int64_t j = 0; j < n; ++j) to[j] += factor * column[j];
  }
}

// The largest finite element of sum over d of |x[d]| |columns[d][j]|: what the rounding errors of the products are relative to.
template <class Real>
double largest_terms(int64_t n, const Real* x, int64_t headdim, const Real* columns, int64_t stride) {
  std::vector<Real> sums(static_cast<size_t>(n), 0);
  for (int64_t d = 0; d < headdim; ++d)
    for (int64_t j = 0; j < n; ++j) sums[static_cast<size_t>(j)] += std::fabs(x[d] * columns[d * stride + j]);
  double largest = 0;
  for (Real sum : sums)
    if (std::isfinite(sum)) largest = std::max(largest, static_cast<double>(sum));
  return largest;
}

// The rounded scores of one row: scaled and, with softcap, capped. `k_transposed` begins at the first of its `visible` keys.
template <class Real>
void score_row(const ModelShape& s, const Real* q, const Real* k_transposed, int64_t visible, std::vector<Real>& scores) {
  scores.assign(static_cast<size_t>(visible), 0);
  add_product(scores.data(), visible, q, s.headdim, k_transposed, s.seqlen_k);
  for (Real& x : scores) x = rounded<Real>(s.stored(), static_cast<Real>(s.softmax_scale) * x);
  const Real cap = static_cast<Real>(s.softcap);
  if (cap > 0)
    for (Real& x : scores) x = rounded<Real>(s.stored(), cap * std::tanh(x / cap));
}

// An element of a tensor over (batch, head, query, key), whose dimensions of 1 are for all.
int64_t pair_index(const Tensor& t, int64_t b, int64_t h, int64_t i, int64_t j) {
  const int64_t at[] = {b, h, i, j};
  int64_t index = 0;
  for (int d = 0; d < 4; ++d) index += t.shape(d) > 1 ? at[d] * t.stride(d) : 0;
  return index;
}

// The same for the weights x[0, n) of a row and the rows of k or v (or their columns) that they are of, but for the hidden ones, which have a score
// of -Inf: a weight of 0 must not meet an Inf or NaN.
template <class Real>
void add_seen(Real* to, int64_t headdim, const std::vector<Real>& x, const Real* rows, const std::vector<Real>& scores) {
  for (size_t j = 0; j < x.size(); ++j)
    if (scores[j] != -std::numeric_limits<Real>::infinity()) add_product(to, headdim, &x[j], 1, rows + static_cast<int64_t>(j) * headdim, headdim);
}

// What is added to a row's scores: rounded into them. Hidden pairs have a score of -Inf, whatever it was.
template <class Real>
void add_terms_to_row(const ModelShape& s, int64_t b, int64_t h, int64_t i, int64_t first, std::vector<Real>& scores) {
  constexpr double kHidden = -std::numeric_limits<double>::infinity();
  const ScoreTensors& t = s.scores;
  if (!t.alibi_slopes && !t.bias && !t.mask && !t.document_q) return;
  const auto id_of = [&](const Tensor& ids, int64_t row) { return load(DType::kI32, ids.data(), b * ids.stride(0) + row); };
  for (size_t n = 0; n < scores.size(); ++n) {
    const int64_t j = first + static_cast<int64_t>(n);
    Real& x = scores[n];
    if (t.alibi_slopes) {
      const int64_t at = t.alibi_slopes.ndim() == 2 ? b * t.alibi_slopes.stride(0) + h * t.alibi_slopes.stride(1) : h * t.alibi_slopes.stride(0);
      const double away = static_cast<double>(std::abs(i + s.keys(b) - s.seqlen_q - j));
      x = rounded_sum<Real>(s.stored(), x - rounded_sum<Real>(s.stored(), static_cast<Real>(load(DType::kF32, t.alibi_slopes.data(), at) * away)));
    }
    const double bias = t.bias ? load(t.bias.dtype(), t.bias.data(), pair_index(t.bias, b, h, i, j)) : 0;
    const bool seen = (!t.mask || load(DType::kU8, t.mask.data(), pair_index(t.mask, b, h, i, j)) != 0) &&
                      (!t.document_q || id_of(t.document_q, i) == id_of(t.document_k, j));
    x = !seen || bias == kHidden ? static_cast<Real>(kHidden) : rounded_sum<Real>(s.stored(), x + static_cast<Real>(bias));
  }
}

// The largest of what is added to a row's scores: the rounding of a score is relative to that too. Not what is so low that it swallows any score,
// without error.
double largest_addend(const ModelShape& s, int64_t b, int64_t h, int64_t i, int64_t first, int64_t visible) {
  std::vector<double> terms(static_cast<size_t>(visible), 0);
  ModelShape exact = s;
  exact.dtype = DType::kF64;
  add_terms_to_row(exact, b, h, i, first, terms);
  double largest = 0;
  for (double x : terms)
    if (std::isfinite(x) && x > kLowestLse) largest = std::max(largest, std::fabs(x));
  return largest;
}

// With `fused` what dropout leaves is multiplied by this at the end, else as it is left.
template <class Real>
Real kept_factor(const ModelShape& s) {
  return s.fused ? static_cast<Real>(65536.0 / (65536.0 - static_cast<double>(std::lround(s.p_dropout * 65536)))) : Real{1};
}

// What dropout makes of weights of 1 in a row.
template <class Real>
std::vector<Real> kept_of_row(const ModelShape& s, int64_t b, int64_t h, int64_t i, int64_t first, size_t visible) {
  std::vector<Real> kept(visible, 1);
  if (s.p_dropout == 0) return kept;
  const auto* state = static_cast<const int64_t*>(s.scores.dropout_state.data());
  const Dropout dropout{static_cast<uint64_t>(state[0]), static_cast<uint64_t>(state[1]), s.p_dropout};
  const bool part = s.scores.dropout_state.shape(0) == 4;
  const int64_t row = part ? state[2] : 0, key = part ? state[3] : 0;
  for (size_t n = 0; n < visible; ++n) {
    kept[n] = static_cast<Real>(dropout.kept(b, s.nheads, h, row + i, key + first + static_cast<int64_t>(n)));
    if (s.fused && kept[n] > 0) kept[n] = 1;
  }
  return kept;
}

// The sink of a head; -inf: none.
double sink_of(const ModelShape& s, int64_t h) {
  return s.scores.sinks ? read(s.scores.sinks)[static_cast<size_t>(h)] : -std::numeric_limits<double>::infinity();
}

// The rounded weights of one row, with `fused` still to be multiplied by `factor`; its log-sum-exp is returned.
template <class Real>
Real softmax_row(const ModelShape& s, const Real* q, const Real* k_transposed, int64_t b, int64_t h, int64_t i, int64_t first, int64_t visible,
                 std::vector<Real>& scores, std::vector<Real>& weights, Real& factor) {
  factor = 1;
  score_row(s, q, k_transposed, visible, scores);
  add_terms_to_row(s, b, h, i, first, scores);
  weights = scores;
  Real largest = -std::numeric_limits<Real>::infinity();
  for (Real w : weights)
    if (!(w <= largest)) largest = w;  // keeps NaN
  if (largest == -std::numeric_limits<Real>::infinity()) {
    std::fill(weights.begin(), weights.end(), Real{0});
    return static_cast<Real>(sink_of(s, h));
  }
  Real sum = std::exp(static_cast<Real>(sink_of(s, h)) - largest);
  for (Real& w : weights) sum += w = std::exp(w - largest);
  for (Real& w : weights) w = rounded<Real>(s.dtype, s.fused ? w : w / sum);
  if (s.p_dropout > 0) {
    const std::vector<Real> kept = kept_of_row<Real>(s, b, h, i, first, weights.size());
    for (size_t n = 0; n < weights.size(); ++n) weights[n] = rounded<Real>(s.dtype, weights[n] * kept[n]);
  }
  if (s.fused) factor = kept_factor<Real>(s) / sum;
  return largest + std::log(sum);
}

template <class Real>
ModelForward forward(const ModelShape& s, const Dense& q, const Dense& k, const Dense& v) {
  ModelForward out;
  out.o.assign(static_cast<size_t>(s.batch * s.seqlen_q * s.nheads * s.headdim_v), 0);
  out.lse.assign(static_cast<size_t>(s.batch * s.nheads * s.seqlen_q), 0);
  std::vector<Real> scores, weights, o(static_cast<size_t>(s.headdim_v));
  for (int64_t b = 0; b < s.batch; ++b)
    for (int64_t h = 0; h < s.nheads; ++h) {
      const int64_t hk = h / (s.nheads / s.nheads_k);
      const auto qs = head<Real>(q, b, h, s.seqlen_q, s.nheads, s.headdim, false);
      const auto ks = head<Real>(k, b, hk, s.seqlen_k, s.nheads_k, s.headdim, true);
      const auto vs = head<Real>(v, b, hk, s.seqlen_k, s.nheads_k, s.headdim_v, false);
      for (int64_t i = 0; i < s.seqlen_q; ++i) {
        const int64_t first = s.visible_begin(b, i), visible = s.visible_end(b, i) - first;
        const Real *q_row = qs.data() + i * s.headdim, *k_columns = ks.data() + first;
        Real factor = 1;
        const Real lse = softmax_row(s, q_row, k_columns, b, h, i, first, visible, scores, weights, factor);
        out.score_terms = std::max(out.score_terms, std::fabs(s.softmax_scale) * largest_terms(visible, q_row, s.headdim, k_columns, s.seqlen_k));
        out.score_terms = std::max(out.score_terms, largest_addend(s, b, h, i, first, visible));
        std::fill(o.begin(), o.end(), Real{0});
        if (lse != -std::numeric_limits<Real>::infinity()) add_seen(o.data(), s.headdim_v, weights, vs.data() + first * s.headdim_v, scores);
        out.lse[static_cast<size_t>((b * s.nheads + h) * s.seqlen_q + i)] = lse;
        for (int64_t d = 0; d < s.headdim_v; ++d)
          out.o[static_cast<size_t>(((b * s.seqlen_q + i) * s.nheads + h) * s.headdim_v + d)] =
              rounded<Real>(s.result(), factor * o[static_cast<size_t>(d)]);
      }
    }
  return out;
}

// Rounds one head of fp32 sums into its place in a dense tensor.
template <class Real>
void store_head(Dense& to, const Matrix<Real>& from, const ModelShape& s, Real scale, int64_t b, int64_t h, int64_t seqlen, int64_t heads,
                int64_t headdim) {
  for (int64_t i = 0; i < seqlen; ++i)
    for (int64_t d = 0; d < headdim; ++d)
      to[static_cast<size_t>(((b * seqlen + i) * heads + h) * headdim + d)] =
          rounded<Real>(s.result(), scale * from[static_cast<size_t>(i * headdim + d)]);
}

// to[d] += weight * |row[d]|, and the largest finite element of all.
template <class Real>
void add_terms(std::vector<double>& to, int64_t at, Real weight, const Real* row, int64_t headdim) {
  for (int64_t d = 0; d < headdim; ++d) to[static_cast<size_t>(at + d)] += static_cast<double>(std::fabs(weight * row[d]));
}
double largest_of(const std::vector<double>& x) {
  double largest = 0;
  for (double v : x)
    if (std::isfinite(v)) largest = std::max(largest, v);
  return largest;
}

template <class Real>
ModelBackward backward(const ModelShape& s, const Dense& q, const Dense& k, const Dense& v, const Dense& o, const Dense& lse, const Dense& dout) {
  ModelBackward out;
  out.dq.assign(q.size(), 0);
  out.dk.assign(k.size(), 0);
  out.dv.assign(v.size(), 0);
  const Tensor& pairs = s.dbias;
  const auto pair_at = [&](int64_t b, int64_t h, int64_t i, int64_t j) {  // of a dense dbias
    const auto of = [&](int d, int64_t x) { return pairs.shape(d) > 1 ? x : 0; };
    return static_cast<size_t>(((of(0, b) * pairs.shape(1) + of(1, h)) * pairs.shape(2) + of(2, i)) * pairs.shape(3) + j);
  };
  std::vector<Real> pair_sums(static_cast<size_t>(pairs.size()), 0);
  std::vector<double> p_sums(pair_sums.size(), 0), sink_p(static_cast<size_t>(s.nheads), 0), sink_terms(sink_p.size(), 0);
  std::vector<Real> sink_sums(sink_p.size(), 0);
  const int64_t group = s.nheads / s.nheads_k;
  const Real scale = static_cast<Real>(s.softmax_scale), cap = static_cast<Real>(s.softcap), factor = kept_factor<Real>(s);
  std::vector<Real> scores, p, ds;
  for (int64_t b = 0; b < s.batch; ++b)
    for (int64_t hk = 0; hk < s.nheads_k; ++hk) {
      const auto k_rows = head<Real>(k, b, hk, s.seqlen_k, s.nheads_k, s.headdim, false);
      const auto k_columns = head<Real>(k, b, hk, s.seqlen_k, s.nheads_k, s.headdim, true);
      const auto v_columns = head<Real>(v, b, hk, s.seqlen_k, s.nheads_k, s.headdim_v, true);
      Matrix<Real> dk(k_rows.size(), 0), dv(v_columns.size(), 0);
      std::vector<double> q_sums(k_rows.size(), 0), dout_sums(v_columns.size(), 0);
      for (int64_t h = hk * group; h < (hk + 1) * group; ++h) {
        const auto q_rows = head<Real>(q, b, h, s.seqlen_q, s.nheads, s.headdim, false);
        const auto o_rows = head<Real>(o, b, h, s.seqlen_q, s.nheads, s.headdim_v, false);
        const auto dout_rows = head<Real>(dout, b, h, s.seqlen_q, s.nheads, s.headdim_v, false);
        Matrix<Real> dq(q_rows.size(), 0);
        for (int64_t i = 0; i < s.seqlen_q; ++i) {
          const int64_t first = s.visible_begin(b, i), visible = s.visible_end(b, i) - first;
          const Real* q_row = q_rows.data() + i * s.headdim;
          const Real* o_row = o_rows.data() + i * s.headdim_v;
          const Real* dout_row = dout_rows.data() + i * s.headdim_v;
          const auto row_lse = static_cast<Real>(lse[static_cast<size_t>((b * s.nheads + h) * s.seqlen_q + i)]);
          if (row_lse < static_cast<Real>(kLowestLse)) continue;
          score_row(s, q_row, k_columns.data() + first, visible, p);
          scores = p;
          add_terms_to_row(s, b, h, i, first, p);
          const std::vector<Real> whole = p;
          for (Real& x : p) x = rounded<Real>(s.stored(), std::exp(x - row_lse));
          const std::vector<Real> kept = kept_of_row<Real>(s, b, h, i, first, p.size());
          Real delta = 0, delta_terms = 0;
          for (int64_t d = 0; d < s.headdim_v; ++d) {
            delta += o_row[d] * dout_row[d];
            delta_terms += std::fabs(o_row[d] * dout_row[d]);
          }
          if (!s.dlse.empty()) {
            const Real row_dlse = static_cast<Real>(s.dlse[static_cast<size_t>((b * s.nheads + h) * s.seqlen_q + i)]);
            delta -= row_dlse;
            delta_terms += std::fabs(row_dlse);
          }
          if (const double sink = sink_of(s, h); sink > -std::numeric_limits<double>::infinity()) {
            const Real weight = std::exp(static_cast<Real>(sink) - row_lse);
            sink_sums[static_cast<size_t>(h)] -= weight * delta;
            sink_p[static_cast<size_t>(h)] += static_cast<double>(weight);
            sink_terms[static_cast<size_t>(h)] += static_cast<double>(weight * delta_terms);
          }
          ds.assign(static_cast<size_t>(visible), 0);
          add_product(ds.data(), visible, dout_row, s.headdim_v, v_columns.data() + first, s.seqlen_k);  // dP
          for (size_t j = 0; j < ds.size(); ++j)
            ds[j] = rounded<Real>(s.stored(), p[j] * (rounded<Real>(s.stored(), ds[j] * kept[j] * factor) - delta));
          for (size_t j = 0; pairs && j < ds.size(); ++j) {
            if (whole[j] == -std::numeric_limits<Real>::infinity()) continue;
            const size_t at = pair_at(b, h, i, first + static_cast<int64_t>(j));
            pair_sums[at] += ds[j];
            p_sums[at] += static_cast<double>(p[j]);
          }
          for (size_t j = 0; j < ds.size(); ++j) p[j] = rounded<Real>(s.dtype, p[j] * kept[j]);
          if (cap > 0)
            for (size_t j = 0; j < ds.size(); ++j) ds[j] = ds[j] * (1 - scores[j] / cap * (scores[j] / cap));
          for (Real& x : ds) x = rounded<Real>(s.dtype, x);
          add_seen(dq.data() + i * s.headdim, s.headdim, ds, k_rows.data() + first * s.headdim, whole);

          std::vector<double> k_sums(static_cast<size_t>(s.headdim), 0);
          for (int64_t j = first; j < first + visible; ++j) {
            const auto at = static_cast<size_t>(j - first);
            if (whole[at] == -std::numeric_limits<Real>::infinity()) continue;
            add_product(dk.data() + j * s.headdim, s.headdim, &ds[at], 1, q_row, s.headdim);
            add_product(dv.data() + j * s.headdim_v, s.headdim_v, &p[at], 1, dout_row, s.headdim_v);
            add_terms(k_sums, 0, p[at], k_rows.data() + j * s.headdim, s.headdim);
            add_terms(q_sums, j * s.headdim, p[at], q_row, s.headdim);
            add_terms(dout_sums, j * s.headdim_v, p[at], dout_row, s.headdim_v);
          }
          out.k_terms = std::max(out.k_terms, largest_of(k_sums));
          const double score_terms = std::fabs(s.softmax_scale) * largest_terms(visible, q_row, s.headdim, k_columns.data() + first, s.seqlen_k);
          out.score_terms = std::max({out.score_terms, score_terms, largest_addend(s, b, h, i, first, visible),
                                      std::isfinite(row_lse) ? std::fabs(static_cast<double>(row_lse)) : 0.0});
          out.dp_terms = std::max({out.dp_terms, largest_terms(visible, dout_row, s.headdim_v, v_columns.data() + first, s.seqlen_k),
                                   std::isfinite(delta_terms) ? static_cast<double>(delta_terms) : 0.0});
        }
        store_head<Real>(out.dq, dq, s, scale, b, h, s.seqlen_q, s.nheads, s.headdim);
      }
      out.q_terms = std::max(out.q_terms, largest_of(q_sums));
      out.dout_terms = std::max(out.dout_terms, largest_of(dout_sums));
      store_head<Real>(out.dk, dk, s, scale, b, hk, s.seqlen_k, s.nheads_k, s.headdim);
      store_head<Real>(out.dv, dv, s, factor, b, hk, s.seqlen_k, s.nheads_k, s.headdim_v);
    }
  for (Real sum : pair_sums) out.dbias.push_back(rounded<Real>(pairs.dtype(), sum));
  out.p_terms = largest_of(p_sums);
  if (s.scores.sinks) out.dsinks.assign(sink_sums.begin(), sink_sums.end());
  out.sink_p = largest_of(sink_p);
  out.sink_terms = largest_of(sink_terms);
  return out;
}

}  // namespace

int64_t ModelShape::keys(int64_t entry) const {
  return scores.seqused_k ? static_cast<int64_t>(load(DType::kI32, scores.seqused_k.data(), entry * scores.seqused_k.stride(0))) : seqlen_k;
}
int64_t ModelShape::visible_begin(int64_t entry, int64_t row) const {
  const int64_t n = keys(entry);
  return window_left < 0 ? 0 : std::clamp<int64_t>(row + n - seqlen_q - window_left, 0, n);
}
int64_t ModelShape::visible_end(int64_t entry, int64_t row) const {
  const int64_t n = keys(entry);
  if (!causal && window_right < 0) return n;
  return std::clamp<int64_t>(row + 1 + n - seqlen_q + (causal ? 0 : window_right), 0, n);
}

ModelForward standard_forward(const ModelShape& shape, const Dense& q, const Dense& k, const Dense& v) {
  return shape.dtype == DType::kF64 ? forward<double>(shape, q, k, v) : forward<float>(shape, q, k, v);
}

ModelBackward standard_backward(const ModelShape& shape, const Dense& q, const Dense& k, const Dense& v, const Dense& o, const Dense& lse,
                                const Dense& dout) {
  return shape.dtype == DType::kF64 ? backward<double>(shape, q, k, v, o, lse, dout) : backward<float>(shape, q, k, v, o, lse, dout);
}

}  // namespace fattn::testing
