#include "problem/problem.h"

#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <string>
#include <string_view>
#include <utility>

#include "problem/overlap.h"
#include "shared/text.h"

namespace fattn::core {
namespace {

[[noreturn]] void invalid(const std::string& message) { throw Error(ErrorCode::kInvalidArgument, message); }

std::string shape_text(const fattn_tensor& t) {
  std::string s = "(";
  for (int i = 0; i < t.ndim; ++i) s += (i ? ", " : "") + std::to_string(t.shape[i]);
  return s + ")";
}

bool known_dtype(int32_t dtype) { return dtype >= FATTN_F32 && dtype <= FATTN_F64; }

Extent extent_of(const fattn_tensor& t) {
  Extent e;
  e.ndim = t.ndim;
  for (int i = 0; i < t.ndim; ++i) {
    e.shape[i] = t.shape[i];
    e.strides[i] = t.strides[i];
  }
  e.element_size = static_cast<int64_t>(size_of(static_cast<DType>(t.dtype)));
  return e;
}

// What holds for every tensor alone: rank, device, shape, strides, size. The dtype is known already. `dimensions` names them.
void check_view(const char* name, const fattn_tensor& t, int ndim, const char* dimensions, bool output) {
  if (t.ndim != ndim)
    invalid(text(name, " has ", t.ndim, " dimensions; allowed: ", ndim, " ", dimensions, ". Add a dimension of 1 where one is missing"));
  const bool on_cpu = t.device_type == FATTN_DEVICE_CPU && t.device_index == 0;
  const bool on_cuda = t.device_type == FATTN_DEVICE_CUDA && t.device_index >= 0;
  if (!on_cpu && !on_cuda)
    invalid(text(name, " is on device type ", t.device_type, ", index ", t.device_index,
                 "; allowed: CPU (0) with index 0, CUDA (1) with the index of a device"));
  for (int i = 0; i < ndim; ++i) {
    if (t.shape[i] < 0) invalid(text(name, " has the shape ", shape_text(t), "; every dimension must be at least 0"));
    if (t.strides[i] < 0)
      invalid(text(name, " has the stride ", t.strides[i], " in dimension ", i, "; strides must be at least 0. Copy the tensor first"));
  }
  if (span_bytes(extent_of(t)) < 0)
    invalid(text(name, " of shape ", shape_text(t), " spans more than 2^63 - 1 bytes with its strides; use a smaller tensor"));
  if (output && overlaps_itself(extent_of(t)))
    invalid(text(name, " is an output whose strides reach one element by two indices (an expanded view?); pass a tensor of its own memory"));
}

// A tensor that the call needs, of a dtype that attention is computed in.
void check_tensor(const char* name, const fattn_tensor& t, int ndim, const char* dimensions, bool output) {
  if (t.ndim == 0) invalid(text(name, " is absent; this call needs it. Describe it with its shape, strides and dtype"));
  if (t.ndim == ndim && !known_dtype(t.dtype))
    invalid(text(name, " has the unknown dtype ", t.dtype, "; allowed: fp32 (1), fp16 (2), bf16 (3), fp64 (4)"));
  check_view(name, t, ndim, dimensions, output);
}

void check_rows(const char* name, const fattn_tensor& t, bool packed, bool output, bool paged = false) {
  const int last = packed && !paged ? 2 : 3;
  check_tensor(name, t, last + 1,
               paged    ? "(pages, page_size, heads, headdim) of a paged cache (block_table)"
               : packed ? "(total, heads, headdim) of packed sequences (cu_seqlens_q, cu_seqlens_k)"
                        : "(batch, seqlen, heads, headdim)",
               output);
  if (t.shape[last] > 1 && t.strides[last] != 1)
    invalid(text(name, " has the stride ", t.strides[last], " in its last dimension (headdim); it must be 1. Make that dimension contiguous"));
}

void check_shape(const char* name, const fattn_tensor& t, std::array<int64_t, 4> wanted, const char* because) {
  for (int i = 0; i < t.ndim; ++i)
    if (t.shape[i] != wanted[static_cast<size_t>(i)]) {
      fattn_tensor w = t;
      for (int j = 0; j < t.ndim; ++j) w.shape[j] = wanted[static_cast<size_t>(j)];
      invalid(text(name, " has the shape ", shape_text(t), "; expected ", shape_text(w), ", ", because));
    }
}

void check_same_dtype(const char* name, const fattn_tensor& t, int32_t dtype) {
  if (t.dtype != dtype)
    invalid(text(name, " is ", name_of(static_cast<DType>(t.dtype)), " but q is ", name_of(static_cast<DType>(dtype)),
                 "; all tensors of a call share one dtype. Cast one of them"));
}

std::string device_text(const fattn_tensor& t) { return t.device_type == FATTN_DEVICE_CPU ? "the CPU" : text("CUDA device ", t.device_index); }

void check_same_device(const char* name, const fattn_tensor& t, const fattn_tensor& q) {
  if (t.device_type != q.device_type || t.device_index != q.device_index)
    invalid(text(name, " is on ", device_text(t), " but q is on ", device_text(q), "; all tensors of a call are on one device. Copy one of them"));
}

// A stride along a dimension of one element reaches nothing, but kernels may form addresses with it: there it becomes that of an aligned row.
Strides row_strides(const fattn_tensor& t) {
  const int last = t.ndim - 1;
  const auto stride = [&](int i) { return t.shape[i] > 1 ? t.strides[i] : (t.shape[last] + 7) / 8 * 8; };
  return {last == 3 ? stride(0) : 0, stride(last - 2), stride(last - 1)};
}

template <class Range>
void check_enum(const char* name, int32_t value, Range allowed, const char* names) {
  for (int32_t a : allowed)
    if (a == value) return;
  invalid(text(name, " is ", value, "; allowed: ", names));
}

std::atomic<int32_t> default_check{FATTN_CHECK_NONE};

constexpr float kLeastSoftcap = 1e-30f;  // its reciprocal is a number of fp32

void check_options(const fattn_problem& g) {
  using A = std::initializer_list<int32_t>;
  check_enum("pass", g.pass, A{FATTN_FORWARD, FATTN_BACKWARD}, "forward (0), backward (1)");
  check_enum("backend", g.backend, A{FATTN_BACKEND_AUTO, FATTN_BACKEND_REFERENCE, FATTN_BACKEND_CPU, FATTN_BACKEND_CUDA},
             "auto (0), reference (1), cpu (2), cuda (3)");
  check_enum("algorithm", g.algorithm, A{FATTN_ALGORITHM_AUTO, FATTN_ALGORITHM_STANDARD, FATTN_ALGORITHM_V2, FATTN_ALGORITHM_V3, FATTN_ALGORITHM_V1},
             "auto (0), standard (1), v2 (2), v3 (3), v1 (4)");
  check_enum("causal", g.causal, A{0, 1}, "0, 1");
  check_enum("has_softmax_scale", g.has_softmax_scale, A{0, 1}, "0, 1");
  check_enum("deterministic", g.deterministic, A{0, 1}, "0, 1");
  check_enum("check", g.check, A{FATTN_CHECK_AUTO, FATTN_CHECK_NONE, FATTN_CHECK_SYNC}, "auto (0), none (1), sync (2)");
  check_enum("reserved", static_cast<int32_t>(g.reserved), A{0}, "0");
  check_enum("cuda_level", g.cuda_level, A{0, 75, 80}, "0 (the best for the device), 75, 80");
  if (g.cpu_isa < FATTN_ISA_AUTO || g.cpu_isa > FATTN_ISA_NEON) invalid(text("cpu_isa is ", g.cpu_isa, "; allowed: 0 (auto) to ", FATTN_ISA_NEON));
  check_enum("has_window", g.has_window, A{0, 1}, "0, 1");
  for (const auto& [name, limit] : {std::pair{"window_left", g.window_left}, std::pair{"window_right", g.window_right}})
    if (g.has_window && limit < -1) invalid(text(name, " is ", limit, "; allowed: -1 (no limit on that side), 0 or more keys"));
  if (!(g.softcap >= 0) || !std::isfinite(static_cast<float>(g.softcap)) || (g.softcap > 0 && static_cast<float>(g.softcap) < kLeastSoftcap))
    invalid(text("softcap is ", g.softcap, "; allowed: 0 (none), or ", kLeastSoftcap, " to the largest fp32"));
  if (g.has_softmax_scale && !std::isfinite(g.softmax_scale))
    invalid(text("softmax_scale is ", g.softmax_scale, "; it must be finite. Leave it unset for 1 / sqrt(headdim)"));
  if (g.has_softmax_scale && !std::isfinite(static_cast<float>(g.softmax_scale)))
    invalid(text("softmax_scale is ", g.softmax_scale, "; it must be within the range of fp32"));
  if (g.num_threads < 0 || g.num_threads > 4096) invalid(text("num_threads is ", g.num_threads, "; allowed: 0 (as many as usable) to 4096"));
  if (g.executor) {
    if (g.executor->struct_size != sizeof(fattn_executor))
      throw Error(ErrorCode::kAbi, text("executor.struct_size is ", g.executor->struct_size, "; this library knows ", sizeof(fattn_executor),
                                        ". Build the caller against this library's fattn.h"));
    if (!g.executor->parallel || g.executor->concurrency < 1)
      invalid(text("executor has concurrency ", g.executor->concurrency, g.executor->parallel ? "" : " and a null parallel",
                   "; it needs a function and a concurrency of at least 1"));
  }
}

void check_dtype(const char* name, const fattn_tensor& t, int32_t wanted, const char* because) {
  if (t.dtype != wanted)
    invalid(text(name, " has the dtype ", t.dtype, "; it must be ", name_of(static_cast<DType>(wanted)), " (", wanted, ")", because));
}

using Shape = std::array<int64_t, 4>;

constexpr const TensorRow& row_of(std::string_view name) { return kTensors[tensor_index(name)]; }

// Of a row that has one dtype.
int32_t dtype_of(const TensorRow& row) {
  switch (row.dtype) {
    case TensorDType::kF32: return FATTN_F32;
    case TensorDType::kI32: return FATTN_I32;
    case TensorDType::kU8: return FATTN_U8;
    case TensorDType::kI64: return FATTN_I64;
    default: throw Error(ErrorCode::kInternal, text(row.name, " has more dtypes than one"));
  }
}

// A tensor of one dtype beside q, k and v.
void check_beside(const TensorRow& row, const fattn_problem& g, int ndim, const char* dimensions, const Shape& shape, const char* because) {
  const fattn_tensor& t = g.*row.described;
  check_dtype(row.name, t, dtype_of(row), "");
  check_view(row.name, t, ndim, dimensions, row.role == TensorRole::kOutput);
  check_same_device(row.name, t, g.q);
  check_shape(row.name, t, shape, because);
}

// Sums of two lengths and a limit stay numbers.
void check_lengths(const Problem& p, const char* with, int64_t most, const char* most_text) {
  if (p.seqlen_q > most || p.seqlen_k > most)
    invalid(text("seqlen_q is ", p.seqlen_q, " and seqlen_k ", p.seqlen_k, "; with ", with, " they may be up to ", most_text, " each"));
}

constexpr const char* kPairDimensions = "(batch or 1, nheads or 1, seqlen_q or 1, seqlen_k)";

// bias, mask, dbias.
PairTensor pair_tensor(const char* name, const fattn_tensor& t, const Problem& p, bool output) {
  check_view(name, t, 4, kPairDimensions, output);
  const std::array<int64_t, 4> whole{p.batch, p.nheads, p.seqlen_q, p.seqlen_k};
  for (int i = 0; i < 4; ++i)
    if (t.shape[i] != whole[static_cast<size_t>(i)] && (i == 3 || t.shape[i] != 1))
      invalid(text(name, " has the shape ", shape_text(t), "; expected ", kPairDimensions, " with batch ", p.batch, ", nheads ", p.nheads,
                   ", seqlen_q ", p.seqlen_q, ", seqlen_k ", p.seqlen_k));
  if (t.shape[3] > 1 && t.strides[3] != 1)
    invalid(text(name, " has the stride ", t.strides[3], " in its last dimension (seqlen_k); it must be 1. Make that dimension contiguous"));
  const auto stride = [&](int i) { return t.shape[i] > 1 ? t.strides[i] : 0; };
  return {true, static_cast<DType>(t.dtype), t.shape[0], t.shape[1], t.shape[2], {stride(0), stride(2), stride(1)}};
}

// lse, dlse.
Strides lse_strides(const char* name, const fattn_tensor& t, const fattn_tensor& q, const Problem& p, bool output) {
  check_tensor(name, t, p.packed ? 2 : 3, p.packed ? "(heads, total_q) of packed sequences (cu_seqlens_q, cu_seqlens_k)" : "(batch, heads, seqlen_q)",
               output);
  check_same_device(name, t, q);
  const int32_t wanted = q.dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32;
  if (t.dtype != wanted)
    invalid(text(name, " is ", name_of(static_cast<DType>(t.dtype)), "; it must be ", name_of(static_cast<DType>(wanted)), " for ", name_of(p.dtype),
                 " tensors"));
  if (p.packed) {
    check_shape(name, t, {p.nheads, p.total_q, 0, 0}, "(nheads, total_q)");
    return {0, t.strides[1], t.strides[0]};
  }
  check_shape(name, t, {p.batch, p.nheads, p.seqlen_q, 0}, "(batch, nheads, seqlen_q)");
  return {t.strides[0], t.strides[2], t.strides[1]};
}

// sinks, dsinks. The result is the stride between heads.
int64_t sinks_stride(const char* name, const fattn_tensor& t, const fattn_tensor& q, const Problem& p, bool output) {
  check_dtype(name, t, q.dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32, ", as lse is");
  check_view(name, t, 1, "(nheads)", output);
  check_same_device(name, t, q);
  check_shape(name, t, {p.nheads}, "one number a query head");
  return t.strides[0];
}

void check_bias_dtype(const char* name, const fattn_tensor& t, const Problem& p) {
  if (t.dtype != FATTN_F32 && t.dtype != static_cast<int32_t>(p.dtype))
    invalid(text(name, " has the dtype ", t.dtype, "; it must be fp32 (1) or q's, ", name_of(p.dtype)));
}

// Ids of documents.
void set_documents(const fattn_problem& g, Problem& p) {
  const bool has_q = g.document_q.ndim != 0, has_k = g.document_k.ndim != 0;
  if (!has_q && !has_k) return;
  if (has_q != has_k)
    invalid(text(has_q ? "document_k" : "document_q", " is absent, and ", has_q ? "document_q" : "document_k",
                 " is not; give the ids of queries and of keys, or neither"));
  p.has_documents = true;
  const auto stride_of = [&](const TensorRow& row, int64_t seqlen, int64_t total, bool packed) {
    const fattn_tensor& t = g.*row.described;
    check_beside(row, g, packed ? 1 : 2, packed ? "(total) of packed sequences (cu_seqlens_q, cu_seqlens_k)" : "(batch, seqlen)",
                 packed ? Shape{total} : Shape{p.batch, seqlen}, "an id for every row");
    if (t.shape[t.ndim - 1] > 1 && t.strides[t.ndim - 1] != 1)
      invalid(text(row.name, " has the stride ", t.strides[t.ndim - 1], " in its last dimension; it must be 1. Make that dimension contiguous"));
    return packed ? 0 : t.strides[0];
  };
  p.document_q_stride = stride_of(row_of("document_q"), p.seqlen_q, p.total_q, p.packed);
  p.document_k_stride = stride_of(row_of("document_k"), p.seqlen_k, p.total_k, p.packed && !p.paged);
}

// What a score depends on beside q and k.
void set_scores(const fattn_problem& g, Problem& p) {
  if (g.seqused_k.ndim != 0) {
    check_beside(row_of("seqused_k"), g, 1, "(batch)", {p.batch}, "(batch)");
    p.has_seqused_k = true;
    p.seqused_k_stride = g.seqused_k.strides[0];
  }
  if (const fattn_tensor& t = g.alibi_slopes; t.ndim != 0) {
    check_beside(row_of("alibi_slopes"), g, t.ndim == 2 ? 2 : 1, "(nheads), or 2 (batch, nheads)",
                 t.ndim == 2 ? Shape{p.batch, p.nheads} : Shape{p.nheads}, "from q's batch and heads");
    check_lengths(p, "alibi_slopes", int64_t{1} << 61, "2^61");
    p.has_alibi = true;
    p.alibi_batch_stride = t.ndim == 2 ? t.strides[0] : 0;
    p.alibi_head_stride = t.strides[t.ndim - 1];
  }
  if (g.bias.ndim != 0) {
    check_bias_dtype("bias", g.bias, p);
    check_same_device("bias", g.bias, g.q);
    p.bias = pair_tensor("bias", g.bias, p, false);
  }
  if (g.mask.ndim != 0) {
    check_dtype("mask", g.mask, FATTN_U8, ", 0 where a key is hidden");
    check_same_device("mask", g.mask, g.q);
    p.pair_mask = pair_tensor("mask", g.mask, p, false);
  }
  if (g.dbias.ndim != 0) {
    if (!p.backward) invalid("dbias is an output of the backward pass only; leave it absent in a forward problem");
    check_bias_dtype("dbias", g.dbias, p);
    check_same_device("dbias", g.dbias, g.q);
    p.dbias = pair_tensor("dbias", g.dbias, p, true);
  }
  if (g.dlse.ndim != 0) {
    if (!p.backward) invalid("dlse is an input of the backward pass only; leave it absent in a forward problem");
    p.dlse = lse_strides("dlse", g.dlse, g.q, p, false);
    p.has_dlse = true;
  }
  if (g.sinks.ndim != 0) {
    p.sinks_stride = sinks_stride("sinks", g.sinks, g.q, p, false);
    p.has_sinks = true;
  }
  if (g.dsinks.ndim != 0) {
    if (!p.backward) invalid("dsinks is an output of the backward pass only; leave it absent in a forward problem");
    if (!p.has_sinks) invalid("sinks is absent, and dsinks, their gradient, is not; give the sinks of the forward pass");
    p.dsinks_stride = sinks_stride("dsinks", g.dsinks, g.q, p, true);
    p.want_dsinks = true;
  }
  set_documents(g, p);
  if (g.status.ndim != 0) {
    check_beside(row_of("status"), g, 1, "(2)", {2}, "(2): a code and an index");
    if (g.status.strides[0] != 1) invalid(text("status has the stride ", g.status.strides[0], "; it must be 1"));
    p.want_status = true;
  }
  p.dropout_below = dropout_below(g.p_dropout);
  if (g.p_dropout > 0) {
    const fattn_tensor& t = g.dropout_state;
    if (t.ndim == 0) invalid(text("p_dropout is ", g.p_dropout, ", and dropout_state is absent; it has the seed and the offset, two int64"));
    check_beside(row_of("dropout_state"), g, 1, "(2)", {2}, "seed and offset");
    if (t.strides[0] != 1) invalid(text("dropout_state has the stride ", t.strides[0], "; it must be 1"));
    check_lengths(p, "p_dropout", int64_t{1} << 31, "2^31");
  }
}

constexpr int64_t kMaxHeaddim = 576;

// One mask, one way to say it: a limit that hides nothing is none, and a window that ends at the query itself is causal.
void set_mask(const fattn_problem& g, Problem& p) {
  p.causal = g.causal != 0;
  if (!g.has_window) return;
  check_lengths(p, "a window", int64_t{1} << 61, "2^61");
  // The last query is at key seqlen_k - 1, the first query's last key in reach is seqlen_q - 1 before the end.
  p.window_left = g.window_left >= p.seqlen_k - 1 ? -1 : g.window_left;
  if (g.window_right == 0) p.causal = true;
  p.window_right = p.causal || g.window_right >= p.seqlen_q - 1 ? -1 : g.window_right;
}

// Where packed sequences begin, and how long they may be.
void set_sequences(const fattn_problem& g, Problem& p) {
  const bool has_q = g.cu_seqlens_q.ndim != 0, has_k = g.cu_seqlens_k.ndim != 0;
  for (const auto& [name, most] : {std::pair{"max_seqlen_q", g.max_seqlen_q}, std::pair{"max_seqlen_k", g.max_seqlen_k}}) {
    if (!has_q && !has_k && most != 0)
      invalid(text(name, " is ", most, ", and cu_seqlens_q and cu_seqlens_k are absent; give them for packed sequences, or leave it at 0"));
    if (most < 0 || most > std::numeric_limits<int32_t>::max())
      invalid(text(name, " is ", most, "; allowed: 0 to 2^31 - 1, the most rows that a packed sequence has"));
  }
  if (g.block_table.ndim != 0) {
    if (has_k)
      invalid("block_table and cu_seqlens_k are both given; where the keys are says block_table, and seqused_k how many. Leave cu_seqlens_k out");
    if (has_q && g.seqused_k.ndim == 0)
      invalid("block_table and cu_seqlens_q are given, and seqused_k is absent; say how many keys each sequence has");
  } else if (has_q != has_k)
    invalid(text(has_q ? "cu_seqlens_k" : "cu_seqlens_q", " is absent, and ", has_q ? "cu_seqlens_q" : "cu_seqlens_k",
                 " is not; packed sequences need both, the same one twice where queries and keys have the same lengths"));
  p.packed = has_q;
}

void check_sequences(const char* name, const fattn_tensor& t, const fattn_tensor& q) {
  check_dtype(name, t, FATTN_I32, "");
  check_view(name, t, 1, "(batch + 1)", false);
  check_same_device(name, t, q);
  if (t.shape[0] < 1 || t.shape[0] > std::numeric_limits<int32_t>::max())
    invalid(text(name, " has the shape ", shape_text(t),
                 "; it has batch + 1 elements, where each sequence begins and the last one ends; allowed: 1 to 2^31 - 1"));
}

// Of k's pages, and how many of them each batch entry has room for.
void set_pages(const fattn_problem& g, Problem& p) {
  const fattn_tensor& t = g.block_table;
  p.pages = g.k.shape[0];
  p.page_size = g.k.shape[1];
  if (p.page_size < 1) invalid(text("k has the shape ", shape_text(g.k), ", pages of ", p.page_size, " keys (block_table); a page has at least 1"));
  check_dtype("block_table", t, FATTN_I32, ", numbers of pages");
  check_view("block_table", t, 2, "(batch, columns)", false);
  check_same_device("block_table", t, g.q);
  check_shape("block_table", t, {p.batch, t.shape[1], 0, 0}, "a row for each batch entry");
  if (t.shape[1] > 1 && t.strides[1] != 1)
    invalid(text("block_table has the stride ", t.strides[1], " in its last dimension; it must be 1. Make that dimension contiguous"));
  constexpr int64_t kMostKeys = std::numeric_limits<int32_t>::max();  // lengths are numbers of 32 bits
  if (t.shape[1] > kMostKeys / p.page_size)
    invalid(text("block_table has the shape ", shape_text(t), " with pages of ", p.page_size,
                 " keys, which is room for more than 2^31 - 1 keys of a batch entry; give it fewer columns"));
  p.seqlen_k = t.shape[1] * p.page_size;
  p.block_table_stride = t.strides[0];
  if (__builtin_mul_overflow(p.batch, p.seqlen_k, &p.total_k)) p.total_k = std::numeric_limits<int64_t>::max();
}

// The strides of a page take the place of those of a batch entry.
void set_page_strides(Problem& p) {
  p.k_page_stride = std::exchange(p.k.batch, 0);
  p.v_page_stride = std::exchange(p.v.batch, 0);
  if (p.page_size > 1) return;
  p.k.row = p.k_page_stride;  // pages that follow each other are rows that do
  p.v.row = p.v_page_stride;
}

// What the call touches of memory. The tensors are good by now.
void set_extents(const fattn_problem& g, Problem& p) {
  constexpr size_t kDropoutState = tensor_index("dropout_state"), kAlibiSlopes = tensor_index("alibi_slopes");
  for (size_t i = 0; i < kTensorCount; ++i) {
    const fattn_tensor& t = g.*kTensors[i].described;
    if (t.ndim == 0 || !kTensors[i].in(p.backward)) continue;
    if (i == kDropoutState && p.dropout_below == 0) continue;
    p.extents[i] = extent_of(t);
    p.bytes[i] = span_bytes(p.extents[i]);
  }
  if (p.batch == 0) p.bytes[kAlibiSlopes] = 0;  // slopes of heads, which no batch entry has
}

}  // namespace

Problem validate(const fattn_problem& g) {
  if (g.abi_version != FATTN_ABI_VERSION)
    throw Error(ErrorCode::kAbi, text("the problem is of ABI version ", g.abi_version, "; this library has version ", FATTN_ABI_VERSION,
                                      ". Set abi_version to FATTN_ABI_VERSION and build against this library's fattn.h"));
  check_options(g);
  const bool backward = g.pass == FATTN_BACKWARD;

  Problem p;
  set_sequences(g, p);
  p.paged = g.block_table.ndim != 0;
  check_rows("q", g.q, p.packed, false);
  check_rows("k", g.k, p.packed, false, p.paged);
  check_rows("v", g.v, p.packed, false, p.paged);
  check_same_dtype("k", g.k, g.q.dtype);
  check_same_dtype("v", g.v, g.q.dtype);
  check_same_device("k", g.k, g.q);
  check_same_device("v", g.v, g.q);

  p.backward = backward;
  p.dtype = static_cast<DType>(g.q.dtype);
  const int row = p.packed ? 0 : 1, key = p.packed && !p.paged ? 0 : 1;  // the dimension of rows
  if (p.packed) {
    check_sequences("cu_seqlens_q", g.cu_seqlens_q, g.q);
    p.cu_seqlens_q_stride = g.cu_seqlens_q.strides[0];
    p.total_q = g.q.shape[0];
  }
  if (p.packed && !p.paged) {
    check_sequences("cu_seqlens_k", g.cu_seqlens_k, g.q);
    check_shape("cu_seqlens_k", g.cu_seqlens_k, {g.cu_seqlens_q.shape[0], 0, 0, 0}, "as many as cu_seqlens_q");
    p.cu_seqlens_k_stride = g.cu_seqlens_k.strides[0];
    p.total_k = g.k.shape[0];
  }
  p.batch = p.packed ? g.cu_seqlens_q.shape[0] - 1 : g.q.shape[0];
  p.seqlen_q = p.packed ? g.max_seqlen_q : g.q.shape[1];
  p.nheads = g.q.shape[row + 1];
  p.headdim = g.q.shape[row + 2];
  p.seqlen_k = p.packed ? g.max_seqlen_k : g.k.shape[1];
  p.nheads_k = g.k.shape[key + 1];
  p.headdim_v = g.v.shape[key + 2];
  if (p.paged) set_pages(g, p);
  const auto rows_shape = [&](int64_t seqlen, int64_t total, int64_t heads, int64_t headdim) {
    return p.packed ? std::array{total, heads, headdim, int64_t{0}} : std::array{p.batch, seqlen, heads, headdim};
  };
  if (p.nheads < 1) invalid(text("nheads is ", p.nheads, " (q has the shape ", shape_text(g.q), "); it must be at least 1"));
  if (p.nheads_k < 1 || p.nheads % p.nheads_k != 0)
    invalid(text("nheads is ", p.nheads, " and nheads_k is ", p.nheads_k, "; nheads must be a multiple of nheads_k (GQA, MQA)"));
  if (int64_t heads = 0; __builtin_mul_overflow(p.batch, p.nheads, &heads))  // without rows no tensor has too many elements
    invalid(text("batch is ", p.batch, " and nheads ", p.nheads, "; together they must be at most 2^63 - 1; split the batch"));
  if (p.headdim < 1 || p.headdim > kMaxHeaddim) invalid(text("headdim of q is ", p.headdim, "; allowed: 1 to ", kMaxHeaddim));
  if (p.headdim_v < 1 || p.headdim_v > kMaxHeaddim) invalid(text("headdim of v is ", p.headdim_v, "; allowed: 1 to ", kMaxHeaddim));
  const auto keys_shape = [&](int64_t headdim) {
    return p.paged ? Shape{p.pages, p.page_size, p.nheads_k, headdim} : rows_shape(p.seqlen_k, p.total_k, p.nheads_k, headdim);
  };
  check_shape("k", g.k, keys_shape(p.headdim), p.packed || p.paged ? "from q's headdim" : "from q's batch and headdim");
  check_shape("v", g.v, keys_shape(p.headdim_v),
              p.paged    ? "from k's pages, page size and heads"
              : p.packed ? "from k's rows and heads"
                         : "from k's batch, seqlen and heads");
  p.q = row_strides(g.q);
  p.k = row_strides(g.k);
  p.v = row_strides(g.v);
  if (p.paged) set_page_strides(p);

  check_rows("o", g.o, p.packed, !backward);
  check_same_dtype("o", g.o, g.q.dtype);
  check_same_device("o", g.o, g.q);
  check_shape("o", g.o, rows_shape(p.seqlen_q, p.total_q, p.nheads, p.headdim_v),
              p.packed ? "from q's rows and heads and v's headdim" : "from q's batch, seqlen and heads and v's headdim");
  p.o = row_strides(g.o);

  if (g.lse.ndim != 0 || backward) {
    p.lse = lse_strides("lse", g.lse, g.q, p, !backward);
    p.want_lse = true;
  }
  if (g.weights.ndim != 0) {
    if (p.packed) invalid("weights of packed sequences are not computed; leave weights absent, or call for one sequence at a time");
    if (backward) invalid("weights are an output of the forward pass only; leave them absent in a backward problem");
    check_tensor("weights", g.weights, 4, "(batch, nheads, seqlen_q, seqlen_k)", true);
    check_same_dtype("weights", g.weights, g.q.dtype);
    check_same_device("weights", g.weights, g.q);
    check_shape("weights", g.weights, {p.batch, p.nheads, p.seqlen_q, p.seqlen_k}, "(batch, nheads, seqlen_q, seqlen_k)");
    if (g.weights.shape[3] > 1 && g.weights.strides[3] != 1)
      invalid(text("weights has the stride ", g.weights.strides[3], " in its last dimension (seqlen_k); it must be 1"));
    p.want_weights = true;
    for (int i = 0; i < 4; ++i) p.weights_strides[i] = g.weights.strides[i];
  }
  if (backward) {
    struct Gradient {
      const char* name;
      const fattn_tensor& tensor;
      const fattn_tensor& like;
      const char* because;
      Strides& strides;
      bool output;
    };
    for (const Gradient& d : {Gradient{"dout", g.dout, g.o, "the shape of o", p.dout, false}, Gradient{"dq", g.dq, g.q, "the shape of q", p.dq, true},
                              Gradient{"dk", g.dk, g.k, "the shape of k", p.dk, true}, Gradient{"dv", g.dv, g.v, "the shape of v", p.dv, true}}) {
      check_rows(d.name, d.tensor, p.packed, d.output);
      check_same_dtype(d.name, d.tensor, g.q.dtype);
      check_same_device(d.name, d.tensor, g.q);
      check_shape(d.name, d.tensor, {d.like.shape[0], d.like.shape[1], d.like.shape[2], d.like.shape[3]}, d.because);
      d.strides = row_strides(d.tensor);
    }
  }

  set_mask(g, p);
  p.softmax_scale = g.has_softmax_scale ? g.softmax_scale : 1.0 / std::sqrt(static_cast<double>(p.headdim));
  p.softcap = g.softcap;
  set_scores(g, p);
  if (p.softcap > 0 && !std::isfinite(static_cast<float>(4 * p.softmax_scale / p.softcap)))
    invalid(text("softmax_scale is ", p.softmax_scale, " and softcap ", p.softcap, "; four times their quotient must be within the range of fp32"));
  p.backend = static_cast<Backend>(g.backend);
  p.algorithm = static_cast<Algorithm>(g.algorithm);
  p.cpu_isa = static_cast<Isa>(g.cpu_isa);
  p.num_threads = g.num_threads;
  if (g.executor) p.executor = *g.executor;
  p.device = static_cast<Device>(g.q.device_type);
  p.device_index = g.q.device_index;
  p.deterministic = g.deterministic != 0;
  p.check = g.check;
  p.cuda_level = g.cuda_level;
  set_extents(g, p);
  return p;
}

int dropout_below(double p) {
  constexpr double kSteps = 65536;
  if (!(p >= 0) || !(p <= (kSteps - 1) / kSteps)) invalid(text("p_dropout is ", p, "; allowed: 0 (none) to 1 - 2^-16"));
  return static_cast<int>(std::lround(p * kSteps));
}

void set_default_check(int32_t check) {
  check_enum("check", check, std::initializer_list<int32_t>{FATTN_CHECK_NONE, FATTN_CHECK_SYNC}, "none (1), sync (2)");
  default_check = check;
}

bool checks_lists(const Problem& p) { return (p.check == FATTN_CHECK_AUTO ? default_check.load() : p.check) == FATTN_CHECK_SYNC; }

void validate_buffers(const Problem& p, const fattn_buffers& b) {
  std::array<const void*, kTensorCount> data{};
  std::array<size_t, kTensorCount> touched{};
  size_t n = 0;
  for (size_t i = 0; i < kTensorCount; ++i) {
    if (p.bytes[i] == 0) continue;
    const char* const name = kTensors[i].name;
    const int64_t element = p.extents[i].element_size;
    data[i] = kTensors[i].pointer.get(b);
    if (!data[i]) invalid(text(name, " is a null pointer, but its shape has elements; pass its memory"));
    if (reinterpret_cast<uintptr_t>(data[i]) % static_cast<uintptr_t>(element) != 0)
      invalid(text(name, " points to ", data[i], ", which is not aligned to its element size of ", element, " bytes"));
    touched[n++] = i;
  }
  for (size_t first = 0; first < n; ++first)
    for (size_t second = first + 1; second < n; ++second) {
      const size_t i = touched[first], j = touched[second];
      const bool written = kTensors[i].written(p.backward);
      if ((written || kTensors[j].written(p.backward)) && may_overlap(data[i], p.extents[i], data[j], p.extents[j]))
        invalid(text(kTensors[written ? i : j].name, " overlaps ", kTensors[written ? j : i].name, " in memory; an output needs memory of its own"));
    }
}

namespace {

// One of cu_seqlens_q and cu_seqlens_k, for tensors of `total` rows. `letter`: of which of them.
void check_sequence_values(char letter, const Problem& p, const fattn_buffers& b, int64_t (*first_of)(const Problem&, const fattn_buffers&, int64_t),
                           int64_t most, int64_t total) {
  if (const int64_t first = first_of(p, b, 0); first != 0) invalid(text("cu_seqlens_", letter, "[0] is ", first, "; it must be 0"));
  for (int64_t n = 0; n < p.batch; ++n) {
    const int64_t begin = first_of(p, b, n), end = first_of(p, b, n + 1);
    if (end < begin || end > total)
      invalid(
          text("cu_seqlens_", letter, "[", n + 1, "] is ", end, "; allowed: ", begin, ", where its sequence begins, to total_", letter, ", ", total));
    if (end - begin > most)
      invalid(text("cu_seqlens_", letter, "[", n, "] and [", n + 1, "] are ", begin, " and ", end, ", a sequence of ", end - begin,
                   "; allowed: up to max_seqlen_", letter, ", ", most, ". Plan with a larger one"));
  }
}

// With seqused_k: where the keys of each packed sequence begin, and how many it uses. Of gradients no two may use the same.
void check_used_keys(const Problem& p, const fattn_buffers& b) {
  bool in_order = true;
  for (int64_t n = 0, end = 0; n < p.batch; ++n) {
    const Sequence s = sequence_of(p, b, n);
    if (s.k_begin < 0 || s.k_begin > p.total_k)
      invalid(text("cu_seqlens_k[", n, "] is ", s.k_begin, "; allowed: 0 to total_k, ", p.total_k, ", with seqused_k in any order"));
    if (const int64_t there = p.total_k - s.k_begin; s.keys < 0 || s.keys > std::min(p.seqlen_k, there))
      invalid(text("seqused_k[", n, "] is ", s.keys, "; allowed: 0 to ",
                   there < p.seqlen_k ? text(there, ", the rows of k from cu_seqlens_k[", n, "] on") : text("max_seqlen_k, ", p.seqlen_k)));
    if (s.keys > 0) {
      in_order = in_order && s.k_begin >= end;
      end = s.k_begin + s.keys;
    }
  }
  if (!p.backward || in_order) return;
  for (int64_t n = 0; n < p.batch; ++n)
    for (int64_t m = 0; m < n; ++m) {
      const Sequence one = sequence_of(p, b, m), other = sequence_of(p, b, n);
      if (one.keys > 0 && other.keys > 0 && one.k_begin < other.k_begin + other.keys && other.k_begin < one.k_begin + one.keys)
        invalid(text("sequences ", m, " and ", n, " use the same keys, from cu_seqlens_k ", one.k_begin, " and ", other.k_begin, " on seqused_k ",
                     one.keys, " and ", other.keys, ", which the forward pass alone computes; for gradients give each keys of its own"));
    }
}

// How many keys each batch entry has.
void check_lengths_of_entries(const Problem& p, const fattn_buffers& b) {
  for (int64_t n = 0; n < p.batch; ++n)
    if (const Sequence s = sequence_of(p, b, n); s.keys < 0 || s.keys > p.seqlen_k)
      invalid(text(
          "seqused_k[", n, "] is ", s.keys, "; allowed: 0 to ",
          p.paged ? text(p.seqlen_k, ", the keys of ", p.seqlen_k / p.page_size, " pages of ", p.page_size, ", which block_table has columns for")
                  : text("seqlen_k, ", p.seqlen_k)));
}

// The pages of the keys that batch entries have.
void check_pages(const Problem& p, const fattn_buffers& b) {
  if (p.empty()) return;
  for (int64_t n = 0; n < p.batch; ++n) {
    const int32_t* const pages = pages_of(p, b, n);
    const int64_t keys = sequence_of(p, b, n).keys, used = (keys + p.page_size - 1) / p.page_size;
    for (int64_t i = 0; i < used; ++i)
      if (pages[i] < 0 || pages[i] >= p.pages)
        invalid(text("block_table[", n, ", ", i, "] is ", pages[i], ", of ", keys,
                     " keys; allowed: ", p.pages == 0 ? "none, as k has no pages" : text("0 to ", p.pages - 1, ", the last page of k")));
  }
}

}  // namespace

void validate_host_values(const Problem& p, const fattn_buffers& b) {
  if (p.packed) {
    check_sequence_values('q', p, b, first_query_of, p.seqlen_q, p.total_q);
    if (!p.paged) {
      if (p.has_seqused_k) return check_used_keys(p, b);
      check_sequence_values('k', p, b, first_key_of, p.seqlen_k, p.total_k);
    }
  }
  if (p.uses_lengths()) check_lengths_of_entries(p, b);
  if (p.paged) check_pages(p, b);
}

}  // namespace fattn::core
