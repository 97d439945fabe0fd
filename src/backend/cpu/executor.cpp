#include "backend/cpu/executor.h"

#include <atomic>
#include <exception>

namespace fattn::core {

struct detail::FirstException::State {
  std::atomic<bool> taken{false};
  std::exception_ptr error;
};
detail::FirstException::FirstException() : state_(new State) {}
detail::FirstException::~FirstException() { delete state_; }
void detail::FirstException::capture() noexcept {
  if (!state_->taken.exchange(true)) state_->error = std::current_exception();
}
void detail::FirstException::rethrow_if_any() {
  if (state_->error) std::rethrow_exception(state_->error);
}

void run_workers_erased(const std::optional<fattn_executor>& host, int workers, WorkerFn fn, void* arg) {
  if (host) {
    host->parallel(host->context, workers, fn, arg);
    return;
  }
  for (int i = 0; i < workers; ++i) fn(arg, i);
}

}  // namespace fattn::core
