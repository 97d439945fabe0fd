// perf_event, by the kernel's own interface.
#include "lab/profile/counters.h"

#include <linux/perf_event.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>

namespace fattn::lab::profile {
namespace {

constexpr uint64_t cache(uint64_t which, uint64_t operation, uint64_t result) { return which | operation << 8 | result << 16; }

struct Kind {
  const char *name, *unit, *words;
  uint32_t type;
  uint64_t config;
};
constexpr Kind kKinds[] = {
    {"cycles", "", "cycles of the processors while they ran this", PERF_TYPE_HARDWARE, PERF_COUNT_HW_CPU_CYCLES},
    {"instructions", "", "instructions that were completed", PERF_TYPE_HARDWARE, PERF_COUNT_HW_INSTRUCTIONS},
    {"l1d_load_misses", "", "loads that the L1 data cache did not hold", PERF_TYPE_HW_CACHE,
     cache(PERF_COUNT_HW_CACHE_L1D, PERF_COUNT_HW_CACHE_OP_READ, PERF_COUNT_HW_CACHE_RESULT_MISS)},
    {"cache_references", "", "accesses to the last-level cache", PERF_TYPE_HARDWARE, PERF_COUNT_HW_CACHE_REFERENCES},
    {"cache_misses", "", "accesses that the last-level cache did not hold", PERF_TYPE_HARDWARE, PERF_COUNT_HW_CACHE_MISSES},
    {"dtlb_load_misses", "", "loads whose page was not in the TLB", PERF_TYPE_HW_CACHE,
     cache(PERF_COUNT_HW_CACHE_DTLB, PERF_COUNT_HW_CACHE_OP_READ, PERF_COUNT_HW_CACHE_RESULT_MISS)},
    {"branch_misses", "", "branches that were guessed wrong", PERF_TYPE_HARDWARE, PERF_COUNT_HW_BRANCH_MISSES},
    {"task_clock", "s", "processor time of all threads", PERF_TYPE_SOFTWARE, PERF_COUNT_SW_TASK_CLOCK},
    {"page_faults", "", "pages that were touched for the first time, or were not there", PERF_TYPE_SOFTWARE, PERF_COUNT_SW_PAGE_FAULTS},
    {"context_switches", "", "times that a thread was taken off its processor", PERF_TYPE_SOFTWARE, PERF_COUNT_SW_CONTEXT_SWITCHES},
    {"cpu_migrations", "", "times that a thread went on on another processor", PERF_TYPE_SOFTWARE, PERF_COUNT_SW_CPU_MIGRATIONS},
};
constexpr int kCycles = 0, kInstructions = 1, kReferences = 3, kMisses = 4, kTaskClock = 7;
constexpr double kLine = 64;

std::string refusal(int error) {
  switch (error) {
    case EACCES:
    case EPERM: {
      std::string level;
      std::ifstream("/proc/sys/kernel/perf_event_paranoid") >> level;
      return "the kernel does not allow it here (" + std::string(std::strerror(error)) +
             (level.empty()
                  ? ")"
                  : ", perf_event_paranoid is " + level + "; 2 or less allows it, where a container's filter of system calls does not forbid it)");
    }
    case ENOENT:
    case ENODEV:
    case EOPNOTSUPP: return "this processor or virtual machine does not offer the counter";
    case ENOSYS: return "this kernel has no perf_event";
    case EMFILE: return "no file descriptor is left for it";
    default: return std::string("perf_event_open failed: ") + std::strerror(error);
  }
}

}  // namespace

PerfCounters::PerfCounters(pid_t process, bool from_exec) {
  for (const Kind& kind : kKinds) {
    perf_event_attr attributes{};
    attributes.size = sizeof attributes;
    attributes.type = kind.type;
    attributes.config = kind.config;
    attributes.disabled = 1;
    attributes.inherit = 1;
    attributes.exclude_kernel = kind.type == PERF_TYPE_SOFTWARE ? 0 : 1;
    attributes.exclude_hv = 1;
    attributes.enable_on_exec = from_exec ? 1 : 0;
    attributes.read_format = PERF_FORMAT_TOTAL_TIME_ENABLED | PERF_FORMAT_TOTAL_TIME_RUNNING;
    const auto open = [&] { return static_cast<int>(syscall(SYS_perf_event_open, &attributes, process, -1, -1, PERF_FLAG_FD_CLOEXEC)); };
    Event event;
    event.descriptor = open();
    if (event.descriptor < 0 && (errno == EACCES || errno == EPERM) && !attributes.exclude_kernel) {
      attributes.exclude_kernel = 1;
      event.descriptor = open();
    }
    if (event.descriptor < 0) event.reason = refusal(errno);
    events_.push_back(event);
  }
}

PerfCounters::~PerfCounters() {
  for (const Event& event : events_)
    if (event.descriptor >= 0) close(event.descriptor);
}

void PerfCounters::start() {
  for (const Event& event : events_)
    if (event.descriptor >= 0) {
      ioctl(event.descriptor, PERF_EVENT_IOC_RESET, 0);
      ioctl(event.descriptor, PERF_EVENT_IOC_ENABLE, 0);
    }
}

void PerfCounters::stop() {
  for (const Event& event : events_)
    if (event.descriptor >= 0) ioctl(event.descriptor, PERF_EVENT_IOC_DISABLE, 0);
}

std::vector<Counter> PerfCounters::read(double calls) const {
  std::vector<Counter> all;
  for (size_t i = 0; i < events_.size(); ++i) {
    const Kind& kind = kKinds[i];
    Counter counter{kind.name, kind.unit, kind.words, {}, events_[i].reason, "perf_event", {}, ""};
    if (events_[i].descriptor >= 0) {
      uint64_t numbers[3] = {};  // value, time enabled, time running
      if (::read(events_[i].descriptor, numbers, sizeof numbers) != static_cast<ssize_t>(sizeof numbers))
        counter.reason = std::string("it could not be read: ") + std::strerror(errno);
      else if (numbers[2] == 0)
        counter.reason = numbers[1] == 0 ? "nothing ran while it counted" : "other counters had the processor's registers all the time";
      else
        // Where several share a register each counts for a part of the time.
        counter.value = static_cast<double>(numbers[0]) * (static_cast<double>(numbers[1]) / static_cast<double>(numbers[2])) / calls *
                        (static_cast<int>(i) == kTaskClock ? 1e-9 : 1);
    }
    all.push_back(std::move(counter));
  }
  const auto derived = [&](const char* name, const char* unit, const char* words, int of, int by, double factor) {
    Counter counter{name, unit, words, {}, "", "perf_event", {}, ""};
    const Counter &a = all[static_cast<size_t>(of)], &b = all[static_cast<size_t>(by)];
    if (a.value && b.value && *b.value > 0)
      counter.value = *a.value / *b.value * factor;
    else
      counter.reason = !a.value ? a.reason : !b.value ? b.reason : b.name + " is 0";
    all.push_back(std::move(counter));
  };
  derived("instructions_per_cycle", "", "instructions a cycle", kInstructions, kCycles, 1);
  derived("cache_miss_share", "share", "accesses to the last-level cache that it did not hold", kMisses, kReferences, 1);
  derived("memory_bytes_per_s", "B/s", "64 bytes for each miss of the last-level cache, over the processor time of a thread", kMisses, kTaskClock,
          kLine);
  Counter bytes{"memory_bytes", "B", "64 bytes for each miss of the last-level cache", {}, all[kMisses].reason, "perf_event", {}, ""};
  if (all[kMisses].value) bytes.value = *all[kMisses].value * kLine;
  all.push_back(std::move(bytes));
  return all;
}

}  // namespace fattn::lab::profile
