#include "backend/cuda/limits.h"

#include "shared/text.h"

namespace fattn::core::cuda {

std::string window_refusal(const Problem& problem) {
  constexpr int64_t kMaxWindowed = kMaxSeqlen / 2;  // a row plus an end of its window is a number of 32 bits, even of rows behind the last
  if (!problem.windowed() || (problem.seqlen_q <= kMaxWindowed && problem.seqlen_k <= kMaxWindowed)) return {};
  return text("seqlen_q is ", problem.seqlen_q, " and seqlen_k ", problem.seqlen_k, "; with a window the CUDA kernels take up to ", kMaxWindowed);
}

bool aligned(const Strides& strides, int64_t batch, int64_t rows, int64_t heads, DType dtype) {
  const auto fits = [=](int64_t stride, int64_t size) { return size <= 1 || stride % copied_at_once(dtype) == 0; };
  return fits(strides.batch, batch) && fits(strides.row, rows) && fits(strides.head, heads);
}

bool pages_aligned(const Problem& p) {
  return p.pages <= 1 || (p.k_page_stride % copied_at_once(p.dtype) == 0 && p.v_page_stride % copied_at_once(p.dtype) == 0);
}

}  // namespace fattn::core::cuda
