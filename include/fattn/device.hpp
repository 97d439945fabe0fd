// CUDA devices for programs without a CUDA toolkit: what there is, and owners of memory, streams, events and graphs.
// Everything throws fattn::Error; destructors throw nothing. An owner belongs to one device and moves, never copies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "fattn/error.hpp"
#include "fattn/fattn.h"

namespace fattn::cuda {

// How many devices there are; where there are none, `reason` (may be null) says why.
inline int count(std::string* reason = nullptr) {
  int32_t n = 0;
  char why[2048] = "";
  check(fattn_cuda_count(&n, why, sizeof why));
  if (reason) *reason = why;
  return n;
}

inline fattn_cuda_info info(int device) {
  fattn_cuda_info i{};
  i.struct_size = sizeof i;
  check(fattn_cuda_query(device, &i));
  return i;
}

inline std::vector<fattn_cuda_info> devices() {
  std::vector<fattn_cuda_info> all;
  for (int i = 0, n = count(); i < n; ++i) all.push_back(info(i));
  return all;
}

struct Memory {
  size_t free_bytes = 0, total_bytes = 0;
};
inline Memory memory(int device) {
  Memory m;
  check(fattn_cuda_memory(device, &m.free_bytes, &m.total_bytes));
  return m;
}

// What a second holds of `what`, one of FATTN_PEAK_...: FLOP, bytes, exponentials, launches. Measured at every call.
inline double peak(int device, int32_t what) {
  double per_second = 0;
  check(fattn_cuda_peak(device, what, &per_second));
  return per_second;
}

// Waits for everything, and throws what failed in between.
inline void synchronize(int device) { check(fattn_cuda_synchronize(device)); }

// A handle and what destroys it.
template <fattn_status (*Destroy)(int32_t, void*)>
class Handle {
 public:
  Handle() = default;
  Handle(int device, void* handle) : device_(device), handle_(handle) {}
  ~Handle() { reset(); }
  Handle(Handle&& other) noexcept : device_(other.device_), handle_(std::exchange(other.handle_, nullptr)) {}
  Handle& operator=(Handle&& other) noexcept {
    if (this != &other) {
      reset();
      device_ = other.device_;
      handle_ = std::exchange(other.handle_, nullptr);
    }
    return *this;
  }
  int device() const { return device_; }
  void* get() const { return handle_; }

 private:
  void reset() noexcept {
    if (handle_) Destroy(device_, std::exchange(handle_, nullptr));
  }
  int device_ = 0;
  void* handle_ = nullptr;
};

// Does not wait for the default stream, nor it for this one. A function that takes a stream takes null as the default stream.
class Stream : public Handle<fattn_cuda_stream_destroy> {
 public:
  explicit Stream(int device) : Handle(device, make(device)) {}
  void synchronize() const { check(fattn_cuda_stream_synchronize(device(), get())); }

 private:
  static void* make(int device) {
    void* stream = nullptr;
    check(fattn_cuda_stream_create(device, &stream));
    return stream;
  }
};

// Memory of the device, uninitialised. Empty by default.
class Buffer : public Handle<fattn_cuda_free> {
 public:
  Buffer() = default;
  Buffer(int device, size_t bytes) : Handle(device, make(device, bytes)), bytes_(bytes) {}
  // What was moved from is empty.
  Buffer(Buffer&& other) noexcept : Handle(std::move(other)), bytes_(std::exchange(other.bytes_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    const size_t bytes = this == &other ? bytes_ : std::exchange(other.bytes_, 0);
    Handle::operator=(std::move(other));
    bytes_ = bytes;
    return *this;
  }
  ~Buffer() = default;
  size_t bytes() const { return bytes_; }

  // From and to the host, in the order of the stream; both return when the copy is done. At most bytes() - offset bytes.
  void copy_from(const void* host, size_t bytes, void* stream = nullptr, size_t offset = 0) {
    check(fattn_cuda_copy(device(), FATTN_COPY_TO_DEVICE, at(offset, bytes), host, bytes, stream));
  }
  void copy_to(void* host, size_t bytes, void* stream = nullptr, size_t offset = 0) const {
    check(fattn_cuda_copy(device(), FATTN_COPY_TO_HOST, host, at(offset, bytes), bytes, stream));
  }
  // Sets every byte; returns at once.
  void fill(unsigned char byte, void* stream = nullptr) { check(fattn_cuda_memset(device(), get(), byte, bytes_, stream)); }

 private:
  static void* make(int device, size_t bytes) {
    void* memory = nullptr;
    check(fattn_cuda_malloc(device, bytes, &memory));
    return memory;
  }
  char* at(size_t offset, size_t bytes) const {
    if (offset > bytes_ || bytes > bytes_ - offset)
      throw Error(ErrorCode::kInvalidArgument, "a copy of " + std::to_string(bytes) + " bytes at offset " + std::to_string(offset) +
                                                   " of a fattn::cuda::Buffer of " + std::to_string(bytes_) + " bytes; stay inside it");
    return static_cast<char*>(get()) + offset;
  }
  size_t bytes_ = 0;
};

// Memory of the host that copies of the device read and write while both go on. Empty by default.
class HostBuffer : public Handle<fattn_cuda_host_free> {
 public:
  HostBuffer() = default;
  HostBuffer(int device, size_t bytes) : Handle(device, make(device, bytes)) {}

 private:
  static void* make(int device, size_t bytes) {
    void* memory = nullptr;
    check(fattn_cuda_host_malloc(device, bytes, &memory));
    return memory;
  }
};

// A point in a stream; two of them measure the time between.
class Event : public Handle<fattn_cuda_event_destroy> {
 public:
  explicit Event(int device) : Handle(device, make(device)) {}
  void record(void* stream = nullptr) { check(fattn_cuda_event_record(device(), get(), stream)); }
  // Until the stream has come so far.
  void wait() const { seconds_to(*this); }
  // Seconds from this event to `end`, which is waited for.
  double seconds_to(const Event& end) const {
    double seconds = 0;
    check(fattn_cuda_event_elapsed(device(), get(), end.get(), &seconds));
    return seconds;
  }

 private:
  static void* make(int device) {
    void* event = nullptr;
    check(fattn_cuda_event_create(device, &event));
    return event;
  }
};

// What `body` gives the stream, recorded instead of done; launch() does it, any number of times.
class Graph : public Handle<fattn_cuda_graph_destroy> {
 public:
  template <class Body>
  Graph(const Stream& stream, const Body& body) : Handle(stream.device(), make(stream, body)) {}
  void launch(void* stream) const { check(fattn_cuda_graph_launch(device(), get(), stream)); }

 private:
  template <class Body>
  static void* make(const Stream& stream, const Body& body) {
    void* graph = nullptr;
    check(fattn_cuda_graph_begin(stream.device(), stream.get()));
    try {
      body();
    } catch (...) {  // the stream must not stay in capture
      if (fattn_cuda_graph_end(stream.device(), stream.get(), &graph) == FATTN_OK) fattn_cuda_graph_destroy(stream.device(), graph);
      throw;
    }
    check(fattn_cuda_graph_end(stream.device(), stream.get(), &graph));
    return graph;
  }
};

}  // namespace fattn::cuda
