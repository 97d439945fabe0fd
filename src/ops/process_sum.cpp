// Sums have a stream of their own, so that the backward pass goes on beside them.
#include "ops/process_sum.h"

#include <cstring>
#include <optional>
#include <string>

#include "device/cuda_device.h"
#include "device/nccl_communicator.h"

namespace fattn::ops {
namespace {

using core::cuda_driver;
using core::CudaCurrent;

constexpr unsigned kNoTiming = 2;  // of an event

core::NcclId id_of(const std::vector<std::byte>& bytes) {
  core::NcclId id{};
  if (bytes.size() != sizeof id.bytes) throw Error(ErrorCode::kInvalidArgument, "an id of NCCL has " + std::to_string(sizeof id.bytes) + " bytes");
  std::memcpy(id.bytes, bytes.data(), sizeof id.bytes);
  return id;
}

}  // namespace

struct ProcessSum::State {
  State(core::CudaDevice* d, const Group& group) : device(d) {
    communicator.emplace(d, id_of(group.id), group.rank, group.ranks, group.alive);
    if (!device) return;
    const CudaCurrent scope = device->current();
    device->check(cuda_driver().streamCreate(&stream, core::kCudaStreamNonBlocking), "making a stream for sums");
    for (core::CUevent* event : {&ready, &done}) device->check(cuda_driver().eventCreate(event, kNoTiming), "making an event for sums");
  }
  ~State() {
    communicator.reset();  // before its stream
    if (!device) return;
    try {
      const CudaCurrent scope = device->current();
      for (const core::CUevent event : {ready, done})
        if (event) cuda_driver().eventDestroy(event);
      if (stream) cuda_driver().streamDestroy(stream);
    } catch (const Error&) {
      // The device is broken: there is nothing left to free.
    }
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  core::CudaDevice* device;
  core::CUstream stream = nullptr;
  core::CUevent ready = nullptr, done = nullptr;
  std::optional<core::NcclCommunicator> communicator;
};

std::vector<std::byte> ProcessSum::new_id() {
  const core::NcclId id = core::NcclCommunicator::new_id();
  static_assert(sizeof id.bytes == kIdBytes);
  const auto* bytes = reinterpret_cast<const std::byte*>(id.bytes);
  return {bytes, bytes + sizeof id.bytes};
}

ProcessSum::ProcessSum(const Device& device, const Group& group)
    : state_(std::make_unique<State>(device.place == Place::kCuda ? &core::cuda_device(device.gpu) : nullptr, group)) {}
ProcessSum::~ProcessSum() = default;

void ProcessSum::begin(float* x, int64_t count, void* stream) {
  State& s = *state_;
  if (s.device) {
    const CudaCurrent scope = s.device->current();
    s.device->check(cuda_driver().eventRecord(s.ready, static_cast<core::CUstream>(stream)), "marking gradients as ready");
    s.device->check(cuda_driver().streamWaitEvent(s.stream, s.ready, 0), "waiting for gradients");
  }
  s.communicator->sum(x, static_cast<size_t>(count), s.stream);
}

void ProcessSum::finish(void* stream) {
  State& s = *state_;
  if (s.device) {
    const CudaCurrent scope = s.device->current();
    s.device->check(cuda_driver().eventRecord(s.done, s.stream), "marking sums as done");
    s.device->check(cuda_driver().streamWaitEvent(static_cast<core::CUstream>(stream), s.done, 0), "waiting for sums");
  }
  s.communicator->wait(s.done);
}

}  // namespace fattn::ops
