// What the kernels of kernels/sinks_gradient.h are told about one call. Passed by value; include-free.
#pragma once

namespace fattn {

inline constexpr int kSinksThreads = 256, kSinksRows = 512;  // threads of a CTA, and its rows

struct SinksStrides {
  long long batch, row, head;
};

struct SinksGradientParams {
  const void *o, *dout;
  const float *lse, *dlse;  // dlse: null if there is none
  const float* sinks;
  float *dsinks, *parts;  // parts: of each head and each kSinksRows rows
  SinksStrides o_strides, dout_strides, lse_strides, dlse_strides;
  long long sinks_stride, dsinks_stride;
  long long rows, all_rows;  // of a batch entry, and of all; packed sequences are one
  int headdim_v;
};

}  // namespace fattn
