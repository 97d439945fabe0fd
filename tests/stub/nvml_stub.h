// What a test tells the stub of NVML (nvml_stub.cpp), through its function `stub_state`.
#pragma once

namespace fattn::test {

struct NvmlStubState {
  int init = 0;                                                                       // the status of nvmlInit
  int clock_mhz = 1500, average_mw = 400000, instant_mw = 600000, limit_mw = 700000;  // -1: not supported
  unsigned long long reasons = 0x1;                                                   // that it is idle
  int devices = 1;
  const char* name = "Stub GPU";
  int busy = 97, memory_busy = 40, celsius = 61, highest_mhz = 1980, memory_clock_mhz = 3201;  // -1: not supported
  long long used_mib = 20480, total_mib = 143771;                                              // -1
  int processes = 1;           // the last has all of `used_mib`, the one before half, ...; -1
  unsigned pid = 4294967294u;  // of the first; the next ones have the numbers below
  bool memory_of_processes = true;
  int every_ms = 0;  // power is measured anew, with another result, so often; 0: never
};

}  // namespace fattn::test
