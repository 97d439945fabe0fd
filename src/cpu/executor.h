// Who runs the workers: the library's own thread pool, or the host's threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <optional>

#include "fattn/fattn.h"

namespace fattn::core {

// Calls body(worker) once for every worker in [0, workers), concurrently where threads are free, and returns when all
// have returned. The first exception of a body reaches the caller. Workers share a problem's tasks through a counter, so
// a body that finds no task left returns at once, and running them one after the other is correct as well: that is what
// a call from inside of a body does. A host's executor that fails, or that leaves workers out, is Error(kInternal).
template <class Body>
void run_workers(const std::optional<fattn_executor>& host, int workers, const Body& body);

// Implementation of the template: catches in the worker, rethrows in the caller.
using WorkerFn = void (*)(void* arg, int32_t worker);
namespace detail {

// What became of a call: the host's return value, and how many workers ran.
struct Outcome {
  int32_t status;
  int ran;
};
Outcome run_workers_erased(const std::optional<fattn_executor>& host, int workers, WorkerFn fn, void* arg);
[[noreturn]] void host_failed(const Outcome& outcome, int workers);

class FirstException {
 public:
  // Call inside of a catch block.
  void capture() noexcept {
    if (!taken_.exchange(true)) error_ = std::current_exception();
  }
  // Call when all workers have returned.
  void rethrow_if_any() {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::atomic<bool> taken_{false};
  std::exception_ptr error_;
};

}  // namespace detail

template <class Body>
void run_workers(const std::optional<fattn_executor>& host, int workers, const Body& body) {
  struct Call {
    const Body& body;
    detail::FirstException error;
  } call{body, {}};
  const detail::Outcome outcome = detail::run_workers_erased(
      host, workers,
      [](void* arg, int32_t worker) {
        auto& c = *static_cast<Call*>(arg);
        try {
          c.body(static_cast<int>(worker));
        } catch (...) {
          c.error.capture();
        }
      },
      &call);
  call.error.rethrow_if_any();
  if (outcome.status != 0 || outcome.ran != workers) detail::host_failed(outcome, workers);
}

}  // namespace fattn::core
