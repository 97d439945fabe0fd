// Operations, instruction set avx512_bf16.
#define FATTN_ISA avx512_bf16
#define FATTN_DOT
#include "cpu/vec_avx512.h"
//
#include "ops/cpu/rows.h"
//
#include "ops/cpu/panel.h"
//
#include "ops/cpu/training_rows.h"
//
#include "ops/cpu/table.h"

namespace fattn::ops {

const OpsKernels* ops_avx512_bf16() { return &core::FATTN_ISA::ops::kTable; }

}  // namespace fattn::ops
