// Barriers in shared memory (8 bytes, aligned) on which threads wait for arrivals and for bytes that asynchronous copies bring.
// PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier". sm_90 and later.
//
// A barrier is in phase 0, 1, 0, ...; a phase ends when all arrivals and bytes are there. Waiting names the parity of the phase that is to end.
#pragma once

namespace fattn::ptx {

// One thread, before anybody uses it; mbarrier_init_fence() then shows it to asynchronous copies, and a barrier of the CTA to the other threads.
__device__ __forceinline__ void mbarrier_init(unsigned barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void mbarrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and lets the phase wait for `bytes` of copies too.
__device__ __forceinline__ void mbarrier_arrive_expect(unsigned barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Whether the phase has ended; does not wait.
__device__ __forceinline__ bool mbarrier_test(unsigned barrier, unsigned parity) {
  unsigned done;
  asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done != 0;
}

// Nothing but waiting may be in the loop: a trap there makes ptxas serialise all wgmma of the kernel (C7520).
__device__ __forceinline__ void mbarrier_wait(unsigned barrier, unsigned parity) {
  unsigned done;
  do {
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  } while (done == 0);
}

}  // namespace fattn::ptx
