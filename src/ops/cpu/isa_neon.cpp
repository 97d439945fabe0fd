// Operations, instruction set neon.
#define FATTN_ISA neon
#include "cpu/vec_neon.h"
//
#include "ops/cpu/rows.h"
//
#include "ops/cpu/panel.h"
//
#include "ops/cpu/training_rows.h"
//
#include "ops/cpu/table.h"

namespace fattn::ops {

const OpsKernels* ops_neon() { return &core::FATTN_ISA::ops::kTable; }

}  // namespace fattn::ops
