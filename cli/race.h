// Any number of contestants: check, memory, times in turns, rows. Of one problem, or each with one of its own.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cli/progress.h"
#include "lab/ceiling.h"
#include "measure/contestant.h"
#include "measure/disturbance.h"
#include "measure/record.h"

namespace fattn::cli {

struct RaceOptions {
  bool grad = true;
  std::vector<measure::Pass> passes;
  measure::SamplingOptions sampling;
  int64_t memory_limit = 0;
  Options library;              // peaks are measured with the instruction set and the threads of its plan
  measure::Placement place;     // where they are measured, and the contestants compute
  double read_bytes_per_s = 0;  // CPU: measured once by the caller
  double oracle_flops = 0;
  double time_limit = 0;         // seconds for all of it, 0: none; providers that would take longer end with kTimeout, samples become fewer
  double patience = 0;           // seconds: what would take longer in all is refused before it starts; 0: nothing is refused
  Progress* progress = nullptr;  // of which this race is all, or, with `part_of_suite`, one step
  bool part_of_suite = false;
  // Called with what was measured so far, the rows of the passes that are done, and what that is.
  std::function<void(const struct RaceResult&, const std::string&)> keep;

  // Of measuring peaks: where calls need last no time, they shall not take most of it. A suite's long calls need none either.
  measure::PeakPains pains() const { return sampling.min_seconds > 0 || part_of_suite ? measure::PeakPains::kUsual : measure::PeakPains::kBrief; }
};

// Threads of the library's plan for this problem; what affinity and control group allow where there is no plan.
int planned_threads(const measure::ProblemSpec& spec, const Options& options);

struct RaceResult {
  std::vector<measure::Row> rows;    // by pass, then by contestant
  measure::Peaks before, after;      // not measured where not even the inputs fit
  lab::CeilingRates ceilings;        // beside the peaks, of the calibration if one is kept
  measure::Disturbance disturbance;  // while samples were taken
};

struct Entrant {
  measure::Contestant* contestant = nullptr;
  measure::ProblemSpec spec;
};

// A contestant's failure is its rows' status, and so is memory that is not there. Throws fattn::Error for a problem that is none, and
// std::runtime_error for one that would take longer than options.patience. Peaks are of the first entrant's problem.
RaceResult race(const std::vector<Entrant>& entrants, const RaceOptions& options);
RaceResult race(const measure::ProblemSpec& spec, const std::vector<measure::Contestant*>& contestants, const RaceOptions& options);

// 1 if a check failed or a rate was refused, 2 if nothing could run, else 0.
int exit_code_of(const std::vector<measure::Row>& rows);

}  // namespace fattn::cli
