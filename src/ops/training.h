// What training needs beside the operations of a forward pass: products with weights that change, and backward passes.
//
// Conventions are those of ops.h. A gradient is added to what is there where its comment says "added"; gradients of weights and of the residual
// stream are fp32. No result depends on the number of threads; on a GPU two calls give the same bits.
//
// A captured graph repeats a step with the numbers that it was captured with. What changes from step to step can be given by a pointer instead, to
// where the other buffers are, and is then read whenever the operation runs: Dropout::state, CrossEntropyGradient::scale_at, AdamWStep::changing and
// AdamWStep::square_sum. On a GPU a factor of a product in fp32 beside one in 16 bits is rounded to its dtype.
#pragma once

#include "ops/ops.h"

namespace fattn::ops {

// c = alpha a b + bias + add. a is (rows, inner), or turned (inner, rows); b is (inner, columns), or turned (columns, inner).
struct Product {
  int64_t rows = 0, columns = 0, inner = 0;
  bool a_turned = false, b_turned = false;
  DType a = DType::kF32, b = DType::kF32, c = DType::kF32;
  double alpha = 1;
  struct Buffers {
    int64_t rows = 0;  // all of them where a is turned
    const void *a = nullptr, *b = nullptr;
    const void* bias = nullptr;  // (columns) in the dtype of b; null: none
    const float* add = nullptr;  // (rows, columns); null: nothing. It may be c, where that is fp32
    void* c = nullptr;
    int64_t inner = 0;  // less than the problem's; 0: all. Only where a is turned and b is not
  };
};

// to[c] is added to by the sum of x[r, c] over rows: the gradient of a bias.
struct ColumnSums {
  int64_t rows = 0, columns = 0;
  DType x = DType::kF32;
  struct Buffers {
    int64_t rows = 0;
    const void* x = nullptr;
    float* to = nullptr;
  };
};

// y = activation(x)
struct Activate {
  int64_t rows = 0, width = 0;
  DType dtype = DType::kF32;
  Activation activation = Activation::kGeluTanh;
  struct Buffers {
    int64_t rows = 0;
    const void* x = nullptr;
    void* y = nullptr;
  };
};

// dx = dy activation'(x), and y = activation(x) once more.
struct ActivationGradient {
  int64_t rows = 0, width = 0;
  DType dtype = DType::kF32;
  Activation activation = Activation::kGeluTanh;
  struct Buffers {
    int64_t rows = 0;
    const void *x = nullptr, *dy = nullptr;
    void* dx = nullptr;  // may be dy
    void* y = nullptr;   // null: not wanted
  };
};

// Of LayerNorm; mean and variance are made again. dx, dweight and dbias are added.
struct LayerNormGradient {
  int64_t rows = 0, width = 0;
  double epsilon = 1e-5;
  DType dtype = DType::kF32;  // of weight
  struct Buffers {
    int64_t rows = 0;
    const float* x = nullptr;
    const void* weight = nullptr;
    const float* dy = nullptr;
    float *dx = nullptr, *dweight = nullptr, *dbias = nullptr;
    void* rounded = nullptr;  // the new dx once more, in the dtype; null: not wanted
  };
};

// Rows of dx are added to those of the tables that were looked up, in the order of rows.
struct EmbeddingGradient {
  int64_t rows = 0, width = 0, vocab = 0, positions = 0;  // positions 0: there is no such table
  struct Buffers {
    int64_t rows = 0;
    const int32_t *ids = nullptr, *position = nullptr;  // out of range: Error, and nothing is written
    const float* dx = nullptr;
    float *dtokens = nullptr, *dpositions = nullptr;
  };
};

// Turns the first `nheads` heads of each row, as KeysValues does; `back` by the same angle the other way, which is the gradient.
struct Rotary {
  int64_t rows = 0, nheads = 0, headdim = 0, stride = 0;  // elements between rows
  DType dtype = DType::kF32;
  double theta = 10000;
  bool back = false;
  struct Buffers {
    int64_t rows = 0;
    void* x = nullptr;
    const int32_t* position = nullptr;
  };
};

// out = add + x / (1 - p) where an element stays, add where it is dropped. Which stay follows from seed, stream, row and column as in attention (row
// and column are its query and key, docs/NUMERICS.md); p is a multiple of 2^-16. The same with dy as x is the gradient. Rows of a larger matrix that
// lie elsewhere there say where: then they drop what it drops.
struct Dropout {
  int64_t rows = 0, width = 0;
  double p = 0;
  struct Buffers {
    int64_t rows = 0;
    const float *x = nullptr, *add = nullptr;  // add null: 0
    float* out = nullptr;                      // may be x or add
    uint64_t seed = 0, stream = 0;
    const uint64_t* state = nullptr;  // of two numbers: the seed, and what is added to `stream`
    const int32_t* place = nullptr;   // of each row, from 0 on; null: they are 0, 1, 2, ...
  };
};

// loss = log(sum(exp(x weight^T))) - (x weight^T)[target] of each row, and its gradient times `scale`. Logits of a part of the rows are there at a
// time, in fp32.
struct CrossEntropyGradient {
  int64_t rows = 0, width = 0, vocab = 0;
  DType dtype = DType::kF32;  // of x and weight
  // Rows that weight and dweight have: those from `vocab` on are 0, and stay so. Products of a GPU are several times as fast where it is a multiple
  // of 64. 0: as many as vocab.
  int64_t padded = 0;
  struct Buffers {
    int64_t rows = 0;
    const void *x = nullptr, *weight = nullptr;  // (vocab, width), not packed
    const int32_t* target = nullptr;             // -1: the row has no loss and no gradient
    float* loss = nullptr;                       // (rows); 0 where there is none
    float* largest = nullptr;                    // (rows): |logit|, NaN where one is not finite; null: not wanted
    double scale = 1;
    float* dx = nullptr;               // (rows, width); null: no gradients
    float* dweight = nullptr;          // added
    const double* scale_at = nullptr;  // takes the place of `scale`
  };
};

// What a step is told of the losses of its rows: their sum is added to sums[0], the largest of `largest` becomes sums[1] where that is less. Of rows
// that have a target; NaN stays.
struct LossSums {
  int64_t rows = 0;
  struct Buffers {
    int64_t rows = 0;
    const int32_t* target = nullptr;
    const float *loss = nullptr, *largest = nullptr;
    double* sums = nullptr;
  };
};

// *sum = sum of x^2 over all, in float64; not finite if an element is not.
struct SquareSum {
  int64_t rows = 0;  // numbers
  struct Buffers {
    int64_t rows = 0;
    const float* x = nullptr;
    double* sum = nullptr;
    const double* finite = nullptr;  // a number that, where it is not finite, makes the sum NaN; null: none
  };
};

// A step of Adam with decoupled weight decay: with g = scale gradient, m += (1 - beta1)(g - m), v += (1 - beta2)(g^2 - v),
// master -= learning_rate (m / (1 - beta1^step) / (sqrt(v / (1 - beta2^step)) + epsilon) + weight_decay master).
struct AdamWStep {
  int64_t rows = 0;           // numbers
  DType dtype = DType::kF32;  // of `weight`
  struct Changing {
    double scale = 1, learning_rate = 0;
    int64_t step = 1;
  };
  struct Buffers {
    int64_t rows = 0;
    const float* gradient = nullptr;
    float *master = nullptr, *m = nullptr, *v = nullptr;
    void* weight = nullptr;  // master in the dtype, written anew; null: there is none
    double scale = 1, learning_rate = 0, beta1 = 0.9, beta2 = 0.95, epsilon = 1e-8, weight_decay = 0;
    int64_t step = 1;                    // counts from 1
    const Changing* changing = nullptr;  // takes the place of scale, learning_rate and step
    // Of the gradient; not finite: nothing is written. With `clip`, g of a greater norm is scaled once more to that one.
    const double* square_sum = nullptr;
    double clip = 0;
  };
};

// call(Problem) for each.
#define FATTN_OPS_FOR_TRAINING(call) \
  call(Product);                     \
  call(ColumnSums);                  \
  call(Activate);                    \
  call(ActivationGradient);          \
  call(LayerNormGradient);           \
  call(EmbeddingGradient);           \
  call(Rotary);                      \
  call(Dropout);                     \
  call(CrossEntropyGradient);        \
  call(LossSums);                    \
  call(SquareSum);                   \
  call(AdamWStep)

#define FATTN_OPS_PLAN(Problem) extern template class Plan<Problem>
FATTN_OPS_FOR_TRAINING(FATTN_OPS_PLAN);
#undef FATTN_OPS_PLAN

}  // namespace fattn::ops
