// Transposition of 8 x 8 matrices of 16-bit elements between the lanes of a warp, all of them together.
// PTX ISA, "Warp Level Matrix Transpose Instruction: movmatrix". sm_75 and later.
#pragma once

namespace fattn::ptx {

// A lane has row lane / 4, columns 2 (lane % 4).. of a matrix, and gets column lane / 4, rows 2 (lane % 4)...
__device__ __forceinline__ unsigned transposed(unsigned x) {
  unsigned d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(x));
  return d;
}

}  // namespace fattn::ptx
