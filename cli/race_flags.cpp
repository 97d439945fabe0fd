#include "cli/race_flags.h"

#include "cli/oracle_check.h"
#include "cli/values.h"

namespace fattn::cli {

using namespace measure;

RaceOptions race_options(const ProblemFlags& problem, const ProblemSpec& spec) {
  RaceOptions options;
  options.grad = problem.grad();
  options.passes = problem.passes();
  options.sampling = problem.sampling();
  options.memory_limit = problem.memory_limit();
  options.patience = problem.patience();
  options.oracle_flops = kOracleFlops;
  options.library = problem.options();
  cost_of(spec, Pass::kForward);
  require_memory(spec.input_bytes(options.grad), options.memory_limit, "the input of " + describe(spec));
  options.place = problem.place();
  return options;
}

void measure_reads(RaceOptions& options, const ProblemSpec& spec) {
  if (options.place.device == Device::kCpu)
    options.read_bytes_per_s = measure_read_bandwidth(planned_threads(spec, options.library), options.pains());
}

}  // namespace fattn::cli
