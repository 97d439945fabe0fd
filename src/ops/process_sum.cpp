// Sums and exchanges have a stream of their own, so that other work goes on beside them.
#include "ops/process_sum.h"

#include <cstring>
#include <deque>
#include <memory>
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

// Where an exchange is done.
class ExchangeDone {
 public:
  explicit ExchangeDone(core::CudaDevice& device) : device_(device) {
    const CudaCurrent scope = device_.current();
    device_.check(cuda_driver().eventCreate(&event_, kNoTiming), "making an event for an exchange");
  }
  ~ExchangeDone() {
    try {
      const CudaCurrent scope = device_.current();
      cuda_driver().eventDestroy(event_);
    } catch (const Error&) {
      // The device is broken: there is nothing left to free.
    }
  }
  ExchangeDone(const ExchangeDone&) = delete;
  ExchangeDone& operator=(const ExchangeDone&) = delete;
  core::CUevent get() const { return event_; }

 private:
  core::CudaDevice& device_;
  core::CUevent event_ = nullptr;
};

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

  // What is begun next comes behind the work so far on `other`.
  void begin_behind(void* other) {
    if (!device) return;
    const CudaCurrent scope = device->current();
    device->check(cuda_driver().eventRecord(ready, static_cast<core::CUstream>(other)), "marking numbers as ready");
    device->check(cuda_driver().streamWaitEvent(stream, ready, 0), "waiting for numbers of this process");
  }

  core::CudaDevice* device;
  core::CUstream stream = nullptr;
  core::CUevent ready = nullptr, done = nullptr;
  std::deque<std::unique_ptr<ExchangeDone>> exchanges;  // that are begun and not finished; null: of nothing, or in memory of the host
  std::vector<std::unique_ptr<ExchangeDone>> spare;
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
  s.begin_behind(stream);
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

void ProcessSum::begin_exchange(const std::vector<fattn_piece>& pieces, void* stream) {
  State& s = *state_;
  std::unique_ptr<ExchangeDone> done;
  if (!pieces.empty()) {
    s.begin_behind(stream);
    s.communicator->exchange(pieces, s.stream);
    if (s.device) {
      if (s.spare.empty()) {
        done = std::make_unique<ExchangeDone>(*s.device);
      } else {
        done = std::move(s.spare.back());
        s.spare.pop_back();
      }
      const CudaCurrent scope = s.device->current();
      s.device->check(cuda_driver().eventRecord(done->get(), s.stream), "marking an exchange");
    }
  }
  s.exchanges.push_back(std::move(done));
}

void ProcessSum::finish_exchange(void* stream) {
  State& s = *state_;
  if (s.exchanges.empty()) throw Error(ErrorCode::kInternal, "an exchange is finished that was not begun");
  std::unique_ptr<ExchangeDone> done = std::move(s.exchanges.front());
  s.exchanges.pop_front();
  if (!s.device) return s.communicator->wait(nullptr);
  if (!done) return;
  const CudaCurrent scope = s.device->current();
  s.device->check(cuda_driver().streamWaitEvent(static_cast<core::CUstream>(stream), done->get(), 0), "waiting for an exchange");
  s.spare.push_back(std::move(done));
}

void ProcessSum::settle() {
  State& s = *state_;
  if (s.device) {
    const CudaCurrent scope = s.device->current();
    s.device->check(cuda_driver().eventRecord(s.done, s.stream), "marking exchanges as done");
  }
  s.communicator->wait(s.done);
}

}  // namespace fattn::ops
