// Something that computes attention and can be measured: the library in this process, or a provider in its own.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fattn/problem.hpp"
#include "measure/convert.h"
#include "measure/failure.h"
#include "measure/problem.h"
#include "measure/sampling.h"

namespace fattn::measure {

// What one forward and, for gradients, one backward call returned. An absent tensor has no pages.
struct Outputs {
  Pages o, lse, dq, dk, dv, dbias;
};

// What a call adds to memory over q, k, v and dout: its outputs included; for gradients also o and lse, which the forward
// pass leaves for the backward.
struct MemoryUse {
  int64_t extra_bytes = 0;      // of the library: what was allocated, exactly; of a provider: what it measured
  int64_t rss_extra_bytes = 0;  // the resident set's peak over what it was before
  bool rss_measured = false;
  std::string method;  // how extra_bytes was found: "allocated", "resident set", "allocator"
};

// Who a row is about.
struct Identity {
  std::string provider, backend, algorithm, version, device = "cpu";
  std::string kernel_forward, kernel_backward;  // of the library's plans; empty for providers
  std::string kernel(Pass pass) const {
    if (pass == Pass::kForward || kernel_backward.empty()) return kernel_forward;
    return pass == Pass::kBackward ? kernel_backward : kernel_forward + ", " + kernel_backward;
  }
  Isa isa = Isa::kAuto;  // of the plan; kAuto for providers
  int threads = 0;
};

// How long one that is a process of its own may make its caller wait, and who is told when that takes long.
struct Patience {
  std::optional<std::chrono::steady_clock::time_point> until;  // then its calls fail with kTimeout
  std::function<void(const std::string&)> tell;
};

// The order of calls is prepare, then any of the others below it. All throw Failure, but for `begin`, `wait_by` and `forward_only`.
class Contestant {
 public:
  virtual ~Contestant() = default;
  virtual Identity identity() const = 0;
  // Whether it computes in another process.
  virtual bool apart() const { return false; }
  // Starts what takes its time before it is wanted, and waits for nothing; what goes wrong is the failure of a later call.
  virtual void begin() {}
  virtual void wait_by(const Patience& patience) { static_cast<void>(patience); }
  // Whether it compiles for each problem, in its first call, for up to a minute. Waits until what `begin` began is there.
  virtual bool compiles() { return false; }
  // Why it has no backward pass; empty if it has. Known once `compiles` has returned. It is then asked for problems without gradients only.
  virtual std::string forward_only() const { return {}; }
  // Throws if a problem would be refused, as far as that is known without its inputs.
  virtual void accept(const ProblemSpec& spec, bool grad, int64_t memory_limit) {
    static_cast<void>(spec), static_cast<void>(grad), static_cast<void>(memory_limit);
  }
  // Takes a problem on; `inputs` must outlive it. Nothing is computed yet, nothing large allocated before its size was checked.
  virtual void prepare(const ProblemSpec& spec, const Inputs& inputs, bool grad, int64_t memory_limit) = 0;
  virtual MemoryUse memory(Pass pass) = 0;
  virtual const Outputs& compute() = 0;
  virtual std::vector<double> time(Pass pass, int samples, int warmup) = 0;
  virtual void release() = 0;  // gives its memory back
};

// Where a contestant computes.
struct Placement {
  Device device = Device::kCpu;
  int index = 0;          // of a CUDA device
  bool flush_l2 = false;  // CUDA: every sample begins with an L2 cache full of other data
  std::string name() const { return device == Device::kCpu ? "cpu" : "cuda:" + std::to_string(index); }
};

// Of "cpu", "none", "cuda" or "cuda:INDEX", as checked before; `flush_l2` is of GPUs.
inline Placement placement_of(const std::string& device, bool flush_l2 = false) {
  if (device == "cpu" || device == "none") return {};
  return {Device::kCuda, device.size() > 5 ? std::stoi(device.substr(5)) : 0, flush_l2};
}

// What is written before a sample, kFlushRepeats times: more than the L2 cache holds, and long enough (about a millisecond) that a
// call is queued before it begins, so that its host time is no part of the measurement. 0 bytes: nothing.
inline constexpr int kFlushRepeats = 16;
int64_t flush_bytes(const Placement& place);

// The library itself; `provider` names the row ("fattn", "standard").
std::unique_ptr<Contestant> make_library_contestant(std::string provider, const Options& options, const Placement& place = {});
std::unique_ptr<Contestant> make_cuda_contestant(std::string provider, const Options& options, const Placement& place);

// The exception as a Failure: by its type and the library's status code, never by its message.
Failure as_failure(const std::exception& e);

}  // namespace fattn::measure
