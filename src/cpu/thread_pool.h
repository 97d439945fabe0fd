// The library's own threads: one pool for the process, started by the first call that can use it.
#pragma once

#include "cpu/executor.h"
#include "device/affinity.h"

namespace fattn::core {

// Calls fn(arg, worker) exactly once for each worker in [0, workers): worker 0 on the calling thread, the others on idle
// threads of the pool or, as long as none has come, on the calling thread as well. fn must not throw. Threads take over
// the caller's set of CPUs, `cpus`, and there are never more of them at work for one call than that set has CPUs, because
// more would only wait for each other. Any number of calls at once, from any threads. Allocates nothing once the threads are there.
void run_on_pool(int workers, const CpuMask& cpus, WorkerFn fn, void* arg) noexcept;

// A moment of a thread that waits for another one by looking.
inline void relax_cpu() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // `yield` is a no-op on most cores
#endif
}

}  // namespace fattn::core
