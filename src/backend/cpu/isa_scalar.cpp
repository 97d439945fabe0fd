// CPU kernels, instruction set scalar.
#define FATTN_ISA scalar
#include "cpu/vec_portable.h"
//
#include "backend/cpu/gemm.h"
#include "backend/cpu/rows.h"
//
#include "backend/cpu/operands.h"
#include "backend/cpu/score.h"
//
#include "backend/cpu/score_inputs.h"
//
#include "backend/cpu/documents.h"
//
#include "backend/cpu/forward.h"
//
#include "backend/cpu/backward_block.h"
#include "backend/cpu/backward_rows.h"
#include "backend/cpu/decode.h"
#include "backend/cpu/table.h"

namespace fattn::core {

const CpuKernels* kernels_scalar() { return &FATTN_ISA::kTable; }

}  // namespace fattn::core
