// Algorithm standard on a GPU, the baseline: scores, softmax, products with the weights and their gradients as separate passes over matrices of
// (seqlen_q, seqlen_k) in memory, one for every query head, in the tensors' dtype. Products by cuBLASLt, what is between them by kernels/standard.
// Roundings as in src/backend/standard/standard.h; scores lose their scale by the product and are capped from what was rounded, and rounded again
// with each of the matrices that is added to them: ALiBi's, and bias.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/cuda/kernel_kind.h"
#include "backend/cuda/matmul.h"
#include "jit/jit.h"
#include "problem/problem.h"
#include "shared/attention_params.h"
#include "shared/standard_params.h"

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

// The kernels of a problem that is not refused, of calls with aligned pointers.
std::vector<StandardKey> standard_keys(const Problem& problem, int arch);
jit::Request standard_request(const StandardKey& key);
// All of them, with v2's that are beside a backward pass with dbias.
std::vector<jit::Request> standard_requests(const Problem& problem, int arch);

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
  std::unique_ptr<Matmul> scores, output, dweights, dq, dk, dv;
};
// For problems that are not refused. Throws Error(kUnsupported) if there is no cuBLASLt or it has no algorithm, kOutOfMemory if the matrices have
// more bytes than can be addressed.
StandardPlan plan_standard(const Problem& problem, CudaDevice& device, int arch);

// What plan_standard() decides without a device: matrices, sums, and their workspace.
StandardPlan lay_out_standard(const Problem& problem, int arch);

void load_standard(CudaDevice& device, const Problem& problem, const StandardPlan& plan);
void run_standard(CudaDevice& device, const Problem& problem, const StandardPlan& plan, const fattn_buffers& buffers, CUstream stream);

}  // namespace fattn::core::cuda
