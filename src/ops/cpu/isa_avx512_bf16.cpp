// Operations, instruction set avx512_bf16: products of bf16 by pairs. Everything else is AVX-512's, compiled once.
#define FATTN_ISA avx512_bf16
#define FATTN_DOT
#include "cpu/vec_avx512.h"
//
#include "ops/cpu/rows.h"
//
#include "ops/cpu/panel.h"
//
#include "ops/cpu/kernels.h"

namespace fattn::core::FATTN_ISA::ops {

static void panel(fattn::ops::KernelDType dtype, const fattn::ops::PanelTask& task) {
  dtype == fattn::ops::kKernelBF16 ? panel_of<bf16, PairProducts>(task) : fattn::ops::ops_avx512()->panel(dtype, task);
}

}  // namespace fattn::core::FATTN_ISA::ops

namespace fattn::ops {

const OpsKernels* ops_avx512_bf16() {
  static const OpsKernels kTable = [] {
    OpsKernels table = *ops_avx512();
    table.pairs = true;
    table.panel = core::avx512_bf16::ops::panel;
    return table;
  }();
  return &kTable;
}

}  // namespace fattn::ops
