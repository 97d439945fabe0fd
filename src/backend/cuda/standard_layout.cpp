// Where algorithm standard has its matrices, and its products.
#include <algorithm>
#include <initializer_list>
#include <limits>

#include "backend/cuda/limits.h"
#include "backend/cuda/pair_features.h"
#include "backend/cuda/standard.h"
#include "backend/cuda/v2_backward.h"
#include "fattn/error.hpp"
#include "shared/text.h"

namespace fattn::core::cuda {
namespace {

constexpr int64_t kBlock = 256;  // bytes: what parts of the workspace are aligned to

// Sizes in bytes that are checked for overflow.
class Bytes {
 public:
  explicit Bytes(const Problem& p) : p_(p) {}
  int64_t of(std::initializer_list<int64_t> factors) const {
    int64_t n = 1;
    bool fits = true;
    for (const int64_t f : factors) fits = fits && !__builtin_mul_overflow(n, f, &n);
    return checked(fits && n <= std::numeric_limits<int64_t>::max() - kBlock, (n + kBlock - 1) / kBlock * kBlock);
  }
  int64_t sum(int64_t a, int64_t b) const {
    int64_t n = 0;
    const bool fits = !__builtin_add_overflow(a, b, &n);
    return checked(fits, n);
  }

 private:
  int64_t checked(bool fits, int64_t n) const {
    if (!fits)
      throw Error(ErrorCode::kOutOfMemory, text("algorithm standard stores the scores of every head; with batch ", p_.batch, ", nheads ", p_.nheads,
                                                ", seqlen_q ", p_.seqlen_q, " and seqlen_k ", p_.seqlen_k,
                                                " that is more than 2^63 - 1 bytes. Use algorithm v2, whose memory grows with seqlen_q only"));
    return n;
  }
  const Problem& p_;
};

MatrixBatch queries_of(const Problem& p, const Strides& s) { return {p.dtype, false, s.row, {s.batch, s.head * p.group(), s.head}}; }
MatrixBatch keys_of(const Problem& p, const Strides& s) { return {p.dtype, false, s.row, {s.batch, s.head, 0}}; }
MatrixBatch transposed(MatrixBatch matrix) {
  matrix.transposed = true;
  return matrix;
}
MatrixBatch sums_of(const Problem& p, int64_t width) { return {DType::kF32, false, p.nheads_k * width, {p.seqlen_k * p.nheads_k * width, width, 0}}; }

StandardPlan lay_out_standard(const Problem& p, int arch) {
  StandardPlan plan;
  plan.arch = arch;
  const Bytes bytes(p);
  const auto take = [&](int64_t size) {
    const int64_t offset = plan.workspace_bytes;
    plan.workspace_bytes = bytes.sum(offset, size);
    return offset;
  };
  const int64_t unit = standard_unit(p.dtype), row = ceil_div(p.seqlen_k, unit) * unit;
  const auto matrix = [&] {
    StandardMatrix m;
    m.offset = take(p.empty() ? 0 : bytes.of({row, p.seqlen_q, p.nheads, p.batch, static_cast<int64_t>(size_of(p.dtype))}));
    m.strides = {row * p.seqlen_q * p.nheads, row, row * p.seqlen_q};
    return m;
  };
  const int64_t* s = p.weights_strides;
  if (p.want_weights) {  // rows of neighbours that do not overlap: as good as ours
    plan.weights.given = true;
    plan.weights.strides = {s[0], s[2], s[1]};
  } else {
    plan.weights = matrix();
  }
  plan.cleans = standard_multiplies(p) && standard_masks(p);
  const auto clean = [&](int64_t heads, int64_t seqlen, int64_t width) {
    StandardClean copy;
    if (!plan.cleans) return copy;
    const int64_t pitch = ceil_div(width, unit) * unit;
    copy.strides = {pitch * seqlen * heads, pitch, pitch * seqlen};
    copy.offset = take(bytes.of({pitch, seqlen, heads, p.batch, static_cast<int64_t>(size_of(p.dtype))}));
    copy.spoilt_offset = take(bytes.of({ceil_div(seqlen, kStandardCleanRows), heads, p.batch, 8}));
    copy.marks_offset = take(bytes.of({2 * ceil_div(width, 32), seqlen, heads, p.batch, 4}));
    return copy;
  };
  if (!p.backward) plan.v = clean(p.nheads_k, p.seqlen_k, p.headdim_v);
  if (!p.backward) return plan;
  plan.dout = clean(p.nheads, p.seqlen_q, p.headdim_v);
  plan.q = clean(p.nheads, p.seqlen_q, p.headdim);
  plan.k = clean(p.nheads_k, p.seqlen_k, p.headdim);
  if (standard_dbias_ctas(p) > 0 && !dbias_in_place(p)) plan.dbias_offset = take(bytes.of({dbias_bytes(p)}));
  plan.dscores = matrix();
  if (p.group() == 1 || p.empty()) return plan;
  plan.sums_k_offset = take(bytes.of({p.batch, p.seqlen_k, p.nheads_k, p.headdim, 4}));
  plan.sums_v_offset = take(bytes.of({p.batch, p.seqlen_k, p.nheads_k, p.headdim_v, 4}));
  return plan;
}

}  // namespace

bool standard_masks(const Problem& p) { return p.mask().ends() || p.mask().begins() || p.has_seqused_k || pair_features(p).hides(); }

StandardPlan plan_standard(const Problem& p, CudaDevice* device, int arch) {
  StandardPlan plan = lay_out_standard(p, arch);
  if (!device) return plan;
  cublaslt_handle(*device);  // throws if there is none, whatever the sizes
  if (!standard_multiplies(p)) return plan;
  const std::array<int64_t, 3> count{p.batch, p.nheads_k, p.group()};
  const float scale = static_cast<float>(p.softmax_scale), factor = scale == 0 ? 1.0f : scale;
  const MatrixBatch q = queries_of(p, p.q), k = keys_of(p, p.k), v = keys_of(p, p.v), weights = queries_of(p, plan.weights.strides);
  size_t most = 0;
  const auto product = [&](int64_t m, int64_t n, int64_t inner, float alpha, const MatrixBatch& a, const MatrixBatch& b, const MatrixBatch& d) {
    auto made = std::make_shared<const Matmul>(*device, MatmulShape{m, n, inner, count, alpha, a, b, d});
    most = std::max(most, made->workspace_bytes());
    return made;
  };
  plan.scores = product(p.seqlen_q, p.seqlen_k, p.headdim, scale == 0 ? kNextToNothing : scale, q, transposed(k), weights);
  if (!p.backward) {
    plan.output = product(p.seqlen_q, p.headdim_v, p.seqlen_k, 1.0f, weights, plan.cleans ? keys_of(p, plan.v.strides) : v, queries_of(p, p.o));
  } else {
    const MatrixBatch dout = queries_of(p, p.dout), dscores = queries_of(p, plan.dscores.strides);
    const MatrixBatch own_dout = plan.cleans ? queries_of(p, plan.dout.strides) : dout, own_q = plan.cleans ? queries_of(p, plan.q.strides) : q,
                      own_k = plan.cleans ? keys_of(p, plan.k.strides) : k;
    const bool summed = p.group() > 1;
    plan.dweights = product(p.seqlen_q, p.seqlen_k, p.headdim_v, 1.0f, dout, transposed(v), dscores);
    plan.dv = product(p.seqlen_k, p.headdim_v, p.seqlen_q, 1.0f, transposed(weights), own_dout, summed ? sums_of(p, p.headdim_v) : keys_of(p, p.dv));
    plan.dk = product(p.seqlen_k, p.headdim, p.seqlen_q, factor, transposed(dscores), own_q, summed ? sums_of(p, p.headdim) : keys_of(p, p.dk));
    plan.dq = product(p.seqlen_q, p.headdim, p.seqlen_k, factor, dscores, own_k, queries_of(p, p.dq));
  }
  plan.blas_offset = plan.workspace_bytes;
  plan.workspace_bytes = Bytes(p).sum(plan.workspace_bytes, Bytes(p).of({static_cast<int64_t>(most)}));
  return plan;
}

}  // namespace fattn::core::cuda
