// Masks of halves of a word from single bits, and the product of words as two words. PTX ISA, "Integer Arithmetic Instructions: mul", "Data Movement
// and Conversion Instructions: prmt".
#pragma once

namespace fattn::ptx {

// x: the low word, y: the high one. Of a product in 64 bits the compiler makes an addition more.
__device__ __forceinline__ uint2 mul_wide(unsigned a, unsigned b) {
  uint2 d;
  asm("{.reg .b64 p; mul.wide.u32 p, %2, %3; mov.b64 {%0, %1}, p;}" : "=r"(d.x), "=r"(d.y) : "r"(a), "r"(b));
  return d;
}

// All ones in the low half if the highest bit of byte kLow is set, in the high half if that of byte kHigh is, else 0.
template <int kLow, int kHigh>
__device__ __forceinline__ unsigned spread_signs(unsigned x) {
  unsigned d;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(d) : "r"(x), "n"((8 + kLow) * 0x11 + (8 + kHigh) * 0x1100));
  return d;
}

}  // namespace fattn::ptx
