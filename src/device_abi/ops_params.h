// What the kernels of operations beside attention are told. Passed by value; include-free, used by the host too.
#pragma once

namespace fattn {

inline constexpr int kOpsThreads = 256;    // of a CTA
inline constexpr int kDrawThreads = 1024;  // of a CTA that draws a token

struct EmbeddingParams {
  const int *ids, *position;
  const void *tokens, *positions;  // the latter null: there is no such table
  float* out;
  int rows, width, vocab, n_positions;
};

struct NormParams {
  float* x;
  const void* delta;  // null: nothing is added to x
  const int* select;  // null: row r of y is of row r of x
  const void *weight, *bias;
  void* y;
  int rows;
  float epsilon;
};

// q is turned in place; k and v go to rows `slot` of the cache, or nowhere if that is negative.
struct KeysValuesParams {
  void* qkv;
  const int* position;
  const long long* slot;
  void *k, *v;
  double log2_theta;  // rotary
  int rows, nheads, nheads_k, headdim;
};

// y = activation(norm(x) weight^T + bias) of up to 16 rows; rows of the weight are kIn elements, filled up to a multiple of 32.
struct ProductParams {
  const void* x;  // elements; with a norm fp32
  const int* select;
  const void *norm_weight, *norm_bias;
  const void *weight, *bias;
  void* y;
  const long long* slot;  // with keys and values: columns from q_width on go to the cache
  void *k, *v;
  int rows, out, q_width, kv_width;
  float epsilon;
};

// y = activation(y + bias), in place; or with fp32 sums y += bias.
struct BiasParams {
  void* y;
  const void* bias;
  long long count;
  int width;
};

// A chunk of a row's logits joins its maximum and sum; the last makes the loss of them.
struct LossParams {
  const float* logits;  // (rows, width)
  const int* target;
  float *greatest, *sum, *own;  // of each row, so far; `own` is the target's logit
  float *loss, *lse;            // null: not wanted
  int rows, width, first;       // the chunk's first token
  int is_first, is_last;
};

// As ops::Choice, in device memory.
struct DrawChoice {
  double temperature;
  long long top_k;
  double top_p, repetition_penalty;
  unsigned long long seed, request, position;
  const int* seen;
  long long seen_count;
};

// What goes on with the token that was drawn: the next step's inputs, so that it needs nothing of the host.
struct DrawAdvance {
  int* ids;  // null: nothing goes on
  int* position;
  int* used;  // keys that attention will see
  long long* slot;
  int* seen;  // (rows, seen_stride): tokens that were there
  long long seen_stride;
};

struct DrawParams {
  const float* logits;
  long long stride;
  DrawChoice* choice;   // position and seen_count grow with `advance`
  int* token;           // -1: a logit is NaN
  unsigned* seen_bits;  // (rows, words of vocab), 0 before and after
  int rows, vocab;
  DrawAdvance advance;
};

}  // namespace fattn
