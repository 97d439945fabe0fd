#include "backend/cuda/v1.h"

#include "backend/cuda/call_params.h"
#include "backend/cuda/kernel_source.h"
#include "backend/cuda/limits.h"
#include "plan/features.h"
#include "shared/text.h"

namespace fattn::core::cuda {
namespace {

constexpr int round_up(int x, int to) { return (x + to - 1) / to * to; }

}  // namespace

std::string v1_refusal(const Problem& p, const V2Target& target) {
  if (std::string why = lacks(p, Way::kCudaV1); !why.empty()) return why;
  if (p.dtype != DType::kF16 && p.dtype != DType::kBF16)
    return text("dtype is ", name_of(p.dtype), "; the CUDA kernels of algorithm v1 take fp16 and bf16");
  if (target.level < 80) return "algorithm v1 has kernels for compute capability 8.0 and later; use v2";
  if (p.headdim > kV1MostHeaddim || p.headdim_v > kV1MostHeaddim)
    return text("headdim is ", p.headdim, " and headdim_v ", p.headdim_v, "; the CUDA kernels of algorithm v1 take up to ", kV1MostHeaddim,
                "; use v2");
  if (p.seqlen_q > kMaxSeqlen || p.seqlen_k > kMaxSeqlen)
    return text("seqlen_q is ", p.seqlen_q, " and seqlen_k ", p.seqlen_k, "; the CUDA kernels take up to ", kMaxSeqlen);
  return {};
}

V1ForwardPlan plan_v1_forward(const Problem& p, const V2Target& target) {
  V1ForwardPlan plan;
  plan.key.arch = target.arch;
  plan.key.dtype = static_cast<int32_t>(p.dtype);
  plan.key.headdim = static_cast<int32_t>(p.headdim);
  plan.key.headdim_v = static_cast<int32_t>(p.headdim_v);
  plan.key.causal = p.causal;
  plan.grid = p.empty() ? 0 : p.batch * p.nheads;
  plan.threads = 32 * kV1Warps;
  plan.shared_bytes = 2 * kV1BlockN * (round_up(plan.key.headdim, 32) + round_up(plan.key.headdim_v, 32));
  plan.aligned_strides = p.headdim % 8 == 0 && p.headdim_v % 8 == 0 && aligned(p.q, p.batch, p.seqlen_q, p.nheads, p.dtype) &&
                         aligned(p.o, p.batch, p.seqlen_q, p.nheads, p.dtype) && aligned(p.k, p.batch, p.seqlen_k, p.nheads_k, p.dtype) &&
                         aligned(p.v, p.batch, p.seqlen_k, p.nheads_k, p.dtype);
  if (p.empty() || p.seqlen_k <= kV1BlockN) return plan;  // one block: nothing is kept
  const int64_t rows = p.batch * p.nheads * v1_row_tiles(p.seqlen_q) * kV1TileRows;
  plan.row_max_offset = rows * v1_width(plan.key.headdim_v) * 4;
  plan.row_sum_offset = plan.row_max_offset + rows * 4;
  plan.workspace_bytes = plan.row_sum_offset + rows * 4;
  return plan;
}

V1ForwardKey v1_forward_key(const V1ForwardPlan& plan, bool aligned) {
  V1ForwardKey key = plan.key;
  key.aligned = aligned && plan.aligned_strides;
  return key;
}

V1Params v1_forward_params(const Problem& problem, const V1ForwardPlan& plan, const fattn_buffers& b) {
  char* const at = static_cast<char*>(b.workspace);
  return {forward_params(problem, 1, b),
          {reinterpret_cast<float*>(at), reinterpret_cast<float*>(at + plan.row_max_offset), reinterpret_cast<float*>(at + plan.row_sum_offset)}};
}

jit::Request v1_forward_request(const V1ForwardKey& key) {
  const auto flag = [](int x) { return x != 0 ? "true" : "false"; };
  jit::Request request;
  request.entry = "fattn_v1_fwd";
  request.arch = key.arch;
  request.source = text(comment_of(key, kV1TileRows, kV1BlockN), "#include \"kernels/v1/forward.h\"\n\nstruct Spec {\n  using Element = fattn::",
                        key.dtype == static_cast<int32_t>(DType::kBF16) ? "bf16" : "f16", ";\n  static constexpr int kHeaddim = ", key.headdim,
                        ", kHeaddimV = ", key.headdim_v, ", kBlockN = ", kV1BlockN, ", kWarps = ", kV1Warps,
                        ";\n  static constexpr bool kCausal = ", flag(key.causal), ", kAligned = ", flag(key.aligned),
                        ";\n};\n\nextern \"C\" __global__ void __launch_bounds__(Spec::kWarps * 32, 1) fattn_v1_fwd(const __grid_constant__ "
                        "fattn::AttentionParams p, const __grid_constant__ fattn::V1State state) {\n  fattn::v1::forward<Spec>(p, state);\n}\n");
  return request;
}

}  // namespace fattn::core::cuda
