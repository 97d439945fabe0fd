// Where a model's memory lies: the host's, or a GPU's with a stream on which all its work is done, in order. The one place that tells them apart when
// memory is asked for and copied.
#pragma once

#include <cstddef>
#include <memory>

#include "fattn/device.hpp"

namespace fattn::gpt2 {

class MemorySpace {
 public:
  MemorySpace() = default;                                                         // the host
  explicit MemorySpace(int gpu) : stream_(std::make_shared<cuda::Stream>(gpu)) {}  // throws fattn::Error

  bool on_gpu() const { return stream_ != nullptr; }
  int gpu() const { return stream_ ? stream_->device() : 0; }
  void* stream() const { return stream_ ? stream_->get() : nullptr; }
  const cuda::Stream& work() const { return *stream_; }  // of a GPU

  // From and to memory of the host, behind the work before; done when they return.
  void upload(void* to, const void* from, size_t bytes) const;
  // The same, but it returns at once: `from` stays as it is until the work has come so far.
  void send(void* to, const void* from, size_t bytes) const;
  void download(void* to, const void* from, size_t bytes) const;
  void zero(void* to, size_t bytes) const;
  // For all work.
  void wait() const;

 private:
  std::shared_ptr<cuda::Stream> stream_;
};

}  // namespace fattn::gpt2
