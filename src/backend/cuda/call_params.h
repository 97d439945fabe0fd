// The parameters that kernels of all algorithms are told: sizes, strides, pointers, scales.
#pragma once

#include <cstdint>

#include "device_abi/attention_params.h"
#include "problem/problem.h"

namespace fattn::core::cuda {

inline TensorStrides strides_of(const Strides& strides) { return {strides.batch, strides.row, strides.head}; }

// `params` with what a problem's features of pairs need; dbias itself is the backward pass's business.
PairParams pair_params(const FeatureParams& params, const Problem& problem, const fattn_buffers& buffers);

// Of a paged cache: where its pages are.
Pages page_params(const Problem& problem, const fattn_buffers& buffers);

// Sizes, the window, and the strides of q, k, v, o and lse; the rest is zero.
FeatureParams call_params(const Problem& problem, int heads_per_section);

// call_params() with all that a forward pass takes besides, and its scale.
FeatureParams forward_params(const Problem& problem, int heads_per_section, const fattn_buffers& buffers);

// call_params() with all that a backward pass takes besides; the offsets are of its parts of the workspace, which begins with dq in fp32.
FeatureParams backward_params(const Problem& problem, int heads_per_section, const fattn_buffers& buffers, bool deterministic, int64_t row_sum_offset,
                              int64_t semaphore_offset);

// softmax_scale and softmax_scale_log2 of a forward pass; with softcap also score_factor.
void set_forward_scale(FeatureParams& params, double softmax_scale, double softcap);

// Whether rows see ever more keys, so that the last tiles of queries take longest; in a window with a beginning all take as long.
inline bool last_rows_longest(const Problem& problem) { return problem.causal && !problem.mask().begins(); }

}  // namespace fattn::core::cuda
