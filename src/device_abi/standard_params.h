// What the kernels of algorithm standard are told about one call. Passed by value; include-free, compiled by the host and by NVRTC.
#pragma once

namespace fattn {

struct PairParams;  // device_abi/attention_params.h, which comes with these

// Elements between neighbours; those of a row are neighbours.
struct StandardStrides {
  long long batch, row, head;
};

// What makes a core::Mask32 (device_abi/mask.h).
struct StandardMask {
  int seqlen_q, seqlen_k, causal, window_left, window_right;
};

// A (seqlen_q, seqlen_k) matrix for every (batch, query head), in the tensors' dtype.
struct PairMatrix {
  void* data;
  StandardStrides strides;
};

// The passes over the matrices: softmax forward, its gradient backward. One row is one query of one head.
template <class Pairs>
struct StandardRowsParamsWith {
  PairMatrix weights;  // scores, which become weights
  PairMatrix dscores;  // backward: dP, which becomes dS
  float* lse;          // forward: null if not wanted
  const void* o;       // backward, with dout
  const void* dout;
  StandardStrides lse_strides, o_strides, dout_strides;

  long long rows;  // batch * nheads * seqlen_q
  int nheads, headdim_v;
  StandardMask mask;
  float after;    // what is left of softmax_scale after the product q k^T: 1, or 0
  float softcap;  // 0: none
  Pairs pairs;    // of specialisations with features of pairs
};
using StandardRowsParams = StandardRowsParamsWith<PairParams>;

// Rows of a CTA that makes a copy without Inf and NaN.
inline constexpr int kStandardCleanRows = 64;

// A copy of an operand of a product whose pairs may be hidden, with 0 in place of Inf and NaN. Rows follow each other, head by head.
struct StandardCleanParams {
  const void* from;
  StandardStrides strides;
  void* to;
  unsigned long long* spoilt;  // of each head's kStandardCleanRows rows in turn: bits of the rows that had some
  unsigned* marks;             // of each of those rows, in the order of the copy: bits of columns with NaN or Inf, then with NaN or -Inf
  int batch, heads, seqlen, width;
  int pitch;  // elements of a row of the copy
  int words;  // of the marks for one sign
  int lanes;  // of a warp that take one row, a power of 2
};

// Rows of an output after its product: sums over a group of heads get their dtype, and Inf and NaN that the copy above is without go to the rows that
// see them.
template <class Pairs>
struct StandardFinishParamsWith {
  void* out;  // o, dq: a row is a query; dk, dv: a key
  StandardStrides out_strides;
  const float* sums;  // (batch, rows, heads, width); null: out is there already
  PairMatrix matrix;  // forward: the weights, which say of a row whether it is empty
  const float* lse;   // backward: rows without a gradient (device_abi/lowest.h) take no part; forward: null
  StandardStrides lse_strides;
  const unsigned long long* spoilt;  // as above, of what was multiplied; null: no pair is hidden
  const unsigned* marks;

  long long blocks;  // of rows of one head
  int block_rows;
  int heads;  // of out
  int group;  // query heads that share a key head
  int width;
  int words;       // as above
  int keeps_sign;  // 0: what sees Inf is NaN
  int lanes;       // of a warp that write one row, a power of 2
  StandardMask mask;
  int all;      // 1: there was nothing to multiply
  Pairs pairs;  // as above
};
using StandardFinishParams = StandardFinishParamsWith<PairParams>;

}  // namespace fattn
