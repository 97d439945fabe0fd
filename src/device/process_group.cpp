#include "device/process_group.h"

#include <algorithm>
#include <utility>

#include "shared/text.h"

namespace fattn::core {

constexpr unsigned kNoTiming = 2;  // of an event

class ProcessGroup::Event {
 public:
  explicit Event(CudaDevice& device) : device_(device) {
    const CudaCurrent scope = device_.current();
    device_.check(cuda_driver().eventCreate(&event_, kNoTiming), "making an event for exchanges");
  }
  ~Event() {
    try {
      const CudaCurrent scope = device_.current();
      cuda_driver().eventDestroy(event_);
    } catch (const Error&) {
      // The device is broken: there is nothing left to free.
    }
  }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  CUevent get() const { return event_; }
  // `later` waits for what `earlier` has so far.
  void order(CUstream earlier, CUstream later, const char* what) {
    const CudaCurrent scope = device_.current();
    device_.check(cuda_driver().eventRecord(event_, earlier), what);
    device_.check(cuda_driver().streamWaitEvent(later, event_, 0), what);
  }
  void record(CUstream stream) {
    const CudaCurrent scope = device_.current();
    device_.check(cuda_driver().eventRecord(event_, stream), "marking an exchange");
  }
  void make_wait(CUstream stream) {
    const CudaCurrent scope = device_.current();
    device_.check(cuda_driver().streamWaitEvent(stream, event_, 0), "waiting for an exchange");
  }

 private:
  CudaDevice& device_;
  CUevent event_ = nullptr;
};

ProcessGroup::ProcessGroup(const Options& options) : options_(options) {
  if (options.ranks < 1 || options.rank < 0 || options.rank >= options.ranks)
    throw Error(ErrorCode::kInvalidArgument, text("rank is ", options.rank, " and nranks ", options.ranks, "; allowed: 0 <= rank < nranks"));
  if (!(options.timeout_s > 0) || options.timeout_s > 1e9)
    throw Error(ErrorCode::kInvalidArgument, text("timeout is ", options.timeout_s, " seconds; allowed: more than 0, up to 1e9"));
  if (options.ranks == 1) return;  // there is nobody to talk to, and no need of NCCL
  since_ = std::chrono::steady_clock::now();
  waiting_for_ = "all ranks to join the group";
  communicator_.emplace(options.device, options.id, options.rank, options.ranks, [this] { alive(); });
  if (!options.device) return;
  const CudaCurrent scope = options.device->current();
  options.device->check(cuda_driver().streamCreate(&stream_, kCudaStreamNonBlocking), "making a stream for exchanges");
  ready_ = std::make_unique<Event>(*options.device);
}

ProcessGroup::~ProcessGroup() {
  since_ = std::chrono::steady_clock::now();
  communicator_.reset();  // before its stream
  if (!stream_) return;
  try {
    const CudaCurrent scope = options_.device->current();
    cuda_driver().streamDestroy(stream_);
  } catch (const Error&) {
    // The device is broken: there is nothing left to free.
  }
}

void ProcessGroup::alive() const {
  const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - since_;
  if (waited.count() < options_.timeout_s) return;
  throw Error(ErrorCode::kDevice,
              text("rank ", options_.rank, " of ", options_.ranks, " has waited ", options_.timeout_s, " seconds for ", waiting_for_,
                   ", which has ended, hangs, made other calls, or waits for a rank that did. Raise the timeout if a part takes "
                   "longer than that; start all processes again"));
}

void ProcessGroup::expect(std::span<const int> peers, const char* doing) {
  since_ = std::chrono::steady_clock::now();
  std::vector<int> sorted(peers.begin(), peers.end());
  std::sort(sorted.begin(), sorted.end());
  sorted.erase(std::unique(sorted.begin(), sorted.end()), sorted.end());
  waiting_for_ = sorted.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < sorted.size(); ++i) waiting_for_ += text(i == 0 ? "" : ", ", sorted[i]);
  waiting_for_ += text(" ", doing);
}

void ProcessGroup::begin(std::span<const fattn_piece> pieces, CUstream stream) {
  Begun begun;
  for (const fattn_piece& p : pieces) {
    if (p.sent != 0 && p.sent != 1)
      throw Error(ErrorCode::kInvalidArgument, text("a piece's sent is ", p.sent, "; allowed: 1 (it is sent) and 0 (received)"));
    if (p.peer < 0 || p.peer >= options_.ranks || p.peer == options_.rank)
      throw Error(ErrorCode::kInvalidArgument,
                  text("a piece's peer is ", p.peer, "; allowed: another rank, 0 to ", options_.ranks - 1, " but not ", options_.rank));
    if (p.bytes > 0 && !p.data) throw Error(ErrorCode::kInvalidArgument, text("a piece of ", p.bytes, " bytes is a null pointer"));
    if (p.bytes > 0 && options_.device) options_.device->require_on_device(p.data, "a piece");
    begun.peers.push_back(p.peer);
  }
  if (communicator_ && !pieces.empty()) {
    expect(begun.peers, "to exchange");
    if (options_.device) {
      ready_->order(stream, stream_, "ordering an exchange");
      begun.done = spare_.empty() ? std::make_unique<Event>(*options_.device) : std::move(spare_.back());
      if (!spare_.empty()) spare_.pop_back();
    }
    communicator_->exchange(pieces, stream_);
    if (begun.done) begun.done->record(stream_);
  }
  begun_.push_back(std::move(begun));
}

void ProcessGroup::finish(CUstream stream) {
  if (begun_.empty()) throw Error(ErrorCode::kInvalidArgument, "finish without a begin before it");
  Begun oldest = std::move(begun_.front());
  begun_.pop_front();
  if (!communicator_ || oldest.peers.empty()) return;
  if (oldest.done) {
    oldest.done->make_wait(stream);
    finished_.push_back(std::move(oldest));
    return;
  }
  expect(oldest.peers, "to exchange");
  communicator_->wait(nullptr);
}

void ProcessGroup::wait() {
  if (!begun_.empty())
    throw Error(ErrorCode::kInvalidArgument, text(begun_.size(), " begun and not finished; call finish for each exchange before waiting"));
  if (!communicator_) return;
  while (!finished_.empty()) {
    expect(finished_.front().peers, "to exchange");
    communicator_->wait(finished_.front().done->get());
    spare_.push_back(std::move(finished_.front().done));
    finished_.pop_front();
  }
}

}  // namespace fattn::core
