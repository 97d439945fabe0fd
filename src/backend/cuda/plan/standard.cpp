// Algorithm standard: products by cuBLASLt with passes over their matrices between them; where pairs may be hidden, products take copies without Inf
// and NaN, and a pass behind each gives those to the rows that see them.
#include "backend/cuda/standard.h"

#include <algorithm>
#include <array>

#include "backend/cuda/call_params.h"
#include "backend/cuda/limits.h"
#include "backend/cuda/plan/planners.h"
#include "backend/cuda/v2_backward.h"
#include "device/cublaslt.h"
#include "shared/text.h"

namespace fattn::core::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kFinishWarps = 8;
constexpr int64_t kFinishCtas = 512;

// Of one call.
struct StandardParams {
  PairParams pairs;
  StandardRowsParams rows;
  std::array<StandardCleanParams, 3> cleans;
  std::array<StandardFinishParams, 3> finishes;
  std::array<Operands, 5> products;
};

StandardMask mask_of(const Problem& p) {
  return {static_cast<int>(p.seqlen_q), static_cast<int>(p.seqlen_k), p.causal ? 1 : 0, static_cast<int>(p.window_left),
          static_cast<int>(p.window_right)};
}

StandardStrides strides_in(const Strides& s) { return {s.batch, s.row, s.head}; }

bool aligned_bytes(const Problem& p, const Strides& s) {
  for (const int64_t stride : {s.batch, s.row, s.head})
    if (stride * static_cast<int64_t>(size_of(p.dtype)) % 16 != 0) return false;
  return true;
}

// Lanes that look at one row of an output, and the CTAs for all.
int lanes_of(const Problem& p, int64_t width) {
  int lanes = 1;
  while (lanes < kWarp && lanes * standard_unit(p.dtype) < width) lanes *= 2;
  return lanes;
}
int words_of(int64_t width) { return static_cast<int>(ceil_div(width, 32)); }

void* at(const fattn_buffers& b, int64_t offset) {
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(b.workspace) + static_cast<uintptr_t>(offset));
}
PairMatrix matrix_of(const StandardMatrix& m, const fattn_buffers& b) { return {m.given ? b.weights : at(b, m.offset), strides_in(m.strides)}; }

// What a product multiplies with weights or dS.
struct Operand {
  size_t tensor;  // of kTensors
  const Strides& strides;
  const StandardClean& copy;
  int64_t heads, seqlen, width;

  const void* data(const StandardPlan& plan, const fattn_buffers& b) const {
    return plan.cleans ? at(b, copy.offset) : kTensors[tensor].pointer.get(b);
  }
};
Operand of_v(const Problem& p, const StandardPlan& plan) { return {tensor_index("v"), p.v, plan.v, p.nheads_k, p.seqlen_k, p.headdim_v}; }
Operand of_dout(const Problem& p, const StandardPlan& plan) { return {tensor_index("dout"), p.dout, plan.dout, p.nheads, p.seqlen_q, p.headdim_v}; }
Operand of_q(const Problem& p, const StandardPlan& plan) { return {tensor_index("q"), p.q, plan.q, p.nheads, p.seqlen_q, p.headdim}; }
Operand of_k(const Problem& p, const StandardPlan& plan) { return {tensor_index("k"), p.k, plan.k, p.nheads_k, p.seqlen_k, p.headdim}; }

StandardCleanParams clean_params(const Problem& p, const Operand& x, const fattn_buffers& b) {
  StandardCleanParams params{};
  params.from = kTensors[x.tensor].pointer.get(b);
  params.strides = strides_in(x.strides);
  params.to = at(b, x.copy.offset);
  params.spoilt = static_cast<unsigned long long*>(at(b, x.copy.spoilt_offset));
  params.marks = static_cast<unsigned*>(at(b, x.copy.marks_offset));
  params.batch = static_cast<int>(p.batch);
  params.heads = static_cast<int>(x.heads);
  params.seqlen = static_cast<int>(x.seqlen);
  params.width = static_cast<int>(x.width);
  params.pitch = static_cast<int>(x.copy.strides.row);
  params.words = words_of(x.width);
  params.lanes = lanes_of(p, x.width);
  return params;
}

// An output whose rows are looked at behind its product: because its operand had no Inf and NaN, because there was no product, or for its dtype.
struct Behind {
  bool needed;
  size_t tensor;  // of kTensors
  bool queries;   // whose rows they are
  const Strides& strides;
  int64_t width;
  const StandardClean& other;  // what was multiplied
  bool keeps_sign;
  int64_t sums_offset;
};
Behind behind_queries(const Problem& p, const StandardPlan& plan) {
  const bool needed = !p.empty() && (standard_masks(p) || p.seqlen_k == 0);
  if (p.backward) return {needed, tensor_index("dq"), true, p.dq, p.headdim, plan.k, false, 0};
  return {needed, tensor_index("o"), true, p.o, p.headdim_v, plan.v, true, 0};
}
Behind behind_keys(const Problem& p, const StandardPlan& plan, bool values) {
  const bool needed = p.backward && p.batch > 0 && p.seqlen_k > 0 && (standard_masks(p) || p.seqlen_q == 0 || p.group() > 1);
  if (values) return {needed, tensor_index("dv"), false, p.dv, p.headdim_v, plan.dout, true, plan.sums_v_offset};
  return {needed, tensor_index("dk"), false, p.dk, p.headdim, plan.q, false, plan.sums_k_offset};
}
std::array<Behind, 3> all_behind(const Problem& p, const StandardPlan& plan) {
  return {behind_queries(p, plan), behind_keys(p, plan, false), behind_keys(p, plan, true)};
}

// Rows of a CTA behind a product. Where it only asks whether there is something to do: as many as leave every multiprocessor some CTAs.
int64_t finish_rows(const Problem& p, int64_t heads, int64_t seqlen, int64_t width, bool writes) {
  int64_t rows = int64_t{kFinishWarps} * (kWarp / lanes_of(p, width));
  while (!writes && rows < seqlen && heads * ceil_div(seqlen, 2 * rows) >= kFinishCtas) rows *= 2;
  return rows;
}

StandardFinishParams finish_params(const Problem& p, const StandardPlan& plan, const Behind& x, const fattn_buffers& b) {
  StandardFinishParams params{};
  params.out = const_cast<void*>(kTensors[x.tensor].pointer.get(b));
  params.out_strides = strides_in(x.strides);
  params.lse_strides = strides_in(p.lse);
  if (plan.cleans) {
    params.spoilt = static_cast<const unsigned long long*>(at(b, x.other.spoilt_offset));
    params.marks = static_cast<const unsigned*>(at(b, x.other.marks_offset));
  }
  params.group = static_cast<int>(p.group());
  params.width = static_cast<int>(x.width);
  params.words = words_of(x.width);
  params.keeps_sign = x.keeps_sign ? 1 : 0;
  params.lanes = lanes_of(p, x.width);
  params.mask = mask_of(p);
  params.all = standard_multiplies(p) ? 0 : 1;
  params.heads = static_cast<int>(x.queries ? p.nheads : p.nheads_k);
  params.lse = p.backward ? static_cast<const float*>(b.lse) : nullptr;
  const bool sums = !x.queries && p.group() > 1 && standard_multiplies(p);
  if (x.queries) params.matrix = matrix_of(plan.weights, b);
  if (sums) params.sums = static_cast<const float*>(at(b, x.sums_offset));
  const int64_t heads = p.batch * params.heads, seqlen = x.queries ? p.seqlen_q : p.seqlen_k;
  const int64_t rows = finish_rows(p, heads, seqlen, x.width, sums || params.all != 0);
  params.block_rows = static_cast<int>(rows);
  params.blocks = heads * ceil_div(seqlen, rows);
  return params;
}

StandardRowsParams rows_params(const Problem& p, const StandardPlan& plan, const fattn_buffers& b) {
  StandardRowsParams params{};
  params.weights = matrix_of(plan.weights, b);
  params.lse_strides = strides_in(p.lse);
  params.rows = p.batch * p.nheads * p.seqlen_q;
  params.nheads = static_cast<int>(p.nheads);
  params.headdim_v = static_cast<int>(p.headdim_v);
  params.mask = mask_of(p);
  params.after = static_cast<float>(p.softmax_scale) == 0 ? 0.0f : 1.0f;
  params.softcap = static_cast<float>(p.softcap);
  params.lse = p.backward || p.want_lse ? static_cast<float*>(b.lse) : nullptr;  // read only, backward
  if (!p.backward) return params;
  params.dscores = matrix_of(plan.dscores, b);
  params.o = b.o;
  params.dout = b.dout;
  params.o_strides = strides_in(p.o);
  params.dout_strides = strides_in(p.dout);
  return params;
}

void set_params(StandardParams& params, const Problem& p, const StandardPlan& plan, const fattn_buffers& b) {
  params.pairs = pair_params(call_params(p, 1), p, b);
  set_dbias_params(params.pairs, p, b.dbias, b.workspace, plan.dbias_offset);
  params.rows = rows_params(p, plan, b);
  params.rows.pairs = params.pairs;
  const std::array<Behind, 3> behind = all_behind(p, plan);
  for (size_t i = 0; i < behind.size(); ++i) {
    if (!behind[i].needed) continue;
    params.finishes[i] = finish_params(p, plan, behind[i], b);
    params.finishes[i].pairs = params.pairs;
  }
  void* const weights = params.rows.weights.data;
  void* const blas = at(b, plan.blas_offset);
  params.products[0] = {b.q, b.k, weights, blas};
  if (!p.backward) {
    const Operand v = of_v(p, plan);
    params.cleans[0] = clean_params(p, v, b);
    params.products[1] = {weights, v.data(plan, b), b.o, blas};
    return;
  }
  const Operand dout = of_dout(p, plan), q = of_q(p, plan), k = of_k(p, plan);
  params.cleans = {clean_params(p, dout, b), clean_params(p, q, b), clean_params(p, k, b)};
  void* const dscores = params.rows.dscores.data;
  const bool summed = p.group() > 1;
  params.products[1] = {b.dout, b.v, dscores, blas};
  params.products[2] = {weights, dout.data(plan, b), summed ? at(b, plan.sums_v_offset) : b.dv, blas};
  params.products[3] = {dscores, q.data(plan, b), summed ? at(b, plan.sums_k_offset) : b.dk, blas};
  params.products[4] = {dscores, k.data(plan, b), b.dq, blas};
}

// Puts the launches together.
class Builder {
 public:
  Builder(const Problem& p, std::shared_ptr<const StandardPlan> plan) : p_(p), plan_(std::move(plan)) {
    block_ =
        route.parameters<StandardParams>([plan = plan_](const Call& c, StandardParams& params) { set_params(params, c.problem, *plan, c.buffers); });
  }

  void forward() {
    if (p_.empty()) return;
    product(0, plan_->scores);
    rows(standard_softmax_key(p_, plan_->arch));
    clean(0, of_v(p_, *plan_));
    product(1, plan_->output);
    finish(0);
  }

  void backward() {
    dbias(KernelKind::kV2DbiasZero);
    if (standard_multiplies(p_)) gradients();
    for (const int i : {0, 1, 2}) finish(i);
    if (!dbias_in_place(p_)) dbias(KernelKind::kV2DbiasFinish);
  }

  Route route;

 private:
  void gradients() {
    product(0, plan_->scores);
    product(1, plan_->dweights);
    rows(standard_gradient_key(p_, plan_->arch));
    clean(0, of_dout(p_, *plan_));
    product(2, plan_->dv);
    clean(1, of_q(p_, *plan_));
    product(3, plan_->dk);
    clean(2, of_k(p_, *plan_));
    product(4, plan_->dq);
  }

  void add(void* member, StandardKey key, bool aligned_strides, TensorSet tensors, int64_t grid) {
    key.aligned = 0;
    const Kernel unaligned = kernel_of<StandardKey, standard_request>(key);
    key.aligned = aligned_strides;
    route.add(block_, std::array<void*, 1>{member},
              {.kernel = kernel_of<StandardKey, standard_request>(key),
               .unaligned = unaligned,
               .aligned = tensors,
               .shape = shape_of(grid, key.threads(), 0)});
  }
  void product(size_t i, const std::shared_ptr<const Matmul>& product) {
    route.add(block_, std::array<void*, 1>{&block_.example.products[i]}, {.kernel = {}, .product = product});
  }
  void rows(const StandardKey& key) {
    const int64_t rows = p_.batch * p_.nheads * p_.seqlen_q;
    add(&block_.example.rows, key, aligned_bytes(p_, plan_->weights.strides), plan_->weights.given ? tensor_set({"weights"}) : 0,
        ceil_div(rows, key.threads() / key.row_threads));
  }
  void clean(size_t i, const Operand& x) {
    if (!plan_->cleans) return;
    add(&block_.example.cleans[i], standard_clean_key(p_, plan_->arch), aligned_bytes(p_, x.strides), TensorSet{1} << x.tensor,
        std::min<int64_t>(p_.batch * x.heads * ceil_div(x.seqlen, kStandardCleanRows), kMaxGrid));
  }
  void finish(int i) {
    const Behind x = all_behind(p_, *plan_)[static_cast<size_t>(i)];
    if (!x.needed) return;
    add(&block_.example.finishes[static_cast<size_t>(i)], standard_finish_key(p_, plan_->arch, x.queries), aligned_bytes(p_, x.strides),
        TensorSet{1} << x.tensor, std::min<int64_t>(finish_params(p_, *plan_, x, {}).blocks, kMaxGrid));
  }
  void dbias(KernelKind kind) {
    route.add(block_, std::array<void*, 1>{&block_.example.pairs},
              {.kernel = kernel_of<V2BackwardKey, v2_backward_request>(dbias_key(p_, plan_->arch, kind)),
               .shape = shape_of(standard_dbias_ctas(p_), kDbiasThreads, 0)});
  }

  const Problem& p_;
  std::shared_ptr<const StandardPlan> plan_;
  ParameterBlock<StandardParams> block_;
};

bool wanted(const Problem& p, const Target&) { return p.algorithm == Algorithm::kStandard || (p.algorithm == Algorithm::kAuto && p.want_weights); }

std::string refusal(const Problem& p, const Target& t) {
  std::string why = standard_refusal(p, t.v2.arch);
  return why.empty() && t.device && !cublaslt() ? "algorithm standard needs cuBLASLt: " + cublaslt().reason : why;
}

Route route(const Problem& p, const Target& t) {
  const auto plan = std::make_shared<const StandardPlan>(plan_standard(p, t.device, t.v2.arch));
  Builder builder(p, plan);
  Route& route = builder.route;
  route.algorithm = Algorithm::kStandard;
  route.level = t.v2.level;
  route.title = text("cuda standard ", p.backward ? "backward " : "forward ", name_of(p.dtype), " sm_", t.v2.arch);
  if (t.device)
    route.why = text(p.algorithm == Algorithm::kStandard ? "asked for" : "the weights are wanted, which only standard attention has",
                     "; products by cuBLASLt ", cublaslt().major, ".", cublaslt().minor);
  route.workspace_bytes = plan->workspace_bytes;
  p.backward ? builder.backward() : builder.forward();
  return std::move(route);
}

}  // namespace

constinit const Planner kStandardPlanner{"standard", true, wanted, refusal, route};

}  // namespace fattn::core::cuda
