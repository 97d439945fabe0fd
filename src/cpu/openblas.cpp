#include "cpu/openblas.h"

#include <pthread.h>

#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "device/dynamic_library.h"
#include "shared/env.h"

namespace fattn::core {
namespace {

// Who has set OpenBLAS's thread count to 1. Global, because that count is.
struct ThreadCount {
  std::mutex mutex;
  int users = 0;
  int before = 0;  // the count to put back; 0: nothing was changed
};
ThreadCount& thread_count() {
  static ThreadCount& count = *new ThreadCount;  // never destroyed: workers may outlive static destruction
  return count;
}

// A fork may come while other threads are users. They do not exist in the child; its next user puts `before` back.
void before_fork() { thread_count().mutex.lock(); }
void after_fork_in_parent() { thread_count().mutex.unlock(); }
void after_fork_in_child() {
  thread_count().users = 0;
  thread_count().mutex.unlock();
}

// Debian's and Fedora's names for the build with threads of its own come after the plain names, which may be any build.
std::vector<std::string> candidates() {
  const std::string wanted = env_value(kEnvOpenBlas);
  if (!wanted.empty()) return {wanted};
  return {
    "libopenblas.so.0", "libopenblas.so", "libopenblasp.so.0",
#if defined(__x86_64__)
        "/usr/lib/x86_64-linux-gnu/openblas-pthread/libopenblas.so.0"
#elif defined(__aarch64__)
        "/usr/lib/aarch64-linux-gnu/openblas-pthread/libopenblas.so.0"
#endif
  };
}

// Fills `blas`, or returns why `library` cannot be used.
std::string bind(const DynamicLibrary& library, OpenBlas& blas) {
  if (!library) return library.reason();
  const auto sgemm = library.function<OpenBlas::SgemmFn>("cblas_sgemm");
  const auto get_num_threads = library.function<int (*)()>("openblas_get_num_threads");
  const auto set_num_threads = library.function<void (*)(int)>("openblas_set_num_threads");
  const auto get_parallel = library.function<int (*)()>("openblas_get_parallel");
  const auto get_config = library.function<const char* (*)()>("openblas_get_config");
  const char* const missing = !sgemm             ? "cblas_sgemm"
                              : !get_num_threads ? "openblas_get_num_threads"
                              : !set_num_threads ? "openblas_set_num_threads"
                              : !get_parallel    ? "openblas_get_parallel"
                              : !get_config      ? "openblas_get_config"
                                                 : nullptr;
  if (missing) return std::string("it has no function ") + missing + ", so it is not an OpenBLAS with the CBLAS interface";
  if (std::string(get_config()).find("USE64BITINT") != std::string::npos)
    return "it is a build with 64-bit integers; one with 32-bit integers is needed";
  // 0: no threads, and perhaps no locks either, so concurrent calls may not be safe. 2: OpenMP, whose thread count is
  // per calling thread, so every worker would start a team of its own.
  const int parallel = get_parallel();
  if (parallel != 1)
    return std::string("it is a build ") + (parallel == 0 ? "without threads" : "with OpenMP") + "; the one with POSIX threads is needed";
  blas.sgemm = sgemm;
  blas.get_num_threads = get_num_threads;
  blas.set_num_threads = set_num_threads;
  blas.path = library.file_of("cblas_sgemm");
  return "";
}

OpenBlas open_openblas() {
  OpenBlas blas;
  std::string tried;
  for (const std::string& name : candidates()) {
    DynamicLibrary library(name);
    const std::string why = bind(library, blas);
    if (why.empty()) {
      std::move(library).keep();
      pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
      return blas;
    }
    tried += (tried.empty() ? "" : "; ") + name + ": " + why;
  }
  // What to do comes first: a caller's buffer may cut the end off.
  blas.reason =
      "no usable OpenBLAS; install it (Debian, Ubuntu: apt install libopenblas0-pthread) or set FATTN_OPENBLAS to the absolute path of the "
      "library. Tried " +
      tried;
  return blas;
}

}  // namespace

const OpenBlas& openblas() {
  static const OpenBlas& blas = *new OpenBlas(open_openblas());  // never destroyed, as above
  return blas;
}

OneBlasThread::OneBlasThread(const OpenBlas& blas) : blas_(blas) {
  ThreadCount& count = thread_count();
  const std::lock_guard lock(count.mutex);
  if (count.users++ > 0) return;
  if (count.before == 0) count.before = blas_.get_num_threads();
  blas_.set_num_threads(1);
}

OneBlasThread::~OneBlasThread() {
  ThreadCount& count = thread_count();
  const std::lock_guard lock(count.mutex);
  if (--count.users > 0) return;
  blas_.set_num_threads(count.before);
  count.before = 0;
}

}  // namespace fattn::core
