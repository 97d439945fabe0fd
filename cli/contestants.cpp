#include "cli/contestants.h"

#include <sstream>

namespace fattn::cli {

std::optional<Algorithm> algorithm_named(const std::string& name) {
  for (const Algorithm algorithm : {Algorithm::kStandard, Algorithm::kV1, Algorithm::kV2, Algorithm::kV3})
    if (name == name_of(algorithm)) return algorithm;
  return std::nullopt;
}

std::vector<std::string> split_at_commas(const std::string& list) {
  std::vector<std::string> names;
  std::istringstream stream(list);
  for (std::string name; std::getline(stream, name, ',');) names.push_back(name);
  return names;
}

std::unique_ptr<measure::Contestant> make_contestant(const std::string& name, Options options, const measure::Placement& place,
                                                     const ProviderFlags& providers) {
  if (const std::optional<Algorithm> algorithm = algorithm_named(name)) {
    options.algorithm = *algorithm;
    if (name == "standard") options.cpu_isa = Isa::kAuto;  // that of the matrix library
    if (place.device == Device::kCpu) options.backend = Backend::kCpu;
  }
  if (name == "fattn" || algorithm_named(name)) return measure::make_library_contestant(name, options, place);
  return providers.make(name, options.num_threads, place);
}

}  // namespace fattn::cli
