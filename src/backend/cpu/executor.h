// Who runs the workers: the library's own thread pool, or the host's threads.
#pragma once

#include <cstdint>
#include <optional>

#include "fattn/fattn.h"

namespace fattn::core {

// Calls body(worker) once for every worker in [0, workers), concurrently where threads are free, and returns when all
// have returned. The first exception of a body reaches the caller. Workers share a problem's tasks through a counter, so
// a body that finds no task left returns at once, and running them one after the other is correct as well.
template <class Body>
void run_workers(const std::optional<fattn_executor>& host, int workers, const Body& body);

using WorkerFn = void (*)(void* arg, int32_t worker);
void run_workers_erased(const std::optional<fattn_executor>& host, int workers, WorkerFn fn, void* arg);

// Implementation of the template: catches in the worker, rethrows in the caller.
namespace detail {
class FirstException {
 public:
  void capture() noexcept;  // call inside a catch block
  void rethrow_if_any();
  FirstException();
  ~FirstException();
  FirstException(const FirstException&) = delete;
  FirstException& operator=(const FirstException&) = delete;

 private:
  struct State;
  State* state_;
};
}  // namespace detail

template <class Body>
void run_workers(const std::optional<fattn_executor>& host, int workers, const Body& body) {
  struct Call {
    const Body& body;
    detail::FirstException error;
  } call{body, {}};
  run_workers_erased(
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
}

}  // namespace fattn::core
