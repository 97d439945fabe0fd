// Ordering of ordinary accesses to shared memory before those of wgmma and bulk copies, which go through another proxy.
// PTX ISA, "Parallel Synchronization and Communication Instructions: membar / fence", fence.proxy.async. sm_90 and later.
#pragma once

namespace fattn::ptx {

// By each thread that wrote, before the barrier that tells the thread which issues wgmma or the copy.
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace fattn::ptx
