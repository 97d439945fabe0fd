// Asynchronous copy of one 4-byte word to shared memory, for arrays with any stride. PTX ISA, cp.async. sm_80 and later.
#pragma once

namespace fattn::ptx {

// Copies 4 bytes if `valid`, else writes zeros and does not touch the global address.
__device__ __forceinline__ void cp_async_4_zfill(unsigned shared_address, const void* global, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address), "l"(global), "r"(valid ? 4 : 0) : "memory");
}

}  // namespace fattn::ptx
