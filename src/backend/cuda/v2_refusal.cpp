#include "backend/cuda/v2_refusal.h"

#include "backend/cuda/limits.h"
#include "backend/cuda/tiles/v2_common.h"
#include "plan/features.h"
#include "shared/text.h"

namespace fattn::core::cuda {

std::string v2_refusal(const Problem& problem, const V2Target& target, std::string_view without) {
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
  const RegisterFacts facts = register_facts(problem, pair_features(problem), target.arch, target.level);
  if (std::string why = register_refusal(kV2Refusals, facts, without); !why.empty()) return why;
  if (problem.headdim > 256 || problem.headdim_v > 256) {
    return text("headdim is ", problem.headdim, " and headdim_v ", problem.headdim_v, "; the CUDA kernels of algorithm v2 take up to 256");
  }
  if (problem.seqlen_q > kMaxSeqlen || problem.seqlen_k > kMaxSeqlen) {
    return text("seqlen_q is ", problem.seqlen_q, " and seqlen_k ", problem.seqlen_k, "; the CUDA kernels take up to ", kMaxSeqlen);
  }
  return window_refusal(problem);
}

}  // namespace fattn::core::cuda
