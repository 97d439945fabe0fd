// What one instruction set offers to operations: a table of functions over plain tasks. As of src/backend/cpu/kernels.h: nothing here, nor in what
// the units of an instruction set include, uses standard-library templates.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace fattn::ops {

enum KernelDType : int { kKernelF32 = 0, kKernelF16 = 1, kKernelBF16 = 2 };
enum KernelActivation : int { kPlain = 0, kGeluByTanh = 1, kGeluByErf = 2 };

// A packed weight is panels of kColumns outputs: panel p is (in, kColumns), the outputs p * kColumns and on of each input side by side. Where the
// instruction set multiplies pairs of bf16, two inputs of an output are a pair, and an odd `in` has a 0 behind it.
constexpr int64_t kColumns = 64;
constexpr int64_t kMostRows = 96;  // of a task: with a block of a panel they stay in an L2 cache of 512 KiB
constexpr int64_t kBlockIn = 384;  // inputs of a block

// A panel against up to kMostRows rows of x.
struct PanelTask {
  const void* x;      // (rows, in)
  const void* panel;  // of the weight
  const void* bias;   // at the panel's first output; may be null
  void* y;            // likewise, at the first row; rows are `y_stride` elements apart
  int64_t rows, in, columns, y_stride;
  KernelDType y_dtype;
  KernelActivation activation;
  bool accumulate;
  void* scratch;  // kPanelScratch bytes, aligned to 64
};
constexpr size_t kPanelScratch = (kMostRows * kColumns + 6 * kBlockIn + 64) * sizeof(float);

struct NormTask {
  float* x;  // (rows, width) at the task's first row
  const void *delta, *weight, *bias;
  void* y;
  int64_t width;
  float epsilon;
  bool add;
};

// The gradient of LayerNorm for rows one after another; dweight and dbias are sums over these rows, added.
struct NormGradientTask {
  const float *x, *dy;
  const void* weight;
  float *dx, *dweight, *dbias;
  int64_t rows, width;
  float epsilon;
};

// Logits of a row become their gradient: scale (softmax - 1 at the target), or 0 where the target is negative.
struct SoftmaxTask {
  float* logits;
  int64_t vocab, target;
  float scale;
  bool gradient;          // else logits stay
  float *loss, *largest;  // largest: |logit|, NaN where one is not finite
};

struct AdamWTask {
  const float* gradient;
  float *master, *m, *v;
  void* weight;  // may be null
  int64_t n;
  // m += take_m (scale g - m), v likewise; master += keep_less master + step_m m / (sqrt(v step_v) + epsilon)
  float scale, take_m, take_v, step_m, step_v, epsilon, keep_less;
};

struct OpsKernels {
  bool pairs;  // bf16 is packed in pairs
  void (*panel)(KernelDType, const PanelTask&);
  void (*norm_row)(KernelDType, const NormTask&);
  // to = a + b; b may be null
  void (*embed_row)(KernelDType, const void* a, const void* b, int64_t width, float* to);
  // sum(exp(logits - largest)) and the largest, of n > 0
  void (*exp_sum)(const float* logits, int64_t n, float* largest, float* sum);

  // Of training.
  void (*widen)(KernelDType, const void* x, int64_t n, float* to);
  void (*narrow)(KernelDType, const float* x, int64_t n, void* to);
  void (*activate)(KernelDType, KernelActivation, const void* x, int64_t n, void* y);
  // dx = dy activation'(x), and y, which may be null
  void (*activation_gradient)(KernelDType, KernelActivation, const void* x, const void* dy, int64_t n, void* dx, void* y);
  // to += x
  void (*add_to)(const float* x, int64_t n, float* to);
  void (*column_sums)(KernelDType, const void* x, int64_t stride, int64_t rows, int64_t columns, float* to);
  void (*norm_gradient)(KernelDType, const NormGradientTask&);
  void (*softmax)(const SoftmaxTask&);
  void (*adamw)(KernelDType, const AdamWTask&);
};

// One a translation unit.
const OpsKernels* ops_scalar();
const OpsKernels* ops_avx2();
const OpsKernels* ops_avx512();
const OpsKernels* ops_avx512_bf16();
const OpsKernels* ops_neon();

}  // namespace fattn::ops
