// Standard attention in plain C++, and attention with FlashAttention-2's rounding: the yardsticks of the error bounds.
//
// It computes as textbook attention in one dtype does when every matrix of it is stored in that dtype:
//   S = round(softmax_scale * q k^T), with softcap round(softcap * tanh(S / softcap))
//   P = round(softmax(S))     o = round(P v)          (softmax in fp32)
//   P = round(exp(S - lse))            dP = round(dout v^T)     dS = round(P (dP - rowsum(o dout)))     (lse and o as given)
//   with softcap dS = round(dS (1 - (S / softcap)^2)), S before what follows
//   what is added to scores: S = round(S + alibi + bias), -Inf where a pair is hidden; dbias is the sum of round(P (dP - rowsum(o dout)))
//   with dlse rowsum(o dout) - dlse takes the place of rowsum(o dout)
//   a sink is a key without a value, whose weight is never stored: the sum of exponentials has it, and dsinks is the sum of -P (rowsum(o dout) -
//   dlse) dropout: P = round(P kept) and dP = round(kept dP), with kept 0 or 1 / (1 - p_dropout); the softmax gradient takes P from before dq =
//   round(softmax_scale * dS k)   dk = round(softmax_scale * dS^T q)   dv = round(P^T dout)
// Products accumulate in fp32, one term after the other. lse is the fp32 log-sum-exp of the rounded S. The sums of dk and
// dv over the query heads of a group stay in fp32.
//
// With `fused` no matrix of scores is stored, and it rounds as FlashAttention-2 does:
//   S in fp32     p = exp(S - the row's maximum)     o = round(round(p) v / sum of p)        lse = maximum + log(sum of p)
//   p = exp(S - lse)     dv = round(round(p)^T dout)     dS = round(p (dP - rowsum(o dout))), with softcap times its slope before it is rounded
//   dbias is the sum of p (dP - rowsum(o dout)) in fp32; dropout leaves out of round(p) and dP, and 1 / (1 - p_dropout) enters with fp32 sums
#pragma once

#include "testing/tensors.h"

namespace fattn::testing {

struct ModelShape {
  int64_t batch, seqlen_q, seqlen_k, nheads, nheads_k, headdim, headdim_v;
  DType dtype;
  bool causal;
  double softmax_scale;
  int64_t window_left = -1, window_right = -1;
  double softcap = 0;
  ScoreTensors scores = {};  // in host memory, as they are given
  double p_dropout = 0;
  bool fused = false;
  bool fp32_out = false;              // o, dq, dk and dv are not rounded once more
  Tensor dbias = {};                  // whose shape says what its gradient is summed over; absent: none is made
  Dense dlse = {};                    // the gradient of lse; empty: absent
  int64_t keys(int64_t batch) const;  // that a batch entry has
  // Row i sees the keys [visible_begin(i), visible_end(i)).
  int64_t visible_begin(int64_t batch, int64_t row) const;
  int64_t visible_end(int64_t batch, int64_t row) const;
  DType result() const { return fp32_out ? DType::kF32 : dtype; }                       // of o, dq, dk and dv
  DType stored() const { return fused && dtype != DType::kF64 ? DType::kF32 : dtype; }  // what S and dP are rounded to
};

// Inputs are dense and hold numbers of the dtype. fp64 is computed with fp64 in place of fp32.
struct ModelForward {
  Dense o, lse;
  double score_terms = 0;  // largest |softmax_scale| sum |q| |k|: what the rounding of a score is relative to
};
ModelForward standard_forward(const ModelShape& shape, const Dense& q, const Dense& k, const Dense& v);

// o and lse are the forward pass's. The sums of absolute terms say what rounding errors are relative to; largest, finite.
struct ModelBackward {
  Dense dq, dk, dv, dbias;
  Dense dsinks;                                     // of each head, if there are sinks
  double score_terms = 0;                           // |softmax_scale| sum |q| |k|, and |lse|
  double dp_terms = 0;                              // sum |dout| |v|, and sum |o| |dout| + |dlse|
  double k_terms = 0, q_terms = 0, dout_terms = 0;  // sum p |k| of a row; sum p |q| and sum p |dout| of a key
  double p_terms = 0;                               // sum p of an element of dbias
  double sink_p = 0, sink_terms = 0;  // sums of a head: of the weights of its sink, and of those times the terms of rowsum(o dout) - dlse
};
ModelBackward standard_backward(const ModelShape& shape, const Dense& q, const Dense& k, const Dense& v, const Dense& o, const Dense& lse,
                                const Dense& dout);

}  // namespace fattn::testing
