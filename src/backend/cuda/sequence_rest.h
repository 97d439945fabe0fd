// Host side of kernels/sequence_rest.h: what a pass over packed sequences writes where no sequence is. It follows the pass's other kernels.
#pragma once

#include <array>
#include <cstdint>

#include "backend/cuda/kernel_kind.h"
#include "device_abi/sequence_rest_params.h"
#include "jit/jit.h"
#include "problem/problem.h"

namespace fattn::core::cuda {

// 64 bytes without padding.
struct SequenceRestKey {
  KernelKind kind = KernelKind::kSequenceRest;
  int32_t arch = 0;
  int32_t lengths = 0;
  int32_t paged = 0;
  std::array<int32_t, 12> reserved{};
};
static_assert(sizeof(SequenceRestKey) == 64);

inline constexpr int kRestCtas = 256;  // whatever the lengths: they are in device memory

// Whether the pass has an output that may have such rows.
bool has_sequence_rest(const Problem& problem);

SequenceRestKey sequence_rest_key(const Problem& problem, int arch);

SequenceRestParams sequence_rest_params(const Problem& problem, const fattn_buffers& buffers);

jit::Request sequence_rest_request(const SequenceRestKey& key);

}  // namespace fattn::core::cuda
