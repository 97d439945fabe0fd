// What the kernel is told that fills rows of packed tensors which no sequence's results are in. Passed by value; include-free, used by the host too.
#pragma once

namespace fattn {

inline constexpr int kRestThreads = 256;  // of a CTA

// (total, heads, columns), 16 bits an element; one of fp32 is two.
struct RestOutput {
  unsigned short* to;  // null: none
  long long row_stride, head_stride;
  int columns;
};

// The outputs with the rows of q, or of k and v.
struct RestOfRows {
  const int* offsets;
  long long stride, total;
  int most, heads;
  RestOutput outputs[2];
  float* lse;  // null: none
  long long lse_row_stride, lse_head_stride;
};

struct SequenceRestParams {
  RestOfRows parts[2];
  int batch;
  const int* lengths;  // keys that each sequence uses; null: all
  long long length_stride;
};

}  // namespace fattn
