// The conductor: validate, plan, execute.
#pragma once

#include "plan/plan.h"

namespace fattn::core {

Plan prepare(const fattn_problem& problem);
void execute(const Plan& plan, const fattn_buffers& buffers);

}  // namespace fattn::core
