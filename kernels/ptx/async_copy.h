// Asynchronous copies from global to shared memory. PTX ISA, "Data Movement and Conversion Instructions: Asynchronous copy",
// cp.async, cp.async.commit_group, cp.async.wait_group, cp.async.mbarrier.arrive. sm_80 and later.
#pragma once

namespace fattn::ptx {

// 16 bytes, past L1. Both addresses are multiples of 16.
__device__ __forceinline__ void cp_async_16(unsigned shared_address, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address), "l"(global) : "memory");
}

// As above, but reads only the first `bytes` (0 to 16) and fills the rest with zeros; with 0 the global address is not touched.
__device__ __forceinline__ void cp_async_16_zfill(unsigned shared_address, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address), "l"(global), "r"(bytes) : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `kPending` of this thread's latest groups are unfinished.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Arrives on a barrier (mbarrier.h) that counts it, when all copies that this thread has begun are there.
__device__ __forceinline__ void cp_async_mbarrier_arrive(unsigned barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace fattn::ptx
