// batch_invariant in v2's forward pass: the bits of a row follow from the row and the keys that it sees, whatever else is in its tile, its warp and
// the call.
#pragma once

namespace fattn::v2 {

// A function, since a variable would give other kernels other machine code.
template <class Spec>
constexpr bool own_bits() {
  if constexpr (requires { Spec::kOwnBits; })
    return Spec::kOwnBits;
  else
    return false;
}

// Makes 0 of -0 in sums, as products with hidden keys do, which are 0: whether there were some leaves no trace then.
template <int kRowTiles, int kOutTiles>
__device__ __forceinline__ void add_zero(float (&o)[kRowTiles][kOutTiles][4]) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o[i][n][e] = __fadd_rn(o[i][n][e], 0.0f);
    }
  }
}

}  // namespace fattn::v2
