// A validated attention problem: shapes, strides, dtype and options, immutable. Every error that the host can know
// without looking at the data is raised here.
#pragma once

#include <cstdint>
#include <optional>

#include "fattn/types.hpp"
#include "shared/mask.h"

namespace fattn::core {

// Elements between neighbours. For q, k, v, o and gradients `row` steps along the sequence; for lse too.
struct Strides {
  int64_t batch = 0, row = 0, head = 0;
};

struct Problem {
  bool backward = false;
  DType dtype = DType::kF32;
  int64_t batch = 0, seqlen_q = 0, seqlen_k = 0, nheads = 0, nheads_k = 0, headdim = 0, headdim_v = 0;
  bool causal = false;
  int64_t window_left = -1, window_right = -1;  // -1: no limit. As mask() wants them: what a limit of 0 or causal say already is said once
  double softmax_scale = 0;
  double softcap = 0;  // 0: none
  Backend backend = Backend::kAuto;
  Algorithm algorithm = Algorithm::kAuto;
  Isa cpu_isa = Isa::kAuto;
  int num_threads = 0;
  std::optional<fattn_executor> executor;
  Device device = Device::kCpu;  // of every tensor
  int device_index = 0;
  bool deterministic = false;
  int cuda_level = 0;

  bool want_lse = false, want_weights = false;
  Strides q, k, v, o, lse, dout, dq, dk, dv;
  int64_t weights_strides[4] = {};  // batch, head, query, key

  int64_t group() const { return nheads / nheads_k; }  // query heads that share a key head
  Mask mask() const { return {seqlen_q, seqlen_k, causal, window_left, window_right}; }
  bool windowed() const { return window_left >= 0 || window_right >= 0; }
  bool empty() const { return batch == 0 || seqlen_q == 0; }  // no output row
};

// Throws Error(kAbi) or Error(kInvalidArgument).
Problem validate(const fattn_problem& given);

// Null, misaligned and overlapping pointers. Throws Error(kInvalidArgument).
void validate_buffers(const Problem& problem, const fattn_buffers& buffers);

// Arithmetic of the problem, from the shapes alone.
struct Cost {
  double flops = 0;          // visible pairs
  double flops_nominal = 0;  // all pairs, halved if causal; visible pairs in a window
  double bytes = 0;          // inputs once, outputs once
};
Cost cost_of(const Problem& problem);

}  // namespace fattn::core
