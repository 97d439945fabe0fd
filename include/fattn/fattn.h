/* The C ABI of fattn: exact, IO-aware attention. These functions are the only symbols that libfattn.so exports.
 *
 *   o = softmax(softmax_scale * q k^T + mask) v        lse = log(sum(exp(softmax_scale * q k^T + mask)))
 *
 * Layout: q (batch, seqlen_q, nheads, headdim), k (batch, seqlen_k, nheads_k, headdim), v (batch, seqlen_k, nheads_k, headdim_v),
 * o (batch, seqlen_q, nheads, headdim_v), lse (batch, nheads, seqlen_q). Strides count elements; the last dimension of
 * q, k, v, o and their gradients is contiguous, every other stride is free, so a (batch, heads, seqlen, headdim) tensor is
 * a view and needs no copy. nheads is a multiple of nheads_k (GQA, MQA). A causal mask is aligned to the bottom right:
 * query i sees the keys j <= i + seqlen_k - seqlen_q. docs/NUMERICS.md says what is computed to the last bit.
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

#define FATTN_ABI_VERSION 1u
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
  FATTN_ERROR_INTERNAL = 6   /* a defect of the library or an exception of the host's executor */
};

enum { FATTN_F32 = 1, FATTN_F16 = 2, FATTN_BF16 = 3, FATTN_F64 = 4 }; /* dtype; F64 on backend reference only */
enum { FATTN_DEVICE_CPU = 0 };                                        /* device_type */
enum { FATTN_FORWARD = 0, FATTN_BACKWARD = 1 };                       /* pass */
enum { FATTN_BACKEND_AUTO = 0, FATTN_BACKEND_REFERENCE = 1, FATTN_BACKEND_CPU = 2 };
/* standard: textbook attention, O(seqlen_q * seqlen_k) memory. v2: FlashAttention-2 (Dao 2023), O(seqlen_q) memory. */
enum { FATTN_ALGORITHM_AUTO = 0, FATTN_ALGORITHM_STANDARD = 1, FATTN_ALGORITHM_V2 = 2 };
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

/* A view of a tensor of at most 4 dimensions. The library never owns the memory and never writes an input. */
typedef struct fattn_tensor {
  void* data;          /* aligned to the element size; may be null in a description and when a dimension is 0 */
  int32_t dtype;       /* FATTN_F32, ... */
  int32_t ndim;        /* 0: the tensor is absent */
  int32_t device_type; /* FATTN_DEVICE_CPU */
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
  int32_t reserved;               /* 0 */
  const fattn_executor* executor; /* null: the library's own thread pool */
  fattn_tensor q, k, v;
  fattn_tensor o;          /* forward: output; backward: input */
  fattn_tensor lse;        /* forward: optional output; backward: input; F32 (F64 for F64 problems), any strides */
  fattn_tensor weights;    /* forward with algorithm standard: optional output (batch, nheads, seqlen_q, seqlen_k) in q's dtype */
  fattn_tensor dout;       /* backward: input, the gradient of o */
  fattn_tensor dq, dk, dv; /* backward: outputs */
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
  void* workspace; /* aligned to 64 bytes; may be null if the plan asks for none */
  size_t workspace_bytes;
} fattn_buffers;

/* What a plan decided. Strings live as long as the plan. */
typedef struct fattn_plan_info {
  uint32_t struct_size; /* sizeof(fattn_plan_info) */
  int32_t backend;
  int32_t algorithm;
  int32_t cpu_isa;
  int32_t num_threads;
  int32_t reserved;
  size_t workspace_bytes;
  double flops;         /* 2 * (headdim + headdim_v) per visible (query, key) pair forward; 2.5 times that backward */
  double flops_nominal; /* the same with every pair counted, halved if causal: what papers print */
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

typedef struct fattn_plan fattn_plan;

FATTN_API const char* fattn_version(void);                    /* "0.1.0" */
FATTN_API uint32_t fattn_abi_version(void);                   /* of the loaded library; compare with FATTN_ABI_VERSION */
FATTN_API const char* fattn_last_error(void);                 /* message of this thread's last failed call; "" if there was none */
FATTN_API const char* fattn_status_name(fattn_status status); /* "invalid_argument", ... */

/* FATTN_OK if the problem can run here, FATTN_ERROR_UNSUPPORTED with the reason if not; other codes for bad input.
 * `reason` (may be null) receives a terminated, possibly shortened text. */
FATTN_API fattn_status fattn_supported(const fattn_problem* problem, char* reason, size_t reason_size);

/* Validates once and decides everything; execute any number of times, from any thread, then destroy. */
FATTN_API fattn_status fattn_plan_create(const fattn_problem* problem, fattn_plan** plan);
FATTN_API fattn_status fattn_plan_query(const fattn_plan* plan, fattn_plan_info* info);
/* Allocates nothing. Executions of one plan at the same time need a workspace each. */
FATTN_API fattn_status fattn_plan_execute(const fattn_plan* plan, const fattn_buffers* buffers);
FATTN_API void fattn_plan_destroy(fattn_plan* plan);

/* One call: plan, allocate the workspace, execute with the pointers in the problem's tensors. */
FATTN_API fattn_status fattn_execute(const fattn_problem* problem);

FATTN_API fattn_status fattn_query_cpu(fattn_cpu_info* info);
/* index counts from 0; FATTN_ERROR_INVALID_ARGUMENT past the end. */
FATTN_API fattn_status fattn_query_library(int32_t index, fattn_library_info* info);
FATTN_API fattn_status fattn_query_environment(int32_t index, fattn_env_info* info);

#ifdef __cplusplus
}
#endif
#endif
