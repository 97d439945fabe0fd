#include "lab/profile/recorder.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <mutex>

#include "fattn/types.hpp"

namespace fattn::lab::profile {
namespace {

constexpr int kDeepest = 24, kBlock = 128, kMostThreads = 4096;

// What a thread has recorded. Pages of its own, never given back: a thread may end before somebody looks.
struct ThreadEvents {
  std::atomic_flag busy = ATOMIC_FLAG_INIT;
  int32_t thread = 0;
  int depth = 0;  // of open events; those deeper than kDeepest are counted alone
  int count = 0;
  TraceEvent open[kDeepest];
  TraceEvent done[kBlock];

  void lock() {
    while (busy.test_and_set(std::memory_order_acquire)) {
    }
  }
  void unlock() { busy.clear(std::memory_order_release); }
};

std::atomic<EventSink> sink{nullptr};
void* sink_context = nullptr;
std::mutex sink_mutex;
std::atomic<int> recorded_threads{0};
std::atomic<ThreadEvents*> recorded[kMostThreads];
thread_local ThreadEvents* mine = nullptr;
ThreadEvents* held[kMostThreads];  // while a process forks
int held_count = 0;

ThreadEvents* of_this_thread() {
  if (mine) return mine;
  void* const pages = mmap(nullptr, sizeof(ThreadEvents), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) return nullptr;
  auto* const made = new (pages) ThreadEvents;
  made->thread = this_thread();
  const int index = recorded_threads.fetch_add(1);
  if (index >= kMostThreads) return nullptr;
  recorded[index] = made;
  return mine = made;
}

void hand_over(ThreadEvents& events) {
  const std::lock_guard lock(sink_mutex);
  if (const EventSink to = sink.load(); to && events.count > 0) to(events.done, static_cast<size_t>(events.count), sink_context);
  events.count = 0;
}

void keep(ThreadEvents& events, const TraceEvent& event) {
  events.lock();
  events.done[events.count++] = event;
  if (events.count == kBlock) hand_over(events);
  events.unlock();
}

TraceEvent* open_event(EventKind kind, const char* name) {
  ThreadEvents* const events = of_this_thread();
  if (!events) return nullptr;
  const int depth = events->depth++;
  if (depth >= kDeepest) return nullptr;
  TraceEvent& event = events->open[depth];
  event = TraceEvent();
  event.kind = kind;
  event.thread = events->thread;
  event.depth = depth;
  copy_text(event.name, sizeof event.name, name);
  return &event;
}

void close_event() {
  const int64_t end = now_ns();
  ThreadEvents* const events = of_this_thread();
  if (!events || events->depth == 0) return;
  if (--events->depth >= kDeepest) return;
  TraceEvent& event = events->open[events->depth];
  event.end_ns = end;
  if (sink.load(std::memory_order_relaxed)) keep(*events, event);
}

void describe(const fattn_trace_call& c, TraceEvent& event) {
  event.kind = EventKind::kCall;
  event.flops = c.flops;
  event.bytes = c.bytes;
  event.workspace_bytes = static_cast<int64_t>(c.workspace_bytes);
  const auto of = [](int64_t a) { return static_cast<long long>(a); };
  char heads[32] = "", keys[32] = "", values[32] = "";
  if (c.nheads_k != c.nheads) std::snprintf(heads, sizeof heads, "/%lld", of(c.nheads_k));
  if (c.seqlen_k != c.seqlen_q) std::snprintf(keys, sizeof keys, "/%lld", of(c.seqlen_k));
  if (c.headdim_v != c.headdim) std::snprintf(values, sizeof values, "/%lld", of(c.headdim_v));
  std::snprintf(event.detail, sizeof event.detail, "B%lld S%lld%s H%lld%s D%lld%s %s%s; %s", of(c.batch), of(c.seqlen_q), keys, of(c.nheads), heads,
                of(c.headdim), values, name_of(static_cast<DType>(c.dtype)), c.causal ? " causal" : "", c.kernel ? c.kernel : "");
}

}  // namespace

void record_to(EventSink to, void* context) {
  flush_events();
  const std::lock_guard lock(sink_mutex);
  sink_context = context;
  sink = to;
}

void flush_events() {
  const int count = recorded_threads.load();
  for (int i = 0; i < count && i < kMostThreads; ++i)
    if (ThreadEvents* const events = recorded[i].load()) {
      events->lock();
      hand_over(*events);
      events->unlock();
    }
}

void before_fork() {
  held_count = 0;  // forks come one at a time: the C library holds a lock of its own
  for (std::atomic<ThreadEvents*>& one : recorded)
    if (ThreadEvents* const events = one.load()) {
      events->lock();
      held[held_count++] = events;
    }
  sink_mutex.lock();
}

void after_fork_in_parent() {
  sink_mutex.unlock();
  for (int i = 0; i < held_count; ++i) held[i]->unlock();
}

void after_fork_in_child() {
  sink = nullptr;
  for (int i = 0; i < held_count; ++i) held[i]->count = 0;
  if (mine) mine->thread = this_thread();
  after_fork_in_parent();
}

void trace_begins(const char* name, const fattn_trace_call* call) {
  TraceEvent* const event = open_event(EventKind::kPart, name);
  if (!event) return;
  if (call) describe(*call, *event);
  event->begin_ns = now_ns();
}

void trace_ends() { close_event(); }

void begin_range(const char* name, const char* detail) {
  TraceEvent* const event = open_event(EventKind::kRange, name);
  if (!event) return;
  copy_text(event->detail, sizeof event->detail, detail);
  event->begin_ns = now_ns();
}

void end_range() { close_event(); }

void record(const TraceEvent& event) {
  if (!sink.load(std::memory_order_relaxed)) return;
  if (ThreadEvents* const events = of_this_thread()) keep(*events, event);
}

int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

int32_t this_thread() { return static_cast<int32_t>(syscall(SYS_gettid)); }

void copy_text(char* to, size_t size, const char* text) {
  size_t length = strnlen(text, size);
  if (length == size) {
    length = size - 1;
    while (length > 0 && (static_cast<unsigned char>(text[length]) & 0xC0) == 0x80) --length;
  }
  std::memcpy(to, text, length);
  std::memset(to + length, 0, size - length);
}

}  // namespace fattn::lab::profile
