// What a test tells the stub of NVML (nvml_stub.cpp), through its function `stub_state`.
#pragma once

namespace fattn::test {

struct NvmlStubState {
  int init = 0;                                                                       // the status of nvmlInit
  int clock_mhz = 1500, average_mw = 400000, instant_mw = 600000, limit_mw = 700000;  // -1: not supported
  unsigned long long reasons = 0x1;                                                   // that it is idle
  int every_ms = 0;  // power is measured anew, with another result, so often; 0: never
};

}  // namespace fattn::test
