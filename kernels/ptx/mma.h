// Matrix multiply-accumulate of one warp: D = A B + D, accumulators in fp32.
// PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions", mma.sync.aligned.m16n8k16 and .m16n8k8.
//
// With g = lane / 4 and t = lane % 4, a lane holds (two elements of a register are neighbours, the lower column or row in the low half):
//   A 16 x 16  a[0]: row g, columns 2t..     a[1]: row g + 8, columns 2t..     a[2]: row g, columns 2t + 8..     a[3]: row g + 8, columns 2t + 8..
//   B 16 x 8   b0: rows 2t.., column g       b1: rows 2t + 8.., column g
//   D 16 x 8   d[0], d[1]: row g, columns 2t, 2t + 1                           d[2], d[3]: row g + 8
#pragma once

#include "kernels/ptx/element.h"

namespace fattn::ptx {

// sm_80 and later.
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// sm_80 and later.
__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// sm_75 and later. A 16 x 8 is a[0] and a[1] (or a[2] and a[3]) of the layout above, B 8 x 8 is b0 (or b1).
__device__ __forceinline__ void mma_m16n8k8_f16(float (&d)[4], unsigned a0, unsigned a1, unsigned b0) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b0));
}

}  // namespace fattn::ptx
