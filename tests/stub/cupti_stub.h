// What a test tells the stub of CUPTI (cupti_stub.cpp), through its function `stub_state`.
#pragma once

namespace fattn::test {

struct CuptiStubState {
  int enable_result = 0, enable_kernels_result = 0, register_result = 0;  // of cuptiActivityEnable: of all but kernels, of kernels
  int profiler_result = 0, availability_result = 0, push_result = 0;
  int passes = 3;                  // until all counters had their turn; -1: never
  long long ahead_ns = 5'000'000;  // CUPTI's clock before CLOCK_MONOTONIC
  const char* unknown_metric = nullptr;
  bool cut_short = false;  // evaluates to NaN
  // What it saw.
  int enabled = 0, pushes = 0, open_sessions = 0;
};

}  // namespace fattn::test
