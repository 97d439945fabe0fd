// A kernel that comes up while the one before it still runs (programmatic dependent launch).
// PTX ISA, "Parallel Synchronization and Communication Instructions: griddepcontrol". sm_90 and later.
#pragma once

namespace fattn::ptx {

// Waits until the kernel before has ended and its writes can be seen; does nothing if this kernel was launched without the attribute.
__device__ __forceinline__ void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// When every CTA has said so (or ended), the kernel after this one may come up. It sees this one's writes only after its wait.
__device__ __forceinline__ void let_kernel_after_come_up() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace fattn::ptx
