// The kernels of one instruction set; last include of each isa_*.cpp.
#pragma once

#include "rows/cpu/merge.h"
#include "rows/cpu/rotary.h"

namespace fattn::core::FATTN_ISA::rows {

static constexpr fattn::core::rows::RowKernels kTable{merge_rows, merge_backward_rows, rotary_row};

}  // namespace fattn::core::FATTN_ISA::rows
