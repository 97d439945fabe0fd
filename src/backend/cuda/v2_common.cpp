#include "backend/cuda/v2_common.h"

#include "shared/text.h"

namespace fattn::core::cuda {
namespace {

constexpr int64_t kMaxSeqlen = int64_t{1} << 30;  // rows and keys are counted in 32 bits, with room for a tile

}  // namespace

std::string v2_refusal(const Problem& problem, const V2Target& target) {
  if (problem.dtype != DType::kF16 && problem.dtype != DType::kBF16) {
    return text("dtype is ", name_of(problem.dtype), "; the CUDA kernels of algorithm v2 take fp16 and bf16");
  }
  if (target.level != 75 && target.level != 80) return text("the level is ", target.level, "; algorithm v2 has kernels for 75 and 80");
  if (target.level < 80 && problem.dtype == DType::kBF16)
    return "bf16 needs compute capability 8.0: matrix instructions for it begin there; use fp16";
  if (problem.headdim > 256 || problem.headdim_v > 256) {
    return text("headdim is ", problem.headdim, " and headdim_v ", problem.headdim_v, "; the CUDA kernels of algorithm v2 take up to 256");
  }
  if (problem.seqlen_q > kMaxSeqlen || problem.seqlen_k > kMaxSeqlen) {
    return text("seqlen_q is ", problem.seqlen_q, " and seqlen_k ", problem.seqlen_k, "; the CUDA kernels take up to ", kMaxSeqlen);
  }
  return {};
}

bool aligned(const Strides& strides, int64_t batch, int64_t rows, int64_t heads) {
  const auto fits = [](int64_t stride, int64_t size) { return size <= 1 || stride % 8 == 0; };
  return fits(strides.batch, batch) && fits(strides.row, rows) && fits(strides.head, heads);
}

AttentionParams v2_params(const Problem& problem, int heads_per_section) {
  AttentionParams params{};
  params.q_strides = strides_of(problem.q);
  params.k_strides = strides_of(problem.k);
  params.v_strides = strides_of(problem.v);
  params.o_strides = strides_of(problem.o);
  params.lse_strides = strides_of(problem.lse);
  params.batch = static_cast<int>(problem.batch);
  params.seqlen_q = static_cast<int>(problem.seqlen_q);
  params.seqlen_k = static_cast<int>(problem.seqlen_k);
  params.nheads = static_cast<int>(problem.nheads);
  params.nheads_k = static_cast<int>(problem.nheads_k);
  params.group = static_cast<int>(problem.group());
  params.heads_per_section = heads_per_section;
  return params;
}

}  // namespace fattn::core::cuda
