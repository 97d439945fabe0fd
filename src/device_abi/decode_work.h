// What the decode kernels are told about one call besides AttentionParams. Passed by value; include-free.
#pragma once

namespace fattn {

inline constexpr int kDecodeCombineThreads = 128;  // of a CTA of kernels/decode/combine.h

// Parts of a sequence that is shared by lengths (decode_shares.h), for the kernel that puts them together.
struct DecodeParts {
  int first, count;
};

struct DecodeWork {
  const int* lengths;       // keys that each sequence has, on the device; null: seqlen_k
  long long length_stride;  // elements from one sequence's to the next

  // Where the keys are split: what each split found of a row, for the kernel that puts it together. Sums are relative to exp2(-shift).
  float* part_o;      // (batch, nheads_k, splits, rows, headdim_v): sums of weights times values
  float* part_stats;  // (batch, nheads_k, rows, splits, 2): shift, sum of weights

  int rows;       // of a key head, group * seqlen_q: row i * group + g is query i of the g-th of its query heads
  int row_tiles;  // CTAs that share them
  int splits;     // CTAs that share the keys; 1: they write o and lse
  int causal;

  const float* sinks;  // of each query head, of specialisations that have them
  long long sinks_stride;

  // Of specialisations that share sequences by their lengths. `splits` are the CTAs of a key head then; PartPlace has the places of parts.
  DecodeParts* parts;  // (batch): written by the first kernel; null: `splits` is 1
};

}  // namespace fattn
