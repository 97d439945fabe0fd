// One thing that took time, or one change of memory, as it is recorded: plain bytes, so that a process can leave them in a file for another.
#pragma once

#include <cstdint>

namespace fattn::lab::profile {

enum class EventKind : int32_t {
  kCall,      // of the library
  kPart,      // of a call, on one thread
  kRange,     // what a program or this command named
  kKernel,    // on a GPU
  kCopy,      // of memory, to, from or on a GPU
  kSet,       // of memory of a GPU to a value
  kDriver,    // a function of the CUDA driver, on the host's thread
  kMemory,    // `bytes` more (or fewer) are allocated
  kOperator,  // of torch
};
inline constexpr int32_t kEventKinds = 9;

inline constexpr int kNameBytes = 120, kDetailBytes = 152;

struct TraceEvent {
  int64_t begin_ns = 0, end_ns = 0;  // CLOCK_MONOTONIC
  EventKind kind = EventKind::kPart;
  int32_t thread = 0;        // the kernel's number of the thread; of what runs on a GPU the stream
  int32_t depth = 0;         // how many others of this thread it is in
  int32_t device = -1;       // of a GPU; -1: the host
  uint64_t correlation = 0;  // of a kernel, a copy or a driver function: the same number is the same launch; 0: none
  double flops = 0, bytes = 0;
  int64_t workspace_bytes = 0;  // of a call; of kMemory: the address
  char name[kNameBytes] = {}, detail[kDetailBytes] = {};
};
static_assert(sizeof(TraceEvent) == 64 + kNameBytes + kDetailBytes);

}  // namespace fattn::lab::profile
