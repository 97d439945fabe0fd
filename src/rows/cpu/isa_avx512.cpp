// Kernels of merge and rotary embeddings, instruction set avx512.
#define FATTN_ISA avx512
#include "cpu/vec_avx512.h"
//
#include "rows/cpu/table.h"

namespace fattn::core::rows {

const RowKernels* row_kernels_avx512() { return &FATTN_ISA::rows::kTable; }

}  // namespace fattn::core::rows
