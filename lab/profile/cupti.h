// CUPTI, NVIDIA's profiling interface, opened at run time. No header of it is used: what is called is declared here, from CUPTI's reference for
// versions 12.6 to 13.5 (cupti_activity.h, cupti_profiler_host.h, cupti_range_profiler.h), whose records begin alike.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace fattn::lab::profile {

namespace cupti {

// Of activity records the beginning, which every version since 12.0 has; they are longer in newer ones, and CUPTI knows by how much.
enum Kind : int32_t { kMemcpy = 1, kMemset = 2, kDriver = 4, kConcurrentKernel = 10, kMemory2 = 49 };

struct Kernel {  // CUpti_ActivityKernel9 to 13
  int32_t kind;
  uint8_t cacheConfig, sharedMemoryConfig;
  uint16_t registersPerThread;
  int32_t partitionedRequested, partitionedExecuted;
  uint64_t start, end, completed;
  uint32_t deviceId, contextId, streamId;
  int32_t grid[3], block[3], staticSharedMemory, dynamicSharedMemory;
  uint32_t localMemoryPerThread, localMemoryTotal, correlationId;
  int64_t gridId;
  const char* name;
};
static_assert(offsetof(Kernel, start) == 16 && offsetof(Kernel, deviceId) == 40 && offsetof(Kernel, grid) == 52 &&
              offsetof(Kernel, correlationId) == 92 && offsetof(Kernel, name) == 104);

struct Memcpy {  // CUpti_ActivityMemcpy6, 7
  int32_t kind;
  uint8_t copyKind, srcKind, dstKind, flags;
  uint64_t bytes, start, end;
  uint32_t deviceId, contextId, streamId, correlationId;
};
static_assert(offsetof(Memcpy, bytes) == 8 && offsetof(Memcpy, deviceId) == 32 && offsetof(Memcpy, correlationId) == 44);

struct Memset {  // CUpti_ActivityMemset4, 5
  int32_t kind;
  uint32_t value;
  uint64_t bytes, start, end;
  uint32_t deviceId, contextId, streamId, correlationId;
};
static_assert(offsetof(Memset, start) == 16 && offsetof(Memset, correlationId) == 44);

struct Api {  // CUpti_ActivityAPI
  int32_t kind;
  uint32_t function;
  uint64_t start, end;
  uint32_t processId, threadId, correlationId, returnValue;
};
static_assert(offsetof(Api, threadId) == 28 && sizeof(Api) == 40);

struct Memory {  // CUpti_ActivityMemory4
  int32_t kind, operation, memoryKind;
  uint32_t correlationId;
  uint64_t address, bytes, timestamp, programCounter;
  uint32_t processId, deviceId, contextId, streamId;
};
static_assert(offsetof(Memory, timestamp) == 32 && offsetof(Memory, deviceId) == 52);

// Parameters of the profiler. `size` is that of the struct up to its last member; what follows it in newer versions has a default.
struct Initialize {
  size_t size = sizeof(Initialize);
  void* priv = nullptr;
};
struct ChipName {
  size_t size = sizeof(ChipName);
  void* priv = nullptr;
  size_t device = 0;
  const char* name = nullptr;
};
struct Availability {
  size_t size = sizeof(Availability);
  void* priv = nullptr;
  void* context = nullptr;
  size_t bytes = 0;
  uint8_t* image = nullptr;
};
struct HostInitialize {
  size_t size = offsetof(HostInitialize, set_name);  // 12.9's; later ones have set_name
  void* priv = nullptr;
  int32_t type = 0, padding = 0;  // of a range profiler
  const char* chip = nullptr;
  const uint8_t* availability = nullptr;
  void* host = nullptr;
  const char* set_name = nullptr;
};
struct HostDeinitialize {
  size_t size = sizeof(HostDeinitialize);
  void *priv = nullptr, *host = nullptr;
};
struct MetricProperties {
  size_t size = offsetof(MetricProperties, scope);  // 12.9's; later ones have scope
  void *priv = nullptr, *host = nullptr;
  const char *metric = nullptr, *description = nullptr, *unit = nullptr, *dimension = nullptr;
  int32_t type = 0, scope = 0;
};
struct AddMetrics {
  size_t size = sizeof(AddMetrics);
  void *priv = nullptr, *host = nullptr;
  const char** metrics = nullptr;
  size_t count = 0;
};
struct ConfigImageSize {
  size_t size = sizeof(ConfigImageSize);
  void *priv = nullptr, *host = nullptr;
  size_t bytes = 0;
};
struct ConfigImage {
  size_t size = sizeof(ConfigImage);
  void *priv = nullptr, *host = nullptr;
  size_t bytes = 0;
  uint8_t* image = nullptr;
};
struct Evaluate {
  size_t size = sizeof(Evaluate);
  void *priv = nullptr, *host = nullptr;
  const uint8_t* data = nullptr;
  size_t data_bytes = 0, range = 0;
  const char** metrics = nullptr;
  size_t count = 0;
  double* values = nullptr;
};
struct Enable {
  size_t size = sizeof(Enable);
  void *priv = nullptr, *context = nullptr, *profiler = nullptr;
};
struct Profiler {  // Start, PopRange, Disable
  size_t size = sizeof(Profiler);
  void *priv = nullptr, *profiler = nullptr;
};
struct PushRange {
  size_t size = sizeof(PushRange);
  void *priv = nullptr, *profiler = nullptr;
  const char* name = nullptr;
};
struct Stop {
  size_t size = offsetof(Stop, all_passes) + 1;
  void *priv = nullptr, *profiler = nullptr;
  size_t pass = 0, level = 0;
  uint8_t all_passes = 0;
};
struct Decode {
  size_t size = sizeof(Decode);
  void *priv = nullptr, *profiler = nullptr;
  size_t dropped = 0;
};
struct DataSize {
  size_t size = sizeof(DataSize);
  void *priv = nullptr, *profiler = nullptr;
  const char** metrics = nullptr;
  size_t count = 0, ranges = 0;
  uint32_t nodes = 0, padding = 0;
  size_t bytes = 0;
};
struct DataInitialize {
  size_t size = sizeof(DataInitialize);
  void *priv = nullptr, *profiler = nullptr;
  size_t bytes = 0;
  uint8_t* data = nullptr;
};
struct SetConfig {
  size_t size = offsetof(SetConfig, target_level) + sizeof(uint16_t);
  void *priv = nullptr, *profiler = nullptr;
  size_t config_bytes = 0;
  const uint8_t* config = nullptr;
  size_t data_bytes = 0;
  uint8_t* data = nullptr;
  int32_t range = 2, replay = 3;  // of the user: what is between push and pop, run again for each pass
  size_t most_ranges = 1;
  uint16_t levels = 1, least_level = 1;
  size_t pass = 0;
  uint16_t target_level = 1;
};
static_assert(offsetof(SetConfig, levels) == 72 && offsetof(SetConfig, target_level) == 88);

}  // namespace cupti

struct Cupti {
  using Requested = void (*)(uint8_t** buffer, size_t* size, size_t* most_records);
  using Completed = void (*)(void* context, uint32_t stream, uint8_t* buffer, size_t size, size_t valid);

  int (*getVersion)(uint32_t* version) = nullptr;
  int (*getResultString)(int result, const char** text) = nullptr;
  int (*activityEnable)(int kind) = nullptr;
  int (*activityDisable)(int kind) = nullptr;
  int (*activityRegisterCallbacks)(Requested requested, Completed completed) = nullptr;
  int (*activityGetNextRecord)(uint8_t* buffer, size_t valid, void** record) = nullptr;
  int (*activityFlushAll)(uint32_t flag) = nullptr;
  int (*getTimestamp)(uint64_t* ns) = nullptr;
  // Not in every version.
  int (*getCallbackName)(int domain, uint32_t function, const char** name) = nullptr;
  int (*setThreadIdType)(int type) = nullptr;
  int (*profilerInitialize)(cupti::Initialize*) = nullptr;
  int (*profilerDeInitialize)(cupti::Initialize*) = nullptr;
  int (*deviceGetChipName)(cupti::ChipName*) = nullptr;
  int (*profilerGetCounterAvailability)(cupti::Availability*) = nullptr;
  int (*profilerHostInitialize)(cupti::HostInitialize*) = nullptr;
  int (*profilerHostDeinitialize)(cupti::HostDeinitialize*) = nullptr;
  int (*profilerHostGetMetricProperties)(cupti::MetricProperties*) = nullptr;
  int (*profilerHostConfigAddMetrics)(cupti::AddMetrics*) = nullptr;
  int (*profilerHostGetConfigImageSize)(cupti::ConfigImageSize*) = nullptr;
  int (*profilerHostGetConfigImage)(cupti::ConfigImage*) = nullptr;
  int (*profilerHostEvaluateToGpuValues)(cupti::Evaluate*) = nullptr;
  int (*rangeProfilerEnable)(cupti::Enable*) = nullptr;
  int (*rangeProfilerDisable)(cupti::Profiler*) = nullptr;
  int (*rangeProfilerStart)(cupti::Profiler*) = nullptr;
  int (*rangeProfilerStop)(cupti::Stop*) = nullptr;
  int (*rangeProfilerPushRange)(cupti::PushRange*) = nullptr;
  int (*rangeProfilerPopRange)(cupti::Profiler*) = nullptr;
  int (*rangeProfilerDecodeData)(cupti::Decode*) = nullptr;
  int (*rangeProfilerGetCounterDataSize)(cupti::DataSize*) = nullptr;
  int (*rangeProfilerCounterDataImageInitialize)(cupti::DataInitialize*) = nullptr;
  int (*rangeProfilerSetConfig)(cupti::SetConfig*) = nullptr;

  uint32_t version = 0;
  std::string path;
  std::string reason = "it was not opened";  // why it cannot be used; empty if it can
  std::string no_counters;                   // the same of the Range Profiler
  explicit operator bool() const { return reason.empty(); }

  // Why a call failed, in words that say what to do where that is known. 0 is success.
  std::string words(const char* what, int result) const;
};

// The first of `candidates` that can be used; it stays open. One that the process has already is taken before all of them.
Cupti open_cupti(const std::vector<std::string>& candidates);
// Names and paths, best first: what lies where `beside` (other libraries of a toolkit: NVRTC, cuBLASLt) do, then the loader's.
std::vector<std::string> cupti_candidates(const std::vector<std::string>& beside);

}  // namespace fattn::lab::profile
