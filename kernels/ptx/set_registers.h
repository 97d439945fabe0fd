// Moves registers between the warps of a CTA. PTX ISA, "Miscellaneous Instructions: setmaxnreg". sm_90a only.
//
// All warps of a warpgroup execute it. A multiple of 8 from 24 to 256 a thread; the sum over the CTA's warps must not exceed what the launch gave,
// which is the kernel's count of registers: otherwise the CTA waits for ever. The host checks that.
#pragma once

namespace fattn::ptx {

template <int kRegisters>
__device__ __forceinline__ void give_registers_up() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace fattn::ptx
