// Everything that can run a case: the oracle itself, standard attention, and the CPU kernels of every instruction set.
#pragma once

#include <string>
#include <vector>

#include "testing/check.h"

namespace fattn::testing {

// All that the library knows of, whether this machine can run them or not.
const std::vector<Target>& all_targets();

// "reference", "standard", "cpu_avx2", ...
std::string name_of(const Target& target);

// Whether the target is to compute what the case asks for beside plain and causal attention. Said here once more, apart from the
// library's own table, so that a test sees what is refused although it should not be.
bool is_to_compute(const Target& target, const Case& c);

// Empty if the target can run small problems of this dtype here, else the library's reason.
std::string why_unavailable(const Target& target, DType dtype);

}  // namespace fattn::testing
