// What a GPU did: kernels (those inside of CUDA graphs too), copies, sets, allocations, and the driver's functions, by CUPTI's activity interface.
#pragma once

#include <string>

#include "lab/profile/cupti.h"

namespace fattn::lab::profile {

struct GpuTraceOptions {
  bool driver = true;   // functions of the driver, on the host's threads
  bool memory = false;  // allocations
};

// From now on the recorder (recorder.h) gets what happens on the GPUs of this process. Empty, or why not; `cupti` must live on.
std::string start_gpu_trace(const Cupti& cupti, const GpuTraceOptions& options);
// Hands all that is done to the recorder. The GPU should be idle.
void flush_gpu_trace();
void stop_gpu_trace();

}  // namespace fattn::lab::profile
