#include "backend/reference/reference.h"

#include <cmath>
#include <limits>
#include <vector>

#include "shared/half.h"

namespace fattn::core {
namespace {

double load(const void* base, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kF64: return static_cast<const double*>(base)[i];
    case DType::kF32: return static_cast<const float*>(base)[i];
    case DType::kF16: return f16_to_float(static_cast<const uint16_t*>(base)[i]);
    case DType::kBF16: return bf16_to_float(static_cast<const uint16_t*>(base)[i]);
  }
  return std::numeric_limits<double>::quiet_NaN();
}

void store(void* base, DType dtype, int64_t i, double value) {
  switch (dtype) {
    case DType::kF64: static_cast<double*>(base)[i] = value; return;
    case DType::kF32: static_cast<float*>(base)[i] = static_cast<float>(value); return;
    case DType::kF16: static_cast<uint16_t*>(base)[i] = float_to_f16(static_cast<float>(value)); return;
    case DType::kBF16: static_cast<uint16_t*>(base)[i] = float_to_bf16(static_cast<float>(value)); return;
  }
}

using Vector = std::vector<double>;

// One row of a (batch, seqlen, heads, headdim) tensor, as float64.
Vector row(const void* base, DType dtype, const Strides& s, int64_t b, int64_t i, int64_t h, int64_t headdim) {
  Vector x(static_cast<size_t>(headdim));
  const int64_t at = b * s.batch + i * s.row + h * s.head;
  for (int64_t d = 0; d < headdim; ++d) x[static_cast<size_t>(d)] = load(base, dtype, at + d);
  return x;
}

double dot(const Vector& a, const Vector& b) {
  double sum = 0;
  for (size_t d = 0; d < a.size(); ++d) sum += a[d] * b[d];
  return sum;
}

// All rows of one head of k or v.
std::vector<Vector> rows(const void* base, DType dtype, const Strides& s, int64_t b, int64_t n, int64_t h, int64_t headdim) {
  std::vector<Vector> all;
  for (int64_t j = 0; j < n; ++j) all.push_back(row(base, dtype, s, b, j, h, headdim));
  return all;
}

// What becomes of a product q k before the softmax.
double score(const Problem& p, double product) {
  const double s = p.softmax_scale * product;
  return p.softcap > 0 ? p.softcap * std::tanh(s / p.softcap) : s;
}
// The derivative of a score by softmax_scale q k, given the score.
double score_slope(const Problem& p, double score) {
  const double t = p.softcap > 0 ? score / p.softcap : 0.0;
  return 1 - t * t;
}

// The scores of query `i`, of the keys that it sees: from p.mask().visible_begin(i) on.
Vector scores(const Problem& p, const Vector& q, const std::vector<Vector>& k, int64_t i) {
  Vector s;
  for (int64_t j = p.mask().visible_begin(i); j < p.mask().visible_end(i); ++j) s.push_back(score(p, dot(q, k[static_cast<size_t>(j)])));
  return s;
}

// log(sum(exp(s))): -inf for an empty row, NaN if a score is NaN.
double log_sum_exp(const Vector& s) {
  double largest = -std::numeric_limits<double>::infinity();
  for (double x : s)
    if (!(x <= largest)) largest = x;  // keeps NaN
  if (s.empty() || largest == -std::numeric_limits<double>::infinity()) return largest;
  double sum = 0;
  for (double x : s) sum += std::exp(x - largest);
  return largest + std::log(sum);
}

void forward(const Problem& p, const fattn_buffers& b) {
  const DType lse_dtype = p.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  for (int64_t n = 0; n < p.batch; ++n)
    for (int64_t h = 0; h < p.nheads; ++h) {
      const auto k = rows(b.k, p.dtype, p.k, n, p.seqlen_k, h / p.group(), p.headdim);
      const auto v = rows(b.v, p.dtype, p.v, n, p.seqlen_k, h / p.group(), p.headdim_v);
      for (int64_t i = 0; i < p.seqlen_q; ++i) {
        const Vector q = row(b.q, p.dtype, p.q, n, i, h, p.headdim);
        const Vector s = scores(p, q, k, i);
        const auto first = static_cast<size_t>(p.mask().visible_begin(i));
        const double lse = log_sum_exp(s);
        // A row that sees nothing, or only scores of -inf, gives o = 0 and lse = -inf.
        const bool empty = lse == -std::numeric_limits<double>::infinity();
        Vector o(static_cast<size_t>(p.headdim_v), 0.0);
        if (!empty)
          for (size_t j = 0; j < s.size(); ++j) {
            const double weight = std::exp(s[j] - lse);
            for (size_t d = 0; d < o.size(); ++d) o[d] += weight * v[first + j][d];
          }
        for (int64_t d = 0; d < p.headdim_v; ++d) store(b.o, p.dtype, n * p.o.batch + i * p.o.row + h * p.o.head + d, o[static_cast<size_t>(d)]);
        if (p.want_lse) store(b.lse, lse_dtype, n * p.lse.batch + i * p.lse.row + h * p.lse.head, lse);
        if (p.want_weights)
          for (int64_t j = 0; j < p.seqlen_k; ++j) {
            const auto at = static_cast<size_t>(j) - first;  // beyond every size for a key before the first
            const int64_t* ws = p.weights_strides;
            store(b.weights, p.dtype, n * ws[0] + h * ws[1] + i * ws[2] + j * ws[3], at < s.size() && !empty ? std::exp(s[at] - lse) : 0.0);
          }
      }
    }
}

// p = exp(s - lse); dv = p^T do; dp = do v^T; ds = p (dp - sum(o do)) slope scale; dq = ds k; dk = ds^T q (Dao 2022, appendix B).
void backward(const Problem& p, const fattn_buffers& b) {
  const DType lse_dtype = p.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  for (int64_t n = 0; n < p.batch; ++n)
    for (int64_t hk = 0; hk < p.nheads_k; ++hk) {
      const auto k = rows(b.k, p.dtype, p.k, n, p.seqlen_k, hk, p.headdim);
      const auto v = rows(b.v, p.dtype, p.v, n, p.seqlen_k, hk, p.headdim_v);
      std::vector<Vector> dk(k.size(), Vector(static_cast<size_t>(p.headdim), 0.0));
      std::vector<Vector> dv(v.size(), Vector(static_cast<size_t>(p.headdim_v), 0.0));
      for (int64_t h = hk * p.group(); h < (hk + 1) * p.group(); ++h)
        for (int64_t i = 0; i < p.seqlen_q; ++i) {
          const Vector q = row(b.q, p.dtype, p.q, n, i, h, p.headdim);
          const Vector o = row(b.o, p.dtype, p.o, n, i, h, p.headdim_v);
          const Vector dout = row(b.dout, p.dtype, p.dout, n, i, h, p.headdim_v);
          const double lse = load(b.lse, lse_dtype, n * p.lse.batch + i * p.lse.row + h * p.lse.head);
          const double delta = dot(o, dout);
          Vector dq(static_cast<size_t>(p.headdim), 0.0);
          const Vector s = scores(p, q, k, i);
          const auto first = static_cast<size_t>(p.mask().visible_begin(i));
          const bool empty = lse == -std::numeric_limits<double>::infinity();
          for (size_t j = first; j < first + s.size() && !empty; ++j) {
            const double weight = std::exp(s[j - first] - lse);
            const double ds = weight * (dot(dout, v[j]) - delta) * score_slope(p, s[j - first]) * p.softmax_scale;
            for (size_t d = 0; d < dout.size(); ++d) dv[j][d] += weight * dout[d];
            for (size_t d = 0; d < q.size(); ++d) {
              dq[d] += ds * k[j][d];
              dk[j][d] += ds * q[d];
            }
          }
          for (int64_t d = 0; d < p.headdim; ++d) store(b.dq, p.dtype, n * p.dq.batch + i * p.dq.row + h * p.dq.head + d, dq[static_cast<size_t>(d)]);
        }
      for (int64_t j = 0; j < p.seqlen_k; ++j) {
        for (int64_t d = 0; d < p.headdim; ++d)
          store(b.dk, p.dtype, n * p.dk.batch + j * p.dk.row + hk * p.dk.head + d, dk[static_cast<size_t>(j)][static_cast<size_t>(d)]);
        for (int64_t d = 0; d < p.headdim_v; ++d)
          store(b.dv, p.dtype, n * p.dv.batch + j * p.dv.row + hk * p.dv.head + d, dv[static_cast<size_t>(j)][static_cast<size_t>(d)]);
      }
    }
}

}  // namespace

void execute_reference(const Plan& plan, const fattn_buffers& buffers) {
  if (plan.problem.backward)
    backward(plan.problem, buffers);
  else
    forward(plan.problem, buffers);
}

}  // namespace fattn::core
