// What the tests of the host side of algorithm v3 plan, without a GPU: the stub of the driver, an H200 and a problem of odd lengths with shared
// heads.
#pragma once

#include <cstdint>
#include <cstdlib>

#include "backend/cuda/v3_common.h"
#include "problem/problem.h"

namespace fattn::core::cuda {

inline const bool stub_is_set = [] {
  setenv("FATTN_CUDA_DRIVER", FATTN_STUB_CUDA_PATH, 1);
  return true;
}();

inline const V3Target kH200{232448, 60 << 20, 132};

inline Problem problem_of(DType dtype, int64_t headdim, int64_t headdim_v, bool causal, int64_t seqlen_q = 300, int64_t seqlen_k = 523) {
  Problem p;
  p.dtype = dtype;
  p.batch = 2;
  p.seqlen_q = seqlen_q;
  p.seqlen_k = seqlen_k;
  p.nheads = 6;
  p.nheads_k = 2;
  p.headdim = headdim;
  p.headdim_v = headdim_v;
  p.causal = causal;
  p.softmax_scale = 0.125;
  p.q = {seqlen_q * 6 * headdim, 6 * headdim, headdim};
  p.k = {seqlen_k * 2 * headdim, 2 * headdim, headdim};
  p.v = {seqlen_k * 2 * headdim_v, 2 * headdim_v, headdim_v};
  p.o = {seqlen_q * 6 * headdim_v, 6 * headdim_v, headdim_v};
  p.lse = {6 * seqlen_q, 1, seqlen_q};
  return p;
}

}  // namespace fattn::core::cuda
