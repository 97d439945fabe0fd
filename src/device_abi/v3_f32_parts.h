// Keys and values in two parts, as algorithm v3 multiplies fp32: what its first kernel (kernels/v3/forward_f32_split.h) writes to the workspace and
// its second one reads. Passed by value; include-free.
#pragma once

namespace fattn {

// Keys of a block. A block of k is two tiles of fp16, high and low, of kV3F32Block rows by headdim rounded up to 64, each as it is wanted in shared
// memory: in columns of 64 elements (128 bytes), column after column, unit u (16 bytes) of row r at place u ^ (r % 8). Zeros fill what the tensor
// does not have. A block of v likewise, by headdim_v.
inline constexpr int kV3F32Block = 64;
constexpr int v3_f32_width(int headdim) { return (headdim + 63) / 64 * 64; }
constexpr int v3_f32_block_bytes(int headdim) { return 2 * 2 * kV3F32Block * v3_f32_width(headdim); }

// Of each block; 16 bytes, because the engine that copies takes no less.
struct V3F32Factor {
  float inverse;  // what products of the block's parts are to be multiplied by: a power of two
  unsigned odd;   // not 0: k holds Inf, or v held what is not finite, which is split as 0
  float unused[2];
};

// What is not finite in a block of v. Written where V3F32Factor::odd is not 0, and nowhere else.
struct V3F32Spoilt {
  unsigned columns[2][4];       // of plus, then of minus: a bit for each column that has an Inf of that sign; NaN counts as both
  unsigned char first[2][128];  // and the first key of the block that has it there; kV3F32Block: none
};

// Block `i` of key head `h` of batch entry `b` is number (b * nheads_k + h) * blocks + i.
struct V3F32Parts {
  unsigned char *k, *v;
  V3F32Factor *k_factors, *v_factors;
  V3F32Spoilt* v_spoilt;
  int blocks;  // of a head
};

inline constexpr int kV3F32SplitThreads = 256;  // of a CTA of the first kernel, which takes a block of k or of v

}  // namespace fattn
