// The one list of the options of attention beyond causal masks: how each is called, and how a problem is given it, to ask what computes it.
#pragma once

#include <cstddef>
#include <string_view>

#include "fattn/problem.hpp"

namespace fattn {

struct OptionRow {
  const char* name;  // in `fattn support`
  const char* text;  // in the support table: fattn_feature_info's `feature`
  // Gives it to a problem that has q, k, v and what else its pass needs: made-up values, and tensors that are nowhere, which is enough to ask
  // supported() or to make a plan.
  void (*add)(fattn_problem& problem);
  bool forward_only = false;  // no way has it in a backward pass
};

namespace detail {
struct OptionSizes {
  int64_t batch, seqlen_q, seqlen_k, nheads;
};
inline OptionSizes option_sizes(const fattn_problem& p) {
  if (p.cu_seqlens_q.ndim > 0) return {p.cu_seqlens_q.shape[0] - 1, p.max_seqlen_q, p.max_seqlen_k, p.q.shape[1]};
  return {p.q.shape[0], p.q.shape[1], p.k.shape[1], p.q.shape[2]};
}
inline fattn_tensor nowhere(const fattn_problem& p, const Tensor& view) {
  return view.on(static_cast<Device>(p.q.device_type), p.q.device_index, nullptr).raw();
}
inline fattn_tensor all_pairs(const fattn_problem& p, DType dtype) {
  const OptionSizes s = option_sizes(p);
  return nowhere(p, Tensor(nullptr, dtype, {s.batch, s.nheads, s.seqlen_q, s.seqlen_k}));
}
inline fattn_tensor ids_of(const fattn_problem& p, const fattn_tensor& rows) {
  return nowhere(p, rows.ndim == 3 ? Tensor(nullptr, DType::kI32, {rows.shape[0]}) : Tensor(nullptr, DType::kI32, {rows.shape[0], rows.shape[1]}));
}
// Keys in pages of 16, or as many as their number allows; of packed sequences queries alone stay packed.
inline void page(fattn_problem& p) {
  const OptionSizes s = option_sizes(p);
  int64_t size = 16;
  while (s.seqlen_k % size != 0) size /= 2;
  const int64_t columns = s.seqlen_k / size;
  p.block_table = nowhere(p, Tensor(nullptr, DType::kI32, {s.batch, columns}));
  for (fattn_tensor* t : {&p.k, &p.v, &p.dk, &p.dv}) {
    if (t->ndim == 0) continue;
    const int last = t->ndim - 1;
    *t = nowhere(p, Tensor(nullptr, static_cast<DType>(t->dtype), {s.batch * columns, size, t->shape[last - 1], t->shape[last]}));
  }
  if (p.cu_seqlens_q.ndim == 0) return;
  p.cu_seqlens_k = {};
  p.seqused_k = nowhere(p, Tensor(nullptr, DType::kI32, {s.batch}));
  if (p.document_k.ndim > 0) p.document_k = nowhere(p, Tensor(nullptr, DType::kI32, {s.batch, s.seqlen_k}));
}
// As many sequences as batch entries, of as many rows.
inline void pack(fattn_problem& p) {
  const OptionSizes s = option_sizes(p);
  p.max_seqlen_q = s.seqlen_q;
  p.max_seqlen_k = s.seqlen_k;
  p.cu_seqlens_q = p.cu_seqlens_k = nowhere(p, Tensor(nullptr, DType::kI32, {s.batch + 1}));
  for (const TensorRow& row : kTensors) {
    fattn_tensor& t = p.*row.described;
    const auto dtype = static_cast<DType>(t.dtype);
    if (t.ndim == 0) continue;
    if (row.dims == TensorDims::kRows) t = nowhere(p, Tensor(nullptr, dtype, {t.shape[0] * t.shape[1], t.shape[2], t.shape[3]}));
    if (row.dims == TensorDims::kLse) t = nowhere(p, Tensor(nullptr, dtype, {t.shape[1], t.shape[0] * t.shape[2]}));
    if (row.dims == TensorDims::kIds) t = nowhere(p, Tensor(nullptr, dtype, {t.shape[0] * t.shape[1]}));
  }
}
}  // namespace detail

// In the order of the support table; packed sequences first of those that have tensors.
inline constexpr OptionRow kOptions[] = {
    {"window", "a sliding window (window_left, window_right)",
     [](fattn_problem& p) {
       p.has_window = 1;
       p.window_left = p.k.shape[p.k.ndim == 3 ? 0 : 1] / 4;
       p.window_right = p.causal ? 0 : -1;
     }},
    {"packed", "packed sequences (cu_seqlens_q, cu_seqlens_k)", detail::pack},
    {"documents", "documents (document_q, document_k)",
     [](fattn_problem& p) {
       p.document_q = detail::ids_of(p, p.q);
       p.document_k = detail::ids_of(p, p.k);
     }},
    {"softcap", "softcap", [](fattn_problem& p) { p.softcap = 30; }},
    {"key_lengths", "lengths of the batch's entries (seqused_k)",
     [](fattn_problem& p) { p.seqused_k = detail::nowhere(p, Tensor(nullptr, DType::kI32, {detail::option_sizes(p).batch})); }},
    {"alibi", "ALiBi (alibi_slopes)",
     [](fattn_problem& p) { p.alibi_slopes = detail::nowhere(p, Tensor(nullptr, DType::kF32, {detail::option_sizes(p).nheads})); }},
    {"bias", "a bias (bias)", [](fattn_problem& p) { p.bias = detail::all_pairs(p, static_cast<DType>(p.q.dtype)); }},
    {"dbias", "the gradient of a bias (dbias)",
     [](fattn_problem& p) {
       p.bias = detail::all_pairs(p, static_cast<DType>(p.q.dtype));
       if (p.pass == FATTN_BACKWARD) p.dbias = p.bias;
     }},
    {"mask", "a mask of pairs (mask)", [](fattn_problem& p) { p.mask = detail::all_pairs(p, DType::kU8); }},
    {"dropout", "dropout",
     [](fattn_problem& p) {
       p.p_dropout = 0.1;
       p.dropout_state = detail::nowhere(p, Tensor(nullptr, DType::kI64, {2}));
     }},
    {"dlse", "the gradient of lse (dlse)",
     [](fattn_problem& p) {
       if (p.pass == FATTN_BACKWARD) p.dlse = p.lse;
     }},
    {"sinks", "sinks (sinks)",
     [](fattn_problem& p) {
       const DType dtype = p.q.dtype == FATTN_F64 ? DType::kF64 : DType::kF32;
       p.sinks = detail::nowhere(p, Tensor(nullptr, dtype, {detail::option_sizes(p).nheads}));
       if (p.pass == FATTN_BACKWARD) p.dsinks = p.sinks;
     }},
    {"pages", "a paged cache (block_table)", detail::page, true},
    {"fp32_outputs", "outputs in fp32 of 16-bit inputs (o; dq, dk, dv)",
     [](fattn_problem& p) {
       if (p.q.dtype != FATTN_F16 && p.q.dtype != FATTN_BF16) return;
       for (fattn_tensor* t : {&p.o, &p.dq, &p.dk, &p.dv})
         if (t != &p.o || p.pass == FATTN_FORWARD) t->dtype = FATTN_F32;
     }},
    {"batch_invariant", "bits of a row that are its own (batch_invariant)", [](fattn_problem& p) { p.batch_invariant = 1; }},
};
inline constexpr size_t kOptionCount = sizeof(kOptions) / sizeof(kOptions[0]);

// The place of an option in the list; kOptionCount: there is none of this name.
constexpr size_t option_index(std::string_view name) {
  size_t i = 0;
  while (i < kOptionCount && name != kOptions[i].name) ++i;
  return i;
}

}  // namespace fattn
