// Host side of kernels/sinks_gradient.h: the gradient of sinks, which follows a backward pass of any algorithm.
#pragma once

#include <array>
#include <cstdint>

#include "backend/cuda/kernel_kind.h"
#include "device_abi/sinks_gradient_params.h"
#include "jit/jit.h"
#include "problem/problem.h"

namespace fattn::core::cuda {

// Tells one of the two kernels, and its dtype, from another; 64 bytes without padding.
struct SinksGradientKey {
  KernelKind kind = KernelKind::kSinksGradient;
  int32_t arch = 0;
  int32_t dtype = 0;  // DType
  std::array<int32_t, 13> reserved{};
};
static_assert(sizeof(SinksGradientKey) == 64);
jit::Request sinks_gradient_request(const SinksGradientKey& key);

// Sums that the first kernel leaves of each head: its CTAs along the rows.
int64_t sinks_gradient_parts(const Problem& problem);

// `parts_offset`: of the sums in the workspace.
SinksGradientParams sinks_gradient_params(const Problem& problem, const fattn_buffers& buffers, int64_t parts_offset);

}  // namespace fattn::core::cuda
