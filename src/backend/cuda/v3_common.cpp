#include "backend/cuda/v3_common.h"

#include "backend/cuda/limits.h"
#include "plan/features.h"
#include "shared/text.h"

namespace fattn::core::cuda {
namespace {

constexpr int kWidths[] = {64, 96, 128, 192, 256};

}  // namespace

std::string v3_refusal(const Problem& problem) {
  if (std::string why = lacks(problem, Way::kCudaV3); !why.empty()) return why;
  if (problem.dtype != DType::kF16 && problem.dtype != DType::kBF16)
    return text("dtype is ", name_of(problem.dtype), "; the CUDA kernels of algorithm v3 take fp16 and bf16, and fp32 in the forward pass");
  if (v3_width(problem.headdim) == 0 || v3_width(problem.headdim_v) == 0)
    return text("headdim is ", problem.headdim, " and headdim_v ", problem.headdim_v, "; the CUDA kernels of algorithm v3 take up to 256");
  if (problem.seqlen_q > kMaxSeqlen || problem.seqlen_k > kMaxSeqlen)
    return text("seqlen_q is ", problem.seqlen_q, " and seqlen_k ", problem.seqlen_k, "; the CUDA kernels take up to ", kMaxSeqlen);
  // Their ranges of documents lie in the order of the rows, and with seqused_k sequences of keys are in any order.
  if (problem.packed && problem.has_documents && problem.has_seqused_k)
    return "algorithm v3 has no documents (document_q, document_k) in packed sequences with lengths (seqused_k); algorithm v2 does all";
  return window_refusal(problem);
}

int v3_width(int64_t headdim) {
  for (const int width : kWidths)
    if (headdim <= width) return width;
  return 0;
}

TiledTensor v3_tiled(const Problem& problem, int64_t rows, int64_t heads, int64_t headdim, const Strides& strides, int box_rows) {
  return {problem.dtype, problem.dense_batch(), rows, heads, headdim, strides.batch, strides.row, strides.head, box_rows};
}

}  // namespace fattn::core::cuda
