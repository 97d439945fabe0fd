// What the kernels of algorithm standard are told about one call. Passed by value; include-free, compiled by the host and by NVRTC.
#pragma once

namespace fattn {

struct PairParams;  // shared/attention_params.h, which comes with these

// Elements between neighbours; those of a row are neighbours.
struct StandardStrides {
  long long batch, row, head;
};

// What makes a core::Mask32 (shared/mask.h).
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

// Rows of an output after its product: sums over a group of heads get their dtype, and a row with a NaN that may come from a hidden pair (0 * NaN) is
// computed again from what it sees.
template <class Pairs>
struct StandardFinishParamsWith {
  void* out;  // o, dq: a row is a query; dk, dv: a key
  StandardStrides out_strides;
  const float* sums;  // (batch, rows, heads, width); null: out is there already
  PairMatrix matrix;  // weights or dS
  const void* other;  // what it is multiplied with
  StandardStrides other_strides;
  const float* lse;  // backward: rows without a gradient (shared/lowest.h) take no part; forward: null
  StandardStrides lse_strides;

  long long rows;  // batch * heads * seqlen
  int heads;       // of out
  int group;       // query heads that share a key head
  int width;
  int lanes;  // of a warp that look at one row, a power of 2
  StandardMask mask;
  float factor;
  int all;      // 1: every row is computed again (there was nothing to multiply)
  Pairs pairs;  // as above
};
using StandardFinishParams = StandardFinishParamsWith<PairParams>;

}  // namespace fattn
