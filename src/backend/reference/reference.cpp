#include "backend/reference/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "device_abi/dropout.h"
#include "device_abi/lowest.h"
#include "shared/half.h"

namespace fattn::core {
namespace {

double load(const void* base, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kF64: return static_cast<const double*>(base)[i];
    case DType::kF32: return static_cast<const float*>(base)[i];
    case DType::kF16: return f16_to_float(static_cast<const uint16_t*>(base)[i]);
    case DType::kBF16: return bf16_to_float(static_cast<const uint16_t*>(base)[i]);
    default: return std::numeric_limits<double>::quiet_NaN();  // no tensor of numbers has another
  }
}

void store(void* base, DType dtype, int64_t i, double value) {
  switch (dtype) {
    case DType::kF64: static_cast<double*>(base)[i] = value; return;
    case DType::kF32: static_cast<float*>(base)[i] = static_cast<float>(value); return;
    case DType::kF16: static_cast<uint16_t*>(base)[i] = float_to_f16(static_cast<float>(value)); return;
    case DType::kBF16: static_cast<uint16_t*>(base)[i] = float_to_bf16(static_cast<float>(value)); return;
    default: return;  // no tensor of numbers has another
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

// All rows of one head of k or v that belong to batch entry n; of a paged cache those that it has.
std::vector<Vector> rows(const Problem& p, const fattn_buffers& b, const void* base, const Strides& s, int64_t page_stride, int64_t n,
                         const Sequence& at, int64_t h, int64_t headdim) {
  std::vector<Vector> all;
  if (!p.paged)
    for (int64_t j = 0; j < at.seqlen_k; ++j) all.push_back(row(base, p.dtype, s, n, at.k_begin + j, h, headdim));
  for (int64_t j = 0; p.paged && j < at.keys; ++j) {
    Strides of_page = s;
    of_page.batch = page_stride;
    all.push_back(row(base, p.dtype, of_page, pages_of(p, b, n)[j / p.page_size], j % p.page_size, h, headdim));
  }
  return all;
}
std::vector<Vector> keys_of(const Problem& p, const fattn_buffers& b, int64_t n, const Sequence& at, int64_t hk) {
  return rows(p, b, b.k, p.k, p.k_page_stride, n, at, hk, p.headdim);
}
std::vector<Vector> values_of(const Problem& p, const fattn_buffers& b, int64_t n, const Sequence& at, int64_t hk) {
  return rows(p, b, b.v, p.v, p.v_page_stride, n, at, hk, p.headdim_v);
}

void store_row(void* base, DType dtype, const Strides& s, int64_t b, int64_t i, int64_t h, const Vector& x) {
  const int64_t at = b * s.batch + i * s.row + h * s.head;
  for (size_t d = 0; d < x.size(); ++d) store(base, dtype, at + static_cast<int64_t>(d), x[d]);
}
// Rows of packed tensors that belong to no sequence: zeros.
void clear_rows(void* base, DType dtype, const Strides& s, int64_t begin, int64_t end, int64_t heads, int64_t headdim) {
  for (int64_t i = begin; i < end; ++i)
    for (int64_t h = 0; h < heads; ++h) store_row(base, dtype, s, 0, i, h, Vector(static_cast<size_t>(headdim), 0.0));
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

// A key that a query sees.
struct Seen {
  size_t key;
  double capped, score;  // before and after what is added to it
  double kept;           // what dropout makes of a weight of 1
};

// What dropout makes of a number: 0 of what is dropped, even of NaN.
double kept_of(const Seen& s, double x) { return s.kept == 0 ? 0 : s.kept * x; }

// One head of a batch entry, its masks and what is added to its scores.
class Head {
 public:
  Head(const Problem& p, const fattn_buffers& b, int64_t n, int64_t h) : p_(p), b_(b), n_(n), h_(h), at_(sequence_of(p, b, n)) {}

  std::vector<Seen> seen(const Vector& q, const std::vector<Vector>& k, int64_t i) const {
    const Mask mask = p_.mask(at_);
    std::vector<Seen> all;
    for (int64_t j = mask.visible_begin(i); j < mask.visible_end(i); ++j) {
      if (p_.has_documents &&
          id_of(b_.document_q, p_.document_q_stride, at_.q_begin + i) != id_of(b_.document_k, p_.document_k_stride, at_.k_begin + j))
        continue;
      if (p_.pair_mask.given && static_cast<const uint8_t*>(b_.mask)[at(p_.pair_mask, i, j)] == 0) continue;
      const double bias = p_.bias.given ? load(b_.bias, p_.bias.dtype, at(p_.bias, i, j)) : 0.0;
      if (bias == -std::numeric_limits<double>::infinity()) continue;  // hides, as a mask does
      const auto key = static_cast<size_t>(j);
      const double capped = score(p_, dot(q, k[key]));
      all.push_back({key, capped, capped + alibi(i, j) + bias, kept(i, j)});
    }
    return all;
  }
  // Of a tensor over (batch, head, query, key).
  int64_t at(const PairTensor& t, int64_t i, int64_t j) const { return n_ * t.strides.batch + h_ * t.strides.head + i * t.strides.row + j; }

 private:
  int32_t id_of(const void* ids, int64_t stride, int64_t row) const { return static_cast<const int32_t*>(ids)[n_ * stride + row]; }
  double alibi(int64_t i, int64_t j) const {
    if (!p_.has_alibi) return 0;
    const double slope = static_cast<const float*>(b_.alibi_slopes)[n_ * p_.alibi_batch_stride + h_ * p_.alibi_head_stride];
    return -slope * std::fabs(static_cast<double>(i + at_.keys - at_.seqlen_q - j));
  }
  double kept(int64_t i, int64_t j) const {
    if (p_.dropout_below == 0) return 1;
    const auto* state = static_cast<const int64_t*>(b_.dropout_state);
    const auto stream = static_cast<uint64_t>(state[1]) + static_cast<uint64_t>(n_ * p_.nheads + h_);
    const int64_t row = p_.dropout_places ? state[2] : 0, key = p_.dropout_places ? state[3] : 0;
    return dropout_number(static_cast<uint64_t>(state[0]), stream, row + i, key + j) < p_.dropout_below ? 0 : p_.dropout_scale();
  }

  const Problem& p_;
  const fattn_buffers& b_;
  int64_t n_, h_;
  Sequence at_;
};

// The weights of a row are exp(s - largest) / sum, and lse is largest + log(sum): of weights by lse nothing would be left where scores are so large
// that they swallow log(sum), as biases of a dtype's lowest finite number are. Empty: largest is -inf, sum 0. NaN if a score is NaN.
struct RowSum {
  double largest = -std::numeric_limits<double>::infinity(), sum = 0;

  // A sink is a key without a value; -inf is none.
  RowSum(const std::vector<Seen>& seen, double sink) {
    if (!(sink <= largest)) largest = sink;  // keeps NaN
    for (const Seen& s : seen)
      if (!(s.score <= largest)) largest = s.score;
    if (empty()) return;
    for (const Seen& s : seen) sum += std::exp(s.score - largest);
    sum += std::exp(sink - largest);
  }
  bool empty() const { return largest == -std::numeric_limits<double>::infinity(); }
  double lse() const { return empty() ? largest : largest + std::log(sum); }
  double weight(double score) const { return std::exp(score - largest) / sum; }
};

double sink_of(const Problem& p, const fattn_buffers& b, int64_t h) {
  if (!p.has_sinks) return -std::numeric_limits<double>::infinity();
  return load(b.sinks, p.dtype == DType::kF64 ? DType::kF64 : DType::kF32, h * p.sinks_stride);
}

void forward(const Problem& p, const fattn_buffers& b) {
  const DType lse_dtype = p.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  const auto store_lse = [&](int64_t n, int64_t row, int64_t h, double lse) {
    if (p.want_lse) store(b.lse, lse_dtype, n * p.lse.batch + row * p.lse.row + h * p.lse.head, lse);
  };
  for (int64_t n = 0; n < p.batch; ++n)
    for (int64_t h = 0; h < p.nheads; ++h) {
      const Sequence at = sequence_of(p, b, n);
      const auto k = keys_of(p, b, n, at, h / p.group()), v = values_of(p, b, n, at, h / p.group());
      const Head head(p, b, n, h);
      for (int64_t i = 0; i < at.seqlen_q; ++i) {
        const std::vector<Seen> seen = head.seen(row(b.q, p.dtype, p.q, n, at.q_begin + i, h, p.headdim), k, i);
        const RowSum row_sum(seen, sink_of(p, b, h));  // a row that sees nothing, or only scores of -inf, gives o = 0 and lse = -inf
        const double lse = row_sum.lse();
        Vector o(static_cast<size_t>(p.headdim_v), 0.0), weights(p.want_weights ? static_cast<size_t>(at.seqlen_k) : 0, 0.0);
        for (const Seen& s : seen) {
          if (row_sum.empty()) break;
          const double weight = kept_of(s, row_sum.weight(s.score));
          for (size_t d = 0; d < o.size(); ++d) o[d] += weight * v[s.key][d];
          if (p.want_weights) weights[s.key] = weight;
        }
        if (std::isnan(lse)) std::fill(o.begin(), o.end(), lse);  // whatever is dropped
        store_row(b.o, p.out_dtype(), p.o, n, at.q_begin + i, h, o);
        store_lse(n, at.q_begin + i, h, lse);
        for (size_t j = 0; j < weights.size(); ++j) {
          const int64_t* ws = p.weights_strides;
          store(b.weights, p.dtype, n * ws[0] + h * ws[1] + i * ws[2] + static_cast<int64_t>(j) * ws[3], weights[j]);
        }
      }
    }
  if (!p.packed) return;
  clear_rows(b.o, p.out_dtype(), p.o, end_of_queries(p, b), p.total_q, p.nheads, p.headdim_v);
  for (int64_t i = end_of_queries(p, b); i < p.total_q; ++i)
    for (int64_t h = 0; h < p.nheads; ++h) store_lse(0, i, h, -std::numeric_limits<double>::infinity());
}

// The gradient of a bias, summed in float64.
class BiasGradient {
 public:
  explicit BiasGradient(const Problem& p)
      : p_(p), t_(p.dbias), sums_(t_.given ? static_cast<size_t>(t_.batch * t_.heads * t_.rows * p.seqlen_k) : 0, 0.0) {}
  void add(int64_t n, int64_t h, int64_t i, size_t j, double gradient) {
    if (t_.given) sums_[index(n % t_.batch, h % t_.heads, i % t_.rows) + j] += gradient;
  }
  void write(const fattn_buffers& b) const {
    for (int64_t n = 0; n < t_.batch; ++n)
      for (int64_t h = 0; h < t_.heads; ++h)
        for (int64_t i = 0; i < t_.rows; ++i)
          for (int64_t j = 0; j < p_.seqlen_k; ++j)
            store(b.dbias, t_.dtype, n * t_.strides.batch + h * t_.strides.head + i * t_.strides.row + j,
                  sums_[index(n, h, i) + static_cast<size_t>(j)]);
  }

 private:
  size_t index(int64_t n, int64_t h, int64_t i) const { return static_cast<size_t>(((n * t_.heads + h) * t_.rows + i) * p_.seqlen_k); }
  const Problem& p_;
  const PairTensor& t_;
  Vector sums_;
};

// What a row gives to the gradient of its head's sink: ds of a key without a value.
double gradient_of_sink(double sink, double lse, double delta) {
  const bool none = lse < kLowestLse || sink == -std::numeric_limits<double>::infinity();
  return none ? 0 : -std::exp(sink - lse) * delta;
}

// p = exp(s - lse); dv = (p kept)^T do; dp = kept do v^T; ds = p (dp - sum(o do)); dbias = ds; with ds' = ds slope scale: dq = ds' k; dk = ds'^T q
// (Dao 2022, appendix B).
void backward(const Problem& p, const fattn_buffers& b) {
  BiasGradient dbias(p);
  Vector dsinks(static_cast<size_t>(p.nheads), 0.0);
  const DType lse_dtype = p.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  if (p.packed) {  // with seqused_k all keys, before some get their own
    clear_rows(b.dk, p.out_dtype(), p.dk, end_of_keys(p, b), p.total_k, p.nheads_k, p.headdim);
    clear_rows(b.dv, p.out_dtype(), p.dv, end_of_keys(p, b), p.total_k, p.nheads_k, p.headdim_v);
  }
  for (int64_t n = 0; n < p.batch; ++n)
    for (int64_t hk = 0; hk < p.nheads_k; ++hk) {
      const Sequence at = sequence_of(p, b, n);
      const auto k = keys_of(p, b, n, at, hk), v = values_of(p, b, n, at, hk);
      std::vector<Vector> dk(k.size(), Vector(static_cast<size_t>(p.headdim), 0.0));
      std::vector<Vector> dv(v.size(), Vector(static_cast<size_t>(p.headdim_v), 0.0));
      for (int64_t h = hk * p.group(); h < (hk + 1) * p.group(); ++h) {
        const Head head(p, b, n, h);
        const double sink = sink_of(p, b, h);
        for (int64_t i = 0; i < at.seqlen_q; ++i) {
          const int64_t in_q = at.q_begin + i;
          const Vector q = row(b.q, p.dtype, p.q, n, in_q, h, p.headdim);
          const Vector o = row(b.o, p.dtype, p.o, n, in_q, h, p.headdim_v);
          const Vector dout = row(b.dout, p.dtype, p.dout, n, in_q, h, p.headdim_v);
          const double lse = load(b.lse, lse_dtype, n * p.lse.batch + in_q * p.lse.row + h * p.lse.head);
          const double dlse = p.has_dlse ? load(b.dlse, lse_dtype, n * p.dlse.batch + in_q * p.dlse.row + h * p.dlse.head) : 0.0;
          const double delta = dot(o, dout) - dlse;  // dlse_i p_ij is what lse adds to ds_ij
          if (p.has_sinks) dsinks[static_cast<size_t>(h)] += gradient_of_sink(sink, lse, delta);
          Vector dq(static_cast<size_t>(p.headdim), 0.0);
          const bool without = lse < kLowestLse;
          for (const Seen& s : head.seen(q, k, i)) {
            if (without) break;
            const size_t j = s.key;
            const double weight = std::exp(s.score - lse), slope = score_slope(p, s.capped) * p.softmax_scale;
            const double gradient = weight * (kept_of(s, dot(dout, v[j])) - delta), ds = gradient * slope;
            dbias.add(n, h, i, j, gradient);
            for (size_t d = 0; d < dout.size(); ++d) dv[j][d] += kept_of(s, weight) * dout[d];
            for (size_t d = 0; d < q.size(); ++d) {
              dq[d] += ds * k[j][d];
              dk[j][d] += ds * q[d];
            }
          }
          store_row(b.dq, p.out_dtype(), p.dq, n, in_q, h, dq);
        }
      }
      for (int64_t j = 0; j < at.seqlen_k; ++j) {
        store_row(b.dk, p.out_dtype(), p.dk, n, at.k_begin + j, hk, dk[static_cast<size_t>(j)]);
        store_row(b.dv, p.out_dtype(), p.dv, n, at.k_begin + j, hk, dv[static_cast<size_t>(j)]);
      }
    }
  if (p.packed) clear_rows(b.dq, p.out_dtype(), p.dq, end_of_queries(p, b), p.total_q, p.nheads, p.headdim);
  if (p.dbias.given) dbias.write(b);
  for (int64_t h = 0; p.want_dsinks && h < p.nheads; ++h) store(b.dsinks, lse_dtype, h * p.dsinks_stride, dsinks[static_cast<size_t>(h)]);
}

}  // namespace

void execute_reference(const Plan& plan, const fattn_buffers& buffers) {
  if (plan.problem.backward)
    backward(plan.problem, buffers);
  else
    forward(plan.problem, buffers);
}

}  // namespace fattn::core
