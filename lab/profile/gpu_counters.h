// What a GPU counts while a call runs, by CUPTI's Range Profiler: the call is run again until all counters had their turn.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "lab/profile/counters.h"
#include "lab/profile/cupti.h"

namespace fattn::lab::profile {

// A metric of the hardware and what it is here. docs/PROFILING.md explains each.
struct GpuMetric {
  const char *name, *unit, *words;
  const char* metric;  // as libnvperf_host knows it
  double factor;       // to the unit
};
const std::vector<GpuMetric>& gpu_metrics();

// Of one call; `run` does it and waits for its end. Each metric is a number or a reason; so are what is added up of them: dram_bytes, and l2_bytes,
// which cross between multiprocessors and the L2 cache. `driver`: the path of libcuda as the library opened it.
std::vector<Counter> count_on_gpu(const Cupti& cupti, int device, const std::string& driver, const std::function<void()>& run);

}  // namespace fattn::lab::profile
