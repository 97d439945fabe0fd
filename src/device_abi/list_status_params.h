// What the kernel is told that looks at lists in device memory. Passed by value; include-free, used by the host too.
#pragma once

namespace fattn {

inline constexpr int kListStatusThreads = 256;  // of its one CTA

// Where sequences begin, in a tensor of `total` rows, at most `most` each; without packed sequences null.
struct ListOfOffsets {
  const int* offsets;
  long long stride, total;
  int most;
};

struct ListStatusParams {
  int* status;  // (2): what is wrong (fattn.h: FATTN_LIST_...), and the first batch entry or sequence where
  ListOfOffsets of_q, of_k;
  const int* lengths;  // keys that each uses; null: all
  long long length_stride;
  int batch, seqlen_k;
};

}  // namespace fattn
