// Operations: events of the same name together, with their times, and what they cost where that is known.
#pragma once

#include <string>
#include <vector>

#include "lab/profile/event.h"
#include "measure/problem.h"

namespace fattn::lab::profile {

struct Operation {
  EventKind kind = EventKind::kPart;
  std::string name, detail;  // detail: shape and kernel of a call, grid of a kernel; of the first that was seen
  int64_t times = 0;
  double seconds = 0;           // of all, one after the other, whatever thread or stream they were on
  double self_seconds = 0;      // without the time of the others inside of them
  double wall_seconds = 0;      // while at least one was under way
  double share = 0;             // of the self time of everything on the same side, host or GPU
  double flops = 0, bytes = 0;  // of all; 0: not known
  double memory_bytes = 0;      // of a call: its workspace
  bool queued = false;          // of a call: what it does, it does on a GPU, after it has returned
  bool on_gpu() const { return kind == EventKind::kKernel || kind == EventKind::kCopy || kind == EventKind::kSet; }
  double flops_per_s() const { return flops > 0 && wall_seconds > 0 && !queued ? flops / wall_seconds : 0; }
};

// Of all operations together: self times by side, work and the largest workspace by the library's calls.
struct Totals {
  double host_seconds = 0, gpu_seconds = 0, flops = 0, bytes = 0, memory_bytes = 0;
};
Totals totals_of(const std::vector<Operation>& operations);

enum class SortBy { kTime, kTimes, kFlops, kBytes, kMemory, kName };

// `events` sorted (sort_events). The most self time first.
std::vector<Operation> operations_of(const std::vector<TraceEvent>& events);
void sort_operations(std::vector<Operation>& operations, SortBy by);
// Leaves the first `top`, and behind them the first of each of the library's calls that is not among them.
void keep_first(std::vector<Operation>& operations, size_t top);

// Gives the parts of the library's calls on the CPU what the algorithm says that they compute and move, for `calls` calls of the pass.
void add_costs(std::vector<Operation>& operations, const measure::ProblemSpec& spec, measure::Pass pass, const std::string& algorithm, Isa isa,
               int64_t calls);
// The same on a GPU: the longest kernel of a fused call does its arithmetic.
void add_gpu_costs(std::vector<Operation>& operations, const measure::ProblemSpec& spec, measure::Pass pass, int64_t calls);

const char* name_of(EventKind kind);  // "part", "kernel"

}  // namespace fattn::lab::profile
