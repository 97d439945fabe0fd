// The conductor: validate, plan, execute.
#pragma once

#include "plan/plan.h"

namespace fattn::core {

Plan prepare(const fattn_problem& problem);
// Compiles and loads what the plan needs, so that execute finds it there. Nothing to do on the CPU.
void load(const Plan& plan);
void execute(const Plan& plan, const fattn_buffers& buffers);

}  // namespace fattn::core
