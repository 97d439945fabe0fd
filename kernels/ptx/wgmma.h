// Matrix multiply-accumulate of one warpgroup (4 warps): D = A B + D with D 64 x N, A 64 x 16, B 16 x N, accumulators in fp32. It is asynchronous:
// from wgmma to wgmma_wait nothing may touch the registers of D and A.
// PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions", wgmma.mma_async, wgmma.fence, wgmma.commit_group, wgmma.wait_group. sm_90a only.
//
// Warp w of the group holds rows 16 w to 16 w + 15. With g = lane / 4 and t = lane % 4:
//   D  d[4 i + e]: row g + 8 (e / 2), column 8 i + 2 t + e % 2. Pairs of d[8 k .. 8 k + 7], in order, are the A registers of columns 16 k to 16 k +
//   15 A  in registers as in kernels/ptx/mma.h
#pragma once

#include "kernels/ptx/element.h"

namespace fattn::ptx {

// Which dimension of an operand is contiguous in shared memory: that of the sum, or the other one.
enum class Major { kSum, kOther };

// The lower half of a descriptor ("Matrix Descriptor Format") of an operand in rows of 128 bytes with the 128-byte swizzle, as TMA writes them:
// groups of 8 rows are 1024 bytes apart, and aligned so. `address` is a multiple of 16. `column_bytes`: from 64 elements of a row to the next 64,
// used for Major::kOther. The upper half, the same for all, is added by wgmma. Steps along the sum are added: 2 for 16 elements of a row (and
// column_bytes / 16 for 64 of them), or 128 for 16 rows.
__device__ __forceinline__ unsigned wgmma_descriptor(unsigned address, unsigned column_bytes) {
  return (address & 0x3ffffu) >> 4 | column_bytes >> 4 << 16;
}

// Before the first wgmma, and after the registers of D or A were touched otherwise.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Closes a group of wgmma.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kPending groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Ties registers to this point of the program: the compiler does not see that a wgmma under way still owns them. After every wgmma_wait, and before
// the fence of the next.
template <int kCount>
__device__ __forceinline__ void pin(float (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(r[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void pin(unsigned (&r)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(r[i][0]), "+r"(r[i][1]), "+r"(r[i][2]), "+r"(r[i][3])::"memory");
}

// The text of one instruction and its operands: the registers of D, which an asm statement must name one by one, then those of A and B, whether to
// add to D, and which operands are not contiguous along the sum.
#define FATTN_TEN(tens) \
  "%" #tens "0, %" #tens "1, %" #tens "2, %" #tens "3, %" #tens "4, %" #tens "5, %" #tens "6, %" #tens "7, %" #tens "8, %" #tens "9"
#define FATTN_TEXT_16 FATTN_TEN() ", %10, %11, %12, %13, %14, %15"
#define FATTN_TEXT_32 FATTN_TEN() ", " FATTN_TEN(1) ", " FATTN_TEN(2) ", %30, %31"
#define FATTN_TEXT_40 FATTN_TEN() ", " FATTN_TEN(1) ", " FATTN_TEN(2) ", " FATTN_TEN(3)
#define FATTN_TEXT_48 FATTN_TEXT_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FATTN_TEXT_60 FATTN_TEXT_40 ", " FATTN_TEN(4) ", " FATTN_TEN(5)
#define FATTN_TEXT_64 FATTN_TEXT_60 ", %60, %61, %62, %63"
#define FATTN_TEXT_90 FATTN_TEXT_60 ", " FATTN_TEN(6) ", " FATTN_TEN(7) ", " FATTN_TEN(8)
#define FATTN_TEXT_96 FATTN_TEXT_90 ", %90, %91, %92, %93, %94, %95"
#define FATTN_TEXT_128 FATTN_TEXT_90 ", " FATTN_TEN(9) ", " FATTN_TEN(10) ", " FATTN_TEN(11) ", %120, %121, %122, %123, %124, %125, %126, %127"
#define FATTN_D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define FATTN_D16(i) FATTN_D8(i), FATTN_D8(i + 8)
#define FATTN_D32(i) FATTN_D16(i), FATTN_D16(i + 16)
#define FATTN_REGISTERS_16 FATTN_D16(0)
#define FATTN_REGISTERS_32 FATTN_D32(0)
#define FATTN_REGISTERS_40 FATTN_D32(0), FATTN_D8(32)
#define FATTN_REGISTERS_48 FATTN_D32(0), FATTN_D16(32)
#define FATTN_REGISTERS_64 FATTN_D32(0), FATTN_D32(32)
#define FATTN_REGISTERS_96 FATTN_D32(0), FATTN_D32(32), FATTN_D32(64)
#define FATTN_REGISTERS_128 FATTN_D32(0), FATTN_D32(32), FATTN_D32(64), FATTN_D32(96)

// x0 to x6: the numbers of the operands after those of D.
#define FATTN_WGMMA_SHARED(n, type, count, x0, x1, x2, x3, x4)                                                                                  \
  asm volatile("{.reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %" #x2 ", 0; mov.b64 a, {%" #x0 ", 0x40000040}; mov.b64 b, {%" #x1                \
               ", 0x40000040}; wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" FATTN_TEXT_##count "}, a, b, p, 1, 1, %" #x3 \
                                                                                                                      ", %" #x4 ";}"            \
               : FATTN_REGISTERS_##count                                                                                                        \
               : "r"(a), "r"(b), "n"(kAccumulate), "n"(kA == Major::kOther), "n"(kB == Major::kOther))
#define FATTN_WGMMA_REGISTERS(n, type, count, x0, x1, x2, x3, x4, x5, x6)                                                                        \
  asm volatile("{.reg .pred p; .reg .b64 b; setp.ne.b32 p, %" #x5 ", 0; mov.b64 b, {%" #x4 ", 0x40000040}; wgmma.mma_async.sync.aligned.m64n" #n \
               "k16.f32." type "." type " {" FATTN_TEXT_##count "}, {%" #x0 ", %" #x1 ", %" #x2 ", %" #x3 "}, b, p, 1, 1, %" #x6 ";}"            \
               : FATTN_REGISTERS_##count                                                                                                         \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(kAccumulate), "n"(kB == Major::kOther))

// For N = n, whose D has `count` registers.
#define FATTN_WGMMA_OF(n, count, x0, x1, x2, x3, x4, x5, x6)                                   \
  template <class Element, bool kAccumulate, Major kA = Major::kSum, Major kB = Major::kSum>   \
  __device__ __forceinline__ void wgmma(float(&d)[count], unsigned a, unsigned b) {            \
    if constexpr (is_same<Element, bf16>)                                                      \
      FATTN_WGMMA_SHARED(n, "bf16", count, x0, x1, x2, x3, x4);                                \
    else                                                                                       \
      FATTN_WGMMA_SHARED(n, "f16", count, x0, x1, x2, x3, x4);                                 \
  }                                                                                            \
  template <class Element, bool kAccumulate, Major kB = Major::kSum>                           \
  __device__ __forceinline__ void wgmma(float(&d)[count], const unsigned(&a)[4], unsigned b) { \
    if constexpr (is_same<Element, bf16>)                                                      \
      FATTN_WGMMA_REGISTERS(n, "bf16", count, x0, x1, x2, x3, x4, x5, x6);                     \
    else                                                                                       \
      FATTN_WGMMA_REGISTERS(n, "f16", count, x0, x1, x2, x3, x4, x5, x6);                      \
  }

// wgmma<Element, kAccumulate, kA, kB>(d, a, b): A and B in shared memory, as lower halves of descriptors.
// wgmma<Element, kAccumulate, kB>(d, a, b): A in registers. N follows from the size of d.
FATTN_WGMMA_OF(32, 16, 16, 17, 18, 19, 20, 21, 22)
FATTN_WGMMA_OF(64, 32, 32, 33, 34, 35, 36, 37, 38)
FATTN_WGMMA_OF(80, 40, 40, 41, 42, 43, 44, 45, 46)
FATTN_WGMMA_OF(96, 48, 48, 49, 50, 51, 52, 53, 54)
FATTN_WGMMA_OF(128, 64, 64, 65, 66, 67, 68, 69, 70)
FATTN_WGMMA_OF(192, 96, 96, 97, 98, 99, 100, 101, 102)
FATTN_WGMMA_OF(256, 128, 128, 129, 130, 131, 132, 133, 134)

}  // namespace fattn::ptx
