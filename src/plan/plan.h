// A plan: which backend and kernel computes a problem, how the work is split, how much workspace that takes, or why not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "device/cpu_info.h"
#include "problem/problem.h"

namespace fattn::core {

// How the CPU backend splits a problem. Everything but `threads` depends on the problem and the instruction set alone,
// so the results do not depend on the number of threads.
struct CpuPlan {
  enum class Path { kForward, kDecode, kBackward };
  Path path = Path::kForward;
  Isa isa = Isa::kScalar;
  int threads = 1;
  int64_t block_q = 0;  // query rows of one forward task; of one inner step backward
  int64_t block_k = 0;  // keys of one inner step
  int64_t task_k = 0;   // keys of one task: decode chunk, backward super-block
  int64_t splits = 1;   // independent parts of one (batch, key head): decode chunks, backward partial dq
  size_t scratch_bytes = 0;  // of one worker
};

struct Plan {
  Problem problem;
  Backend backend = Backend::kReference;
  Algorithm algorithm = Algorithm::kStandard;
  CpuPlan cpu;  // for Backend::kCpu
  size_t workspace_bytes = 0;
  Cost cost;
  std::string kernel, why;
};

// Throws Error(kUnsupported) with the reason if nothing here can run the problem.
Plan make_plan(const Problem& problem, const CpuInfo& cpu);

}  // namespace fattn::core
