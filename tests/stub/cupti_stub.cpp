// CUPTI for tests, never installed: activity records of a kernel in a graph, a copy, a set, a driver's function and an allocation at each flush; a
// profiler whose metrics are numbers by their place. STUB_INCOMPLETE: without the Range Profiler.
#include "cupti_stub.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <ctime>

#include "lab/profile/cupti.h"

#define STUB_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace fattn::lab::profile;

fattn::test::CuptiStubState state;
Cupti::Requested requested;
Cupti::Completed completed;
int host, profiler, passes_done;

uint64_t clock_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(static_cast<long long>(now.tv_sec) * 1'000'000'000 + now.tv_nsec + state.ahead_ns);
}

// Records are longer than what is known of them, as those of newer versions are.
constexpr size_t kRecord = 248;

template <class Record>
void put(uint8_t* buffer, size_t& valid, const Record& record) {
  std::memcpy(buffer + valid, &record, sizeof record);
  valid += kRecord;
}

}  // namespace

STUB_EXPORT fattn::test::CuptiStubState* stub_state() { return &state; }

STUB_EXPORT int cuptiGetVersion(uint32_t* version) {
  *version = 130500;
  return 0;
}
STUB_EXPORT int cuptiGetResultString(int result, const char** text) {
  *text = result == 35   ? "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"
          : result == 39 ? "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED"
                         : "CUPTI_ERROR_STUBBORN";
  return 0;
}
STUB_EXPORT int cuptiActivityEnable(int kind) {
  const int result = kind == cupti::kConcurrentKernel ? state.enable_kernels_result : state.enable_result;
  if (result == 0) ++state.enabled;
  return result;
}
STUB_EXPORT int cuptiActivityDisable(int) {
  state.enabled = 0;
  return 0;
}
STUB_EXPORT int cuptiActivityRegisterCallbacks(Cupti::Requested r, Cupti::Completed c) {
  requested = r, completed = c;
  return state.register_result;
}
STUB_EXPORT int cuptiActivityGetNextRecord(uint8_t* buffer, size_t valid, void** record) {
  uint8_t* const next = *record ? static_cast<uint8_t*>(*record) + kRecord : buffer;
  if (next >= buffer + valid) return 12;
  *record = next;
  return 0;
}
STUB_EXPORT int cuptiActivityFlushAll(uint32_t) {
  if (state.enabled == 0) return 0;
  uint8_t* buffer = nullptr;
  size_t size = 0, most = 0, valid = 0;
  requested(&buffer, &size, &most);
  if (size < 5 * kRecord) return 0;
  std::memset(buffer, 0xA5, 5 * kRecord);
  const uint64_t now = clock_ns();
  cupti::Kernel kernel{};
  kernel.kind = cupti::kConcurrentKernel, kernel.start = now - 3000, kernel.end = now - 1000, kernel.streamId = 7, kernel.correlationId = 11;
  kernel.registersPerThread = 168, kernel.grid[0] = 132, kernel.grid[1] = kernel.grid[2] = 1, kernel.block[0] = 384,
  kernel.block[1] = kernel.block[2] = 1;
  kernel.dynamicSharedMemory = 200 * 1024, kernel.name = "_Z6kernelILi64EEvPf";
  put(buffer, valid, kernel);
  cupti::Memcpy copy{};
  copy.kind = cupti::kMemcpy, copy.copyKind = 1, copy.bytes = 4096, copy.start = now - 900, copy.end = now - 800, copy.streamId = 7;
  put(buffer, valid, copy);
  cupti::Memset set{};
  set.kind = cupti::kMemset, set.bytes = 64, set.start = now - 700, set.end = now - 600, set.streamId = 8;
  put(buffer, valid, set);
  cupti::Api api{};
  api.kind = cupti::kDriver, api.function = 307, api.start = now - 3500, api.end = now - 3400, api.threadId = 42, api.correlationId = 11;
  put(buffer, valid, api);
  cupti::Memory memory{};
  memory.kind = cupti::kMemory2, memory.operation = 1, memory.memoryKind = 3, memory.bytes = 1 << 20, memory.timestamp = now - 5000;
  put(buffer, valid, memory);
  completed(nullptr, 0, buffer, size, valid);
  return 0;
}
STUB_EXPORT int cuptiGetTimestamp(uint64_t* ns) {
  *ns = clock_ns();
  return 0;
}
STUB_EXPORT int cuptiGetCallbackName(int, uint32_t, const char** name) {
  *name = "cuLaunchKernelEx";
  return 0;
}

STUB_EXPORT int cuptiProfilerInitialize(cupti::Initialize*) {
  if (state.profiler_result == 0) ++state.open_sessions;
  return state.profiler_result;
}
STUB_EXPORT int cuptiProfilerDeInitialize(cupti::Initialize*) {
  --state.open_sessions;
  return 0;
}
STUB_EXPORT int cuptiDeviceGetChipName(cupti::ChipName* p) {
  p->name = "GH100";
  return 0;
}
STUB_EXPORT int cuptiProfilerGetCounterAvailability(cupti::Availability* p) {
  if (!p->context) return 3;
  p->bytes = 16;
  if (p->image) std::memset(p->image, 1, 16);
  return state.availability_result;
}
// Knows the longer parameters alone.
STUB_EXPORT int cuptiProfilerHostInitialize(cupti::HostInitialize* p) {
  if (p->size != sizeof *p || std::strcmp(p->chip, "GH100") != 0) return 1;
  p->host = &host;
  return 0;
}
STUB_EXPORT int cuptiProfilerHostDeinitialize(cupti::HostDeinitialize* p) { return p->host == &host ? 0 : 1; }
STUB_EXPORT int cuptiProfilerHostGetMetricProperties(cupti::MetricProperties* p) {
  return state.unknown_metric && std::strcmp(p->metric, state.unknown_metric) == 0 ? 17 : 0;
}
STUB_EXPORT int cuptiProfilerHostConfigAddMetrics(cupti::AddMetrics* p) { return p->count > 0 ? 0 : 1; }
STUB_EXPORT int cuptiProfilerHostGetConfigImageSize(cupti::ConfigImageSize* p) {
  p->bytes = 32;
  return 0;
}
STUB_EXPORT int cuptiProfilerHostGetConfigImage(cupti::ConfigImage* p) { return p->bytes == 32 && p->image ? 0 : 1; }
STUB_EXPORT int cuptiProfilerHostEvaluateToGpuValues(cupti::Evaluate* p) {
  for (size_t i = 0; i < p->count; ++i) p->values[i] = state.cut_short ? NAN : 100.0 * static_cast<double>(i + 1);
  return 0;
}
STUB_EXPORT int cuptiRangeProfilerEnable(cupti::Enable* p) {
  p->profiler = &profiler;
  passes_done = 0;
  return 0;
}
STUB_EXPORT int cuptiRangeProfilerDisable(cupti::Profiler* p) { return p->profiler == &profiler ? 0 : 1; }
STUB_EXPORT int cuptiRangeProfilerStart(cupti::Profiler*) { return 0; }
STUB_EXPORT int cuptiRangeProfilerStop(cupti::Stop* p) {
  p->all_passes = ++passes_done == state.passes;
  return 0;
}
STUB_EXPORT int cuptiRangeProfilerPushRange(cupti::PushRange*) {
  ++state.pushes;
  return state.push_result;
}
STUB_EXPORT int cuptiRangeProfilerPopRange(cupti::Profiler*) { return 0; }
STUB_EXPORT int cuptiRangeProfilerDecodeData(cupti::Decode*) { return 0; }
STUB_EXPORT int cuptiRangeProfilerGetCounterDataSize(cupti::DataSize* p) {
  p->bytes = 64;
  return 0;
}
STUB_EXPORT int cuptiRangeProfilerCounterDataImageInitialize(cupti::DataInitialize*) { return 0; }
#ifndef STUB_INCOMPLETE
STUB_EXPORT int cuptiRangeProfilerSetConfig(cupti::SetConfig* p) { return p->levels == 1 && p->target_level == 1 && p->range == 2 ? 0 : 1; }
#endif
