// What attention moves between chip and cache, and between cache and DRAM, how much arithmetic comes with it, and which limit binds.
#pragma once

#include <string>
#include <vector>

#include "lab/memory/machine.h"
#include "measure/problem.h"
#include "measure/traffic.h"

namespace fattn::lab {

// A term between chip and cache, and what of it goes on to DRAM.
struct LevelTerm {
  measure::MovedTerm moved;
  double reused_bytes = 0;  // of all heads at work: what the cache must hold so that only `once` comes from DRAM
  double missed = 0;        // the share of the rest that it does not hold
  double dram_bytes = 0;    // once + missed * (bytes - once), twice where it is added to
};

struct Limit {
  std::string name;        // "matrix unit" ("arithmetic" on the CPU), "exponentials", "L2 bandwidth", "DRAM bandwidth", "latency"
  std::string arithmetic;  // "8.59e+09 FLOP / 4.67e+11 FLOP/s"
  double seconds = 0;      // 0: its rate is not known
};

struct Traffic {
  std::string algorithm;
  std::string reason;         // why there is nothing of it here; empty: there is
  bool by_our_loops = false;  // what moved_bytes counts: the loops that run here; else the papers'
  double papers_bytes = 0;
  std::vector<measure::MovedTerm> papers;
  std::vector<LevelTerm> terms;
  double moved_bytes = 0, dram_bytes = 0;
  double flops = 0, exponentials = 0;
  double on_chip_bytes = 0;  // what one worker holds at a time, of the machine's chip_bytes
  std::string on_chip;       // its arithmetic
  std::vector<Limit> limits;
  size_t binding = 0;  // of `limits`: the one that takes longest; at least so long the pass takes. No meaning where no rate is known
  bool bound_known = false;

  double intensity() const { return moved_bytes > 0 ? flops / moved_bytes : 0; }
  double dram_intensity() const { return dram_bytes > 0 ? flops / dram_bytes : 0; }
  double bound_seconds() const { return bound_known ? limits[binding].seconds : 0; }
};

// `pass`: forward or backward. Of problems that measure/traffic.h counts (no window, nothing but causal masks). `tiles`: of the plan, on a GPU.
Traffic traffic_of(const std::string& algorithm, const measure::ProblemSpec& spec, measure::Pass pass, const MemoryMachine& machine,
                   const measure::CudaTiles& tiles = {});

}  // namespace fattn::lab
