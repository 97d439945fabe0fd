// Kernels of merge and rotary embeddings, instruction set avx2.
#define FATTN_ISA avx2
#include "cpu/vec_avx2.h"
//
#include "rows/cpu/table.h"

namespace fattn::core::rows {

const RowKernels* row_kernels_avx2() { return &FATTN_ISA::rows::kTable; }

}  // namespace fattn::core::rows
