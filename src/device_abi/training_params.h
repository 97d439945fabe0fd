// What the kernels of training are told. Passed by value; include-free, used by the host too. `wide`: all rows begin at multiples of four numbers,
// which are read at once.
#pragma once

namespace fattn {

inline constexpr int kLogitThreads = 1024;  // of a CTA that makes a row of logits its gradient

// to = x + bias + add, from one dtype to another; to may be x, where both have the same.
struct ConvertParams {
  const void* x;
  const float *bias, *add;  // of a row; of each number. Null: none
  void* to;
  long long count;
  int width, wide;
};

// Sums over `rows_of_part` rows each; a CTA has a part and a strip of columns.
struct ColumnSumsParams {
  const void* x;
  float* parts;  // (parts, columns)
  long long rows, rows_of_part;
  int columns, strips, wide;
};

// Sums over parts are added to one row, or to two that lie side by side in the parts.
struct JoinSumsParams {
  const float* parts;  // (n_parts, columns)
  float *to, *second;  // columns before `split`, and those from it on
  int n_parts, columns, split;
};

// y = activation(x); with dy also dx = dy activation'(x).
struct ActivateParams {
  const void *x, *dy;
  void *dx, *y;  // y null: not wanted
  long long count;
  int wide;
};

struct NormGradientParams {
  const float* x;
  const void* weight;
  const float* dy;
  float* dx;      // added to
  void* rounded;  // null, or: dx in the dtype of the weight
  float* parts;   // (CTAs, 2, width): dweight, dbias
  int rows;
  float epsilon;
};

struct EmbeddingGradientParams {
  const int* ids;
  const float* dx;
  float* to;  // added to
  int rows, width, entries, wide;
};

struct RotaryParams {
  void* x;
  const int* position;
  long long stride;
  double log2_theta;
  int rows, nheads, headdim, back;
};

struct DropoutParams {
  const float *x, *add;  // add null: 0
  float* out;
  unsigned long long seed, stream;
  const unsigned long long* state;  // null, or: seed, and what is added to `stream`
  const int* place;                 // of each row in the matrix that numbers are drawn for; null: rows are 0, 1, 2, ...
  unsigned below;                   // of 65536
  float scale;
  int rows, width, pairs;  // pairs: all rows begin at multiples of 8 bytes
};

// Logits of a row become their gradient in place; element i of the gradient is where its dtype has it, so a row of 16 bits takes half of the room.
struct LogitGradientParams {
  float* logits;  // (rows, stride); the stride is a multiple of 4
  long long stride;
  const int* target;
  float *loss, *largest;  // largest null: not wanted
  double scale;
  const double* scale_at;             // null, or: takes the place of `scale`
  int rows, vocab, padded, gradient;  // columns from vocab to `padded` have the gradient 0
};

// Added to sums[0], the largest to sums[1]; of rows with a target.
struct LossSumsParams {
  const int* target;
  const float *loss, *largest;
  double* sums;
  int rows;
};

struct SquareSumParams {
  const float* x;
  double* parts;  // one a CTA
  long long count;
  int wide;
};
struct JoinSquaresParams {
  const double* parts;
  const double* finite;  // null, or: not finite makes the sum NaN
  double* sum;
  int n_parts;
};

// As ops::AdamWStep::Changing.
struct AdamWChanging {
  double scale, learning_rate;
  long long step;
};
struct AdamWParams {
  const float* gradient;
  float *master, *m, *v;
  void* weight;  // null: there is none
  AdamWChanging now;
  const AdamWChanging* changing;  // null, or: takes the place of `now`
  const double* square_sum;       // null, or: of the gradient
  double clip, beta1, beta2, epsilon, weight_decay;
  long long count;
  int wide;
};

}  // namespace fattn
