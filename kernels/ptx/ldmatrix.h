// Loads of 8 x 8 matrices of 16-bit elements from shared memory into the fragments of mma.
// PTX ISA, "Warp Level Matrix Load Instruction: ldmatrix". sm_75 and later.
//
// Lane i gives the address of row i % 8 (16 bytes, aligned) of matrix i / 8. Of each matrix a lane gets row lane / 4, columns 2 (lane % 4)..;
// with .trans column lane / 4, rows 2 (lane % 4)...
// The asm is volatile: it reads memory that ordinary code does not see being written (cp.async).
#pragma once

namespace fattn::ptx {

__device__ __forceinline__ void ldmatrix_x4(unsigned (&d)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&d)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}

}  // namespace fattn::ptx
