#include "device/nccl.h"

#include <utility>

#include "device/dynamic_library.h"
#include "device/toolkit_search.h"
#include "fattn/error.hpp"
#include "shared/env.h"
#include "shared/text.h"

namespace fattn::core {
namespace {

constexpr int kOldest = 21400;  // 2.14.0

// Fills `to`, or returns why `library` cannot be used.
std::string bind(const DynamicLibrary& library, Nccl& to) {
  if (!library) return library.reason();
  std::string missing;
  const auto find = [&]<class Function>(Function& function, const char* symbol) {
    function = library.function<Function>(symbol);
    if (!function && missing.empty()) missing = symbol;
  };
  Nccl found;
  find(found.getVersion, "ncclGetVersion");
  int version = 0;
  if (found.getVersion && found.getVersion(&version) == kNcclSuccess && version < kOldest)
    return text("it is NCCL of version code ", version, "; 2.14 or later is needed");
  find(found.getErrorString, "ncclGetErrorString");
  find(found.getLastError, "ncclGetLastError");
  find(found.getUniqueId, "ncclGetUniqueId");
  find(found.commInitRankConfig, "ncclCommInitRankConfig");
  find(found.commGetAsyncError, "ncclCommGetAsyncError");
  find(found.commFinalize, "ncclCommFinalize");
  find(found.commDestroy, "ncclCommDestroy");
  find(found.commAbort, "ncclCommAbort");
  find(found.allReduce, "ncclAllReduce");
  find(found.groupStart, "ncclGroupStart");
  find(found.groupEnd, "ncclGroupEnd");
  find(found.send, "ncclSend");
  find(found.recv, "ncclRecv");
  if (!missing.empty()) return "it has no function " + missing + ", so it is not NCCL 2.14 or later";
  if (version == 0) return "ncclGetVersion gives no version";
  found.major = version / 10000;
  found.minor = version / 100 % 100;
  found.patch = version % 100;
  found.host_memory = library.function<int (*)()>("fattn_nccl_in_host_memory") != nullptr;
  found.path = library.file_of("ncclGetVersion");
  to = std::move(found);
  return "";
}

}  // namespace

std::vector<std::string> nccl_candidates() {
  const std::string wanted = env_value(kEnvNccl);
  return wanted.empty() ? toolkit_candidates("libnccl", {"/nvidia/nccl/lib"}, {2}) : std::vector<std::string>{wanted};
}

Nccl open_nccl(const std::vector<std::string>& candidates, bool keep) {
  Nccl found;
  std::string tried;
  for (const std::string& name : candidates) {
    DynamicLibrary library(name);
    const std::string why = bind(library, found);
    if (why.empty()) {
      if (keep) std::move(library).keep();
      return found;
    }
    tried += text(tried.empty() ? "" : "; ", name, ": ", why);
  }
  found.reason =
      "no usable NCCL (NVIDIA's library of exchanges between GPUs); install it (the system's package libnccl2, or, in an active virtual environment "
      "or with --user, pip install nvidia-nccl-cu13; for drivers before CUDA 13 nvidia-nccl-cu12), or set FATTN_NCCL to the path of libnccl.so.2. "
      "Tried " +
      tried;
  return found;
}

const Nccl& nccl() {
  static const Nccl& found = *new Nccl(open_nccl(nccl_candidates()));  // never destroyed: communicators refer to it
  return found;
}

void nccl_check(ncclStatus status, const char* what) {
  if (status == kNcclSuccess || status == kNcclInProgress) return;
  const Nccl& library = nccl();
  const char* name = library ? library.getErrorString(status) : nullptr;
  const char* last = library ? library.getLastError(nullptr) : nullptr;
  throw Error(status == kNcclInvalidArgument ? ErrorCode::kInvalidArgument : ErrorCode::kDevice,
              text("NCCL ", library.major, ".", library.minor, ".", library.patch, ": ", what, " failed: ", name ? name : "status", " (", status, ")",
                   last && *last ? ": " : "", last ? last : "", "; NCCL_DEBUG=INFO tells more"));
}

}  // namespace fattn::core
