// Where bias and mask of the pairs of one block lie in shared memory. Include-free, used by the host too.
#pragma once

namespace fattn {

// Rows are queries. They are so far apart that reading them in the order of accumulators meets each bank once: 16-bit biases by ldmatrix, fp32 as
// pairs of keys or, where scores are transposed, one by one.
struct TermTile {
  int rows, keys;  // multiples of 16
  int bias_bytes;  // of an element; 0: none
  bool mask;       // a byte a pair
  bool transposed;

  constexpr int bias_pitch() const { return bias_bytes == 0 ? 0 : keys * bias_bytes + (bias_bytes == 4 && !transposed ? 32 : 16); }
  constexpr int mask_pitch() const { return mask ? keys + 16 : 0; }
  constexpr int mask_offset() const { return rows * bias_pitch(); }
  constexpr int bytes() const { return rows * (bias_pitch() + mask_pitch()); }
};

}  // namespace fattn
