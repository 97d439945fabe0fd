// From a description to a Problem: what its tensors and options say together.
#include "problem/problem.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "problem/option_checks.h"
#include "problem/score_checks.h"
#include "problem/tensor_checks.h"
#include "shared/text.h"

namespace fattn::core {
namespace {

using Shape = std::array<int64_t, 4>;

// One mask, one way to say it: a limit that hides nothing is none, and a window that ends at the query itself is causal.
void set_mask(const fattn_problem& g, Problem& p) {
  p.causal = g.causal != 0;
  if (!g.has_window) return;
  check_lengths(p, "a window", int64_t{1} << 61, "2^61");
  if (g.window_right == 0) p.causal = true;
  if (p.batch_invariant) {  // which kernel it is must not follow from lengths: a window stays one, and no length reaches beyond these
    constexpr int64_t kFarthest = int64_t{1} << 30;
    p.window_left = std::min(g.window_left, kFarthest);
    p.window_right = p.causal ? -1 : std::min(g.window_right, kFarthest);
    return;
  }
  // The last query is at key seqlen_k - 1, the first query's last key in reach is seqlen_q - 1 before the end.
  p.window_left = g.window_left >= p.seqlen_k - 1 ? -1 : g.window_left;
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

// The shape of a tensor with a row for each query or key.
Shape rows_shape(const Problem& p, int64_t seqlen, int64_t total, int64_t heads, int64_t headdim) {
  return p.packed ? Shape{total, heads, headdim, 0} : Shape{p.batch, seqlen, heads, headdim};
}

// Sizes, from the shapes of q, k and v.
void set_sizes(const fattn_problem& g, Problem& p) {
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
  if (p.nheads < 1) invalid(text("nheads is ", p.nheads, " (q has the shape ", shape_text(g.q), "); it must be at least 1"));
  if (p.nheads_k < 1 || p.nheads % p.nheads_k != 0)
    invalid(text("nheads is ", p.nheads, " and nheads_k is ", p.nheads_k, "; nheads must be a multiple of nheads_k (GQA, MQA)"));
  if (int64_t heads = 0; __builtin_mul_overflow(p.batch, p.nheads, &heads))  // without rows no tensor has too many elements
    invalid(text("batch is ", p.batch, " and nheads ", p.nheads, "; together they must be at most 2^63 - 1; split the batch"));
  if (p.headdim < 1 || p.headdim > kMaxHeaddim) invalid(text("headdim of q is ", p.headdim, "; allowed: 1 to ", kMaxHeaddim));
  if (p.headdim_v < 1 || p.headdim_v > kMaxHeaddim) invalid(text("headdim of v is ", p.headdim_v, "; allowed: 1 to ", kMaxHeaddim));
}

// q, k and v, whose dtypes and ranks are checked, have these sizes.
void set_inputs(const fattn_problem& g, Problem& p) {
  const auto keys_shape = [&](int64_t headdim) {
    return p.paged ? Shape{p.pages, p.page_size, p.nheads_k, headdim} : rows_shape(p, p.seqlen_k, p.total_k, p.nheads_k, headdim);
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
}

void set_output(const fattn_problem& g, Problem& p) {
  check_rows("o", g.o, p.packed, !p.backward);
  if (p.backward && g.o.dtype != g.q.dtype && g.o.dtype == FATTN_F32)
    invalid(text("o is fp32 but q is ", name_of(p.dtype), "; the backward pass takes o in q's dtype. Convert it"));
  check_output_dtype("o", g.o, g.q.dtype);
  p.fp32_out = g.o.dtype != g.q.dtype;
  check_same_device("o", g.o, g.q);
  check_shape("o", g.o, rows_shape(p, p.seqlen_q, p.total_q, p.nheads, p.headdim_v),
              p.packed ? "from q's rows and heads and v's headdim" : "from q's batch, seqlen and heads and v's headdim");
  p.o = row_strides(g.o);

  if (g.lse.ndim != 0 || p.backward) {
    p.lse = lse_strides("lse", g.lse, g.q, p, !p.backward);
    p.want_lse = true;
  }
}

void set_weights(const fattn_problem& g, Problem& p) {
  if (g.weights.ndim == 0) return;
  if (p.packed) invalid("weights of packed sequences are not computed; leave weights absent, or call for one sequence at a time");
  if (p.backward) invalid("weights are an output of the forward pass only; leave them absent in a backward problem");
  check_tensor("weights", g.weights, 4, "(batch, nheads, seqlen_q, seqlen_k)", true);
  check_same_dtype("weights", g.weights, g.q.dtype);
  check_same_device("weights", g.weights, g.q);
  check_shape("weights", g.weights, {p.batch, p.nheads, p.seqlen_q, p.seqlen_k}, "(batch, nheads, seqlen_q, seqlen_k)");
  if (g.weights.shape[3] > 1 && g.weights.strides[3] != 1)
    invalid(text("weights has the stride ", g.weights.strides[3], " in its last dimension (seqlen_k); it must be 1"));
  p.want_weights = true;
  for (int i = 0; i < 4; ++i) p.weights_strides[i] = g.weights.strides[i];
}

// dout and the gradients of q, k and v.
void set_gradients(const fattn_problem& g, Problem& p) {
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
    d.output ? check_output_dtype(d.name, d.tensor, g.q.dtype) : check_same_dtype(d.name, d.tensor, g.q.dtype);
    check_same_device(d.name, d.tensor, g.q);
    check_shape(d.name, d.tensor, {d.like.shape[0], d.like.shape[1], d.like.shape[2], d.like.shape[3]}, d.because);
    d.strides = row_strides(d.tensor);
  }
  p.fp32_out = g.dq.dtype != g.q.dtype;
  for (const auto& [name, tensor] : {std::pair{"dk", &g.dk}, std::pair{"dv", &g.dv}})
    if (tensor->dtype != g.dq.dtype)
      invalid(text(name, " is ", name_of(static_cast<DType>(tensor->dtype)), " but dq is ", name_of(p.out_dtype()),
                   "; dq, dk and dv share one dtype, q's or fp32"));
}

}  // namespace

Problem validate(const fattn_problem& g) {
  check_options(g);

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

  p.backward = g.pass == FATTN_BACKWARD;
  p.dtype = static_cast<DType>(g.q.dtype);
  set_sizes(g, p);
  set_inputs(g, p);
  set_output(g, p);
  set_weights(g, p);
  if (p.backward) set_gradients(g, p);

  p.batch_invariant = g.batch_invariant != 0 && !p.backward;
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

}  // namespace fattn::core
