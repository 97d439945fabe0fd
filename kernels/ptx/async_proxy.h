// Ordering of ordinary accesses to memory before those of wgmma and bulk copies, which go through another proxy.
// PTX ISA, "Parallel Synchronization and Communication Instructions: membar / fence", fence.proxy.async. sm_90 and later.
#pragma once

namespace fattn::ptx {

// Shared memory. By each thread that wrote, before the barrier that tells the thread which issues wgmma or the copy.
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// All memory: between what one thread has waited for in the ordinary way and its copies, either order.
__device__ __forceinline__ void async_proxy_fence_all() { asm volatile("fence.proxy.async;" ::: "memory"); }

}  // namespace fattn::ptx
