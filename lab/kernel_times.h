// What one of each thing that kernels do takes on a machine: constants by families of kernels, fitted to measured calls, and the time of a problem
// from them.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "lab/kernel_work.h"

namespace fattn::lab {

// A call of the fitting set.
struct TimedWork {
  Work work;
  double seconds = 0;
};

struct FamilyTimes {
  std::map<std::string, double> seconds_each;  // by the names of amounts
  int samples = 0;                             // calls that they were fitted to
  // Of those calls, each predicted from constants that were fitted without it: the mean of errors, and what 90 % of them stay below, as shares.
  double mean_error = 0, error_90 = 0;
};

// Seconds of `work`, and of each of its parts.
struct Breakdown {
  double seconds = 0, call = 0, compute = 0, memory = 0;
  std::vector<double> of_amounts;  // as they are in the work
};
Breakdown breakdown_of(const Work& work, const FamilyTimes& times);

// `samples` are of one family; at least two more of them than it has amounts. `expected`: what one of some amounts takes by other measurements, peaks
// and bandwidths; the fit leaves that only where many samples say so.
FamilyTimes fit_family(const std::vector<TimedWork>& samples, const std::map<std::string, double>& expected = {});

struct KernelTimes {
  std::map<std::string, FamilyTimes> families;
  std::map<std::string, int> too_few;  // calls of families that have no constants, as more are needed
  double seconds = 0;                  // that measuring took
  // The share of their time that the machine's ceilings (lab/ceiling.h) account for in the best hundredth of the library's calls, and of how many.
  std::optional<double> reach;
  int reach_calls = 0;

  // Null where nothing of that family was measured.
  const FamilyTimes* of(const std::string& family) const;
};

nlohmann::ordered_json to_json(const KernelTimes& times);
// Throws std::invalid_argument with what is wrong in it.
KernelTimes kernel_times_from_json(const nlohmann::ordered_json& json);

}  // namespace fattn::lab
