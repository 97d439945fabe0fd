// What a kernel has to do for a problem, in amounts that cost about the same wherever they occur: products, scores, rows, bytes, .... A model of its
// time is such amounts times what one of each takes on a machine (lab/kernel_times.h).
#pragma once

#include <string>
#include <vector>

#include "lab/plan_shape.h"
#include "measure/problem.h"

namespace fattn::lab {

enum class Part { kCall, kCompute, kMemory };
constexpr const char* name_of(Part part) {
  switch (part) {
    case Part::kCall: return "call";
    case Part::kCompute: return "compute";
    case Part::kMemory: return "memory";
  }
  return "unknown";
}

// One thing that is done `amount` times, by the worker that has most to do: so what is done by many at once counts once, and a last wave that fills
// half of the machine counts whole.
struct Amount {
  std::string name;
  Part part = Part::kCompute;
  double count = 0;
};

struct Work {
  std::string family;  // kernels that share constants
  // How computing and moving bytes overlap: (compute^p + memory^p)^(1/p). 1: one after the other, as cores do; 4: nearly the longer of both.
  double overlap = 1;
  std::vector<Amount> amounts;

  void add(const char* name, Part part, double count) { amounts.push_back({name, part, count}); }
};

// What of a machine decides on amounts.
struct MachineSizes {
  bool cuda = false;
  double l2_bytes = 0, l3_bytes = 0;  // CPU: of a core, of all; GPU: l2 of all
  double multiprocessors = 0, shared_per_multiprocessor = 0;
};
MachineSizes machine_sizes(const measure::Placement& place);

// Of plain attention with any mask of positions; what else scores depend on (ProblemSpec::has_terms, softcap) is not counted.
Work work_of(const measure::ProblemSpec& spec, const PlanShape& shape, const MachineSizes& machine);
Work cpu_work(const measure::ProblemSpec& spec, const PlanShape& shape, const MachineSizes& machine);
Work cuda_work(const measure::ProblemSpec& spec, const PlanShape& shape, const MachineSizes& machine);

// Keys that query `row` sees: [begin, end).
struct KeyRange {
  int64_t begin = 0, end = 0;
  int64_t count() const { return end > begin ? end - begin : 0; }
};
KeyRange keys_seen(const measure::ProblemSpec& spec, int64_t row);

// Tasks of `size`, `count` of them.
struct Tasks {
  double size = 0, count = 0;
};
// The share of all work that the worker has who has most of it, where each takes the next task when it is free.
double largest_share(std::vector<Tasks> tasks, double workers);

// How much of a working set does not stay in a cache: 0 well below its size, 1 well above.
double share_beyond(double working_set, double cache_bytes);

}  // namespace fattn::lab
