// Reads of global memory. PTX ISA, "Data Movement and Conversion Instructions: ld".
#pragma once

namespace fattn::ptx {

// Of what is the same in all passes of a loop, where it is wanted: no register keeps it from one pass to the next.
__device__ __forceinline__ unsigned ld_again(const void* from) {
  unsigned d;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(d) : "l"(from));
  return d;
}

}  // namespace fattn::ptx
