// Kernels of merge and rotary embeddings, instruction set scalar.
#define FATTN_ISA scalar
#include "cpu/vec_portable.h"
//
#include "rows/cpu/table.h"

namespace fattn::core::rows {

const RowKernels* row_kernels_scalar() { return &FATTN_ISA::rows::kTable; }

}  // namespace fattn::core::rows
