#include "cpu/thread_pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <new>

// How it works. Every thread of the pool has a slot. A call (Job, on the caller's stack) offers itself to free slots by a
// compare-and-swap, then works itself: the caller and the threads that took the offer draw worker numbers from one
// counter. When no number is left, the caller takes back the offers that nobody took, so a thread that wakes late costs
// nothing, and waits for those that are still at work.
// Calls at the same time share the pool: each gets the threads that are free at its start, and none waits for a thread
// of another, so all make progress and there is nothing to deadlock. On two CPUs, two callers that ask for two workers each
// got as much done as two that asked for one each, within the noise (calls of 2, 20 and 200 us).

namespace fattn::core {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMaxThreads = 1023;                      // besides the caller; further worker numbers find a thread all the same
constexpr auto kSpin = std::chrono::microseconds(40);  // about ten times what being woken takes
constexpr int kCrowdedYields = 4;                      // instead of spinning, where another thread could use the CPU
constexpr auto kRetry = std::chrono::seconds(1);       // after the system refused a thread

static_assert(sizeof(std::atomic<uint32_t>) == 4 && std::atomic<uint32_t>::is_always_lock_free, "a futex is a plain 32-bit word");

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected) noexcept {
  ::syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}
// Takes an address and not an atomic: it may already be gone, then the call wakes nobody or a waiter that looks again.
void futex_wake(void* word) noexcept { ::syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0); }

// Polls for a short time; true if `ready` came true.
template <class Ready>
bool spin_until(bool crowded, const Ready& ready) noexcept {
  if (crowded) {
    for (int i = 0; i < kCrowdedYields; ++i) {
      if (ready()) return true;
      ::sched_yield();
    }
    return ready();
  }
  const Clock::time_point end = Clock::now() + kSpin;
  do {
    for (int i = 0; i < 16; ++i) {
      if (ready()) return true;
      relax_cpu();
    }
  } while (Clock::now() < end);
  return ready();
}

struct Job {
  WorkerFn fn;
  void* arg;
  int workers;
  const CpuMask* cpus;
  bool crowded = false;  // more threads want to run than there are CPUs

  alignas(64) std::atomic<int> next{1};  // worker number to draw; 0 is the caller's
  // Threads that may still touch this job, and kCallerSleeps. One word, so that a thread's last step tells it whether to
  // wake the caller without another look at the job, which may be gone by then.
  alignas(64) std::atomic<uint32_t> outstanding{0};
  static constexpr uint32_t kCallerSleeps = 1u << 31;

  void work() noexcept {
    for (int worker = next.fetch_add(1, std::memory_order_relaxed); worker < workers; worker = next.fetch_add(1, std::memory_order_relaxed))
      fn(arg, worker);
  }
  void leave() noexcept {
    if (outstanding.fetch_sub(1, std::memory_order_acq_rel) == (kCallerSleeps | 1)) futex_wake(&outstanding);
  }
  void wait_until_all_left() noexcept {
    const auto left = [&] { return outstanding.load(std::memory_order_acquire) == 0; };
    if (spin_until(crowded, left)) return;
    for (uint32_t now = outstanding.fetch_or(kCallerSleeps) | kCallerSleeps; now != kCallerSleeps; now = outstanding.load(std::memory_order_acquire))
      futex_wait(outstanding, now);
  }
};

// Two cache lines, because processors fetch them in pairs.
struct alignas(128) Slot {
  std::atomic<Job*> job{nullptr};     // null: free; taken(): at work; else an offer
  std::atomic<uint32_t> sleeping{0};  // the futex: 1 while the thread sleeps or is about to
  pthread_t thread{};
};

// Everything is constant-initialised, has no destructor and is never freed: a call during or after the end of the process
// finds valid memory. That is why the slots are an array; pages that are never used take no memory.
struct Pool {
  Slot slots[kMaxThreads];
  std::atomic<int> started{0};       // slots [0, started) have a thread
  std::atomic<int> callers{0};       // calls under way
  std::atomic<bool> growing{false};  // held by whoever starts threads
  std::atomic<bool> closed{false};   // threads end; calls run on the caller alone
  bool fork_handler = false;         // guarded by growing
  Clock::time_point retry_at{};      // guarded by growing
};

constinit Pool pool;  // the one process-wide state: threads are a resource of the process

// What a slot holds while its thread is at work; no job has this address.
Job* taken() noexcept { return reinterpret_cast<Job*>(alignof(Job)); }

void* thread_main(void* argument) noexcept {
  const int index = static_cast<int>(static_cast<Slot*>(argument) - pool.slots);
  Slot& slot = pool.slots[index];
  char name[24];  // the system takes 15 characters, and a number here has 4
  std::snprintf(name, sizeof name, "fattn-%d", index + 1);
  ::pthread_setname_np(::pthread_self(), name);

  CpuMask cpus = CpuMask::current();
  bool crowded = false;
  const auto offered = [&] { return slot.job.load(std::memory_order_relaxed) != nullptr || pool.closed.load(std::memory_order_relaxed); };
  for (;;) {
    if (!spin_until(crowded, offered)) {
      // The caller stores its offer and then reads `sleeping`; here it is the other way round: one of the two sees the other's.
      slot.sleeping.store(1);
      while (slot.sleeping.load() == 1 && slot.job.load() == nullptr && !pool.closed.load()) futex_wait(slot.sleeping, 1);
      slot.sleeping.store(0);
    }
    Job* job = slot.job.load();
    if (job == nullptr) {  // taken back meanwhile, or the end
      if (pool.closed.load()) return nullptr;
      continue;
    }
    if (!slot.job.compare_exchange_strong(job, taken())) continue;

    if (job->cpus->known() && cpus != *job->cpus) {
      cpus = *job->cpus;  // also if the kernel refuses: it would again
      cpus.apply();
    }
    job->work();
    crowded = job->crowded;
    slot.job.store(nullptr);  // free before the caller returns, so that its next call finds this thread
    job->leave();
  }
}

// All signals stay on the host's threads, but for those that a thread's own fault raises: handlers that write a report
// of a crash must see it.
class BlockedSignals {
 public:
  BlockedSignals() noexcept {
    sigset_t blocked;
    ::sigfillset(&blocked);
    for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT}) ::sigdelset(&blocked, fault);
    ::pthread_sigmask(SIG_SETMASK, &blocked, &before_);
  }
  ~BlockedSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t before_;
};

// After fork only the forking thread lives on; whatever the others were doing with the pool is forgotten.
void reset_in_child() noexcept {
  // One beyond those that count: another thread may have been starting it.
  const int touched = std::min(pool.started.load(std::memory_order_relaxed) + 1, kMaxThreads);
  for (int i = 0; i < touched; ++i) new (&pool.slots[i]) Slot;
  pool.started.store(0, std::memory_order_relaxed);
  pool.callers.store(0, std::memory_order_relaxed);
  pool.growing.store(false, std::memory_order_relaxed);
  pool.retry_at = {};
}

// Starts threads until there are `wanted`, or as many as the system grants. Another thread that is at it is not waited for.
void grow(int wanted) noexcept {
  if (pool.growing.exchange(true)) return;
  if (!pool.closed.load() && Clock::now() >= pool.retry_at) {
    if (!pool.fork_handler) pool.fork_handler = ::pthread_atfork(nullptr, nullptr, reset_in_child) == 0;
    const BlockedSignals blocked;
    for (int i = pool.started.load(); pool.fork_handler && i < wanted; ++i) {
      if (::pthread_create(&pool.slots[i].thread, nullptr, thread_main, &pool.slots[i]) != 0) {
        pool.retry_at = Clock::now() + kRetry;
        break;
      }
      pool.started.store(i + 1);
    }
  }
  pool.growing.store(false);
}

// Offers the job to as many free threads as `wanted`; returns how many that are.
int offer(Job& job, int wanted) noexcept {
  if (pool.closed.load(std::memory_order_relaxed)) return 0;
  if (pool.started.load(std::memory_order_relaxed) < wanted) grow(wanted);
  const int started = pool.started.load(std::memory_order_acquire);
  int offers = 0;
  for (int i = 0; i < started && offers < wanted; ++i) {
    Slot& slot = pool.slots[i];
    Job* free = nullptr;
    if (slot.job.load(std::memory_order_relaxed) != nullptr || !slot.job.compare_exchange_strong(free, &job)) continue;
    ++offers;
    if (slot.sleeping.load() == 1 && slot.sleeping.exchange(0) == 1) futex_wake(&slot.sleeping);
  }
  return offers;
}

// Takes back the offers that no thread took; returns how many those are.
uint32_t take_back(Job& job) noexcept {
  const int started = pool.started.load(std::memory_order_relaxed);
  uint32_t taken_back = 0;
  for (int i = 0; i < started; ++i) {
    Job* mine = &job;
    Slot& slot = pool.slots[i];
    if (slot.job.load(std::memory_order_relaxed) == mine && slot.job.compare_exchange_strong(mine, nullptr)) ++taken_back;
  }
  return taken_back;
}

// Ends the threads before the code that they run is unloaded, or the process ends.
struct Closer {
  ~Closer() {
    while (pool.growing.exchange(true)) ::sched_yield();  // kept: no thread starts any more
    pool.closed.store(true);
    const int started = pool.started.load();
    for (int i = 0; i < started; ++i) {
      pool.slots[i].sleeping.store(0);
      futex_wake(&pool.slots[i].sleeping);
    }
    for (int i = 0; i < started; ++i)
      if (!::pthread_equal(pool.slots[i].thread, ::pthread_self())) ::pthread_join(pool.slots[i].thread, nullptr);
  }
} closer;

}  // namespace

void run_on_pool(int workers, const CpuMask& cpus, WorkerFn fn, void* arg) noexcept {
  if (workers <= 0) return;
  Job job{fn, arg, workers, &cpus};
  const int useful = cpus.known() ? std::min(workers, cpus.count()) : workers;
  const int wanted = std::min(useful - 1, kMaxThreads);
  if (wanted > 0) {
    // Counted before the offers, because a thread that takes one may leave at once.
    job.outstanding.store(static_cast<uint32_t>(wanted), std::memory_order_relaxed);
    const int callers = pool.callers.fetch_add(1, std::memory_order_relaxed) + 1;
    job.crowded = cpus.known() && callers + wanted > cpus.count();
    const int offers = offer(job, wanted);
    if (offers < wanted) job.outstanding.fetch_sub(static_cast<uint32_t>(wanted - offers), std::memory_order_relaxed);
  }
  fn(arg, 0);
  job.work();
  if (wanted > 0) {
    if (job.outstanding.load(std::memory_order_acquire) != 0) {
      const uint32_t taken_back = take_back(job);
      if (taken_back > 0) job.outstanding.fetch_sub(taken_back, std::memory_order_relaxed);
      job.wait_until_all_left();
    }
    pool.callers.fetch_sub(1, std::memory_order_relaxed);
  }
}

}  // namespace fattn::core
