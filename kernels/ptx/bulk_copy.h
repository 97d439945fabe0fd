// Copies and additions of plain runs of bytes between global and shared memory, by the same engine as tensor copies.
// PTX ISA, "Data Movement and Conversion Instructions: cp.async.bulk, cp.reduce.async.bulk". sm_90 and later. Addresses and sizes: multiples of 16.
#pragma once

namespace fattn::ptx {

// To shared memory; the bytes count for the barrier.
__device__ __forceinline__ void bulk_load(unsigned shared_address, const void* from, int bytes, unsigned barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address), "l"(from), "r"(bytes),
               "r"(barrier)
               : "memory");
}

// Adds floats to global memory, after async_proxy_fence() of those who wrote them; belongs to this thread's open group (kernels/ptx/tensor_copy.h).
__device__ __forceinline__ void bulk_add_f32(float* to, unsigned shared_address, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(shared_address), "r"(bytes) : "memory");
}

}  // namespace fattn::ptx
