#include "problem/score_checks.h"

#include <array>
#include <string_view>

#include "problem/tensor_checks.h"
#include "shared/text.h"

namespace fattn::core {
namespace {

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
    invalid(text(name, " has the dtype ", dtype_text(t), "; it must be fp32 (1) or q's, ", name_of(p.dtype)));
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

}  // namespace

void check_lengths(const Problem& p, const char* with, int64_t most, const char* most_text) {
  if (p.seqlen_q > most || p.seqlen_k > most)
    invalid(text("seqlen_q is ", p.seqlen_q, " and seqlen_k ", p.seqlen_k, "; with ", with, " they may be up to ", most_text, " each"));
}

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
    p.dropout_places = t.ndim == 1 && t.shape[0] == 4;
    check_beside(row_of("dropout_state"), g, 1, "(2)", {p.dropout_places ? 4 : 2},
                 "seed and offset; with 4 numbers the places of the first row and key besides");
    if (t.strides[0] != 1) invalid(text("dropout_state has the stride ", t.strides[0], "; it must be 1"));
    check_lengths(p, "p_dropout", int64_t{1} << 31, "2^31");
  }
}

}  // namespace fattn::core
