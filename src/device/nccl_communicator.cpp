#include "device/nccl_communicator.h"

#include <chrono>
#include <thread>
#include <utility>

#include "shared/text.h"

namespace fattn::core {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kSpinning = std::chrono::milliseconds(2);  // a sum over GPUs of one host is done by then; sleeping would make it late
constexpr auto kSleep = std::chrono::microseconds(100);
constexpr auto kNaming = std::chrono::seconds(2);  // that the group may take to tell which process is gone: it knows better than NCCL
constexpr auto kEnding = std::chrono::seconds(5);  // that an orderly end may take

// Calls with the device's context current; of the host there is none.
template <class Call>
ncclStatus in_context(CudaDevice* device, const Call& call) {
  if (!device) return call();
  const CudaCurrent scope = device->current();
  return call();
}

}  // namespace

NcclId NcclCommunicator::new_id() {
  if (!nccl()) throw Error(ErrorCode::kUnsupported, nccl().reason);
  NcclId id{};
  nccl_check(nccl().getUniqueId(&id), "making the id of a group");
  return id;
}

NcclCommunicator::NcclCommunicator(CudaDevice* device, const NcclId& id, int rank, int ranks, Alive alive)
    : device_(device), alive_(std::move(alive)) {
  if (!nccl()) throw Error(ErrorCode::kUnsupported, nccl().reason);
  if (!device && !nccl().host_memory) throw Error(ErrorCode::kUnsupported, "NCCL exchanges memory of GPUs only: several processes need a GPU each");
  NcclConfig config;
  nccl_check(in_context(device_, [&] { return nccl().commInitRankConfig(&communicator_, ranks, id, rank, &config); }), "joining the group");
  wait_until([this] { return settled(); });
}

NcclCommunicator::~NcclCommunicator() { end(); }

bool NcclCommunicator::settled() {
  ncclStatus status = kNcclSuccess;
  const ncclStatus asked = nccl().commGetAsyncError(communicator_, &status);
  if (asked != kNcclSuccess || (status != kNcclSuccess && status != kNcclInProgress)) {
    for (const Clock::time_point begin = Clock::now(); Clock::now() - begin < kNaming; std::this_thread::sleep_for(kSleep)) alive_();
    nccl_check(asked, "asking the group");
    nccl_check(status, "an exchange");
  }
  return status == kNcclSuccess;
}

template <class Done>
void NcclCommunicator::wait_until(const Done& done) {
  if (!communicator_) throw Error(ErrorCode::kDevice, "the processes' group has ended");
  const Clock::time_point begin = Clock::now();
  try {
    while (!done()) {
      alive_();
      if (Clock::now() - begin < kSpinning)
        std::this_thread::yield();
      else
        std::this_thread::sleep_for(kSleep);
    }
  } catch (...) {
    failed_ = true;
    end();  // at once: freeing memory waits for kernels, and those of NCCL for a process that is gone
    throw;
  }
}

template <class Call>
void NcclCommunicator::finish_call(const char* what, const Call& call) {
  bool begun = false;
  wait_until([&] {
    if (begun) return settled();
    begun = true;
    const ncclStatus status = in_context(device_, call);
    nccl_check(status, what);
    return status == kNcclSuccess;
  });
}

void NcclCommunicator::sum(float* x, size_t count, CUstream stream) {
  if (count == 0) return;
  finish_call("a sum over the processes", [&] { return nccl().allReduce(x, x, count, NcclType::kF32, NcclOp::kSum, communicator_, stream); });
}

void NcclCommunicator::exchange(std::span<const fattn_piece> pieces, CUstream stream) {
  if (pieces.empty()) return;
  finish_call("an exchange with other processes", [&] {
    ncclStatus first = nccl().groupStart();
    for (const fattn_piece& p : pieces) {
      if (first != kNcclSuccess && first != kNcclInProgress) break;
      first = p.sent != 0 ? nccl().send(p.data, p.bytes, NcclType::kByte, p.peer, communicator_, stream)
                          : nccl().recv(p.data, p.bytes, NcclType::kByte, p.peer, communicator_, stream);
    }
    const ncclStatus ended = nccl().groupEnd();
    return first == kNcclSuccess || first == kNcclInProgress ? ended : first;
  });
}

void NcclCommunicator::wait(CUevent event) {
  if (!device_) {
    wait_until([this] { return settled(); });
    return;
  }
  const CudaDriver& driver = cuda_driver();
  const CudaCurrent scope = device_->current();
  wait_until([&] {
    settled();
    const CUresult status = driver.eventQuery(event);
    if (status == kCudaNotReady) return false;
    device_->check(status, "an exchange with other processes");
    return true;
  });
}

// An orderly end waits for what is under way; where something has failed that would be for ever.
void NcclCommunicator::end() noexcept {
  if (!communicator_) return;
  ncclComm communicator = std::exchange(communicator_, nullptr);
  try {
    alive_();
  } catch (...) {
    failed_ = true;
  }
  try {
    in_context(device_, [&] {
      ncclStatus status = failed_ ? kNcclRemoteError : nccl().commFinalize(communicator);
      for (const Clock::time_point begin = Clock::now(); status == kNcclInProgress && Clock::now() - begin < kEnding;) {
        if (nccl().commGetAsyncError(communicator, &status) != kNcclSuccess) status = kNcclRemoteError;
        if (status == kNcclInProgress) std::this_thread::sleep_for(kSleep);
      }
      return status == kNcclSuccess ? nccl().commDestroy(communicator) : nccl().commAbort(communicator);
    });
  } catch (const Error&) {
    // The device is broken: there is nothing left to end.
  }
}

}  // namespace fattn::core
