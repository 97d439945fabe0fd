// Store of a 16 x 16 block of 16-bit elements, held as an A fragment of mma, to shared memory.
// PTX ISA, "Warp Level Matrix Store Instruction: stmatrix". sm_90 and later.
#pragma once

namespace fattn::ptx {

// Lane i gives the address of row i % 16 (16 bytes, aligned), columns 8 (i / 16)..
__device__ __forceinline__ void stmatrix_x4(unsigned address, const unsigned (&a)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
               : "memory");
}

}  // namespace fattn::ptx
