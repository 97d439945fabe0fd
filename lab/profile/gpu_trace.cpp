#include "lab/profile/gpu_trace.h"

#include <cxxabi.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "lab/profile/recorder.h"

namespace fattn::lab::profile {
namespace {

constexpr size_t kBufferBytes = size_t{1} << 20;
constexpr int kDriverDomain = 1, kSystemThreads = 1, kAllocated = 1, kReleased = 2, kDevice = 3, kManaged = 5;
constexpr uint32_t kForced = 1;

std::atomic<const Cupti*> active{nullptr};
std::atomic<int64_t> offset_ns{0};  // CLOCK_MONOTONIC less CUPTI's clock

int64_t on_our_clock(uint64_t ns) { return static_cast<int64_t>(ns) + offset_ns.load(std::memory_order_relaxed); }

// Of several readings the one that took least says best how far the clocks are apart.
void compare_clocks(const Cupti& cupti) {
  int64_t least = INT64_MAX;
  for (int i = 0; i < 20; ++i) {
    uint64_t theirs = 0;
    const int64_t before = now_ns();
    if (cupti.getTimestamp(&theirs) != 0) return;
    const int64_t after = now_ns();
    if (after - before >= least) continue;
    least = after - before;
    offset_ns = before + (after - before) / 2 - static_cast<int64_t>(theirs);
  }
}

TraceEvent gpu_event(EventKind kind, uint64_t start, uint64_t end, uint32_t device, uint32_t stream, uint32_t correlation) {
  TraceEvent e;
  e.kind = kind;
  e.begin_ns = on_our_clock(start);
  e.end_ns = on_our_clock(end < start ? start : end);
  e.device = static_cast<int32_t>(device);
  e.thread = static_cast<int32_t>(stream);
  e.correlation = correlation;
  return e;
}

void take_kernel(const cupti::Kernel& k) {
  TraceEvent e = gpu_event(EventKind::kKernel, k.start, k.end, k.deviceId, k.streamId, k.correlationId);
  int status = -1;
  const std::unique_ptr<char, void (*)(void*)> plain(k.name && k.name[0] == '_' ? abi::__cxa_demangle(k.name, nullptr, nullptr, &status) : nullptr,
                                                     std::free);
  copy_text(e.name, sizeof e.name, plain ? plain.get() : k.name ? k.name : "kernel");
  std::snprintf(e.detail, sizeof e.detail, "grid %dx%dx%d, block %dx%dx%d, %u registers, %d KiB shared%s", k.grid[0], k.grid[1], k.grid[2],
                k.block[0], k.block[1], k.block[2], k.registersPerThread, (k.staticSharedMemory + k.dynamicSharedMemory + 1023) / 1024,
                k.localMemoryPerThread > 0 ? ", local memory" : "");
  record(e);
}

const char* words_of_copy(uint8_t kind) {
  switch (kind) {
    case 1: return "copy host to device";
    case 2: return "copy device to host";
    case 8: return "copy device to device";
    case 10: return "copy peer to peer";
    default: return "copy";
  }
}

void take_copy(const cupti::Memcpy& m) {
  TraceEvent e = gpu_event(EventKind::kCopy, m.start, m.end, m.deviceId, m.streamId, m.correlationId);
  e.bytes = static_cast<double>(m.bytes);
  copy_text(e.name, sizeof e.name, words_of_copy(m.copyKind));
  record(e);
}

void take_set(const cupti::Memset& m) {
  TraceEvent e = gpu_event(EventKind::kSet, m.start, m.end, m.deviceId, m.streamId, m.correlationId);
  e.bytes = static_cast<double>(m.bytes);
  copy_text(e.name, sizeof e.name, "set memory");
  record(e);
}

void take_function(const Cupti& cupti, const cupti::Api& a) {
  TraceEvent e = gpu_event(EventKind::kDriver, a.start, a.end, 0, a.threadId, a.correlationId);
  e.device = -1;
  const char* name = nullptr;
  if (cupti.getCallbackName && cupti.getCallbackName(kDriverDomain, a.function, &name) != 0) name = nullptr;
  copy_text(e.name, sizeof e.name, name ? name : "driver function");
  record(e);
}

void take_memory(const cupti::Memory& m) {
  if (m.memoryKind != kDevice && m.memoryKind != kManaged) return;
  if (m.operation != kAllocated && m.operation != kReleased) return;
  TraceEvent e = gpu_event(EventKind::kMemory, m.timestamp, m.timestamp, m.deviceId, m.streamId, m.correlationId);
  e.bytes = m.operation == kAllocated ? static_cast<double>(m.bytes) : -static_cast<double>(m.bytes);
  e.workspace_bytes = static_cast<int64_t>(m.address);
  copy_text(e.name, sizeof e.name, m.operation == kAllocated ? "allocation" : "release");
  record(e);
}

void requested(uint8_t** buffer, size_t* size, size_t* most_records) {
  *buffer = static_cast<uint8_t*>(std::aligned_alloc(8, kBufferBytes));
  *size = *buffer ? kBufferBytes : 0;
  *most_records = 0;
}

void completed(void*, uint32_t, uint8_t* buffer, size_t, size_t valid) {
  void* record = nullptr;
  if (const Cupti* const cupti = active.load())
    while (valid > 0 && cupti->activityGetNextRecord(buffer, valid, &record) == 0) switch (*static_cast<int32_t*>(record)) {
        case cupti::kConcurrentKernel: take_kernel(*static_cast<cupti::Kernel*>(record)); break;
        case cupti::kMemcpy: take_copy(*static_cast<cupti::Memcpy*>(record)); break;
        case cupti::kMemset: take_set(*static_cast<cupti::Memset*>(record)); break;
        case cupti::kDriver: take_function(*cupti, *static_cast<cupti::Api*>(record)); break;
        case cupti::kMemory2: take_memory(*static_cast<cupti::Memory*>(record)); break;
        default: break;
      }
  std::free(buffer);
}

constexpr int kAll[] = {cupti::kConcurrentKernel, cupti::kMemcpy, cupti::kMemset, cupti::kDriver, cupti::kMemory2};

}  // namespace

std::string start_gpu_trace(const Cupti& cupti, const GpuTraceOptions& options) {
  if (!cupti) return cupti.reason;
  active = &cupti;
  if (cupti.setThreadIdType) cupti.setThreadIdType(kSystemThreads);
  if (const int result = cupti.activityRegisterCallbacks(requested, completed); result != 0) {
    active = nullptr;
    return cupti.words("cuptiActivityRegisterCallbacks", result);
  }
  std::string refused;
  for (const int kind : kAll) {
    if ((kind == cupti::kDriver && !options.driver) || (kind == cupti::kMemory2 && !options.memory)) continue;
    const int result = cupti.activityEnable(kind);
    if (result == 0) continue;
    if (kind == cupti::kConcurrentKernel) {
      stop_gpu_trace();
      return cupti.words("cuptiActivityEnable", result);
    }
    refused = cupti.words("cuptiActivityEnable", result);
  }
  compare_clocks(cupti);
  return refused;
}

void flush_gpu_trace() {
  if (const Cupti* const cupti = active.load()) cupti->activityFlushAll(kForced);
}

void stop_gpu_trace() {
  const Cupti* const cupti = active.load();
  if (!cupti) return;
  cupti->activityFlushAll(kForced);
  for (const int kind : kAll) cupti->activityDisable(kind);
  active = nullptr;
}

}  // namespace fattn::lab::profile
