// NVML for tests, never installed: one device, the first of the stub of libcuda, and the numbers that the test sets. STUB_INCOMPLETE: without a
// function.
#include <chrono>
#include <cstring>

#include "nvml_stub.h"

#define STUB_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kNotSupported = 3, kNotFound = 6, kTooFew = 7;
fattn::test::NvmlStubState state;
int device;

// What is measured anew every so often differs by a milliwatt from what was measured before.
unsigned measured(int milliwatts) {
  if (state.every_ms <= 0) return static_cast<unsigned>(milliwatts);
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<unsigned>(milliwatts + std::chrono::duration_cast<std::chrono::milliseconds>(now).count() / state.every_ms % 10);
}

int answer(int number, unsigned* to, bool changes) {
  if (number < 0) return kNotSupported;
  *to = changes ? measured(number) : static_cast<unsigned>(number);
  return 0;
}

struct FieldValue {
  unsigned field, scope;
  long long timestamp_us, latency_us;
  int type, status;
  union {
    double real;
    unsigned small;
  } value;
};

struct ProcessInfo {
  unsigned pid;
  unsigned long long memory;
  unsigned gpu_instance, compute_instance;
};

}  // namespace

STUB_EXPORT fattn::test::NvmlStubState* stub_state() { return &state; }

STUB_EXPORT int nvmlInit_v2() { return state.init; }
STUB_EXPORT const char* nvmlErrorString(int status) {
  return status == kNotFound ? "Not Found" : status == kNotSupported ? "Not Supported" : "Stubborn";
}
STUB_EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char* address, void** to) {
  *to = &device;
  return std::strcmp(address, "0000:60:00.0") == 0 ? 0 : kNotFound;
}
#ifndef STUB_INCOMPLETE
STUB_EXPORT int nvmlDeviceGetClockInfo(void*, int which, unsigned* mhz) {
  return which == 1 ? answer(state.clock_mhz, mhz, false) : which == 2 ? answer(state.memory_clock_mhz, mhz, false) : kNotSupported;
}
#endif
STUB_EXPORT int nvmlDeviceGetPowerUsage(void*, unsigned* milliwatts) { return answer(state.average_mw, milliwatts, true); }
STUB_EXPORT int nvmlDeviceGetEnforcedPowerLimit(void*, unsigned* milliwatts) { return answer(state.limit_mw, milliwatts, false); }
STUB_EXPORT int nvmlDeviceGetFieldValues(void*, int count, FieldValue* values) {
  for (int i = 0; i < count; ++i) {
    values[i].type = 1;
    values[i].status = values[i].field == 186 ? answer(state.instant_mw, &values[i].value.small, true) : kNotSupported;
  }
  return 0;
}
STUB_EXPORT int nvmlDeviceGetCurrentClocksThrottleReasons(void*, unsigned long long* reasons) {
  *reasons = state.reasons;
  return 0;
}

STUB_EXPORT int nvmlDeviceGetCount_v2(unsigned* count) { return answer(state.devices, count, false); }
STUB_EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** to) {
  *to = &device;
  return static_cast<int>(index) < state.devices ? 0 : kNotFound;
}
STUB_EXPORT int nvmlDeviceGetName(void*, char* name, unsigned length) {
  std::strncpy(name, state.name, length);
  return 0;
}
STUB_EXPORT int nvmlDeviceGetUtilizationRates(void*, unsigned* rates) {
  return answer(state.busy, rates, false) + answer(state.memory_busy, rates + 1, false);
}
STUB_EXPORT int nvmlDeviceGetMemoryInfo(void*, unsigned long long* memory) {
  if (state.used_mib < 0) return kNotSupported;
  memory[0] = static_cast<unsigned long long>(state.total_mib) << 20;
  memory[1] = static_cast<unsigned long long>(state.total_mib - state.used_mib) << 20;
  memory[2] = static_cast<unsigned long long>(state.used_mib) << 20;
  return 0;
}
STUB_EXPORT int nvmlDeviceGetTemperature(void*, int sensor, unsigned* celsius) {
  return sensor == 0 ? answer(state.celsius, celsius, false) : kNotSupported;
}
STUB_EXPORT int nvmlDeviceGetMaxClockInfo(void*, int which, unsigned* mhz) {
  return which == 1 ? answer(state.highest_mhz, mhz, false) : kNotSupported;
}
STUB_EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(void*, unsigned* count, ProcessInfo* processes) {
  if (state.processes < 0) return kNotSupported;
  if (*count < static_cast<unsigned>(state.processes)) return kTooFew;
  *count = static_cast<unsigned>(state.processes);
  for (unsigned i = 0; i < *count; ++i)  // those with the least memory first
    processes[i] = {state.pid - i, state.memory_of_processes ? (static_cast<unsigned long long>(state.used_mib) << 20) / (*count - i) : ~0ull, 0, 0};
  return 0;
}
