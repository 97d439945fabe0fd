#include "backend/cuda/standard.h"

#include <algorithm>
#include <initializer_list>
#include <limits>

#include "backend/cuda/v2_backward.h"
#include "backend/cuda/v2_common.h"
#include "jit/kernel_table.h"
#include "plan/features.h"
#include "shared/text.h"

namespace fattn::core::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kElementsHeld = 32;  // of a row, by a thread
constexpr int kMostThreads = 512;  // of a row: with more, a thread has too few registers to hold its part
constexpr int kFinishWarps = 8;
constexpr int64_t kFinishCtas = 512;
constexpr int64_t kBlock = 256;  // bytes: what parts of the workspace are aligned to

int64_t unit_of(DType dtype) { return 16 / static_cast<int64_t>(size_of(dtype)); }

StandardKey key_of(KernelKind kind, const Problem& p, int arch) {
  StandardKey key;
  key.kind = kind;
  key.arch = arch;
  key.dtype = static_cast<int32_t>(p.dtype);
  key.aligned = 1;
  return key;
}

// One warp a row as long as its registers hold it, so that no warp waits for another.
StandardKey softmax_key(const Problem& p, int arch) {
  StandardKey key = key_of(KernelKind::kStandardSoftmax, p, arch);
  key.capped = p.softcap > 0;
  key.pair = pair_bits(pair_features(p));
  key.row_threads = kWarp;
  while (key.row_threads < kMostThreads && int64_t{key.row_threads} * kElementsHeld < p.seqlen_k) key.row_threads *= 2;
  const bool held = int64_t{key.row_threads} * kElementsHeld >= p.seqlen_k;
  const bool small = p.seqlen_k <= kWarp * unit_of(p.dtype);
  key.units = !held ? 0 : small ? 1 : kElementsHeld / static_cast<int>(unit_of(p.dtype));
  return key;
}

StandardKey gradient_key(const Problem& p, int arch) {
  StandardKey key = key_of(KernelKind::kStandardGradient, p, arch);
  key.capped = p.softcap > 0;
  PairFeatures pair = pair_features(p);
  pair.dlse = p.has_dlse;
  key.pair = pair_bits(pair);
  key.row_threads = p.seqlen_k <= 2048 ? kWarp : p.seqlen_k <= 16384 ? 128 : 512;
  return key;
}

StandardKey finish_key(const Problem& p, int arch, bool queries) {
  StandardKey key = key_of(KernelKind::kStandardFinish, p, arch);
  key.row_threads = kWarp;
  key.queries = queries;
  const PairFeatures pair = pair_features(p);  // what hides pairs; forward, dropout, whose weights of 0 are of pairs that are seen
  key.pair =
      pair_bits({.lengths = pair.lengths, .bias = pair.bias, .mask = pair.mask, .dropout = pair.dropout && !p.backward, .documents = pair.documents});
  return key;
}

StandardKey clean_key(const Problem& p, int arch) {
  StandardKey key = key_of(KernelKind::kStandardClean, p, arch);
  key.row_threads = kWarp;
  return key;
}

bool masked(const Problem& p) { return p.mask().ends() || p.mask().begins() || p.has_seqused_k || pair_features(p).hides(); }

// Whether products take copies without Inf and NaN.
bool cleans(const Problem& p) { return !p.empty() && p.seqlen_k > 0 && masked(p); }

// Whether there is something to do after a product: because its operand had no Inf and NaN, because there was none, or for the outputs' dtype.
bool finishes_queries(const Problem& p) { return !p.empty() && (masked(p) || p.seqlen_k == 0); }
bool finishes_keys(const Problem& p) { return p.backward && p.batch > 0 && p.seqlen_k > 0 && (masked(p) || p.seqlen_q == 0 || p.group() > 1); }

int64_t rows_of(const Problem& p) { return p.batch * p.nheads * p.seqlen_q; }

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

// The library does not look at its operands where alpha is 0, and a NaN in them would be lost: a factor that leaves nothing but those, and `after` in
// the kernels.
constexpr float kNextToNothing = 1e-18f;
float scale_of(const Problem& p) { return static_cast<float>(p.softmax_scale); }

StandardMask mask_of(const Problem& p) {
  return {static_cast<int>(p.seqlen_q), static_cast<int>(p.seqlen_k), p.causal ? 1 : 0, static_cast<int>(p.window_left),
          static_cast<int>(p.window_right)};
}

StandardStrides strides_in(const Strides& s) { return {s.batch, s.row, s.head}; }

bool aligned_bytes(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }
bool aligned_bytes(const Problem& p, const Strides& s) {
  for (const int64_t stride : {s.batch, s.row, s.head})
    if (stride * static_cast<int64_t>(size_of(p.dtype)) % 16 != 0) return false;
  return true;
}

jit::Request request_of(const jit::KernelKey& key) { return standard_request(jit::pod_of_key<StandardKey>(key)); }

const jit::Loaded& kernel_of(CudaDevice& device, const StandardKey& key) { return jit::kernel_table().get(device, jit::key_of_pod(key), request_of); }

template <class Params>
void launch(CudaDevice& device, const StandardKey& key, int64_t grid, Params& params, CUstream stream) {
  if (grid == 0) return;
  const jit::Loaded& kernel = kernel_of(device, key);
  CudaLaunch shape;
  shape.grid_x = static_cast<unsigned>(grid);
  shape.block_x = static_cast<unsigned>(key.threads());
  void* parameters[] = {&params};
  device.launch(kernel.function, shape, stream, parameters, kernel.name.c_str());
}

int64_t grid_of_rows(const StandardKey& key, int64_t rows) { return ceil_div(rows, key.threads() / key.row_threads); }

// The kernels before and behind a backward pass with dbias, and their CTAs, one a row of dbias.
int64_t dbias_ctas(const Problem& p) { return p.backward && p.dbias.given && p.seqlen_k > 0 ? p.dbias.batch * p.dbias.heads * p.dbias.rows : 0; }
const jit::Loaded& dbias_kernel_of(CudaDevice& device, const Problem& p, int arch, KernelKind kind) {
  return jit::kernel_table().get(device, jit::key_of_pod(dbias_key(p, arch, kind)),
                                 [](const jit::KernelKey& key) { return v2_backward_request(jit::pod_of_key<V2BackwardKey>(key)); });
}
std::vector<KernelKind> dbias_kernels(const Problem& p) {
  if (dbias_ctas(p) == 0) return {};
  if (dbias_in_place(p)) return {KernelKind::kV2DbiasZero};
  return {KernelKind::kV2DbiasZero, KernelKind::kV2DbiasFinish};
}

// Lanes that look at one row of an output, and the CTAs for all.
int lanes_of(const Problem& p, int64_t width) {
  int lanes = 1;
  while (lanes < kWarp && lanes * unit_of(p.dtype) < width) lanes *= 2;
  return lanes;
}
int words_of(int64_t width) { return static_cast<int>(ceil_div(width, 32)); }

// Rows of a CTA behind a product. Where it only asks whether there is something to do: as many as leave every multiprocessor some CTAs.
int64_t finish_rows(const Problem& p, int64_t heads, int64_t seqlen, int64_t width, bool writes) {
  int64_t rows = int64_t{kFinishWarps} * (kWarp / lanes_of(p, width));
  while (!writes && rows < seqlen && heads * ceil_div(seqlen, 2 * rows) >= kFinishCtas) rows *= 2;
  return rows;
}

// One call: where everything lies.
class Call {
 public:
  Call(CudaDevice& device, const Problem& p, const StandardPlan& plan, const fattn_buffers& b, CUstream stream)
      : device_(device), p_(p), plan_(plan), b_(b), stream_(stream), pairs_(pair_params(v2_params(p, 1), p, b)) {
    set_dbias_params(pairs_, p, b.dbias, b.workspace, plan.dbias_offset);
  }

  void forward() const {
    if (p_.empty()) return;
    void* const weights = matrix(plan_.weights);
    if (plan_.scores) multiply(*plan_.scores, b_.q, b_.k, weights);
    StandardRowsParams params = rows();
    params.lse = p_.want_lse ? static_cast<float*>(b_.lse) : nullptr;
    rows_pass(softmax_key(p_, plan_.arch), params);
    if (plan_.output) multiply(*plan_.output, weights, clean(plan_.v, b_.v, p_.v, p_.nheads_k, p_.seqlen_k, p_.headdim_v), b_.o);
    if (finishes_queries(p_)) finish_queries(b_.o, p_.o, p_.headdim_v, plan_.v, false);
  }

  void backward() const {
    beside_dbias(KernelKind::kV2DbiasZero);
    gradients();
    if (!dbias_in_place(p_)) beside_dbias(KernelKind::kV2DbiasFinish);
  }

 private:
  void gradients() const {
    if (p_.batch == 0) return;
    void *const weights = matrix(plan_.weights), *const dscores = matrix(plan_.dscores);
    if (plan_.scores) {
      multiply(*plan_.scores, b_.q, b_.k, weights);
      multiply(*plan_.dweights, b_.dout, b_.v, dscores);
      StandardRowsParams params = rows();
      params.dscores = pairs_of(plan_.dscores);
      params.lse = static_cast<float*>(b_.lse);  // read only, here
      params.o = b_.o;
      params.dout = b_.dout;
      params.o_strides = strides_in(p_.o);
      params.dout_strides = strides_in(p_.dout);
      rows_pass(gradient_key(p_, plan_.arch), params);
      const void* const dout = clean(plan_.dout, b_.dout, p_.dout, p_.nheads, p_.seqlen_q, p_.headdim_v);
      multiply(*plan_.dv, weights, dout, p_.group() > 1 ? sums(plan_.sums_v_offset) : b_.dv);
      const void* const q = clean(plan_.q, b_.q, p_.q, p_.nheads, p_.seqlen_q, p_.headdim);
      multiply(*plan_.dk, dscores, q, p_.group() > 1 ? sums(plan_.sums_k_offset) : b_.dk);
      multiply(*plan_.dq, dscores, clean(plan_.k, b_.k, p_.k, p_.nheads_k, p_.seqlen_k, p_.headdim), b_.dq);
    }
    if (finishes_queries(p_)) finish_queries(b_.dq, p_.dq, p_.headdim, plan_.k, true);
    if (!finishes_keys(p_)) return;
    finish_keys(b_.dk, p_.dk, p_.headdim, plan_.q, false, plan_.sums_k_offset);
    finish_keys(b_.dv, p_.dv, p_.headdim_v, plan_.dout, true, plan_.sums_v_offset);
  }

  void beside_dbias(KernelKind kind) const {
    const int64_t grid = dbias_ctas(p_);
    if (grid == 0) return;
    const jit::Loaded& kernel = dbias_kernel_of(device_, p_, plan_.arch, kind);
    CudaLaunch shape;
    shape.grid_x = static_cast<unsigned>(grid);
    shape.block_x = kDbiasThreads;
    void* parameters[] = {const_cast<PairParams*>(&pairs_)};
    device_.launch(kernel.function, shape, stream_, parameters, kernel.name.c_str());
  }

  void* at(int64_t offset) const { return static_cast<char*>(b_.workspace) + offset; }
  void* matrix(const StandardMatrix& m) const { return m.given ? b_.weights : at(m.offset); }
  PairMatrix pairs_of(const StandardMatrix& m) const { return {matrix(m), strides_in(m.strides)}; }
  void* sums(int64_t offset) const { return at(offset); }

  void multiply(const Matmul& product, const void* a, const void* b, void* d) const { product.run(a, b, d, at(plan_.blas_offset), stream_); }

  StandardRowsParams rows() const {
    StandardRowsParams params{};
    params.weights = pairs_of(plan_.weights);
    params.lse_strides = strides_in(p_.lse);
    params.rows = rows_of(p_);
    params.nheads = static_cast<int>(p_.nheads);
    params.headdim_v = static_cast<int>(p_.headdim_v);
    params.mask = mask_of(p_);
    params.after = scale_of(p_) == 0 ? 0.0f : 1.0f;
    params.softcap = static_cast<float>(p_.softcap);
    params.pairs = pairs_;
    return params;
  }
  void rows_pass(StandardKey key, StandardRowsParams& params) const {
    key.aligned = aligned_bytes(params.weights.data) && aligned_bytes(p_, plan_.weights.strides);
    launch(device_, key, grid_of_rows(key, params.rows), params, stream_);
  }

  // The operand of a product: a copy without Inf and NaN, where there is one.
  const void* clean(const StandardClean& to, const void* from, const Strides& strides, int64_t heads, int64_t seqlen, int64_t width) const {
    if (!plan_.cleans) return from;
    StandardCleanParams params{};
    params.from = from;
    params.strides = strides_in(strides);
    params.to = at(to.offset);
    params.spoilt = static_cast<unsigned long long*>(at(to.spoilt_offset));
    params.marks = static_cast<unsigned*>(at(to.marks_offset));
    params.batch = static_cast<int>(p_.batch);
    params.heads = static_cast<int>(heads);
    params.seqlen = static_cast<int>(seqlen);
    params.width = static_cast<int>(width);
    params.pitch = static_cast<int>(to.strides.row);
    params.words = words_of(width);
    params.lanes = lanes_of(p_, width);
    StandardKey key = clean_key(p_, plan_.arch);
    key.aligned = aligned_bytes(from) && aligned_bytes(p_, strides);
    launch(device_, key, std::min<int64_t>(p_.batch * heads * ceil_div(seqlen, kStandardCleanRows), kMaxGrid), params, stream_);
    return params.to;
  }

  StandardFinishParams finish(void* out, const Strides& out_strides, int64_t width, const StandardClean& other, bool keeps_sign) const {
    StandardFinishParams params{};
    params.out = out;
    params.out_strides = strides_in(out_strides);
    params.lse_strides = strides_in(p_.lse);
    if (plan_.cleans) {
      params.spoilt = static_cast<const unsigned long long*>(at(other.spoilt_offset));
      params.marks = static_cast<const unsigned*>(at(other.marks_offset));
    }
    params.group = static_cast<int>(p_.group());
    params.width = static_cast<int>(width);
    params.words = words_of(width);
    params.keeps_sign = keeps_sign ? 1 : 0;
    params.lanes = lanes_of(p_, width);
    params.mask = mask_of(p_);
    params.all = plan_.scores ? 0 : 1;
    params.pairs = pairs_;
    return params;
  }
  void finish_pass(StandardFinishParams& params, const Strides& out_strides, bool queries) const {
    StandardKey key = finish_key(p_, plan_.arch, queries);
    key.aligned = aligned_bytes(params.out) && aligned_bytes(p_, out_strides);
    const int64_t heads = p_.batch * params.heads, seqlen = queries ? p_.seqlen_q : p_.seqlen_k;
    const int64_t rows = finish_rows(p_, heads, seqlen, params.width, params.sums || params.all != 0);
    params.block_rows = static_cast<int>(rows);
    params.blocks = heads * ceil_div(seqlen, rows);
    launch(device_, key, std::min<int64_t>(params.blocks, kMaxGrid), params, stream_);
  }
  void finish_queries(void* out, const Strides& out_strides, int64_t width, const StandardClean& other, bool backward) const {
    StandardFinishParams params = finish(out, out_strides, width, other, !backward);
    params.matrix = pairs_of(plan_.weights);
    params.heads = static_cast<int>(p_.nheads);
    params.lse = backward ? static_cast<const float*>(b_.lse) : nullptr;
    finish_pass(params, out_strides, true);
  }
  void finish_keys(void* out, const Strides& out_strides, int64_t width, const StandardClean& other, bool keeps_sign, int64_t sums_offset) const {
    StandardFinishParams params = finish(out, out_strides, width, other, keeps_sign);
    params.heads = static_cast<int>(p_.nheads_k);
    params.lse = static_cast<const float*>(b_.lse);
    params.sums = p_.group() > 1 && plan_.scores ? static_cast<const float*>(sums(sums_offset)) : nullptr;
    finish_pass(params, out_strides, false);
  }

  CudaDevice& device_;
  const Problem& p_;
  const StandardPlan& plan_;
  const fattn_buffers& b_;
  CUstream stream_;
  PairParams pairs_;
};

}  // namespace

std::string standard_refusal(const Problem& p, int arch) {
  if (std::string why = lacks(p, Way::kCudaStandard); !why.empty()) return why;
  if (p.dtype == DType::kF64) return "algorithm standard takes fp32, fp16 and bf16, not fp64; backend reference computes it on the host";
  if (p.dtype == DType::kBF16 && arch < 80) return "bf16 needs compute capability 8.0: conversions to it begin there; use fp16 or fp32";
  if (p.seqlen_q > kMaxSeqlen || p.seqlen_k > kMaxSeqlen)
    return text("seqlen_q is ", p.seqlen_q, " and seqlen_k ", p.seqlen_k, "; algorithm standard takes up to ", kMaxSeqlen);
  struct Input {
    const char* name;
    const Strides& strides;
    int64_t rows, width;
  };
  for (const Input& x : {Input{"q", p.q, p.seqlen_q, p.headdim}, Input{"k", p.k, p.seqlen_k, p.headdim}, Input{"v", p.v, p.seqlen_k, p.headdim_v},
                         Input{"dout", p.dout, p.backward ? p.seqlen_q : 0, p.headdim_v}})
    if (!Matmul::takes(x.strides.row, x.rows, x.width))
      return text(x.name, " has a stride of ", x.strides.row, " elements along the sequence, less than a row of ", x.width,
                  ": cuBLASLt takes no such matrix; copy it, or use algorithm v2");
  const int64_t threads = softmax_key(p, arch).threads() / softmax_key(p, arch).row_threads;
  const int64_t most = kMaxGrid * std::min<int64_t>(threads, gradient_key(p, arch).threads() / gradient_key(p, arch).row_threads);
  if (p.batch > 0 && p.seqlen_q > 0 && p.nheads > most / p.seqlen_q / p.batch)
    return text("batch ", p.batch, " * nheads ", p.nheads, " * seqlen_q ", p.seqlen_q, " is more rows than a grid has; split the batch");
  if (p.batch > 0 && p.seqlen_k > 0 && p.nheads_k > kMaxGrid / p.seqlen_k / p.batch)
    return text("batch ", p.batch, " * nheads_k ", p.nheads_k, " * seqlen_k ", p.seqlen_k, " is more rows than a grid has; split the batch");
  if (dbias_ctas(p) > kMaxGrid) return text("dbias has ", dbias_ctas(p), " rows, more than a grid of ", kMaxGrid, "; split the batch");
  return dbias_order_refusal(p);
}

std::vector<StandardKey> standard_keys(const Problem& p, int arch) {
  std::vector<StandardKey> keys;
  if (!p.empty() && (!p.backward || p.seqlen_k > 0)) keys.push_back(p.backward ? gradient_key(p, arch) : softmax_key(p, arch));
  if (cleans(p)) keys.push_back(clean_key(p, arch));
  if (finishes_queries(p)) keys.push_back(finish_key(p, arch, true));
  if (finishes_keys(p)) keys.push_back(finish_key(p, arch, false));
  return keys;
}

std::vector<jit::Request> standard_requests(const Problem& p, int arch) {
  std::vector<jit::Request> requests;
  for (const StandardKey& key : standard_keys(p, arch)) requests.push_back(standard_request(key));
  for (const KernelKind kind : dbias_kernels(p)) requests.push_back(v2_backward_request(dbias_key(p, arch, kind)));
  return requests;
}

jit::Request standard_request(const StandardKey& key) {
  struct Kernel {
    const char *file, *function, *entry, *params;
  };
  const Kernel kernel = key.kind == KernelKind::kStandardSoftmax    ? Kernel{"softmax", "softmax_rows", "fattn_std_softmax", "StandardRowsParams"}
                        : key.kind == KernelKind::kStandardGradient ? Kernel{"gradient", "gradient_rows", "fattn_std_gradient", "StandardRowsParams"}
                        : key.kind == KernelKind::kStandardClean    ? Kernel{"clean", "clean_rows", "fattn_std_clean", "StandardCleanParams"}
                        : key.queries != 0 ? Kernel{"finish", "finish_rows", "fattn_std_finish_queries", "StandardFinishParams"}
                                           : Kernel{"finish", "finish_rows", "fattn_std_finish_keys", "StandardFinishParams"};
  const DType dtype = static_cast<DType>(key.dtype);
  const char* const element = dtype == DType::kBF16 ? "fattn::bf16" : dtype == DType::kF16 ? "fattn::f16" : "fattn::standard::f32";
  const auto flag = [](int x) { return x != 0 ? "true" : "false"; };
  const bool finish = key.kind == KernelKind::kStandardFinish || key.kind == KernelKind::kStandardClean;
  std::string comment = text("// ", name_of(dtype));
  if (!finish) comment += text(", ", key.row_threads, " threads a row");
  if (key.capped != 0) comment += ", softcap";
  comment += names_of_pair(key.pair);
  if (key.aligned == 0) comment += ", unaligned";
  jit::Request request;
  request.entry = kernel.entry;
  request.arch = key.arch;
  request.source =
      text(comment, "\n#include \"kernels/standard/", kernel.file, ".h\"\n\nstruct Spec {\n  using Element = ", element,
           ";\n  static constexpr bool kAligned = ", flag(key.aligned), ", kCapped = ", flag(key.capped), ", kQueries = ", flag(key.queries),
           ";\n  static constexpr int kThreads = ", key.threads(), ", kRowThreads = ", key.row_threads, ", kUnits = ", key.units, ";\n",
           pair_line(key.pair), "};\n\nextern \"C\" __global__ void __launch_bounds__(Spec::kThreads, ", key.ctas(), ") ", kernel.entry,
           "(const __grid_constant__ fattn::", kernel.params, " p) {\n  fattn::standard::", kernel.function, "<Spec>(p);\n}\n");
  return request;
}

StandardPlan lay_out_standard(const Problem& p, int arch) {
  StandardPlan plan;
  plan.arch = arch;
  const Bytes bytes(p);
  const auto take = [&](int64_t size) {
    const int64_t offset = plan.workspace_bytes;
    plan.workspace_bytes = bytes.sum(offset, size);
    return offset;
  };
  const int64_t unit = unit_of(p.dtype), row = ceil_div(p.seqlen_k, unit) * unit;
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
  plan.cleans = cleans(p);
  const auto clean = [&](int64_t heads, int64_t seqlen, int64_t width) {
    StandardClean copy;
    if (!plan.cleans) return copy;
    const int64_t pitch = ceil_div(width, unit) * unit;
    copy.strides = {pitch * seqlen * heads, pitch, pitch * seqlen};
    copy.offset = take(bytes.of({pitch, seqlen, heads, p.batch, static_cast<int64_t>(size_of(p.dtype))}));
    copy.spoilt_offset = take(bytes.of({ceil_div(seqlen, kStandardCleanRows), heads, p.batch, 8}));
    copy.marks_offset = take(bytes.of({2 * words_of(width), seqlen, heads, p.batch, 4}));
    return copy;
  };
  if (!p.backward) plan.v = clean(p.nheads_k, p.seqlen_k, p.headdim_v);
  if (!p.backward) return plan;
  plan.dout = clean(p.nheads, p.seqlen_q, p.headdim_v);
  plan.q = clean(p.nheads, p.seqlen_q, p.headdim);
  plan.k = clean(p.nheads_k, p.seqlen_k, p.headdim);
  if (dbias_ctas(p) > 0 && !dbias_in_place(p)) plan.dbias_offset = take(bytes.of({dbias_bytes(p)}));
  plan.dscores = matrix();
  if (p.group() == 1 || p.empty()) return plan;
  plan.sums_k_offset = take(bytes.of({p.batch, p.seqlen_k, p.nheads_k, p.headdim, 4}));
  plan.sums_v_offset = take(bytes.of({p.batch, p.seqlen_k, p.nheads_k, p.headdim_v, 4}));
  return plan;
}

StandardPlan plan_standard(const Problem& p, CudaDevice& device, int arch) {
  StandardPlan plan = lay_out_standard(p, arch);
  cublaslt_handle(device);  // throws if there is none, whatever the sizes
  if (p.empty() || p.seqlen_k == 0) return plan;
  const std::array<int64_t, 3> count{p.batch, p.nheads_k, p.group()};
  const float scale = scale_of(p), factor = scale == 0 ? 1.0f : scale;
  const MatrixBatch q = queries_of(p, p.q), k = keys_of(p, p.k), v = keys_of(p, p.v), weights = queries_of(p, plan.weights.strides);
  size_t most = 0;
  const auto product = [&](int64_t m, int64_t n, int64_t inner, float alpha, const MatrixBatch& a, const MatrixBatch& b, const MatrixBatch& d) {
    auto made = std::make_unique<Matmul>(device, MatmulShape{m, n, inner, count, alpha, a, b, d});
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

void load_standard(CudaDevice& device, const Problem& p, const StandardPlan& plan) {
  for (const StandardKey& key : standard_keys(p, plan.arch)) kernel_of(device, key);
  for (const KernelKind kind : dbias_kernels(p)) dbias_kernel_of(device, p, plan.arch, kind);
}

void run_standard(CudaDevice& device, const Problem& p, const StandardPlan& plan, const fattn_buffers& b, CUstream stream) {
  const Call call(device, p, plan, b, stream);
  p.backward ? call.backward() : call.forward();
}

}  // namespace fattn::core::cuda
