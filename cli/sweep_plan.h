// What a sweep will measure: its steps with the seconds that each contestant takes at each, and who is left out for want of time.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/provider_flags.h"
#include "cli/race.h"
#include "lab/sweep/axis.h"
#include "measure/contestant.h"
#include "measure/failure.h"

namespace fattn::cli {

struct PlannedStep {
  lab::Step step;
  std::optional<measure::Failure> impossible;  // for everybody: sizes that are no problem, or that no machine can address
  struct Entry {
    bool wanted = true;    // false: all of its rows are there already
    double seconds = 0;    // expected, of all passes; 0 where it will say at once that it cannot
    std::string too_long;  // why it is not measured
    bool measured() const { return wanted && too_long.empty(); }
  };
  std::vector<Entry> entries;  // one a contestant

  double seconds() const;  // of those that are measured
  bool anything() const;   // whether something is left to do
};

// The contestants of a sweep by number of threads: the same ones for all steps that have it.
class SweepContestants {
 public:
  SweepContestants(std::vector<std::string> names, Options options, measure::Placement place, const ProviderFlags& providers);

  const std::vector<std::string>& names() const { return names_; }
  // In their order. 0 threads: as many as --threads says. Throws CLI::ValidationError for a name that nobody has.
  std::vector<measure::Contestant*> with_threads(int threads);
  Options options(int threads) const;

 private:
  struct Set {
    int threads = 0;
    std::vector<std::unique_ptr<measure::Contestant>> contestants;
  };
  const std::vector<std::string> names_;
  const Options options_;
  const measure::Placement place_;
  const ProviderFlags& providers_;
  std::vector<Set> sets_;
};

// Times calls of slices, of each contestant in this process for the longest step of each kind that it accepts; others are taken to be as fast as the
// slowest of those. Nothing where all of it takes no time worth saying.
void estimate_steps(std::vector<PlannedStep>& steps, SweepContestants& contestants, const RaceOptions& options);

// Leaves out, from the first on, what does not fit any more into so many seconds (0: everything fits).
void heed_patience(std::vector<PlannedStep>& steps, double patience);

}  // namespace fattn::cli
