// The oracle: attention in float64, forward and backward, written to be read, not to be fast.
#pragma once

#include "plan/plan.h"

namespace fattn::core {

void execute_reference(const Plan& plan, const fattn_buffers& buffers);

}  // namespace fattn::core
