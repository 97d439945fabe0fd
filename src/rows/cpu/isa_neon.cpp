// Kernels of merge and rotary embeddings, instruction set neon.
#define FATTN_ISA neon
#include "cpu/vec_neon.h"
//
#include "rows/cpu/table.h"

namespace fattn::core::rows {

const RowKernels* row_kernels_neon() { return &FATTN_ISA::rows::kTable; }

}  // namespace fattn::core::rows
