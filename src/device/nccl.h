// NVIDIA's library of exchanges between GPUs (libnccl), opened at run time. Its C interface is declared here by ourselves, as far as fattn uses it:
// types and values as NVIDIA's NCCL documentation and the library's interface have them, the same from 2.14 on.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "device/cuda_driver.h"

namespace fattn::core {

using ncclStatus = int;
inline constexpr ncclStatus kNcclSuccess = 0;
inline constexpr ncclStatus kNcclInvalidArgument = 4;
inline constexpr ncclStatus kNcclRemoteError = 6;
inline constexpr ncclStatus kNcclInProgress = 7;  // of a communicator that does not block: ask commGetAsyncError again

using ncclComm = struct NcclCommBody*;
enum class NcclType : int { kByte = 0, kF32 = 7 };
enum class NcclOp : int { kSum = 0 };

// What all of a group are told by one of them.
struct NcclId {
  char bytes[128];
};

// Of 2.14, the first that knows communicators that do not block; later ones take it as it is, with their own values for the rest.
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;
};
static_assert(sizeof(NcclConfig) == 24);

// The functions, named as in the library without `nccl`. Calls check nothing: nccl_check() turns a status into an Error.
struct Nccl {
  ncclStatus (*getVersion)(int* version) = nullptr;
  const char* (*getErrorString)(ncclStatus status) = nullptr;
  const char* (*getLastError)(ncclComm communicator) = nullptr;
  ncclStatus (*getUniqueId)(NcclId* id) = nullptr;
  ncclStatus (*commInitRankConfig)(ncclComm* communicator, int ranks, NcclId id, int rank, NcclConfig* config) = nullptr;
  ncclStatus (*commGetAsyncError)(ncclComm communicator, ncclStatus* status) = nullptr;
  ncclStatus (*commFinalize)(ncclComm communicator) = nullptr;
  ncclStatus (*commDestroy)(ncclComm communicator) = nullptr;
  ncclStatus (*commAbort)(ncclComm communicator) = nullptr;
  ncclStatus (*allReduce)(const void* from, void* to, size_t count, NcclType type, NcclOp op, ncclComm communicator, CUstream stream) = nullptr;
  ncclStatus (*groupStart)() = nullptr;
  ncclStatus (*groupEnd)() = nullptr;
  ncclStatus (*send)(const void* from, size_t count, NcclType type, int peer, ncclComm communicator, CUstream stream) = nullptr;
  ncclStatus (*recv)(void* to, size_t count, NcclType type, int peer, ncclComm communicator, CUstream stream) = nullptr;

  int major = 0, minor = 0, patch = 0;
  bool host_memory = false;  // it is a stand-in for tests, whose pointers are of the host and whose streams are null
  std::string path, reason;  // what was opened; why nothing was and what to do
  explicit operator bool() const { return reason.empty(); }
};

// Opened at the first call (FATTN_NCCL is read then), kept for the life of the process. Looked for as NVRTC is (toolkit_search.h); what the process
// has loaded already (torch's) is found by its name.
const Nccl& nccl();

// What is looked for, best first.
std::vector<std::string> nccl_candidates();
// The first of these that can be used; else a reason. Without `keep` it is closed again, and what is told of it alone is good: a torch that this
// process may load later brings a libnccl.so.2 of its own, in whose place it would be.
Nccl open_nccl(const std::vector<std::string>& candidates, bool keep = true);

// Throws kDevice, or kInvalidArgument, unless status is kNcclSuccess or kNcclInProgress: `what` is what was being done, for people.
void nccl_check(ncclStatus status, const char* what);

}  // namespace fattn::core
