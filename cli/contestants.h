// Contestants by the names that --algorithm and --provider have: the library, one of its algorithms, a provider.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/provider_flags.h"
#include "fattn/problem.hpp"
#include "measure/contestant.h"

namespace fattn::cli {

// "standard", "v1", "v2", "v3".
std::optional<Algorithm> algorithm_named(const std::string& name);

std::vector<std::string> split_at_commas(const std::string& list);

// "fattn", an algorithm, or a provider as NAME or NAME:VARIANT. Throws CLI::ValidationError for other names.
std::unique_ptr<measure::Contestant> make_contestant(const std::string& name, Options options, const measure::Placement& place,
                                                     const ProviderFlags& providers);

}  // namespace fattn::cli
