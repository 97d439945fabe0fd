#include "cpu/executor.h"

#include "cpu/thread_pool.h"
#include "fattn/error.hpp"
#include "shared/text.h"

namespace fattn::core::detail {
namespace {

// Whether this thread is inside of a body. Only touched while a call is under way: a thread of the pool that is about to
// end must not make the loader set up thread-local memory of a library that is being unloaded.
thread_local bool in_body = false;

// A call as the threads see it, own or host's.
struct Marked {
  WorkerFn fn;
  void* arg;
  std::atomic<int> ran{0};  // of a host's executor
};

void run_marked(void* arg, int32_t worker) {
  const auto& call = *static_cast<Marked*>(arg);
  in_body = true;
  call.fn(call.arg, worker);
  in_body = false;
}

void run_counted(void* arg, int32_t worker) {
  run_marked(arg, worker);
  static_cast<Marked*>(arg)->ran.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

Outcome run_workers_erased(const std::optional<fattn_executor>& host, int workers, WorkerFn fn, void* arg) {
  if (in_body || workers <= 0) {
    for (int worker = 0; worker < workers; ++worker) fn(arg, worker);
    return {0, workers};
  }
  Marked call{fn, arg};
  if (host) {
    const int32_t status = host->parallel(host->context, workers, run_counted, &call);
    return {status, call.ran.load(std::memory_order_relaxed)};
  }
  if (workers == 1)
    run_marked(&call, 0);  // no thread but this one, so that nobody asks the system where it may run
  else
    run_on_pool(workers, CpuMask::current(), run_marked, &call);
  return {0, workers};
}

void host_failed(const Outcome& outcome, int workers) {
  if (outcome.status != 0)
    throw Error(ErrorCode::kInternal, text("the host's executor failed: parallel() returned ", outcome.status, " for ", workers,
                                           " workers; it must return 0 once every worker has run. Repair the executor, or pass none to use the "
                                           "library's own threads"));
  throw Error(ErrorCode::kInternal, text("the host's executor ran ", outcome.ran, " workers; it must call each of the ", workers,
                                         " exactly once. Repair the executor, or pass none to use the library's own threads"));
}

}  // namespace fattn::core::detail
