// The options of a description that no tensor says: each within its limits.
#pragma once

#include "problem/problem.h"

namespace fattn::core {

void check_options(const fattn_problem& given);

}  // namespace fattn::core
