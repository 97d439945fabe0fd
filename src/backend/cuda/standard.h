// Algorithm standard on a GPU, the baseline: scores, softmax, products with the weights and their gradients as separate passes over matrices of
// (seqlen_q, seqlen_k) in memory, one for every query head, in the tensors' dtype. Products by cuBLASLt, what is between them by kernels/standard.
// Roundings as in src/backend/standard/standard.h; scores lose their scale by the product and are capped from what was rounded, and rounded again
// with each of the matrices that is added to them: ALiBi's, and bias.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "backend/cuda/kernel_kind.h"
#include "backend/cuda/matmul.h"
#include "device_abi/attention_params.h"
#include "device_abi/standard_params.h"
#include "jit/jit.h"
#include "problem/problem.h"

namespace fattn::core::cuda {

// Tells one specialisation of one of the kernels from another; 64 bytes without padding.
struct StandardKey {
  KernelKind kind = KernelKind::kStandardSoftmax;
  int32_t arch = 0;
  int32_t dtype = 0;  // DType
  int32_t aligned = 0;
  int32_t capped = 0;
  int32_t row_threads = 0;  // softmax, gradient: threads that share a row
  int32_t units = 0;        // softmax: of 16 bytes that a thread holds; 0: rows that are longer
  int32_t queries = 0;      // finish: rows are queries
  int32_t pair = 0;         // pair_bits() of what the kernel has to do with
  std::array<int32_t, 7> reserved{};
  int threads() const { return row_threads > 32 ? row_threads : 256; }
  int ctas() const {                                                                       // of a multiprocessor, at least
    if (kind == KernelKind::kStandardClean) return (arch < 80 ? 1024 : 1280) / threads();  // what it does is waiting for memory
    return threads() > 256 ? 1 : (pair != 0 ? 512 : 768) / threads();
  }
};
static_assert(sizeof(StandardKey) == 64);

// Why it cannot compute the problem on an architecture; empty: it can, if there is cuBLASLt.
std::string standard_refusal(const Problem& problem, int arch);

// What is between the products, forward and backward; rows behind them, of queries or keys; copies without Inf and NaN.
StandardKey standard_softmax_key(const Problem& problem, int arch);
StandardKey standard_gradient_key(const Problem& problem, int arch);
StandardKey standard_finish_key(const Problem& problem, int arch, bool queries);
StandardKey standard_clean_key(const Problem& problem, int arch);
jit::Request standard_request(const StandardKey& key);

// Elements of 16 bytes.
constexpr int64_t standard_unit(DType dtype) { return 16 / static_cast<int64_t>(size_of(dtype)); }
// CTAs of the kernels before and behind a backward pass with dbias: one a row of it.
inline int64_t standard_dbias_ctas(const Problem& p) {
  return p.backward && p.dbias.given && p.seqlen_k > 0 ? p.dbias.batch * p.dbias.heads * p.dbias.rows : 0;
}

// A (seqlen_q, seqlen_k) matrix of every query head: in the workspace, with rows that begin at multiples of 16 bytes, or the caller's weights.
struct StandardMatrix {
  Strides strides;
  int64_t offset = 0;  // in the workspace
  bool given = false;  // the caller's
};

// Where pairs may be hidden: a copy of what is multiplied with weights or dS, without Inf and NaN, in the workspace, and notes of what there was.
struct StandardClean {
  Strides strides;
  int64_t offset = 0, spoilt_offset = 0, marks_offset = 0;
};

struct StandardPlan {
  int arch = 0;
  StandardMatrix weights, dscores;
  bool cleans = false;
  StandardClean v, dout, q, k;                   // forward the first, backward the others
  int64_t sums_k_offset = 0, sums_v_offset = 0;  // backward, where query heads share key heads: dk and dv in fp32
  int64_t dbias_offset = 0;                      // its sums in fp32, unless in place
  int64_t blas_offset = 0;                       // the library's share
  int64_t workspace_bytes = 0;
  std::shared_ptr<const Matmul> scores, output, dweights, dq, dk, dv;
};
// For problems that are not refused; without a device no products are planned. Throws Error(kUnsupported) if there is no cuBLASLt or it has no
// algorithm, kOutOfMemory if the matrices have more bytes than can be addressed.
StandardPlan plan_standard(const Problem& problem, CudaDevice* device, int arch);

// Whether there is something to multiply, and whether products take copies without Inf and NaN: where pairs may be hidden.
inline bool standard_multiplies(const Problem& p) { return !p.empty() && p.seqlen_k > 0; }
bool standard_masks(const Problem& p);
// The greatest factor that leaves nothing of the scores but Inf and NaN: the library does not look at its operands where alpha is 0, and a NaN in
// them would be lost.
inline constexpr float kNextToNothing = 1e-18f;

}  // namespace fattn::core::cuda
