#include "lab/profile/cupti.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>

namespace fattn::lab::profile {
namespace {

constexpr int kInvalidOperation = 7, kHardwareBusy = 26, kInsufficientPrivileges = 35, kOldProfilerApi = 36, kMultipleSubscribers = 39,
              kNotSupported = 27, kVirtualizedDevice = 33, kVirtualizedPrivileges = 40, kNotInitialized = 15;

void bind(void* library, Cupti& to) {
  std::string missing, missing_counters;
  const auto optional = [&]<class Function>(Function& function, const char* symbol) {
    function = reinterpret_cast<Function>(dlsym(library, symbol));
  };
  const auto needed = [&](auto& function, const char* symbol, std::string& which) {
    optional(function, symbol);
    if (!function && which.empty()) which = symbol;
  };
  needed(to.getVersion, "cuptiGetVersion", missing);
  needed(to.getResultString, "cuptiGetResultString", missing);
  needed(to.activityEnable, "cuptiActivityEnable", missing);
  needed(to.activityDisable, "cuptiActivityDisable", missing);
  needed(to.activityRegisterCallbacks, "cuptiActivityRegisterCallbacks", missing);
  needed(to.activityGetNextRecord, "cuptiActivityGetNextRecord", missing);
  needed(to.activityFlushAll, "cuptiActivityFlushAll", missing);
  needed(to.getTimestamp, "cuptiGetTimestamp", missing);
  optional(to.getCallbackName, "cuptiGetCallbackName");
  optional(to.setThreadIdType, "cuptiSetThreadIdType");
  needed(to.profilerInitialize, "cuptiProfilerInitialize", missing_counters);
  needed(to.profilerDeInitialize, "cuptiProfilerDeInitialize", missing_counters);
  needed(to.deviceGetChipName, "cuptiDeviceGetChipName", missing_counters);
  needed(to.profilerGetCounterAvailability, "cuptiProfilerGetCounterAvailability", missing_counters);
  needed(to.profilerHostInitialize, "cuptiProfilerHostInitialize", missing_counters);
  needed(to.profilerHostDeinitialize, "cuptiProfilerHostDeinitialize", missing_counters);
  needed(to.profilerHostGetMetricProperties, "cuptiProfilerHostGetMetricProperties", missing_counters);
  needed(to.profilerHostConfigAddMetrics, "cuptiProfilerHostConfigAddMetrics", missing_counters);
  needed(to.profilerHostGetConfigImageSize, "cuptiProfilerHostGetConfigImageSize", missing_counters);
  needed(to.profilerHostGetConfigImage, "cuptiProfilerHostGetConfigImage", missing_counters);
  needed(to.profilerHostEvaluateToGpuValues, "cuptiProfilerHostEvaluateToGpuValues", missing_counters);
  needed(to.rangeProfilerEnable, "cuptiRangeProfilerEnable", missing_counters);
  needed(to.rangeProfilerDisable, "cuptiRangeProfilerDisable", missing_counters);
  needed(to.rangeProfilerStart, "cuptiRangeProfilerStart", missing_counters);
  needed(to.rangeProfilerStop, "cuptiRangeProfilerStop", missing_counters);
  needed(to.rangeProfilerPushRange, "cuptiRangeProfilerPushRange", missing_counters);
  needed(to.rangeProfilerPopRange, "cuptiRangeProfilerPopRange", missing_counters);
  needed(to.rangeProfilerDecodeData, "cuptiRangeProfilerDecodeData", missing_counters);
  needed(to.rangeProfilerGetCounterDataSize, "cuptiRangeProfilerGetCounterDataSize", missing_counters);
  needed(to.rangeProfilerCounterDataImageInitialize, "cuptiRangeProfilerCounterDataImageInitialize", missing_counters);
  needed(to.rangeProfilerSetConfig, "cuptiRangeProfilerSetConfig", missing_counters);
  if (!missing_counters.empty()) to.no_counters = "this CUPTI has no function " + missing_counters + "; the Range Profiler came with CUDA 12.6";
  if (!missing.empty()) {
    to.reason = "it has no function " + missing;
    return;
  }
  const int result = to.getVersion(&to.version);
  to.reason = result == 0 ? "" : to.words("cuptiGetVersion", result);
}

}  // namespace

std::string Cupti::words(const char* what, int result) const {
  const char* text = nullptr;
  if (getResultString && getResultString(result, &text) != 0) text = nullptr;
  std::string why = std::string(what) + " failed: " + (text ? text : "error " + std::to_string(result));
  switch (result) {
    case kVirtualizedPrivileges:
    case kInsufficientPrivileges:
      why += "; the driver lets administrators alone use counters here (NVIDIA's note ERR_NVGPUCTRPERM says how an administrator allows it to all)";
      break;
    case kHardwareBusy: why += "; another program has the counters, perhaps DCGM or another profiler"; break;
    case kOldProfilerApi:
    case kMultipleSubscribers: why += "; another profiler in this process holds CUPTI"; break;
    case kVirtualizedDevice: why += "; this virtual GPU gives no counters"; break;
    case kNotInitialized: why += "; CUPTI and the driver do not fit together: take the CUPTI of the driver's CUDA version, or a newer driver"; break;
    case kInvalidOperation:
    case kNotSupported: why += "; this GPU or driver does not offer it"; break;
    default: break;
  }
  return why;
}

Cupti open_cupti(const std::vector<std::string>& candidates) {
  std::string tried;
  const auto try_library = [&](const std::string& name, int flags, Cupti& found) {
    void* const library = dlopen(name.c_str(), flags);
    if (!library) {
      const char* const error = dlerror();
      if ((flags & RTLD_NOLOAD) == 0) tried += (tried.empty() ? "" : "; ") + std::string(error ? error : name);
      return false;
    }
    bind(library, found);
    if (!found) {
      tried += (tried.empty() ? "" : "; ") + name + ": " + found.reason;
      dlclose(library);
      return false;
    }
    Dl_info info{};
    found.path = dladdr(reinterpret_cast<const void*>(found.getVersion), &info) && info.dli_fname ? info.dli_fname : name;
    return true;
  };
  // Two in a process would hold each other's hooks.
  for (const char* loaded : {"libcupti.so.13", "libcupti.so.12"}) {
    Cupti found;
    if (try_library(loaded, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD, found)) return found;
  }
  for (const std::string& name : candidates) {
    Cupti found;
    if (try_library(name, RTLD_NOW | RTLD_LOCAL, found)) return found;
  }
  Cupti none;
  none.reason = "CUPTI cannot be opened (" + (tried.empty() ? "nothing to try" : tried) +
                "); `pip install nvidia-cuda-cupti` has it, and so have CUDA toolkits";
  none.no_counters = none.reason;
  return none;
}

std::vector<std::string> cupti_candidates(const std::vector<std::string>& beside) {
  std::vector<std::string> all;
  const auto add = [&](const std::string& name) {
    if (std::find(all.begin(), all.end(), name) == all.end()) all.push_back(name);
  };
  std::vector<int> majors = {13, 12};
  for (const std::string& path : beside)  // of the major version that the others have
    if (path.ends_with(".so.12")) majors = {12, 13};
  for (const std::string& path : beside) {
    const size_t slash = path.rfind('/');
    if (slash == std::string::npos || slash == 0) continue;
    const std::string folder = path.substr(0, slash);
    for (const int major : majors)
      for (const char* where : {"", "/../../cuda_cupti/lib", "/../../cu13/lib", "/../extras/CUPTI/lib64"})
        if (const std::string file = folder + where + "/libcupti.so." + std::to_string(major); access(file.c_str(), R_OK) == 0) add(file);
  }
  for (const int major : majors) {
    add("libcupti.so." + std::to_string(major));
    for (const char* folder : {"/usr/local/cuda/lib64", "/usr/local/cuda/extras/CUPTI/lib64", "/opt/cuda/extras/CUPTI/lib64"})
      if (const std::string file = std::string(folder) + "/libcupti.so." + std::to_string(major); access(file.c_str(), R_OK) == 0) add(file);
  }
  return all;
}

}  // namespace fattn::lab::profile
