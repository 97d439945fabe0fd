// What to compute: the options and tensors of a forward or backward pass, as the C ABI wants them.
#pragma once

#include <optional>

#include "fattn/types.hpp"

namespace fattn {

struct Options {
  bool causal = false;  // bottom-right aligned: query i sees keys j <= i + seqlen_k - seqlen_q
  // Sliding window: query i sees the keys j with -window_left <= j - (i + seqlen_k - seqlen_q) <= window_right; -1 is no limit.
  int64_t window_left = -1, window_right = -1;
  std::optional<double> softmax_scale;         // default 1 / sqrt(headdim)
  double softcap = 0;                          // > 0: scaled scores s become softcap * tanh(s / softcap)
  double p_dropout = 0;                        // > 0: weights become 0 with this probability, the others are divided by 1 - p_dropout
  int64_t max_seqlen_q = 0, max_seqlen_k = 0;  // of packed sequences (ScoreTensors::cu_seqlens_q): the most rows that one has
  Backend backend = Backend::kAuto;
  Algorithm algorithm = Algorithm::kAuto;
  Isa cpu_isa = Isa::kAuto;
  int num_threads = 0;                       // 0: all that affinity and the control group allow
  const fattn_executor* executor = nullptr;  // the host's own threads; null: the library's pool
  bool deterministic = false;                // CUDA, backward: the same bits every run; everything else gives them always
  Check check = Check::kAuto;                // CUDA: kSync: lists in device memory that are out of range are an error, for which the call waits
  int cuda_level = 0;                        // CUDA: 75 or 80, kernels for that compute capability; 0: the best for the device
};

// What a score depends on beside q and k; every tensor may be absent. fattn.h (fattn_problem) has their shapes.
struct ScoreTensors {
  Tensor seqused_k;     // (batch) of kI32: keys that each batch entry has
  Tensor alibi_slopes;  // (nheads) or (batch, nheads) of kF32
  // Added to scores, (batch or 1, nheads or 1, seqlen_q or 1, seqlen_k); -Inf hides. A row whose keys all have a finite one that is meant to hide (an
  // lse below -2^25) has no gradient, though its o depends on v.
  Tensor bias;
  Tensor mask;           // the same shape, kU8: 0 hides
  Tensor dropout_state;  // (2) of kI64: seed and offset; with Options::p_dropout
  // (batch + 1) of kI32: where each of the packed sequences begins; with Options::max_seqlen_q and max_seqlen_k. q is (total_q, nheads, headdim)
  // then, k and v (total_k, ...), o (total_q, ...), lse (nheads, total_q).
  Tensor cu_seqlens_q, cu_seqlens_k;
  // (batch, seqlen_q) and (batch, seqlen_k), or (total_q) and (total_k), of kI32: a query sees the keys of its own document's id only.
  Tensor document_q, document_k;
  // Output, (2) of kI32: FATTN_LISTS_GOOD and 0, or which of seqused_k and cu_seqlens is out of range, and its first batch entry or sequence that is.
  Tensor status = {};
};

// q (batch, seqlen_q, nheads, headdim), k (batch, seqlen_k, nheads_k, headdim), v (batch, seqlen_k, nheads_k, headdim_v),
// o (batch, seqlen_q, nheads, headdim_v), lse (batch, nheads, seqlen_q) or absent,
// weights (batch, nheads, seqlen_q, seqlen_k) with Algorithm::kStandard only, or absent.
struct ForwardTensors {
  Tensor q, k, v, o, lse, weights;
  ScoreTensors scores = {};
};

// o and lse as the forward pass returned them; dout has o's shape, dq, dk, dv those of q, k, v. dbias, the gradient of a bias, may be absent; it is
// summed over each of batch, heads and queries where its shape is 1. dlse, the gradient of lse, of its shape and dtype, may be absent, which is 0.
struct BackwardTensors {
  Tensor q, k, v, o, lse, dout, dq, dk, dv;
  ScoreTensors scores = {};
  Tensor dbias = {}, dlse = {};
};

namespace detail {
inline fattn_problem describe(const Options& options) {
  fattn_problem p{};
  p.struct_size = sizeof p;
  p.abi_version = FATTN_ABI_VERSION;
  p.backend = static_cast<int32_t>(options.backend);
  p.algorithm = static_cast<int32_t>(options.algorithm);
  p.cpu_isa = static_cast<int32_t>(options.cpu_isa);
  p.causal = options.causal ? 1 : 0;
  p.has_softmax_scale = options.softmax_scale.has_value() ? 1 : 0;
  p.softmax_scale = options.softmax_scale.value_or(0.0);
  p.num_threads = options.num_threads;
  p.executor = options.executor;
  p.has_window = options.window_left != -1 || options.window_right != -1 ? 1 : 0;
  p.window_left = options.window_left;
  p.window_right = options.window_right;
  p.softcap = options.softcap;
  p.p_dropout = options.p_dropout;
  p.max_seqlen_q = options.max_seqlen_q;
  p.max_seqlen_k = options.max_seqlen_k;
  p.deterministic = options.deterministic ? 1 : 0;
  p.check = static_cast<int32_t>(options.check);
  p.cuda_level = options.cuda_level;
  return p;
}
inline void describe(const ScoreTensors& t, fattn_problem& p) {
  p.seqused_k = t.seqused_k.raw();
  p.alibi_slopes = t.alibi_slopes.raw();
  p.bias = t.bias.raw();
  p.mask = t.mask.raw();
  p.dropout_state = t.dropout_state.raw();
  p.cu_seqlens_q = t.cu_seqlens_q.raw();
  p.cu_seqlens_k = t.cu_seqlens_k.raw();
  p.document_q = t.document_q.raw();
  p.document_k = t.document_k.raw();
  p.status = t.status.raw();
}
}  // namespace detail

inline fattn_problem describe(const ForwardTensors& t, const Options& options) {
  fattn_problem p = detail::describe(options);
  p.pass = FATTN_FORWARD;
  p.q = t.q.raw();
  p.k = t.k.raw();
  p.v = t.v.raw();
  p.o = t.o.raw();
  p.lse = t.lse.raw();
  p.weights = t.weights.raw();
  detail::describe(t.scores, p);
  return p;
}

inline fattn_problem describe(const BackwardTensors& t, const Options& options) {
  fattn_problem p = detail::describe(options);
  p.pass = FATTN_BACKWARD;
  p.q = t.q.raw();
  p.k = t.k.raw();
  p.v = t.v.raw();
  p.o = t.o.raw();
  p.lse = t.lse.raw();
  p.dout = t.dout.raw();
  p.dq = t.dq.raw();
  p.dk = t.dk.raw();
  p.dv = t.dv.raw();
  detail::describe(t.scores, p);
  p.dbias = t.dbias.raw();
  p.dlse = t.dlse.raw();
  return p;
}

// Yes, or the reason why not.
struct Support {
  bool ok = false;
  std::string reason;
  explicit operator bool() const { return ok; }
};

// Throws Error only for input that no configuration accepts.
inline Support supported(const fattn_problem& problem) {
  char reason[1024] = "";
  const fattn_status status = fattn_supported(&problem, reason, sizeof reason);
  if (status == FATTN_OK) return {true, {}};
  if (status == FATTN_ERROR_UNSUPPORTED) return {false, reason};
  throw Error(static_cast<ErrorCode>(status), fattn_last_error());
}

}  // namespace fattn
