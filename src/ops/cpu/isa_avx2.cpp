// Operations, instruction set avx2.
#define FATTN_ISA avx2
#include "cpu/vec_avx2.h"
//
#include "ops/cpu/rows.h"
//
#include "ops/cpu/panel.h"
//
#include "ops/cpu/training_rows.h"
//
#include "ops/cpu/table.h"

namespace fattn::ops {

const OpsKernels* ops_avx2() { return &core::FATTN_ISA::ops::kTable; }

}  // namespace fattn::ops
