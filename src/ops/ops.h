// The operations of a transformer beside attention: what each computes, a plan made once, executed without allocating.
//
//   const Plan<Linear> plan(Linear{.rows = 8, .in = 768, .out = 2304, .dtype = DType::kBF16}, device);
//   plan.execute({.rows = 1, .x = x, .weight = packed, .bias = b, .y = y}, workspace, stream);
//
// Matrices are row-major and contiguous. `rows` of a problem is the most that a call may have. Activations and weights are in the problem's dtype
// (fp32, fp16, bf16), the residual stream in fp32; sums are in fp32, in float64 by the reference. A row's result depends on that row alone: not on
// how many others there are, nor on the number of threads. A backward pass is a problem of its own.
//
// On a GPU all pointers are of its memory, and what the host cannot see is not checked: an id, position or token out of range gives NaN, or nothing.
// A row's result depends on itself among calls of up to rows_alike() rows; above, products are cuBLASLt's, whose sums depend on how many rows there
// are. The workspace is aligned to 256 bytes. A plan loads its kernels when it is made; what a number of rows needs besides is made at its first call,
// so that a graph may be captured after it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "fattn/types.hpp"

namespace fattn::ops {

// Where a plan runs. Every backend makes its own plans of the same problems; `stream` of execute() is a device's.
enum class Place { kReference, kCpu, kCuda };

struct Device {
  Place place = Place::kCpu;
  Isa isa = Isa::kAuto;                      // of a CPU
  int threads = 0;                           // 0: all that affinity and the control group allow
  const fattn_executor* executor = nullptr;  // the host's own threads; null: the library's pool
  int gpu = 0;                               // index of the CUDA device
};

// out = token_table[id] + position_table[position]
struct Embedding {
  int64_t rows = 0, width = 0, vocab = 0, positions = 0;  // positions 0: there is no such table
  DType dtype = DType::kF32;                              // of the tables
  struct Buffers {
    int64_t rows = 0;
    const int32_t *ids = nullptr, *position = nullptr;  // of each row; out of range: Error, and nothing is written
    const void *token_table = nullptr, *position_table = nullptr;
    float* out = nullptr;
  };
};

// y = (x - mean) / sqrt(variance + epsilon) * weight + bias, of each row; with `add`, x is x + delta, which replaces it.
struct LayerNorm {
  int64_t rows = 0, width = 0;
  double epsilon = 1e-5;
  DType dtype = DType::kF32;  // of weight, bias, delta and y
  bool add = false;
  struct Buffers {
    int64_t rows = 0;
    float* x = nullptr;               // written only with `add`
    const void* delta = nullptr;      // with `add`
    const int32_t* select = nullptr;  // y's row r is of x's row select[r]; null: r. Not with `add`
    const void *weight = nullptr, *bias = nullptr;
    void* y = nullptr;
  };
};

enum class Activation { kNone, kGeluTanh, kGelu };

// y = activation(x weight^T + bias), weight (out, in) packed once by pack(); with `accumulate` that is added to y.
struct Linear {
  int64_t rows = 0, in = 0, out = 0;
  DType dtype = DType::kF32;  // of x, weight and bias
  DType y = DType::kF32;      // kF32, or dtype
  Activation activation = Activation::kNone;
  bool accumulate = false;  // y is kF32
  struct Buffers {
    int64_t rows = 0;
    const void *x = nullptr, *weight = nullptr, *bias = nullptr;  // no bias: null
    void* y = nullptr;
    const float* bias_single = nullptr;  // the same in fp32; a GPU adds it at once to sums in fp32, where it is given
  };
};

// A projection has left q, k and v of each row side by side. With `rotary`, q and k are turned by the row's position, dimension d with d + headdim /
// 2, by position * theta^(-2 d / headdim). k and v go to their places in a cache.
struct KeysValues {
  int64_t rows = 0, nheads = 0, nheads_k = 0, headdim = 0;
  DType dtype = DType::kF32;
  bool rotary = false;
  double theta = 10000;
  struct Buffers {
    int64_t rows = 0;
    void* qkv = nullptr;                // q is turned in place
    const int32_t* position = nullptr;  // of each row
    const int64_t* slot = nullptr;      // row of the cache; null: r
    void *k = nullptr, *v = nullptr;    // (slots, nheads_k, headdim)
  };
};

// LayerNorm, and the product behind it. With nheads: the projection to q, k and v, whose k and v go to the cache (KeysValues).
struct NormLinear {
  Linear linear;  // does not accumulate
  double epsilon = 1e-5;
  int64_t nheads = 0, nheads_k = 0, headdim = 0;
  bool rotary = false;
  double theta = 10000;
  struct Buffers {
    int64_t rows = 0;
    const float* x = nullptr;
    const int32_t* select = nullptr;  // as of LayerNorm
    const void *norm_weight = nullptr, *norm_bias = nullptr;
    void* normed = nullptr;  // room for (rows, in); holds the normalised rows afterwards, or not
    const void *weight = nullptr, *bias = nullptr;
    void* y = nullptr;  // of k and v there may be nothing in it
    const int32_t* position = nullptr;
    const int64_t* slot = nullptr;  // on a GPU a negative one: nowhere
    void *k = nullptr, *v = nullptr;
  };
};

// loss = log(sum(exp(x weight^T))) - (x weight^T)[target] of each row, without keeping the logits; `weight` as of Linear{in = width, out = vocab}.
struct CrossEntropy {
  int64_t rows = 0, width = 0, vocab = 0;
  DType dtype = DType::kF32;
  struct Buffers {
    int64_t rows = 0;
    const void *x = nullptr, *weight = nullptr;
    const int32_t* target = nullptr;  // -1: the row has no loss, which is then 0
    float *loss = nullptr, *lse = nullptr;
  };
};

// How a row's next token is drawn. Logits of tokens that were there are divided by the penalty (multiplied, if below 0), then divided by the
// temperature; the most likely top_k stay, of these the most likely ones that have top_p together.
struct Choice {
  double temperature = 0;  // 0: the most likely token, of equal ones the first
  int64_t top_k = 0;       // 0: all
  double top_p = 1;
  double repetition_penalty = 1;
  // The random number depends on these alone.
  uint64_t seed = 0, request = 0, position = 0;
  const int32_t* seen = nullptr;  // tokens that were there, in any order
  int64_t seen_count = 0;
};

// What each row's next step takes, brought up to date with the token that was drawn: it becomes the id, the others grow by 1, `seen` and position of
// the choice with them. So a captured step goes on by itself. On a GPU; rows whose slot is negative stay as they are.
struct Advance {
  int32_t *ids = nullptr, *position = nullptr, *used = nullptr;  // used: tokens that attention sees
  int64_t* slot = nullptr;
  int32_t* seen = nullptr;  // (rows, seen_stride)
  int64_t seen_stride = 0;
};

struct Sampling {
  int64_t rows = 0, vocab = 0, stride = 0;  // elements between rows of logits
  struct Buffers {
    int64_t rows = 0;
    const float* logits = nullptr;  // NaN: Error; on a GPU the token is -1
    const Choice* choice = nullptr;
    int32_t* token = nullptr;
    Advance advance = {};
  };
};
// Error if it cannot be.
void check_choice(const Choice& choice);

// In [0, 1), the same everywhere.
double uniform_number(uint64_t seed, uint64_t request, uint64_t position);

// What a backend makes of a problem.
template <class Problem>
class Kernel {
 public:
  virtual ~Kernel() = default;
  virtual size_t workspace_bytes() const { return 0; }
  virtual void execute(const typename Problem::Buffers& buffers, void* workspace, void* stream) const = 0;
};

template <class Problem>
class Plan {
 public:
  Plan() = default;
  // Throws Error: kInvalidArgument, kUnsupported, kOutOfMemory.
  Plan(const Problem& problem, const Device& device);

  const Problem& problem() const { return problem_; }
  size_t workspace_bytes() const { return kernel_->workspace_bytes(); }  // aligned to 64 bytes; the same from call to call, or another
  void execute(const typename Problem::Buffers& buffers, void* workspace = nullptr, void* stream = nullptr) const;

 private:
  Problem problem_{};
  std::shared_ptr<const Kernel<Problem>> kernel_;
};

extern template class Plan<Embedding>;
extern template class Plan<LayerNorm>;
extern template class Plan<Linear>;
extern template class Plan<KeysValues>;
extern template class Plan<NormLinear>;
extern template class Plan<CrossEntropy>;
extern template class Plan<Sampling>;

// A weight (out, in), or with `in_by_out` (in, out), as the device's plans of Linear and CrossEntropy read it. Depends on in, out and dtype of the
// problem. Rows (of `out`) up to `given` are in `weight`; the rest become 0. Both are memory of the host, for a GPU too, where `packed` is then
// copied.
size_t packed_bytes(const Linear& problem, const Device& device);
void pack(const Linear& problem, const Device& device, const void* weight, bool in_by_out, int64_t given, void* packed);

// Up to how many rows a call may have so that none changes another's result by a bit.
int64_t rows_alike(const Linear& problem, const Device& device);

}  // namespace fattn::ops
