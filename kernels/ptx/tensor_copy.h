// Copies of boxes of a tensor of 4 dimensions by the tensor memory accelerator. What lies outside of the tensor is read as 0 and not written.
// PTX ISA, "Data Movement and Conversion Instructions: cp.async.bulk.tensor, cp.async.bulk.commit_group, .wait_group". sm_90 and later.
#pragma once

#include "device_abi/tensor_map.h"

namespace fattn::ptx {

// Where a box begins: element of the contiguous dimension, row, head, batch (in the order of the tensor map).
struct TensorPlace {
  int column, row, head, batch;
};

// To shared memory, aligned as the swizzle asks for (1024 bytes for 128-byte rows). The bytes of the whole box count for the barrier.
__device__ __forceinline__ void tensor_load(unsigned shared_address, const TensorMap* map, unsigned barrier, const TensorPlace& at) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address),
      "l"(map), "r"(barrier), "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch)
      : "memory");
}

// From shared memory, after async_proxy_fence() of those who wrote it; belongs to this thread's open group.
__device__ __forceinline__ void tensor_store(const TensorMap* map, unsigned shared_address, const TensorPlace& at) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map), "r"(shared_address), "r"(at.column),
               "r"(at.row), "r"(at.head), "r"(at.batch)
               : "memory");
}

// Closes the group of this thread's stores.
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most kPending groups have not yet read their shared memory: it may then be written again, or end with the CTA.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until at most kPending groups are unfinished: this thread then sees what they wrote, by ordinary accesses, too.
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace fattn::ptx
