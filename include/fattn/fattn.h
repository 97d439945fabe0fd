/* The C ABI of fattn: exact, IO-aware attention. These functions are the only symbols that libfattn.so exports.
 *
 *   s = cap(softmax_scale * q k^T) + alibi + bias + mask        o = dropout(softmax(s)) v        lse = log(sum(exp(s)))
 *
 * Layout: q (batch, seqlen_q, nheads, headdim), k (batch, seqlen_k, nheads_k, headdim), v (batch, seqlen_k, nheads_k, headdim_v),
 * o (batch, seqlen_q, nheads, headdim_v), lse (batch, nheads, seqlen_q). Strides count elements; the last dimension of
 * q, k, v, o and their gradients is contiguous, every other stride is free, so a (batch, heads, seqlen, headdim) tensor is
 * a view and needs no copy. nheads is a multiple of nheads_k (GQA, MQA). Masks are aligned to the bottom right: causal, query i
 * sees the keys j <= i + seqlen_k - seqlen_q; in a window, the keys j with -window_left <= j - (i + seqlen_k - seqlen_q) <= window_right.
 * cap(s) = softcap tanh(s / softcap), or s. With seqused_k, seqlen_k is each batch entry's own in all of this. docs/NUMERICS.md says what is computed
 * to the last bit.
 *
 * Packed sequences of unequal lengths: with cu_seqlens_q and cu_seqlens_k q is (total_q, nheads, headdim), k and v (total_k, nheads_k, headdim or
 * headdim_v), o (total_q, nheads, headdim_v), lse (nheads, total_q), gradients likewise. Batch entry b has the rows [cu_seqlens_q[b],
 * cu_seqlens_q[b + 1]) of q and [cu_seqlens_k[b], cu_seqlens_k[b + 1]) of k and v, and everything else is as if it were alone: its seqlen_q and
 * seqlen_k are those lengths, its queries, keys, biases and dropped weights are counted from its own first row.
 *
 * Paged caches, forward: with block_table k is (pages, page_size, nheads_k, headdim) and v (pages, page_size, nheads_k, headdim_v), of any strides,
 * so (pages, heads, page_size, headdim) is a view. Key j of batch entry b is row j % page_size of page block_table[b, j / page_size]; entries may
 * share pages. In shapes (of bias, mask, document_k) seqlen_k is page_size times the columns of the table; seqused_k says how many keys an entry
 * has, and masks are aligned to those.
 *
 * Every struct that may grow begins with its size; set it to sizeof(the struct) and zero the rest, which selects the
 * defaults (`fattn_problem p = {.struct_size = sizeof p, .abi_version = FATTN_ABI_VERSION};`).
 * Every function is safe to call from several threads at once. A failed call leaves its outputs unspecified and the
 * library usable; fattn_last_error() then says what was given, what is allowed and what to do.
 */
#ifndef FATTN_FATTN_H
#define FATTN_FATTN_H

#include <stddef.h>
#include <stdint.h>

#define FATTN_ABI_VERSION 9u
#define FATTN_VERSION_STRING "0.1.0"

#if defined(__GNUC__)
#define FATTN_API __attribute__((visibility("default")))
#else
#define FATTN_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Status of a call. */
typedef int32_t fattn_status;
enum {
  FATTN_OK = 0,
  FATTN_ERROR_INVALID_ARGUMENT = 1, /* the caller gave something that no configuration accepts */
  FATTN_ERROR_UNSUPPORTED = 2,      /* valid, but not on this backend, algorithm or machine; the message says why */
  FATTN_ERROR_OUT_OF_MEMORY = 3,
  FATTN_ERROR_WORKSPACE = 4, /* the workspace handed to fattn_plan_execute is too small or misaligned */
  FATTN_ERROR_ABI = 5,       /* a struct of another ABI version, or a size that this library does not know */
  FATTN_ERROR_INTERNAL = 6,  /* a defect of the library or an exception of the host's executor */
  FATTN_ERROR_DEVICE = 7,    /* a GPU or its driver failed; the message says whether the process must restart */
  FATTN_ERROR_COMPILE = 8    /* a GPU kernel could not be compiled, or the driver refused it */
};

/* dtype. q, k, v, o and their gradients are of the first four, F64 on backend reference only; the others are for what stands beside them. Where q, k
   and v are F16 or BF16, the forward pass's o may be F32, and the backward pass's dq, dk and dv together: sums as they are, not rounded once more. */
enum { FATTN_F32 = 1, FATTN_F16 = 2, FATTN_BF16 = 3, FATTN_F64 = 4, FATTN_I32 = 5, FATTN_U8 = 6, FATTN_I64 = 7 };
enum { FATTN_DEVICE_CPU = 0, FATTN_DEVICE_CUDA = 1 }; /* device_type */
enum { FATTN_FORWARD = 0, FATTN_BACKWARD = 1 };       /* pass */
enum { FATTN_BACKEND_AUTO = 0, FATTN_BACKEND_REFERENCE = 1, FATTN_BACKEND_CPU = 2, FATTN_BACKEND_CUDA = 3 };
/* standard: textbook attention, O(seqlen_q * seqlen_k) memory. v1: FlashAttention as published first (Dao et al. 2022), to compare with.
   v2: FlashAttention-2 (Dao 2023), O(seqlen_q) memory. v3: the same for Hopper GPUs (compute capability 9.0), with products and softmax
   overlapped as in FlashAttention-3 (Shah et al. 2024). */
enum { FATTN_ALGORITHM_AUTO = 0, FATTN_ALGORITHM_STANDARD = 1, FATTN_ALGORITHM_V2 = 2, FATTN_ALGORITHM_V3 = 3, FATTN_ALGORITHM_V1 = 4 };
/* Instruction set of the CPU kernels. */
enum {
  FATTN_ISA_AUTO = 0,
  FATTN_ISA_SCALAR = 1,
  FATTN_ISA_AVX2 = 2,        /* AVX2 + FMA + F16C */
  FATTN_ISA_AVX512 = 3,      /* AVX-512 F, BW, VL, DQ */
  FATTN_ISA_AVX512_BF16 = 4, /* AVX512 + VDPBF16PS */
  FATTN_ISA_AMX = 5,         /* AVX512_BF16 + AMX-TILE + AMX-BF16 */
  FATTN_ISA_NEON = 6         /* AArch64 Advanced SIMD */
};

/* What is done about lists in device memory (seqused_k, cu_seqlens_q, cu_seqlens_k, block_table) whose numbers are out of range. By themselves
   kernels read and write nothing by such numbers, and what the batch entry or sequence has of outputs is NaN. On the CPU they are always an error. */
enum {
  FATTN_CHECK_AUTO = 0, /* as fattn_set_check said last, at first none */
  FATTN_CHECK_NONE = 1, /* nothing */
  FATTN_CHECK_SYNC = 2  /* a call waits for its stream, looks at them, and is an error before anything is computed; refused in a capture */
};
/* What is out of range, as fattn_problem's `status` says; the last two, and cu_seqlens_new and cache_seqlens by the names of what attention has in
   their place, fattn_append_problem's alone. */
enum {
  FATTN_LISTS_GOOD = 0,
  FATTN_LIST_CU_SEQLENS_Q = 1,
  FATTN_LIST_CU_SEQLENS_K = 2,
  FATTN_LIST_SEQUSED_K = 3,
  FATTN_LIST_BLOCK_TABLE = 4,
  FATTN_LIST_CACHE_BATCH_IDX = 5,
  FATTN_LIST_POSITIONS = 6
};

/* A view of a tensor of at most 4 dimensions. The library never owns the memory and never writes an input. */
typedef struct fattn_tensor {
  void* data;          /* aligned to the element size; may be null in a description and when a dimension is 0 */
  int32_t dtype;       /* FATTN_F32, ... */
  int32_t ndim;        /* 0: the tensor is absent */
  int32_t device_type; /* FATTN_DEVICE_CPU, ... */
  int32_t device_index;
  int64_t shape[4];
  int64_t strides[4]; /* in elements, >= 0; inputs may have stride 0 (expanded views) */
} fattn_tensor;

/* A host's own threads. `parallel` calls body(arg, worker) once for every worker in [0, nworkers), concurrently or one
 * after the other, and returns 0 when all have returned; any other value fails the call with FATTN_ERROR_INTERNAL.
 * body never throws. The struct is copied when a plan is made; `context` must outlive the plan. */
typedef struct fattn_executor {
  uint32_t struct_size;
  int32_t concurrency; /* how many workers may run at once, >= 1 */
  void* context;
  int32_t (*parallel)(void* context, int32_t nworkers, void (*body)(void* arg, int32_t worker), void* arg);
} fattn_executor;

/* One attention problem: what to compute, on which shapes, how. The data pointers are ignored when a plan is made. */
typedef struct fattn_problem {
  uint32_t struct_size; /* sizeof(fattn_problem) */
  uint32_t abi_version; /* FATTN_ABI_VERSION */
  int32_t pass;         /* FATTN_FORWARD, FATTN_BACKWARD */
  int32_t backend;
  int32_t algorithm;
  int32_t causal;            /* 0 or 1 */
  int32_t has_softmax_scale; /* 0: softmax_scale = 1 / sqrt(headdim) */
  int32_t cpu_isa;           /* FATTN_ISA_AUTO, or the instruction set to use (for tests and measurements) */
  double softmax_scale;
  int32_t num_threads;            /* 0: every CPU that affinity and the control group allow; results do not depend on it */
  int32_t deterministic;          /* 0 or 1: a backward pass on a GPU gives the same bits every run, at a price; all else does always */
  int32_t cuda_level;             /* 0: the best that the GPU has; 75 or 80: the kernels for that compute capability (for tests) */
  int32_t has_window;             /* 0: no sliding window, and window_left and window_right are not looked at */
  const fattn_executor* executor; /* null: the library's own thread pool */
  int64_t window_left;            /* keys before a query's own position that it sees; -1: all */
  int64_t window_right;           /* keys behind it, likewise; with causal there are none, whatever this says */
  double softcap;                 /* > 0: scaled scores s become softcap * tanh(s / softcap); 0: they stay as they are */
  double p_dropout;               /* > 0: a weight becomes 0 with this probability (a multiple of 2^-16), else is divided by 1 - p_dropout; 0: none */
  fattn_tensor q, k, v;
  fattn_tensor o;          /* forward: output, of q's dtype or F32; backward: input, of q's dtype */
  fattn_tensor lse;        /* forward: optional output; backward: input; F32 (F64 for F64 problems), any strides */
  fattn_tensor weights;    /* forward with algorithm standard: optional output (batch, nheads, seqlen_q, seqlen_k) in q's dtype */
  fattn_tensor dout;       /* backward: input, the gradient of o */
  fattn_tensor dq, dk, dv; /* backward: outputs, all of q's dtype or all F32 */
  /* Inputs of both passes that may be absent. */
  fattn_tensor seqused_k;    /* (batch), I32: batch entry b has the keys [0, seqused_k[b]) only, 0 to seqlen_k, and its masks align with them */
  fattn_tensor alibi_slopes; /* (nheads) or (batch, nheads), F32: adds -slope * |i + seqlen_k - seqlen_q - j| to the score of query i and key j */
  /* (batch or 1, nheads or 1, seqlen_q or 1, seqlen_k), F32 or q's dtype: added to scores; -Inf hides the key as mask does. A row whose keys all have
     a finite one that is meant to hide (-1e9; its lse is below -2^25) has no gradient, though its o depends on v. */
  fattn_tensor bias;
  fattn_tensor mask; /* the same shape, U8: a query sees the keys where it is not 0 */
  fattn_tensor
      dropout_state; /* with p_dropout: (2), I64: seed and offset of the random numbers; the same give the same weights on every backend. (4):
                       then the places of the first row and key in a whole matrix, multiples of 16 and 64, of which this is a part */
  fattn_tensor dbias; /* backward: optional output, bias's gradient, (batch or 1, nheads or 1, seqlen_q or 1, seqlen_k), F32 or q's dtype, summed
                         over every dimension of 1; it needs not bias's shape, and is there without bias too */
  fattn_tensor dlse;  /* backward: optional input, the gradient of lse, of lse's shape and dtype, any strides; absent: 0. Not looked at in rows
                         that have no gradient: they see no key, or their lse is below -2^25 */
  /* (batch + 1), I32: the first rows of the packed sequences, 0 first, ascending; rows behind the last one belong to none: they are as rows that see
     nothing, and keys that no query sees. With seqused_k sequence b has the keys from cu_seqlens_k[b] on, as many as that says, and nothing else of
     cu_seqlens_k is read: in any order, with anything between them. Both or none. What they hold may change from call to call of a plan. */
  fattn_tensor cu_seqlens_q, cu_seqlens_k;
  int64_t max_seqlen_q, max_seqlen_k; /* with them: the most rows of a sequence (with seqused_k, that one uses), 0 to 2^31 - 1; bias, mask and dbias
                                         have these lengths. Else 0 */
  /* (batch, seqlen_q) and (batch, seqlen_k), of packed sequences (total_q) and (total_k), I32, rows side by side: ids of documents. A query sees the
     keys of its own id only (that masks do not hide); masks and distances are those of the whole sequences. Sorted ids cost least. Both or none. */
  fattn_tensor document_q, document_k;
  fattn_tensor status; /* optional output, (2), I32: FATTN_LISTS_GOOD and 0, or the first batch entry or sequence with a list out of range, behind
                          which of its lists that is, in the order of the codes; on a GPU written by a kernel of its own ahead of the others; left as
                          it was where the call is an error */
  /* (nheads), F32 (F64 for F64 problems): a logit of each query head that joins the softmax's sum and has no value. lse counts it: a row of a batch
     entry or sequence that sees no key has o = 0 and lse = its sink. -Inf: as if there were none. */
  fattn_tensor sinks;
  fattn_tensor dsinks; /* backward, with sinks: optional output, their gradient, of their shape and dtype; always the same bits */
  /* (batch, columns), I32, columns side by side, forward only: the pages of each batch entry's keys. Of an entry that has n keys the first
     ceil(n / page_size) numbers are read, each 0 to pages - 1 (on a GPU others give NaN for the entry); behind them may be anything. With
     cu_seqlens_q seqused_k says the lengths, not cu_seqlens_k. */
  fattn_tensor block_table;
  int32_t check; /* FATTN_CHECK_... */
  /* 0 or 1, of a forward pass: o and lse of a row have the same bits whatever else is in the call (other entries, sequences, heads and queries) and
     however a sequence's queries are divided among calls of the same options, at a price: keys are never split among workers */
  int32_t batch_invariant;
} fattn_problem;

/* The pointers of one execution of a plan; shapes and strides are the plan's. */
typedef struct fattn_buffers {
  uint32_t struct_size; /* sizeof(fattn_buffers) */
  uint32_t reserved;    /* 0 */
  const void *q, *k, *v;
  void* o;   /* forward: output; backward: input, not written */
  void* lse; /* forward: output or null if absent in the plan; backward: input, not written */
  void* weights;
  const void* dout;
  void *dq, *dk, *dv;
  const void *seqused_k, *alibi_slopes, *bias, *mask, *dropout_state; /* what they point to may change from call to call */
  void* dbias;
  const void *dlse, *cu_seqlens_q, *cu_seqlens_k, *document_q, *document_k;
  void* status;
  const void* sinks;
  void* dsinks;
  const void* block_table;
  void* workspace; /* on the tensors' device, aligned to 64 bytes (CUDA: 256); may be null if the plan asks for none */
  size_t workspace_bytes;
  void* stream; /* CUDA: the CUstream (cudaStream_t) to work on, null: the default stream; CPU: null */
} fattn_buffers;

/* What a plan decided. Strings live as long as the plan. */
typedef struct fattn_plan_info {
  uint32_t struct_size; /* sizeof(fattn_plan_info) */
  int32_t backend;
  int32_t algorithm;
  int32_t cpu_isa;
  int32_t num_threads;
  int32_t cuda_level; /* compute capability that the kernels are written for: 75, 80; 0: not a GPU's */
  size_t workspace_bytes;
  double flops;         /* 2 * (headdim + headdim_v) per (query, key) pair that causal and window leave, forward; 2.5 times that backward */
  double flops_nominal; /* the same with every pair counted, halved if causal: what papers print; as `flops` in a window */
  double bytes;         /* compulsory traffic: every input read once, every output written once */
  const char* kernel;   /* name of the kernel, for people */
  const char* why;      /* why this backend, kernel and split were chosen, for people */
} fattn_plan_info;

/* The processor as the library sees it. */
typedef struct fattn_cpu_info {
  uint32_t struct_size; /* sizeof(fattn_cpu_info) */
  int32_t logical_cpus;
  int32_t usable_threads; /* what affinity and the control group allow */
  int32_t isa_default;
  uint32_t isas_available; /* bit i set: FATTN_ISA value i can run here */
  uint32_t reserved;
  int64_t l1d_bytes, l2_bytes, l3_bytes; /* of one core, one core, one package; 0: unknown */
  int64_t memory_bytes, memory_available_bytes;
  char vendor[32];
  char model[128];
} fattn_cpu_info;

/* A library that fattn opens at run time, and whether it was found. */
typedef struct fattn_library_info {
  uint32_t struct_size; /* sizeof(fattn_library_info) */
  int32_t loaded;
  char name[32];
  char purpose[128];
  char path[512];   /* what was opened */
  char reason[512]; /* why not, if it was not */
} fattn_library_info;

/* An environment variable that fattn reads. */
typedef struct fattn_env_info {
  uint32_t struct_size; /* sizeof(fattn_env_info) */
  int32_t is_set;
  char name[32];
  char meaning[256];
  char value[512];
} fattn_env_info;

/* A CUDA device as its driver describes it. */
typedef struct fattn_cuda_info {
  uint32_t struct_size; /* sizeof(fattn_cuda_info) */
  int32_t index;        /* what device_index of a tensor means; CUDA_VISIBLE_DEVICES decides which devices there are */
  int32_t capability_major, capability_minor;
  int32_t multiprocessors;
  int32_t clock_khz, memory_clock_khz; /* the highest that the driver states; 0: unknown */
  int32_t memory_bus_bits;
  int32_t shared_per_block; /* bytes of shared memory, the most that a block can ask for */
  int32_t shared_per_multiprocessor;
  int32_t registers_per_multiprocessor;
  int32_t driver_version; /* the newest CUDA that the driver knows: 13000 is 13.0 */
  int64_t memory_bytes, l2_bytes;
  char name[128];
  char pci_bus_id[32];
  char uuid[64]; /* "GPU-...", the name that CUDA_VISIBLE_DEVICES and nvidia-smi know */
} fattn_cuda_info;

/* The folder that keeps compiled GPU kernels. */
typedef struct fattn_cache_info {
  uint32_t struct_size; /* sizeof(fattn_cache_info) */
  int32_t usable;
  int64_t entries, bytes, limit_bytes; /* beyond the limit, what was used longest ago is removed */
  char path[1024];
  char reason[512]; /* why it cannot be used, if it cannot: kernels are compiled anew by every process then */
  char pack[1024];  /* where the pack file of the installation is looked for; it need not be there */
} fattn_cache_info;

/* Where a compiled kernel came from: the disk cache, a pack file, or it was compiled now. */
enum { FATTN_FROM_DISK = 0, FATTN_FROM_PACK = 1, FATTN_FROM_COMPILER = 2 };

/* A compiled kernel. */
typedef struct fattn_cache_entry {
  uint32_t struct_size;        /* sizeof(fattn_cache_entry) */
  int32_t origin;              /* FATTN_FROM_... */
  int32_t arch, arch_specific; /* 90, 1: compiled for sm_90a */
  int32_t nvrtc_major, nvrtc_minor;
  int32_t registers, stack_bytes, spill_bytes; /* of a thread */
  int32_t shared_bytes;                        /* static, of a block */
  int64_t bytes;
  int64_t last_used; /* seconds since 1970; 0: not from the disk cache */
  double compile_seconds;
  char name[128];
  char key[72];
  char description[128]; /* what this one is made for: "bf16, headdim 128, causal, tile 128 x 64, level 80" */
  char damage[128];      /* why it cannot be used; nothing above but key, bytes and last_used is known then */
} fattn_cache_entry;

/* Called for each kernel; `entry` is gone when it returns. It must not throw. `index` counts from 0 to count - 1. */
typedef void (*fattn_cache_visit)(void* context, const fattn_cache_entry* entry, int32_t index, int32_t count);

/* A GPU architecture that kernels are compiled for. */
typedef struct fattn_architecture_info {
  uint32_t struct_size; /* sizeof(fattn_architecture_info) */
  int32_t capability;   /* 10 * major + minor */
  char name[32];
  char executed_on[128]; /* a device on which its kernels were run and checked; empty: they are compiled by the tests, but were never run */
} fattn_architecture_info;

/* A cell of the support table: whether a way to compute has an option of attention. What else a way needs (a dtype, a headdim, a device),
 * fattn_supported says of a problem. */
typedef struct fattn_feature_info {
  uint32_t struct_size; /* sizeof(fattn_feature_info) */
  int32_t supported;    /* 0 or 1 */
  char feature[96];     /* "softcap" */
  char way[64];         /* "algorithm v2 of backend cpu" */
} fattn_feature_info;

/* What a profiler is told of a call. All text lives as long as the plan. */
typedef struct fattn_trace_call {
  uint32_t struct_size; /* sizeof(fattn_trace_call) of the library */
  int32_t backward;     /* 0 or 1 */
  int32_t backend, algorithm, dtype, device, causal;
  int32_t num_threads; /* of the CPU's plan */
  int64_t batch, seqlen_q, seqlen_k, nheads, nheads_k, headdim, headdim_v;
  double flops, bytes; /* as in fattn_plan_info */
  size_t workspace_bytes;
  const char* kernel;
} fattn_trace_call;

/* A profiler: `begin` is called where a call (then `call` is not null) or a part of one begins, `end` where what began last on this thread ends.
 * Both are called by several threads at once; they must not throw, and a call is as slow as they are. Names are literals of the library. */
typedef struct fattn_trace {
  uint32_t struct_size; /* sizeof(fattn_trace) */
  uint32_t reserved;    /* 0 */
  void (*begin)(const char* name, const fattn_trace_call* call);
  void (*end)(void);
} fattn_trace;

/* A part of the keys in fattn_merge_problem: what attention over these keys alone gave, as fattn_problem's o and lse, of any strides. */
typedef struct fattn_merge_part {
  fattn_tensor o; /* (batch, seqlen_q, nheads, headdim_v), of packed sequences (total_q, nheads, headdim_v): F32, F16 or BF16, each part its own */
  /* (batch, nheads, seqlen_q), packed (nheads, total_q), F32, forward F64 too. -Inf: the row sees no key of the part, and its o counts nothing.
     Absent from all parts (forward): they are added, o = sum(o_i) */
  fattn_tensor lse;
  fattn_tensor dout; /* backward: optional output, the gradient of o, of its shape; F32, F16 or BF16 */
  fattn_tensor dlse; /* backward: optional output, the gradient of lse, of its shape and dtype */
} fattn_merge_part;

/* Results over parts of the keys become that over all of them: lse = log(sum(exp(lse_i))), o = sum(exp(lse_i - lse) o_i), summed in fp32. A row that
 * no part sees gets o = 0 and lse = -Inf. NaN in o_i counts where lse_i is a number; lse_i NaN or +Inf makes the row's o and lse NaN. Parts are in
 * one memory or on one device. F64 on backend reference only, and then everything is F64. */
typedef struct fattn_merge_problem {
  uint32_t struct_size; /* sizeof(fattn_merge_problem) */
  uint32_t abi_version; /* FATTN_ABI_VERSION */
  int32_t backend;
  int32_t cpu_isa;                /* as in fattn_problem */
  int32_t num_threads;            /* likewise */
  int32_t nparts;                 /* of `parts`, 1 to 1024; on backend cuda up to 24 */
  const fattn_executor* executor; /* likewise */
  void* stream;                   /* CUDA: the CUstream to work on, null: the default stream; CPU: null */
  const fattn_merge_part* parts;
  fattn_tensor o; /* fattn_merge: output, of the parts' shape; F32, F16 or BF16, whatever theirs are */
  fattn_tensor
      lse; /* fattn_merge: optional output, of the parts' shape, F32 or F64, which keeps its last places where it is merged again and again */
  fattn_tensor dout; /* fattn_merge_backward: input, the gradient of o, of its shape; F32, F16 or BF16 */
  fattn_tensor dlse; /* fattn_merge_backward: optional input, the gradient of lse, F32; absent: 0 */
} fattn_merge_problem;

/* Rotary position embedding (Su et al. 2021): the pairs of the first rotary_dim dimensions of each head turn by the angles of the row's position: (a,
 * b) becomes (a cos - b sin, a sin + b cos), in fp32. The dimensions behind them stay as they are. */
typedef struct fattn_rotary_problem {
  uint32_t struct_size; /* sizeof(fattn_rotary_problem) */
  uint32_t abi_version; /* FATTN_ABI_VERSION */
  int32_t backend;
  int32_t cpu_isa;                /* as in fattn_problem */
  int32_t num_threads;            /* likewise */
  int32_t interleaved;            /* 1: pairs are neighbours (0, 1), (2, 3), ... (GPT-J); 0: dimensions d and d + rotary_dim / 2 (GPT-NeoX, Llama) */
  int32_t inverse;                /* 1: turns back, by -sin: the gradient of x from that of y */
  int32_t reserved;               /* 0 */
  const fattn_executor* executor; /* as in fattn_problem */
  void* stream;                   /* as in fattn_merge_problem */
  int64_t offset;                 /* the position of every sequence's first row, without `offsets`; with them 0 */
  fattn_tensor x;        /* (batch, seqlen, nheads, headdim), of packed sequences (total, nheads, headdim): F32, F16, BF16, F64 (reference) */
  fattn_tensor y;        /* output, of x's shape and dtype; may be x itself */
  fattn_tensor cos, sin; /* (positions, rotary_dim / 2), F32 or x's dtype, scaled as the model wants them; rotary_dim is at most headdim */
  fattn_tensor offsets;  /* (batch), I32 or I64: the position of each sequence's first row. May be absent */
  /* (batch + 1), I32: the first rows of packed sequences, as in fattn_problem; rows behind the last one are copied. Absent: x is not packed */
  fattn_tensor cu_seqlens;
} fattn_rotary_problem;

/* New keys and values go into a cache behind what is there, and what is rotary turns to its position on the way, as the queries do: all that a step
 * of decoding needs before attention. k and v, k_cache and v_cache, q and q_out: F32, F16 or BF16, k and v and their caches each their own; F64 on
 * backend reference only, and then everything is F64. A new key lies behind those of its sequence, and its position is its place there; padding on
 * the left counts among them. */
enum {
  FATTN_QUERIES_LAST = 0,    /* the last query has the position of the last new key, the others those before it: as masks are aligned */
  FATTN_QUERIES_FIRST = 1,   /* the first query has that of the first new key, the others those behind it */
  FATTN_QUERIES_TOGETHER = 2 /* all have that of the first new key, as flash_attn_with_kvcache turns them without causal mask and window */
};
typedef struct fattn_append_problem {
  uint32_t struct_size; /* sizeof(fattn_append_problem) */
  uint32_t abi_version; /* FATTN_ABI_VERSION */
  int32_t backend;
  int32_t cpu_isa;                /* as in fattn_problem */
  int32_t num_threads;            /* likewise */
  int32_t interleaved;            /* as in fattn_rotary_problem */
  int32_t q_positions;            /* FATTN_QUERIES_... */
  int32_t reserved;               /* 0 */
  const fattn_executor* executor; /* as in fattn_problem */
  void* stream;                   /* as in fattn_merge_problem */
  int64_t cache_seqlen;           /* how many keys every sequence has before the call, without `cache_seqlens`; with them 0 */
  fattn_tensor k, v;              /* (batch, seqlen_new, nheads_k, headdim or headdim_v), of packed sequences (total_new, nheads_k, ...) */
  /* Outputs: (entries, longest, nheads_k, headdim or headdim_v), with block_table (pages, page_size, nheads_k, ...). Nothing else of them is written
   */
  fattn_tensor k_cache, v_cache;
  /* All below may be absent. */
  fattn_tensor cache_seqlens;   /* (batch), I32 or I64: how many keys each sequence has before the call */
  fattn_tensor cu_seqlens_new;  /* (batch + 1), I32: k and v are packed, and sequences begin there; rows behind the last one go nowhere */
  fattn_tensor cache_batch_idx; /* (batch), I32 or I64: which entry of the caches is each sequence's; absent: entry b is that of sequence b */
  fattn_tensor block_table;     /* (batch, columns), I32 or I64: the pages of each sequence, as in fattn_problem */
  fattn_tensor cos, sin;        /* (positions, rotary_dim / 2), as in fattn_rotary_problem, of any dtype above; absent: nothing turns */
  fattn_tensor positions;       /* with cos, (batch), I32 or I64: the position of each sequence's first new key; absent: its place in the cache */
  fattn_tensor q;               /* with cos, (batch, seqlen_q, nheads, headdim), packed (total_q, nheads, headdim): queries to be turned */
  fattn_tensor q_out;           /* with q: output, of its shape and dtype; may be q itself */
  fattn_tensor cu_seqlens_q;    /* (batch + 1), I32: q is packed, and sequences begin there; rows behind the last one are copied */
  fattn_tensor seqused_k; /* output, (batch), I32: how many keys each sequence has after the call, as attention wants them; -1: see fattn_append */
  fattn_tensor status;    /* output, (2), I32: as in fattn_problem, of this call's lists */
} fattn_append_problem;

typedef struct fattn_plan fattn_plan;

FATTN_API const char* fattn_version(void);                    /* "0.1.0" */
FATTN_API uint32_t fattn_abi_version(void);                   /* of the loaded library; compare with FATTN_ABI_VERSION */
FATTN_API const char* fattn_last_error(void);                 /* message of this thread's last failed call; "" if there was none */
FATTN_API const char* fattn_status_name(fattn_status status); /* "invalid_argument", ... */

/* Which weights dropout keeps, on every backend: mask, in host memory, (batch, nheads, seqlen_q, seqlen_k) side by side, gets 1 where it does, 0
   where it does not. `seed` and `offset` as in dropout_state, p_dropout as in fattn_problem; of packed sequences each is a batch entry. */
FATTN_API fattn_status fattn_dropout_mask(int64_t seed, int64_t offset, double p_dropout, int64_t batch, int64_t nheads, int64_t seqlen_q,
                                          int64_t seqlen_k, uint8_t* mask);

/* FATTN_CHECK_NONE or FATTN_CHECK_SYNC: what FATTN_CHECK_AUTO means from now on in this process, also in plans that there are already. */
FATTN_API fattn_status fattn_set_check(int32_t check);

/* Who is told of calls from now on in this process; null: nobody, as in the beginning, and then it costs nothing. `trace` and its functions must stay
 * there for good: a call that is under way tells whom it told of its beginning. A library that is preloaded (LD_PRELOAD) and defines
 * `const fattn_trace fattn_trace_preloaded` is told from the beginning. */
FATTN_API fattn_status fattn_set_trace(const fattn_trace* trace);

/* FATTN_OK if the problem can run here, FATTN_ERROR_UNSUPPORTED with the reason if not; other codes for bad input.
 * `reason` (may be null) receives a terminated, possibly shortened text. */
FATTN_API fattn_status fattn_supported(const fattn_problem* problem, char* reason, size_t reason_size);
/* The same of a GPU with this compute capability (80, 90, ...), which need not be there, by backend cuda alone. */
FATTN_API fattn_status fattn_supported_on(const fattn_problem* problem, int32_t arch, char* reason, size_t reason_size);

/* Validates once and decides everything; execute any number of times, from any thread, then destroy. */
FATTN_API fattn_status fattn_plan_create(const fattn_problem* problem, fattn_plan** plan);
FATTN_API fattn_status fattn_plan_query(const fattn_plan* plan, fattn_plan_info* info);
/* Allocates nothing, but with FATTN_CHECK_SYNC. Executions of one plan at the same time need a workspace each. On a GPU it returns at once (but with
 * FATTN_CHECK_SYNC), and the work is done in the order of the stream; a call may be captured into a graph. (Kernels are compiled when the plan is
 * made; only pointers that are not aligned to 16 bytes, although the strides would allow it, need another kernel at their first use.) */
FATTN_API fattn_status fattn_plan_execute(const fattn_plan* plan, const fattn_buffers* buffers);
FATTN_API void fattn_plan_destroy(fattn_plan* plan);

/* One call: plan, allocate the workspace, execute with the pointers in the problem's tensors. On a GPU: on the default stream,
 * and back when it is done. */
FATTN_API fattn_status fattn_execute(const fattn_problem* problem);

/* These check everything, and compute; nothing is allocated (but by backend reference, and for an error's message), so a plan would save nothing. On
 * a GPU they return at once, the work is done in the order of the stream, and a call may be captured into a graph once its kernel is loaded, which
 * the first call does. An output may be an input that it has the memory, shape, strides and dtype of (o or lse those of a part); any other overlap is
 * refused. */
FATTN_API fattn_status fattn_merge(const fattn_merge_problem* problem);
/* dout and dlse of the parts, from those of o and lse: with w = exp(lse_i - lse), dout_i = w dout, dlse_i = w (dlse + dout (o_i - o)). 0 where the
 * row sees no key of the part. o and lse of the problem are not looked at. Outputs need memory of their own. */
FATTN_API fattn_status fattn_merge_backward(const fattn_merge_problem* problem);
/* Likewise. Positions without a row of cos are an error; in memory of a GPU (offsets, cu_seqlens) they make NaN of the row's first rotary_dim
 * dimensions. */
FATTN_API fattn_status fattn_rotary(const fattn_rotary_problem* problem);
/* Likewise, in one pass or launch; above 512 pages or entries of new keys the CPU allocates, to see whether two of them have one place. What lists of
 * the host say out of range is an error, and nothing is written. On a GPU nothing is written by such numbers: a sequence without room for its new
 * keys, or without an entry, gets none, a key whose page is none is left out; q_out of the sequence is NaN and its seqused_k -1, so that attention
 * gives NaN. A position without a row of cos makes NaN of the query, or of the key's first rotary_dim dimensions. */
FATTN_API fattn_status fattn_append(const fattn_append_problem* problem);

FATTN_API fattn_status fattn_query_cpu(fattn_cpu_info* info);
/* index counts from 0; FATTN_ERROR_INVALID_ARGUMENT past the end. */
FATTN_API fattn_status fattn_query_library(int32_t index, fattn_library_info* info);
FATTN_API fattn_status fattn_query_environment(int32_t index, fattn_env_info* info);

/* index counts from 0; FATTN_ERROR_INVALID_ARGUMENT past the end. */
FATTN_API fattn_status fattn_query_architecture(int32_t index, fattn_architecture_info* info);
FATTN_API fattn_status fattn_query_feature(int32_t feature, int32_t way, fattn_feature_info* info); /* the same on every machine */

/* CUDA devices, for programs that have no CUDA toolkit: what there is, memory, streams, events, graphs. Attention needs none
 * of it: a program with its own CUDA runtime passes its own pointers and streams. The device's primary context is used, the
 * one of the CUDA runtime; the calling thread's current context is left as it was. `stream` is a CUstream (cudaStream_t); null is the
 * default stream. Every function that takes a device fails with FATTN_ERROR_UNSUPPORTED and the reason where there is none,
 * and with the same FATTN_ERROR_DEVICE again and again once a kernel has broken the device for this process. */

/* FATTN_OK and the number of devices; where that is 0, `reason` (may be null) receives why and what to do. */
FATTN_API fattn_status fattn_cuda_count(int32_t* count, char* reason, size_t reason_size);
FATTN_API fattn_status fattn_cuda_query(int32_t device, fattn_cuda_info* info);
/* What the device can do at most, measured now on the default stream (about 30 ms, and the compilation of a kernel at the first
 * call): FLOP/s of the tensor cores with 16-bit inputs and fp32 sums, FLOP/s of fp32 FMA, bytes a second read from memory; 2^x a second in fp32;
 * bytes a second read from shared memory by all multiprocessors, from the L2 cache, and read and written (both counted) by a copy in memory; kernels
 * a second that do nothing, one behind the other on a stream, and where the host waits for each. */
enum {
  FATTN_PEAK_MATRIX = 1,
  FATTN_PEAK_FMA = 2,
  FATTN_PEAK_READ = 3,
  FATTN_PEAK_EXP = 4,
  FATTN_PEAK_SHARED = 5,
  FATTN_PEAK_L2 = 6,
  FATTN_PEAK_COPY = 7,
  FATTN_PEAK_LAUNCH = 8,
  FATTN_PEAK_ROUND_TRIP = 9
};
FATTN_API fattn_status fattn_cuda_peak(int32_t device, int32_t what, double* per_second);
FATTN_API fattn_status fattn_cuda_memory(int32_t device, size_t* free_bytes, size_t* total_bytes);
/* Waits until the device has done everything that this process gave it, and reports what failed in between. */
FATTN_API fattn_status fattn_cuda_synchronize(int32_t device);

FATTN_API fattn_status fattn_cuda_malloc(int32_t device, size_t bytes, void** pointer); /* 0 bytes: a null pointer */
FATTN_API fattn_status fattn_cuda_free(int32_t device, void* pointer);                  /* may be null */
/* Memory of the host that stays where it is, so that copies from and to it need not wait for each other. */
FATTN_API fattn_status fattn_cuda_host_malloc(int32_t device, size_t bytes, void** pointer); /* 0 bytes: a null pointer */
FATTN_API fattn_status fattn_cuda_host_free(int32_t device, void* pointer);                  /* may be null */
/* Copies between host and device, in the order of the stream: fattn_cuda_copy returns when it is done, _async at once, and then
 * host memory must live until the stream has come so far. */
enum { FATTN_COPY_TO_DEVICE = 1, FATTN_COPY_TO_HOST = 2, FATTN_COPY_ON_DEVICE = 3 };
FATTN_API fattn_status fattn_cuda_copy(int32_t device, int32_t direction, void* to, const void* from, size_t bytes, void* stream);
FATTN_API fattn_status fattn_cuda_copy_async(int32_t device, int32_t direction, void* to, const void* from, size_t bytes, void* stream);
/* Sets every byte, in the order of the stream; returns at once. */
FATTN_API fattn_status fattn_cuda_memset(int32_t device, void* to, int32_t byte, size_t bytes, void* stream);

FATTN_API fattn_status fattn_cuda_stream_create(int32_t device, void** stream); /* does not wait for the default stream */
FATTN_API fattn_status fattn_cuda_stream_synchronize(int32_t device, void* stream);
FATTN_API fattn_status fattn_cuda_stream_destroy(int32_t device, void* stream); /* may be null */
FATTN_API fattn_status fattn_cuda_event_create(int32_t device, void** event);
FATTN_API fattn_status fattn_cuda_event_record(int32_t device, void* event, void* stream);
/* Waits for `end`, then gives the time between two recorded events of the same device. */
FATTN_API fattn_status fattn_cuda_event_elapsed(int32_t device, void* start, void* end, double* seconds);
FATTN_API fattn_status fattn_cuda_event_destroy(int32_t device, void* event); /* may be null */
/* Between begin and end, what this thread gives the stream is recorded, not done, and calls that would allocate or wait fail.
 * end makes an executable graph of it. The stream is not the default stream. */
FATTN_API fattn_status fattn_cuda_graph_begin(int32_t device, void* stream);
FATTN_API fattn_status fattn_cuda_graph_end(int32_t device, void* stream, void** graph);
FATTN_API fattn_status fattn_cuda_graph_launch(int32_t device, void* graph, void* stream);
FATTN_API fattn_status fattn_cuda_graph_destroy(int32_t device, void* graph); /* may be null */

/* How several processes, the ranks, compute one attention whose rows they share: what each holds, what travels, what each computes. Nothing here
 * computes or sends; fattn.distributed of the Python package carries it out. Positions count all queries or all keys (of packed sequences all behind
 * each other), rows count what a rank holds, or what came in a hop. */

/* Who holds which positions. Contiguous: rank r the r-th of nranks parts. Zigzag: of 2 nranks parts the r-th and the r-th from the end, which gives
   every rank the same work under a causal mask. Parts differ by one position at most, and may be empty. */
enum { FATTN_RING_CONTIGUOUS = 0, FATTN_RING_ZIGZAG = 1 };

typedef struct fattn_ring_problem {
  uint32_t struct_size; /* sizeof(fattn_ring_problem) */
  int32_t layout;
  int32_t nranks, rank;
  int32_t causal, has_window;
  int32_t gathered;  /* 1: the last hop has all blocks, over keys that lie in the order of their positions; 0: each hop those over the keys that it
                        brings */
  int32_t has_alibi; /* 1: in a block that is not square all keys are on one side of all queries (fattn_ring_block's `side`) */
  int32_t keep_positions; /* 1: rows of a block are at positions behind each other; 0: blocks that make one rectangle of rows become one */
  int32_t nsequences;     /* of packed sequences; 0: there are none, and cu_seqlens_q and cu_seqlens_k are null */
  int64_t seqlen_q, seqlen_k;
  int64_t window_left, window_right;          /* as in fattn_problem */
  const int64_t *cu_seqlens_q, *cu_seqlens_k; /* (nsequences + 1), in host memory, not looked at after the call */
} fattn_ring_problem;

typedef struct fattn_ring_range {
  int64_t first, count;
} fattn_ring_range;

/* Hop 0 sends nothing: its blocks are over the rank's own keys. Hop h sends to rank + h and receives from rank - h. */
typedef struct fattn_ring_hop {
  int32_t send_to, receive_from;
  int64_t nsent, nreceived, nblocks; /* of the lists of the schedule, each hop's behind those of the hop before */
  int64_t rows_sent, rows_received;  /* 0: nothing is sent or received */
} fattn_ring_hop;

/* Queries and keys that are one call of attention, with a window that is aligned to the bottom right of these rows. Results are merged in the order
   of the list. */
typedef struct fattn_ring_block {
  int64_t q_row, q_rows;             /* of the queries that the rank holds */
  int64_t k_row, k_rows;             /* of what came in the hop, in hop 0 of the keys that the rank holds, gathered: positions */
  int64_t q_position, k_position;    /* of the first query and key */
  int64_t window_left, window_right; /* -1: no limit */
  int64_t distance;                  /* of the first query from the first key, counted as ALiBi does: i + seqlen_k - seqlen_q - j */
  int32_t sequence;                  /* which of the packed sequences; 0 without */
  int32_t side;                      /* with has_alibi, 1: no key is behind a query's own position, -1: none is before it, 0: aligned as in a call */
} fattn_ring_block;

typedef struct fattn_ring_schedule {
  uint32_t struct_size; /* sizeof(fattn_ring_schedule) */
  int32_t nhops;
  int64_t rows_q, rows_k; /* that the rank holds */
  int64_t nheld_q, nheld_k, nblocks;
  const fattn_ring_range *held_q, *held_k; /* the positions of its rows, in the order of the rows */
  const fattn_ring_range* sent;            /* rows of its keys */
  const fattn_ring_range* received;        /* positions of keys, in the order in which they come */
  const fattn_ring_hop* hops;
  const fattn_ring_block* blocks;
} fattn_ring_schedule;

typedef struct fattn_ring fattn_ring;

/* Every rank's schedule follows from its numbers alone, so that no rank need ask another. */
FATTN_API fattn_status fattn_ring_create(const fattn_ring_problem* problem, fattn_ring** ring);
FATTN_API fattn_status fattn_ring_query(const fattn_ring* ring, fattn_ring_schedule* schedule); /* its pointers live as long as `ring` */
FATTN_API void fattn_ring_destroy(fattn_ring* ring);                                            /* may be null */

/* Processes that exchange memory of their GPUs, a GPU each, over NCCL (libnccl.so.2, 2.14 or later, opened at run time; FATTN_NCCL names it): what
 * carries the rows of ring attention. One process makes an id and tells it to all others, by whatever they share: a file, a socket, MPI. */
enum { FATTN_GROUP_ID_BYTES = 128 };

typedef struct fattn_group_options {
  uint32_t struct_size; /* sizeof(fattn_group_options) */
  int32_t rank, nranks;
  int32_t device_type, device_index; /* whose memory is exchanged: FATTN_DEVICE_CUDA; with one rank, which exchanges nothing, FATTN_DEVICE_CPU too */
  int32_t reserved;                  /* 0 */
  double timeout;                    /* seconds that a process waits for another one; 0: 30 */
  const void* id;                    /* FATTN_GROUP_ID_BYTES bytes, the same in all processes; with one rank null */
} fattn_group_options;

/* Contiguous memory of the group's device. Of two processes what one sends to the other comes in the order given, in pieces of the same sizes. */
typedef struct fattn_piece {
  void* data;
  size_t bytes;
  int32_t peer; /* the rank that it goes to or comes from */
  int32_t sent; /* 1: it is sent; 0: received */
} fattn_piece;

typedef struct fattn_group fattn_group;

FATTN_API fattn_status fattn_group_id(void* id); /* writes FATTN_GROUP_ID_BYTES bytes. FATTN_ERROR_UNSUPPORTED where there is no NCCL */
/* Returns when all ranks have called it. A group is used by one thread at a time. */
FATTN_API fattn_status fattn_group_create(const fattn_group_options* options, fattn_group** group);
/* Begins to send and receive all pieces: behind the work so far on `stream`, beside what comes after it. Returns at once. */
FATTN_API fattn_status fattn_group_begin(fattn_group* group, const fattn_piece* pieces, int32_t npieces, void* stream);
/* Of those begun and not finished the oldest: work on `stream` from here on sees what came and may write what was sent. Returns at once. */
FATTN_API fattn_status fattn_group_finish(fattn_group* group, void* stream);
/* Until all that was finished is over. FATTN_ERROR_DEVICE, with the ranks that did not answer, after the timeout or where a process is gone; the
 * group can only be destroyed then. */
FATTN_API fattn_status fattn_group_wait(fattn_group* group);
FATTN_API void fattn_group_destroy(fattn_group* group); /* may be null */

/* Compiled GPU kernels. A kernel is compiled when it is first needed and kept on disk. */
FATTN_API fattn_status fattn_cache_query(fattn_cache_info* info);
/* The entries of the disk cache, the last used first. Damaged ones too; they are replaced when they are needed. */
FATTN_API fattn_status fattn_cache_list(fattn_cache_visit visit, void* context);
/* Removes everything; `entries` and `bytes` (may be null) say how much it was. */
FATTN_API fattn_status fattn_cache_clear(int64_t* entries, int64_t* bytes);
/* Has the kernels of a problem ready in the disk cache, so that no call waits for them. `problem` null: the kernels of the list that is
 * built in, common shapes and options. `arch` is a compute capability (80, 90, ...), for which no GPU need be there; 0: that of CUDA
 * device 0. `visit` may be null. */
FATTN_API fattn_status fattn_cache_warm(const fattn_problem* problem, int32_t arch, fattn_cache_visit visit, void* context);
/* The kernels of several problems (none: the built-in list) for several architectures (none: all that the compiler at hand knows and there
 * are kernels for, but for Jetson boards) into one file, for machines without a compiler; the file is replaced. */
FATTN_API fattn_status fattn_cache_pack(const char* path, const fattn_problem* problems, int32_t nproblems, const int32_t* archs, int32_t narchs,
                                        fattn_cache_visit visit, void* context);
/* Kernels are looked for in this pack file, too, as long as the process lives: after the disk cache, before the compiler. The path is
 * absolute, the file belongs to root or the user of the process. */
FATTN_API fattn_status fattn_cache_use_pack(const char* path);

#ifdef __cplusplus
}
#endif
#endif
