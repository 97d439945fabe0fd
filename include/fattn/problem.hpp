// What to compute: the options of a forward or backward pass on tensors (fattn/tensors.hpp), as the C ABI wants them.
#pragma once

#include <optional>

#include "fattn/tensors.hpp"

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
  bool batch_invariant = false;              // forward: a row's bits do not depend on what else is in the call, nor on how its sequence is divided
  Check check = Check::kAuto;                // CUDA: kSync: lists in device memory that are out of range are an error, for which the call waits
  int cuda_level = 0;                        // CUDA: 75 or 80, kernels for that compute capability; 0: the best for the device
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
  p.batch_invariant = options.batch_invariant ? 1 : 0;
  p.cuda_level = options.cuda_level;
  return p;
}
template <class Tensors>
fattn_problem describe(const Tensors& tensors, const Options& options, int32_t pass) {
  fattn_problem p = describe(options);
  p.pass = pass;
  for_each_tensor(tensors, [&](const TensorRow& row, const Tensor& view) { p.*row.described = view.raw(); });
  return p;
}
}  // namespace detail

inline fattn_problem describe(const ForwardTensors& t, const Options& options) { return detail::describe(t, options, FATTN_FORWARD); }
inline fattn_problem describe(const BackwardTensors& t, const Options& options) { return detail::describe(t, options, FATTN_BACKWARD); }

// Yes, or the reason why not.
struct Support {
  bool ok = false;
  std::string reason;
  explicit operator bool() const { return ok; }
};

namespace detail {
inline Support support_of(fattn_status status, const char* reason) {
  if (status == FATTN_OK) return {true, {}};
  if (status == FATTN_ERROR_UNSUPPORTED) return {false, reason};
  throw Error(static_cast<ErrorCode>(status), fattn_last_error());
}
}  // namespace detail

// Throws Error only for input that no configuration accepts.
inline Support supported(const fattn_problem& problem) {
  char reason[1024] = "";
  return detail::support_of(fattn_supported(&problem, reason, sizeof reason), reason);
}
// On a GPU with this compute capability (80, 90, ...), which need not be there.
inline Support supported_on(const fattn_problem& problem, int32_t arch) {
  char reason[1024] = "";
  return detail::support_of(fattn_supported_on(&problem, arch, reason, sizeof reason), reason);
}

}  // namespace fattn
