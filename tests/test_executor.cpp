// The executor and the thread pool: every worker once, calls at once and within each other, fork, errors, affinity, unloading.
#include <dirent.h>
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cpu/executor.h"
#include "cpu/thread_pool.h"
#include "fattn/fattn.hpp"

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define FATTN_TEST_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer) || __has_feature(address_sanitizer)
#define FATTN_TEST_SANITIZED 1
#endif
#endif
#ifndef FATTN_TEST_SANITIZED
#define FATTN_TEST_SANITIZED 0
#endif

// The tests fork while threads run and use threads in the child, which ThreadSanitizer allows only when told so.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_options();
extern "C" const char* __tsan_default_options() { return "die_after_fork=0"; }

namespace fattn::core {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

CpuMask first_cpus(int n) {
  std::vector<int> cpus(static_cast<size_t>(n));
  std::iota(cpus.begin(), cpus.end(), 0);
  return CpuMask::of(cpus);
}

// As run_workers, but with a set of CPUs of the test's choice: so that many threads run on a machine with few CPUs.
void run_with_cpus(int workers, const CpuMask& cpus, const std::function<void(int)>& body) {
  run_on_pool(
      workers, cpus, [](void* arg, int32_t worker) { (*static_cast<const std::function<void(int)>*>(arg))(worker); },
      const_cast<std::function<void(int)>*>(&body));
}

bool wait_for(const std::function<bool()>& done, Clock::duration limit = 20s) {
  const auto end = Clock::now() + limit;
  while (!done()) {
    if (Clock::now() > end) return false;
    std::this_thread::sleep_for(100us);
  }
  return true;
}

// Names of this process's threads that the pool has started.
std::multiset<std::string> pool_threads() {
  std::multiset<std::string> names;
  DIR* tasks = ::opendir("/proc/self/task");
  if (!tasks) return names;
  while (const dirent* entry = ::readdir(tasks)) {
    std::ifstream file(std::string("/proc/self/task/") + entry->d_name + "/comm");
    std::string name;
    if (std::getline(file, name) && name.rfind("fattn-", 0) == 0) names.insert(name);
  }
  ::closedir(tasks);
  return names;
}

// Whether every other thread of the process waits for something.
bool others_sleep() {
  DIR* tasks = ::opendir("/proc/self/task");
  if (!tasks) return true;
  bool asleep = true;
  const std::string self = std::to_string(::gettid());
  while (const dirent* entry = ::readdir(tasks)) {
    if (entry->d_name[0] == '.' || self == entry->d_name) continue;
    std::ifstream file(std::string("/proc/self/task/") + entry->d_name + "/stat");
    std::string line;
    if (!std::getline(file, line)) continue;  // ended meanwhile
    const size_t name_end = line.rfind(") ");
    asleep = asleep && name_end != std::string::npos && line[name_end + 2] == 'S';
  }
  ::closedir(tasks);
  return asleep;
}

// Runs the body in a child; returns its exit status, or -1 if it hangs or dies of a signal. The body returns the status. A sanitizer's locks are not
// taken around fork: there other threads, which may just begin, must have come to rest.
int in_child(const std::function<int()>& body) {
  if (FATTN_TEST_SANITIZED) wait_for(others_sleep);
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);  // ends a child that hangs
    ::_exit(body());
  }
  int status = 0;
  if (child < 0 || ::waitpid(child, &status, 0) != child || !WIFEXITED(status)) return -1;
  return WEXITSTATUS(status);
}

// 0 if each worker of a call runs exactly once.
int count_errors(int workers) {
  std::vector<std::atomic<int>> runs(static_cast<size_t>(workers));
  run_workers(std::nullopt, workers, [&](int worker) { runs[static_cast<size_t>(worker)].fetch_add(1); });
  int errors = 0;
  for (const auto& n : runs) errors += n.load() != 1;
  return errors;
}

TEST(Executor, NoThreadBeforeTheFirstCallThatUsesOne) {
  EXPECT_EQ(in_child([] {  // a child starts without threads, so the order of the tests does not matter
              if (!pool_threads().empty()) return 1;
              run_workers(std::nullopt, 1, [](int) {});
              if (!pool_threads().empty()) return 2;
              run_with_cpus(3, first_cpus(16), [](int) {});
              return wait_for([] { return pool_threads() == std::multiset<std::string>{"fattn-1", "fattn-2"}; }) ? 0 : 3;
            }),
            0);
}

TEST(Executor, EveryWorkerRunsOnce) {
  for (int workers : {0, 1, 2, 3, 7, 16, 100, 1500}) {
    EXPECT_EQ(count_errors(workers), 0) << workers;
    std::vector<std::atomic<int>> runs(static_cast<size_t>(workers));
    run_with_cpus(workers, first_cpus(16), [&](int worker) { runs.at(static_cast<size_t>(worker)).fetch_add(1); });
    for (const auto& n : runs) EXPECT_EQ(n.load(), 1) << workers;
  }
}

TEST(Executor, NegativeCountsRunNothing) {
  run_workers(std::nullopt, -3, [](int) { ADD_FAILURE(); });
}

TEST(Executor, TheCallerIsWorkerZero) {
  std::thread::id zero;
  run_with_cpus(4, first_cpus(16), [&](int worker) {
    if (worker == 0) zero = std::this_thread::get_id();
  });
  EXPECT_EQ(zero, std::this_thread::get_id());
}

TEST(Executor, WorkersRunAtTheSameTime) {
  std::atomic<int> arrived{0};
  std::atomic<bool> all{true};
  run_with_cpus(5, first_cpus(16), [&](int) {
    arrived.fetch_add(1);
    if (!wait_for([&] { return arrived.load() == 5; })) all = false;
  });
  EXPECT_TRUE(all.load());
}

TEST(Executor, ThePoolGrows) {
  EXPECT_EQ(in_child([] {
              for (size_t workers : {2, 5, 3, 9, 9}) {
                static size_t most = 0;
                most = std::max(most, workers);
                run_with_cpus(static_cast<int>(workers), first_cpus(16), [](int) {});
                if (!wait_for([] { return pool_threads().size() == most - 1; })) return static_cast<int>(workers);
              }
              return 0;
            }),
            0);
}

TEST(Executor, ACallerWithOneCpuRunsAlone) {
  std::thread([] {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(static_cast<size_t>(::sched_getcpu()), &one);
    ASSERT_EQ(::pthread_setaffinity_np(::pthread_self(), sizeof one, &one), 0);
    run_workers(std::nullopt, 8, [me = std::this_thread::get_id()](int) { EXPECT_EQ(std::this_thread::get_id(), me); });
  }).join();
}

TEST(Executor, ThreadsTakeOverTheCallersCpus) {
  const CpuMask mine = CpuMask::current();
  // Two CPUs by count, of which only this one exists: a set that differs from every set of the tests before.
  const int here = ::sched_getcpu();
  const auto seen_with = [](const CpuMask& cpus) {
    std::atomic<bool> helped{false};
    CpuMask seen;
    run_with_cpus(2, cpus, [&](int worker) {
      if (worker == 0) return void(wait_for([&] { return helped.load(); }));
      seen = CpuMask::current();
      helped = true;
    });
    return seen;
  };
  const CpuMask narrow = seen_with(CpuMask::of({here, 4095}));
  EXPECT_EQ(narrow.count(), 1);
  EXPECT_TRUE(seen_with(first_cpus(2000)) == mine || mine.count() != static_cast<int>(std::thread::hardware_concurrency()));
  EXPECT_TRUE(CpuMask::current() == mine);  // the caller's own is left alone
}

TEST(Executor, SignalsStayOnTheHostsThreads) {
  sigset_t blocked;
  std::atomic<bool> helped{false};
  run_with_cpus(2, first_cpus(16), [&](int worker) {
    if (worker == 0) return void(wait_for([&] { return helped.load(); }));
    ::pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
    helped = true;
  });
  ASSERT_TRUE(helped.load());
  for (int signal : {SIGINT, SIGTERM, SIGUSR1, SIGCHLD, SIGPROF, SIGALRM}) EXPECT_EQ(sigismember(&blocked, signal), 1) << signal;
  for (int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) EXPECT_EQ(sigismember(&blocked, signal), 0) << signal;
  sigset_t mine;
  ::pthread_sigmask(SIG_BLOCK, nullptr, &mine);
  EXPECT_EQ(sigismember(&mine, SIGUSR1), 0);
}

TEST(Executor, AnExceptionReachesTheCallerAndThePoolGoesOn) {
  for (int guilty = 0; guilty < 4; ++guilty) {
    try {
      run_workers(std::nullopt, 4, [&](int worker) {
        if (worker == guilty) throw std::runtime_error("worker " + std::to_string(worker));
      });
      ADD_FAILURE() << "nothing was thrown";
    } catch (const std::runtime_error& e) {
      EXPECT_EQ(e.what(), "worker " + std::to_string(guilty));
    }
    EXPECT_EQ(count_errors(4), 0);
  }
  EXPECT_THROW(run_workers(std::nullopt, 16, [](int worker) { throw worker; }), int);
  EXPECT_EQ(count_errors(16), 0);
}

TEST(Executor, ACallFromInsideOfABodyRunsOnItsThread) {
  std::atomic<int> inner{0};
  run_workers(std::nullopt, 4, [&](int) {
    const auto me = std::this_thread::get_id();
    int next = 0;
    run_workers(std::nullopt, 5, [&](int worker) {
      EXPECT_EQ(std::this_thread::get_id(), me);
      EXPECT_EQ(worker, next++);
      inner.fetch_add(1);
      std::this_thread::sleep_for(100us);  // time enough for another thread to come, if it were asked to
    });
    EXPECT_THROW(run_workers(std::nullopt, 2, [](int) { throw 1; }), int);
  });
  EXPECT_EQ(inner.load(), 20);
  EXPECT_EQ(count_errors(4), 0);
}

TEST(Executor, CallsAtTheSameTime) {
  constexpr int kCallers = 8, kCalls = 2000;
  std::atomic<int> errors{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < kCallers; ++caller) {
    callers.emplace_back([caller, &errors] {
      std::mt19937 random(static_cast<unsigned>(caller));
      const CpuMask many = first_cpus(16);
      for (int call = 0; call < kCalls; ++call) {
        const int workers = 1 + static_cast<int>(random() % 12);
        std::atomic<uint32_t> ran{0};
        std::atomic<int> twice{0};
        const auto body = [&](int worker) {
          if (ran.fetch_or(1u << worker) & (1u << worker)) twice.fetch_add(1);
          if (worker % 4 == 3) std::this_thread::yield();
        };
        try {
          if (call % 3 == 0) {
            run_with_cpus(workers, many, body);
          } else if (call % 100 == 1) {
            run_workers(std::nullopt, workers, [&](int worker) {
              body(worker);
              throw worker;
            });
            errors.fetch_add(1);
          } else {
            run_workers(std::nullopt, workers, body);
          }
        } catch (int worker) {
          if (call % 100 != 1 || worker >= workers) errors.fetch_add(1);
        }
        if (ran.load() != (1u << workers) - 1 || twice.load() != 0) errors.fetch_add(1);
      }
    });
  }
  for (auto& caller : callers) caller.join();
  EXPECT_EQ(errors.load(), 0);
}

TEST(Executor, MoreThreadsThanCpusDoNotCrawl) {
  const auto begin = Clock::now();
  for (int call = 0; call < 1000; ++call) run_with_cpus(16, first_cpus(16), [](int) {});
  EXPECT_LT(Clock::now() - begin, 10s);
}

TEST(Executor, ThreadsThatSleepAreWoken) {
  for (int call = 0; call < 20; ++call) {
    std::this_thread::sleep_for(2ms);
    std::atomic<bool> helped{false};
    run_with_cpus(2, first_cpus(16), [&](int worker) {
      if (worker == 1) helped = true;
      if (worker == 0) wait_for([&] { return helped.load(); });
    });
    EXPECT_TRUE(helped.load()) << call;
  }
}

TEST(Executor, AChildHasAPoolOfItsOwn) {
  EXPECT_EQ(count_errors(8), 0);
  std::atomic<bool> stop{false};
  // So that forks fall into calls, and into the growth of the pool. Not with a sanitizer: its allocator's locks are not taken
  // around fork, so that a child of a process whose other threads allocate may wait for ever.
  std::vector<std::thread> callers;
  for (int caller = 0; caller < (FATTN_TEST_SANITIZED ? 0 : 3); ++caller)
    callers.emplace_back([&] {
      for (int call = 0; !stop; ++call) run_with_cpus(2 + call % 30, first_cpus(32), [](int) {});
    });
  for (int i = 0; i < (FATTN_TEST_SANITIZED ? 10 : 100); ++i) {
    EXPECT_EQ(in_child([] {
                if (!pool_threads().empty()) return 1;
                for (int workers : {2, 5, 16})
                  if (count_errors(workers) != 0) return 2;
                std::atomic<int> arrived{0};
                run_with_cpus(3, first_cpus(16), [&](int) {
                  arrived.fetch_add(1);
                  wait_for([&] { return arrived.load() == 3; });
                });
                return in_child([] { return count_errors(4); }) == 0 ? 0 : 3;  // and the child's child
              }),
              0);
    EXPECT_EQ(count_errors(3), 0);
  }
  stop = true;
  for (auto& caller : callers) caller.join();
}

TEST(ExecutorDeathTest, TheProcessEndsWhileThreadsWork) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a process of its own
  for (int i = 0; i < 5; ++i) {
    EXPECT_EXIT(
        {
          ::alarm(60);
          // Never joined: still calling while the static destructors run.
          std::thread([] {
            for (;;) run_with_cpus(4, first_cpus(16), [](int) {});
          }).detach();
          std::this_thread::sleep_for(3ms);
          std::exit(0);
        },
        ::testing::ExitedWithCode(0), "");
  }
}

TEST(ExecutorDeathTest, AWorkerMayEndTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        ::alarm(60);
        run_with_cpus(4, first_cpus(16), [](int worker) {
          if (worker == 0) wait_for([] { return false; });
          if (worker == 1) std::exit(7);
        });
      },
      ::testing::ExitedWithCode(7), "");
}

// Runs calls with room for the stack of one more thread; 0 if all of them did their work.
int status_with_room_for_one_thread() {
  ::alarm(60);
  const size_t stack = size_t{256} << 20;  // our own size, as the user's limit may be any
  pthread_attr_t attributes;
  ::pthread_attr_init(&attributes);
  if (::pthread_attr_setstacksize(&attributes, stack) != 0 || ::pthread_setattr_default_np(&attributes) != 0) return 1;
  rlim_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const rlimit limit{pages * static_cast<rlim_t>(::sysconf(_SC_PAGESIZE)) + stack + stack / 2, RLIM_INFINITY};
  if (::setrlimit(RLIMIT_AS, &limit) != 0) return 2;
  std::atomic<int> runs{0};
  for (int call = 0; call < 100; ++call) run_with_cpus(8, first_cpus(16), [&](int) { runs.fetch_add(1); });
  if (runs.load() != 800) return 3;
  const auto threads = std::distance(std::filesystem::directory_iterator("/proc/self/task"), {});
  return threads <= 2 ? 0 : 4;  // more: nothing was refused
}

TEST(ExecutorDeathTest, RefusedThreadsAreNoError) {
  if (FATTN_TEST_SANITIZED) GTEST_SKIP() << "a sanitizer's own memory leaves no room for a limit";
  // A process of its own: a forked child would reuse the stacks of its parent's threads.
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(std::_Exit(status_with_room_for_one_thread()), ::testing::ExitedWithCode(0), "");
}

// A host's executor: as many threads as workers, with the faults that a test asks for.
struct Host {
  int32_t status = 0;
  int skip = -1, repeat = -1;
  int calls = 0;
  bool throws = false;

  static int32_t parallel(void* context, int32_t workers, void (*body)(void*, int32_t), void* arg) {
    auto& host = *static_cast<Host*>(context);
    ++host.calls;
    if (host.throws) throw std::runtime_error("the host's own trouble");
    std::vector<std::thread> threads;
    for (int32_t worker = 0; worker < workers; ++worker) {
      if (worker == host.skip) continue;
      threads.emplace_back(body, arg, worker);
      if (worker == host.repeat) threads.emplace_back(body, arg, worker);
    }
    for (auto& thread : threads) thread.join();
    return host.status;
  }
  std::optional<fattn_executor> executor() { return fattn_executor{sizeof(fattn_executor), 4, this, parallel}; }
};

std::string internal_error(Host& host, int workers) {
  try {
    run_workers(host.executor(), workers, [](int) {});
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kInternal);
    return e.what();
  }
  return "";
}

TEST(HostExecutor, RunsEveryWorkerAndNestedCallsToo) {
  Host host;
  std::atomic<int> outer{0}, inner{0};
  run_workers(host.executor(), 4, [&](int) {
    outer.fetch_add(1);
    run_workers(host.executor(), 3, [&](int) { inner.fetch_add(1); });
    run_workers(std::nullopt, 3, [&](int) { inner.fetch_add(1); });
  });
  EXPECT_EQ(outer.load(), 4);
  EXPECT_EQ(inner.load(), 24);
  EXPECT_EQ(host.calls, 1);
  run_workers(host.executor(), 0, [](int) { ADD_FAILURE(); });
  EXPECT_EQ(host.calls, 1);
}

TEST(HostExecutor, ItsFaultsAreErrors) {
  Host failing;
  failing.status = -7;
  EXPECT_NE(internal_error(failing, 3).find("returned -7"), std::string::npos);
  Host lazy;
  lazy.skip = 1;
  EXPECT_NE(internal_error(lazy, 3).find("ran 2 workers; it must call each of the 3"), std::string::npos);
  Host eager;
  eager.repeat = 2;
  EXPECT_NE(internal_error(eager, 3).find("ran 4 workers"), std::string::npos);
  Host broken;
  broken.throws = true;
  EXPECT_THROW(run_workers(broken.executor(), 3, [](int) {}), std::runtime_error);
  EXPECT_EQ(count_errors(4), 0);
}

TEST(HostExecutor, ABodysExceptionComesBeforeTheHostsStatus) {
  Host failing;
  failing.status = 1;
  EXPECT_THROW(run_workers(failing.executor(), 3, [](int worker) { throw std::out_of_range(std::to_string(worker)); }), std::out_of_range);
}

#ifdef FATTN_LIBRARY_PATH
TEST(Executor, UnloadingTheLibraryEndsItsThreads) {
  const auto own = pool_threads().size();  // this program's
  constexpr int64_t kSeqlen = 512, kHeads = 8, kDim = 64;
  std::vector<float> q(kSeqlen * kHeads * kDim, 0.5f), o(q.size());
  for (int i = 0; i < 50; ++i) {
    void* library = ::dlopen(FATTN_LIBRARY_PATH, RTLD_NOW | RTLD_LOCAL);
    ASSERT_NE(library, nullptr) << ::dlerror();
    const auto execute = reinterpret_cast<decltype(&fattn_execute)>(::dlsym(library, "fattn_execute"));
    ASSERT_NE(execute, nullptr);
    const fattn_tensor tensor = Tensor(q.data(), DType::kF32, {1, kSeqlen, kHeads, kDim}).raw();
    fattn_problem problem{};
    problem.struct_size = sizeof problem;
    problem.abi_version = FATTN_ABI_VERSION;
    problem.backend = FATTN_BACKEND_CPU;
    problem.num_threads = 4;
    problem.q = problem.k = problem.v = problem.o = tensor;
    problem.o.data = o.data();
    ASSERT_EQ(execute(&problem), FATTN_OK);
    // A thread has its name once it runs, which may be after the call.
    const bool used_a_thread = CpuMask::current().count() == 1 || wait_for([&] { return pool_threads().size() > own; });
    ASSERT_TRUE(used_a_thread) << "so this test shows nothing";
    ASSERT_EQ(::dlclose(library), 0);
    ASSERT_EQ(::dlopen(FATTN_LIBRARY_PATH, RTLD_NOW | RTLD_NOLOAD), nullptr) << "still loaded";
    ASSERT_TRUE(wait_for([&] { return pool_threads().size() == own; })) << "after " << i + 1 << " times";  // /proc may lag behind the join
  }
  EXPECT_EQ(in_child([] { return count_errors(4); }), 0);  // no handler of the unloaded library is left for fork to call
}
#endif

}  // namespace
}  // namespace fattn::core
