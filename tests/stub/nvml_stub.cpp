// NVML for tests, never installed: one device, the first of the stub of libcuda, and the numbers that the test sets. STUB_INCOMPLETE: without a
// function.
#include <chrono>
#include <cstring>

#include "nvml_stub.h"

#define STUB_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kNotSupported = 3, kNotFound = 6;
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
STUB_EXPORT int nvmlDeviceGetClockInfo(void*, int which, unsigned* mhz) { return which == 1 ? answer(state.clock_mhz, mhz, false) : kNotSupported; }
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
