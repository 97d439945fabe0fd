#include "backend/cuda/v2_refusal.h"

#include <algorithm>

#include "backend/cuda/limits.h"
#include "plan/features.h"
#include "shared/text.h"

namespace fattn::core::cuda {

std::string v2_refusal(const Problem& problem, const V2Target& target) {
  if (std::string why = lacks(problem, Way::kCudaV2); !why.empty()) return why;
  if (problem.dtype == DType::kF64) return "dtype is fp64; the CUDA kernels of algorithm v2 take fp32, fp16 and bf16";
  if (target.level != 75 && target.level != 80) return text("the level is ", target.level, "; algorithm v2 has kernels for 75 and 80");
  if (target.level < 80 && problem.dtype == DType::kBF16)
    return "bf16 needs compute capability 8.0: matrix instructions for it begin there; use fp16";
  if (target.level < 80 && problem.dtype == DType::kF32)
    return "fp32 needs compute capability 8.0: its kernels need asynchronous copies, which begin there; use fp16";
  if (problem.dbias.given && problem.softcap > 0)
    return "the CUDA kernels have no dbias with softcap: the gradient of a score is not kept apart from that of what softcap is taken of; use the "
           "CPU";
  if (problem.has_documents && problem.bias.given && problem.pair_mask.given && std::max(problem.headdim, problem.headdim_v) > 192)
    return text(
        "headdim is ", problem.headdim, " and headdim_v ", problem.headdim_v,
        "; with documents, a bias and a mask of pairs together the CUDA kernels have registers for up to 192: have the mask, or -Inf in the bias, "
        "say what documents say, or use the CPU");
  if (problem.headdim > 256 || problem.headdim_v > 256) {
    return text("headdim is ", problem.headdim, " and headdim_v ", problem.headdim_v, "; the CUDA kernels of algorithm v2 take up to 256");
  }
  if (problem.seqlen_q > kMaxSeqlen || problem.seqlen_k > kMaxSeqlen) {
    return text("seqlen_q is ", problem.seqlen_q, " and seqlen_k ", problem.seqlen_k, "; the CUDA kernels take up to ", kMaxSeqlen);
  }
  return window_refusal(problem);
}

}  // namespace fattn::core::cuda
