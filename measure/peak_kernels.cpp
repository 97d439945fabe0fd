// Arithmetic loops for peaks. Inline assembly, so that no compiler folds, reorders or splits them.
// An FMA unit takes 4 to 6 cycles and a core starts 2 a cycle: 12 independent accumulators keep it busy, 14 to 16 leave room.
#include "measure/peak_kernels.h"

#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fattn::measure {
namespace {

// 16 accumulators of 4 floats, multiply and add: what any processor of the family has.
typedef float Quad __attribute__((vector_size(16)));

void run_base(int64_t iterations) {
  Quad a[16];
  const Quad factor = {0.999F, 0.998F, 0.997F, 0.996F}, step = {1e-3F, 2e-3F, 3e-3F, 4e-3F};
  for (int i = 0; i < 16; ++i) a[i] = step * static_cast<float>(i + 1);
  for (int64_t n = 0; n < iterations; ++n)
    for (int i = 0; i < 16; ++i) a[i] = a[i] * factor + step;
  for (int i = 0; i < 16; ++i) {
    const Quad kept = a[i];
    asm volatile("" : : "m"(kept));
  }
}
constexpr PeakKernel kBase{"multiply and add, 128 bit", 16 * 4 * 2, run_base};

#if defined(__x86_64__)

alignas(64) const float kOperands[2] = {0.999F, 1e-3F};

#define FATTN_FMA256(r) "vfmadd231ps %%ymm14, %%ymm15, %%ymm" #r "\n\t"
__attribute__((target("avx2,fma"))) void run_avx2(int64_t iterations) {
  asm volatile(
      "vbroadcastss (%[operands]), %%ymm14\n\t"
      "vbroadcastss 4(%[operands]), %%ymm15\n\t"
      "vxorps %%ymm0, %%ymm0, %%ymm0\n\tvmovaps %%ymm0, %%ymm1\n\tvmovaps %%ymm0, %%ymm2\n\tvmovaps %%ymm0, %%ymm3\n\t"
      "vmovaps %%ymm0, %%ymm4\n\tvmovaps %%ymm0, %%ymm5\n\tvmovaps %%ymm0, %%ymm6\n\tvmovaps %%ymm0, %%ymm7\n\t"
      "vmovaps %%ymm0, %%ymm8\n\tvmovaps %%ymm0, %%ymm9\n\tvmovaps %%ymm0, %%ymm10\n\tvmovaps %%ymm0, %%ymm11\n\t"
      "vmovaps %%ymm0, %%ymm12\n\tvmovaps %%ymm0, %%ymm13\n\t"
      ".p2align 5\n\t"
      "1:\n\t"  //
      FATTN_FMA256(0) FATTN_FMA256(1) FATTN_FMA256(2) FATTN_FMA256(3) FATTN_FMA256(4) FATTN_FMA256(5) FATTN_FMA256(6)
      FATTN_FMA256(7) FATTN_FMA256(8) FATTN_FMA256(9) FATTN_FMA256(10) FATTN_FMA256(11) FATTN_FMA256(12) FATTN_FMA256(13)
      "sub $1, %[n]\n\t"
      "jnz 1b\n\t"
      "vzeroupper"
      : [n] "+r"(iterations)
      : [operands] "r"(kOperands), "m"(kOperands)
      : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14",
        "xmm15");
}
#undef FATTN_FMA256
constexpr PeakKernel kAvx2{"FMA, 256 bit", 14 * 8 * 2, run_avx2};

// `op` three times on registers 16 to 31 each, with zmm0 and zmm1 as operands.
#define FATTN_16(op)                                                                                                                                 \
  op "16\n\t" op "17\n\t" op "18\n\t" op "19\n\t" op "20\n\t" op "21\n\t" op "22\n\t" op "23\n\t" op "24\n\t" op "25\n\t" op "26\n\t" op "27\n\t" op \
     "28\n\t" op "29\n\t" op "30\n\t" op "31\n\t"
#define FATTN_LOOP512(op) \
  asm volatile("vbroadcastss (%[operands]), %%zmm0\n\t"                                                                            \
               "vbroadcastss 4(%[operands]), %%zmm1\n\t" FATTN_16("vmovaps %%zmm1, %%zmm")                                         \
               ".p2align 5\n\t"                                                                                                    \
               "1:\n\t" FATTN_16(op " %%zmm0, %%zmm1, %%zmm")                                                                      \
               "sub $1, %[n]\n\t"                                                                                                  \
               "jnz 1b\n\t"                                                                                                        \
               "vzeroupper"                                                                                                        \
               : [n] "+r"(iterations)                                                                                              \
               : [operands] "r"(kOperands), "m"(kOperands)                                                                         \
               : "cc", "xmm0", "xmm1", "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25",   \
                 "xmm26", "xmm27", "xmm28", "xmm29", "xmm30", "xmm31")

__attribute__((target("avx512f"))) void run_avx512(int64_t iterations) { FATTN_LOOP512("vfmadd231ps"); }
__attribute__((target("avx512f,avx512bf16"))) void run_vdpbf16ps(int64_t iterations) { FATTN_LOOP512("vdpbf16ps"); }
#undef FATTN_LOOP512
#undef FATTN_16
constexpr PeakKernel kAvx512{"FMA, 512 bit", 16 * 16 * 2, run_avx512};
constexpr PeakKernel kVdpbf16ps{"VDPBF16PS", 16 * 32 * 2, run_vdpbf16ps};

struct TileConfig {
  uint8_t palette = 1, start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_a_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64, "the layout that LDTILECFG reads");

// Two tiles of A and two of B feed four accumulators, as in a matrix product.
void run_tdpbf16ps(int64_t iterations) {
  constexpr long kRequestTiles = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  if (syscall(SYS_arch_prctl, kRequestTiles, kTileData) != 0) return;
  alignas(64) const TileConfig config;
  asm volatile(
      "ldtilecfg (%[config])\n\t"
      "tilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2\n\ttilezero %%tmm3\n\t"
      "tilezero %%tmm4\n\ttilezero %%tmm5\n\ttilezero %%tmm6\n\ttilezero %%tmm7\n\t"
      ".p2align 5\n\t"
      "1:\n\t"
      "tdpbf16ps %%tmm6, %%tmm4, %%tmm0\n\ttdpbf16ps %%tmm7, %%tmm4, %%tmm1\n\t"
      "tdpbf16ps %%tmm6, %%tmm5, %%tmm2\n\ttdpbf16ps %%tmm7, %%tmm5, %%tmm3\n\t"
      "sub $1, %[n]\n\t"
      "jnz 1b\n\t"
      "tilerelease"
      : [n] "+r"(iterations)
      : [config] "r"(&config), "m"(config)
      : "cc");
}
constexpr PeakKernel kTdpbf16ps{"TDPBF16PS", 4 * 16 * 16 * 32 * 2, run_tdpbf16ps};

#elif defined(__aarch64__)

#define FATTN_FMLA(r) "fmla v" #r ".4s, v0.4s, v1.4s\n\t"
void run_neon(int64_t iterations) {
  asm volatile(
      "fmov v0.4s, #0.5\n\tfmov v1.4s, #0.125\n\t"
      "movi v16.4s, #0\n\tmovi v17.4s, #0\n\tmovi v18.4s, #0\n\tmovi v19.4s, #0\n\tmovi v20.4s, #0\n\tmovi v21.4s, #0\n\t"
      "movi v22.4s, #0\n\tmovi v23.4s, #0\n\tmovi v24.4s, #0\n\tmovi v25.4s, #0\n\tmovi v26.4s, #0\n\tmovi v27.4s, #0\n\t"
      "movi v28.4s, #0\n\tmovi v29.4s, #0\n\tmovi v30.4s, #0\n\tmovi v31.4s, #0\n\t"
      "1:\n\t"  //
      FATTN_FMLA(16) FATTN_FMLA(17) FATTN_FMLA(18) FATTN_FMLA(19) FATTN_FMLA(20) FATTN_FMLA(21) FATTN_FMLA(22) FATTN_FMLA(23)
      FATTN_FMLA(24) FATTN_FMLA(25) FATTN_FMLA(26) FATTN_FMLA(27) FATTN_FMLA(28) FATTN_FMLA(29) FATTN_FMLA(30) FATTN_FMLA(31)
      "subs %[n], %[n], #1\n\t"
      "b.ne 1b"
      : [n] "+r"(iterations)
      :
      : "cc", "v0", "v1", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31");
}
#undef FATTN_FMLA
constexpr PeakKernel kNeon{"FMLA, 128 bit", 16 * 4 * 2, run_neon};

#endif

}  // namespace

PeakKernel fma_kernel(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::kAvx2: return kAvx2;
    case Isa::kAvx512:
    case Isa::kAvx512Bf16:
    case Isa::kAmx: return kAvx512;
#elif defined(__aarch64__)
    case Isa::kNeon: return kNeon;
#endif
    default: return kBase;
  }
}

PeakKernel bf16_kernel(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::kAvx512Bf16: return kVdpbf16ps;
    case Isa::kAmx: return kTdpbf16ps;
#endif
    default: return {};
  }
}

}  // namespace fattn::measure
