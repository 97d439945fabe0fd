// Masks of the v3 kernels: how many keys a row sees. Rows of a tile see ever more keys; what lies behind a row's end is hidden.
#pragma once

#include "shared/attention_params.h"
#include "shared/mask.h"

namespace fattn::v3 {

struct FullMask {
  static constexpr bool kUneven = false;  // every row sees all keys
  static __device__ __forceinline__ int visible_end(const AttentionParams& p, int) { return p.seqlen_k; }
};

struct CausalMask {
  static constexpr bool kUneven = true;
  static __device__ __forceinline__ int visible_end(const AttentionParams& p, int row) {
    return core::Mask32{p.seqlen_q, p.seqlen_k, true}.visible_end(row);
  }
};

}  // namespace fattn::v3
