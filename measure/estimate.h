// How long a measurement will take, found from calls on a much smaller part of the same problem.
#pragma once

#include <vector>

#include "measure/contestant.h"
#include "measure/problem.h"
#include "measure/sampling.h"

namespace fattn::measure {

// The problem with a forward pass of `flops` at most, as nearly as its sizes permit: fewer batch entries, then fewer heads, and at last shorter
// sequences, both lengths in proportion.
ProblemSpec slice_of(const ProblemSpec& spec, double flops);

// Seconds of one call; 0 where the contestant cannot compute it.
struct CallSeconds {
  double forward = 0, backward = 0;
  double of(Pass pass) const { return (pass == Pass::kBackward ? 0 : forward) + (pass == Pass::kForward ? 0 : backward); }
};

// Computes slices, each larger than the one before, until a forward call takes long enough to say something: well below a second in all. FLOPs say
// the rest. Takes the contestant's problem from it; what it cannot compute, whatever the reason, takes no time. `telling_flops`: of a slice that says
// enough at once, if that is known, so that what a call takes to start does not count.
CallSeconds estimate_calls(Contestant& contestant, const ProblemSpec& spec, bool grad, int64_t memory_limit, const Placement& place,
                           double telling_flops = 0);
// By how long another contestant took.
double telling_flops(const CallSeconds& other, const ProblemSpec& spec);

// What cannot take long needs no estimate: fewer FLOPs in all calls of a measurement than this.
double flops_worth_an_estimate(const Placement& place);

// Seconds of the steps of one contestant's measurement.
struct StepSeconds {
  double check = 0;  // its result computed and held against the oracle
  struct OfPass {
    double memory = 0;         // what it takes of it, measured
    SamplingSeconds sampling;  // in turns
  };
  std::vector<OfPass> passes;
  double total(const SamplingOptions& sampling) const;
};
// `fixed`: seconds of what does not grow with the problem, the oracle.
StepSeconds seconds_of_steps(const CallSeconds& calls, const std::vector<Pass>& passes, bool grad, const SamplingOptions& sampling, double fixed);

}  // namespace fattn::measure
