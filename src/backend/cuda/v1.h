// Host side of kernels/v1: FlashAttention as published in 2022, forward and backward. A CTA has one head: query heads forward, key heads backward.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "backend/cuda/kernel_kind.h"
#include "backend/cuda/target.h"
#include "device_abi/attention_params.h"
#include "device_abi/v1_state.h"
#include "jit/jit.h"
#include "problem/problem.h"

namespace fattn::core::cuda {

// Tells one specialisation of the forward kernel from another; 64 bytes without padding.
struct V1ForwardKey {
  KernelKind kind = KernelKind::kV1Forward;
  int32_t arch = 0;
  int32_t dtype = 0;  // DType
  int32_t headdim = 0, headdim_v = 0;
  int32_t causal = 0;
  int32_t aligned = 0;
  int32_t level = 80;
  std::array<int32_t, 8> reserved{};
};
static_assert(sizeof(V1ForwardKey) == 64);

inline constexpr int kV1BlockN = 128;  // keys of a block
inline constexpr int kV1Warps = 8;     // each with tiles of kV1TileRows queries
inline constexpr int kV1MostHeaddim = 128;

// Why the kernels cannot compute the problem on the target; empty: they can.
std::string v1_refusal(const Problem& problem, const V2Target& target);

struct V1ForwardPlan {
  V1ForwardKey key;  // but for `aligned`, which depends on the pointers
  int64_t grid = 0;  // CTAs; 0: nothing to do
  int threads = 0, shared_bytes = 0;
  bool aligned_strides = false;
  int64_t row_max_offset = 0, row_sum_offset = 0, workspace_bytes = 0;  // the workspace begins with o
};
// For problems that are not refused.
V1ForwardPlan plan_v1_forward(const Problem& problem, const V2Target& target);
V1ForwardKey v1_forward_key(const V1ForwardPlan& plan, bool aligned);
// What the kernel takes, and where it is; of the first it takes the AttentionParams.
struct V1Params {
  FeatureParams call;
  V1State state;
  std::array<void*, 2> pointers() { return {static_cast<AttentionParams*>(&call), &state}; }
};
V1Params v1_forward_params(const Problem& problem, const V1ForwardPlan& plan, const fattn_buffers& buffers);
jit::Request v1_forward_request(const V1ForwardKey& key);

}  // namespace fattn::core::cuda
