// How long a race takes: said before it begins, told to its progress bar while it runs.
#pragma once

#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cli/race.h"
#include "measure/contestant.h"
#include "measure/estimate.h"
#include "measure/failure.h"

namespace fattn::cli {

// What a contestant has in common over all passes.
struct Entry {
  measure::Contestant* contestant = nullptr;
  const measure::ProblemSpec* spec = nullptr;
  std::shared_ptr<const measure::Inputs> inputs;
  std::vector<measure::Row*> rows;  // one a pass
  bool running = true;
  bool compiles = false;  // for each problem
  bool grad = true;
  measure::StepSeconds steps;  // of the passes in their order; of those that it has not none
  double expected = 0;         // seconds of the steps that are still to come

  bool has(size_t pass) const { return running && rows[pass]->ok(); }

  void fail(const measure::Failure& failure) {
    running = false;
    for (measure::Row* row : rows)
      if (row->ok()) row->fail(failure);
  }
  template <typename Body>
  void guarded(const Body& body) {
    if (!running) return;
    try {
      body();
    } catch (const std::exception& e) {
      fail(measure::as_failure(e));
    }
  }
};

// The seconds that a race takes, before it is run and while it runs.
class Schedule {
 public:
  explicit Schedule(const RaceOptions& options) : options_(options) {}

  // Whether calls are long enough in all to be estimated.
  bool worth_it(const std::vector<Entry>& entries) const;

  // Times calls of slices: of those that compute in this process, or of the others, once they are there.
  void estimate(std::vector<Entry>& entries, bool apart);

  // The steps of all entries, from what is known of their calls.
  void plan(std::vector<Entry>& entries);

  double total(const std::vector<Entry>& entries) const;

  // Throws std::runtime_error if that is more than anyone wants to wait.
  void refuse_if_too_long(const std::vector<Entry>& entries) const;

  void announce(const std::vector<Entry>& entries) const;

  // A step of an entry is done.
  void step(Entry& entry, double seconds) const;
  // It failed: what it had to do is not done.
  void forget(Entry& entry) const;

 private:
  const RaceOptions& options_;
  std::vector<std::pair<const Entry*, measure::CallSeconds>> calls_;
};

// Seconds from which on it is said how long something takes.
constexpr double kWorthSaying = 20;
// What --patience may be given for so many seconds.
std::string patience_for(double seconds);

// What making the inputs takes, and the check beside the calls: its share of FLOPs, and three times all keys and values that a row may see.
double input_seconds(const measure::ProblemSpec& spec, bool grad);
double oracle_seconds(const measure::ProblemSpec& spec, bool grad, double oracle_flops);

}  // namespace fattn::cli
