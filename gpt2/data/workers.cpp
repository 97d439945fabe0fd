// A thread that cannot be started is no error while there is another.
#include "gpt2/data/workers.h"

#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "files/interrupt.h"

namespace fattn::gpt2 {

void run_on_threads(int threads, const std::function<void()>& work) {
  std::mutex mutex;
  std::exception_ptr error;
  const auto guarded = [&] {
    try {
      work();
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
    }
  };
  std::vector<std::thread> workers;
  {
    const files::SignalsBlocked blocked;  // they are this thread's
    workers.reserve(static_cast<size_t>(threads));
    try {
      for (int i = 0; i < threads; ++i) workers.emplace_back(guarded);
    } catch (const std::system_error&) {
      if (workers.empty()) throw;
    }
  }
  for (std::thread& worker : workers) worker.join();
  if (error) std::rethrow_exception(error);
}

}  // namespace fattn::gpt2
