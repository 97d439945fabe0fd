// Operations, instruction set scalar.
#define FATTN_ISA scalar
#include "cpu/vec_portable.h"
//
#include "ops/cpu/rows.h"
//
#include "ops/cpu/panel.h"
//
#include "ops/cpu/training_rows.h"
//
#include "ops/cpu/table.h"

namespace fattn::ops {

const OpsKernels* ops_scalar() { return &core::FATTN_ISA::ops::kTable; }

}  // namespace fattn::ops
