// What one instruction set offers to the CPU backend: a table of functions over plain tasks. Each instruction set has a
// translation unit of its own, built with its own flags; so this header, and all that those units include, uses no
// standard-library templates (the linker might keep a copy that an older processor cannot run).
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace fattn::core {

enum KernelDType : int { kKernelF32 = 0, kKernelF16 = 1, kKernelBF16 = 2, kKernelDTypes = 3 };

// Shape of a task, for its scratch size. Rows are query rows.
struct KernelShape {
  int64_t rows;     // most query rows of a task; in decode of one key head
  int64_t task_k;   // most keys of a task (backward, decode)
  int64_t block_k;  // keys of one inner step
  int headdim, headdim_v;
  int64_t heads = 1;    // most key heads of a task (decode)
  bool inputs = false;  // scores depend on more than q k: ScoreInputs, with gradient or dropout
  bool paged = false;   // keys are in pages: KeyPages
};

// Every task: row i sees the keys [max(0, i + left_diagonal), min(seqlen_k, i + diagonal)). A mask that has no end there: diagonal is seqlen_k; no
// beginning: left_diagonal is kNoBegin.
constexpr int64_t kNoBegin = INT64_MIN / 4;

// What scores depend on beside q k, and which weights are dropped. Pointers are at row 0, key 0 of a task's first query head and null where there is
// nothing; strides in elements between rows (0: one row for all) and between query heads.
struct ScoreInputs {
  const float* alibi_slopes;
  const void* bias;  // of the task's dtype or, with bias_fp32, fp32; keys side by side
  const uint8_t* mask;
  const int32_t *document_q, *document_k;  // ids of rows and keys: a pair of different ones is hidden (documents.h)
  int64_t alibi_head_stride, bias_stride, bias_head_stride, mask_stride, mask_head_stride;
  bool bias_fp32;
  int64_t shift;                         // seqlen_k - seqlen_q: query i is aligned with key i + shift
  uint64_t seed, stream;                 // of the dropout; the stream is the first head's, the next head has the next (device_abi/dropout.h)
  uint32_t dropout_query, dropout_call;  // what the first row and key add to the numbers of query pairs and calls
  int dropout_below;                     // 0: no dropout
  float dropout_scale;                   // of the weights that stay; 1 without dropout
  const float* sink;                     // forward: the first query head's logit without a key; null: none
};

// The pages of a batch entry's keys: key j is row j % size of page table[j / size], and k and v are at the head in page 0. Strides in elements
// between pages.
struct KeyPages {
  const int32_t* table;  // null: keys are in no pages
  int64_t size, k_stride, v_stride;
};

// Rows [row_begin, row_end) of one query head against the whole key head. Pointers are at row 0 of the head; strides in
// elements between rows.
struct ForwardTask {
  const void *q, *k, *v;
  void* o;
  bool fp32_out;  // o is fp32, whatever the dtype
  float* lse;     // null if not wanted
  int64_t q_stride, k_stride, v_stride, o_stride, lse_stride;
  int64_t row_begin, row_end, seqlen_k, diagonal, left_diagonal;
  int64_t block_k;
  bool own_blocks;  // blocks begin at multiples of block_k, whatever the task's rows do not see: each row has the same blocks in any task
  int headdim, headdim_v;
  float scale;    // softmax_scale
  float softcap;  // 0: none
  KeyPages pages;
  ScoreInputs inputs;
  void* scratch;  // aligned to 64 bytes
};

// Few query rows against the keys [key_begin, key_end) of `heads` neighbouring key heads: the rows of a key head are all
// (head of its group, query) pairs, row r is query r % seqlen_q of head r / seqlen_q of the group. Writes unnormalised partial
// results. What a head gets does not depend on which heads are with it.
struct DecodeTask {
  const void *q, *k, *v;  // at the first key head and the first head of its group
  int64_t q_stride, q_head_stride, k_stride, v_stride;
  int64_t heads, q_group_stride, k_head_stride, v_head_stride;  // between key heads
  int64_t part_stride;                                          // partial results between key heads
  int64_t rows, seqlen_q, key_begin, key_end, diagonal, left_diagonal;
  int headdim, headdim_v;
  float scale, softcap;
  KeyPages pages;
  ScoreInputs inputs;
  float*
      max;  // (rows) of the first key head: largest score = sign(scale) q k (0 for a scale of 0), before the scale, or the whole score; -inf if none
  float* sum;  // (rows): sum of exp((score - max) |scale|), of whole scores: of exp(score - max)
  float* acc;  // (rows, headdim_v): the same, weighing v
  void* scratch;
};

// The keys [key_begin, key_end) of one key head against all rows of the query heads that share it.
// dq is accumulated in fp32 (added to what is there, in turn with the other tasks of the key head: dq_order.h), if it has 16 bits in two halves
// (dq_sums.h);
// dk and dv are written.
struct BackwardTask {
  const void *q, *k, *v, *dout;  // q, dout at the group's first head
  const float *lse, *delta;      // delta = rowsum(o * dout), (head, row) with the strides below
  void* dq;                      // fp32: the sums; else their high halves
  uint16_t* dq_low;              // else: their low halves
  void *dk, *dv;
  bool fp32_out;  // dq, dk and dv are fp32, whatever the dtype
  int64_t q_stride, k_stride, v_stride, dout_stride, lse_stride, delta_stride, dq_stride, dq_low_stride, dk_stride, dv_stride;  // rows
  int64_t q_head_stride, dout_head_stride, lse_head_stride, delta_head_stride, dq_head_stride, dq_low_head_stride;
  int64_t group, seqlen_q, seqlen_k, key_begin, key_end, diagonal, left_diagonal;
  int64_t block_k;
  int headdim, headdim_v;
  float scale, softcap;
  ScoreInputs inputs;
  // The gradient of a bias, at row 0, key 0 of the first head's: fp32 sums, and the tensor. A stride of 0: rows, or heads, are summed.
  bool has_dbias;
  float* dbias_sums;
  int64_t dbias_stride, dbias_head_stride;
  void* dbias;
  int64_t dbias_out_stride, dbias_out_head_stride;
  bool first_of_dbias;           // nothing was added to the sums yet, and they hold anything: the task's keys are written whole; dbias_stride > 0
  bool last_of_dbias;            // nothing more will be: the tensor is written, in its dtype, and the sums need not be
  int64_t* walked;               // how far each task of the key head is, in the order of their keys; null: nobody else adds to dq
  int64_t turn;                  // this task's place there
  void (*pause)(int64_t times);  // for who waits, and has done so `times` times
  void* scratch;
};

// Algorithm v1, a head at a time, in blocks of `rows` queries and `keys` keys. No mask has a beginning.
// A query head with its key head. `largest` and `sum` (seqlen_q each) and, in 16 bits, `sums` (seqlen_q, headdim_v) are m, l and o between two blocks
// of keys.
struct V1ForwardTask {
  const void *q, *k, *v;
  void* o;
  bool fp32_out;  // o is fp32, whatever the dtype
  float* lse;     // null if not wanted
  int64_t q_stride, k_stride, v_stride, o_stride, lse_stride;
  int64_t seqlen_q, seqlen_k, diagonal;
  int64_t rows, keys;
  int headdim, headdim_v;
  float scale;
  float *largest, *sum, *sums;
  void* scratch;
};

// A key head with the query heads that share it. `sums`: in 16 bits dq between two blocks of keys, (group, seqlen_q, headdim).
struct V1BackwardTask {
  const void *q, *k, *v, *o, *dout;  // q, o, dout, lse, dlse and dq at the group's first head
  const float *lse, *dlse;           // dlse: null if there is none
  void *dq, *dk, *dv;
  bool fp32_out;  // dq, dk and dv are fp32, whatever the dtype
  int64_t q_stride, k_stride, v_stride, o_stride, dout_stride, lse_stride, dlse_stride, dq_stride, dk_stride, dv_stride;
  int64_t q_head_stride, o_head_stride, dout_head_stride, lse_head_stride, dlse_head_stride, dq_head_stride;
  int64_t group, seqlen_q, seqlen_k, diagonal;
  int64_t rows, keys;
  int headdim, headdim_v;
  float scale;
  float* sums;
  void* scratch;
};

struct CpuKernels {
  size_t (*forward_scratch)(KernelDType, const KernelShape&);
  void (*forward)(KernelDType, const ForwardTask&);
  size_t (*decode_scratch)(KernelDType, const KernelShape&);
  void (*decode)(KernelDType, const DecodeTask&);
  size_t (*backward_scratch)(KernelDType, const KernelShape&);
  void (*backward)(KernelDType, const BackwardTask&);
  // to[i] = sum over d of a[i][d] * b[i][d], rows x headdim: delta of the backward pass
  void (*row_dots)(KernelDType, const void* a, int64_t a_stride, const void* b, int64_t b_stride, int64_t rows, int headdim, float* to,
                   int64_t to_stride);
  // to (in dtype) = sum of `parts` fp32 rows, in order
  void (*sum_rows)(KernelDType, const float* parts, int64_t part_stride, int64_t nparts, int64_t headdim, void* to);
  // A row of dq from its sums: their high halves are in it (16 bits only)
  void (*round_sums)(KernelDType, const uint16_t* low, int64_t headdim, void* row);
  // Of KernelShape: rows, block_k, headdim and headdim_v
  size_t (*v1_forward_scratch)(const KernelShape&);
  void (*v1_forward)(KernelDType, const V1ForwardTask&);
  size_t (*v1_backward_scratch)(const KernelShape&);
  void (*v1_backward)(KernelDType, const V1BackwardTask&);
};

// One a translation unit; null where the compiler or the architecture lacks it.
const CpuKernels* kernels_scalar();
const CpuKernels* kernels_avx2();
const CpuKernels* kernels_avx512();
const CpuKernels* kernels_avx512_bf16();
const CpuKernels* kernels_amx();
const CpuKernels* kernels_neon();

}  // namespace fattn::core
