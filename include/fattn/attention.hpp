// One-call attention: plan, workspace and execution in one.
#pragma once

#include "fattn/problem.hpp"

namespace fattn {

// o = softmax(softmax_scale * q k^T + mask) v and, if tensors.lse is present, the natural log-sum-exp of every row.
// FlashAttention-2 (Dao 2023, algorithm 1) unless options.algorithm says otherwise. Throws Error.
inline void forward(const ForwardTensors& tensors, const Options& options = {}) {
  const fattn_problem problem = describe(tensors, options);
  check(fattn_execute(&problem));
}

// dq, dk, dv from q, k, v, the forward pass's o and lse, and dout (Dao 2023, algorithm 2). Throws Error.
inline void backward(const BackwardTensors& tensors, const Options& options = {}) {
  const fattn_problem problem = describe(tensors, options);
  check(fattn_execute(&problem));
}

}  // namespace fattn
