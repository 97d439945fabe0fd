/* Attention through the C ABI: a plan, its workspace, one execution, and a check of the result by the definition. */
#include <fattn/fattn.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { BATCH = 1, SEQLEN = 33, NHEADS = 2, HEADDIM = 16, ELEMENTS = BATCH * SEQLEN * NHEADS * HEADDIM };

/* A contiguous (batch, seqlen, nheads, headdim) tensor in fp32. */
static fattn_tensor tensor(float* data) {
  fattn_tensor t = {.data = data, .dtype = FATTN_F32, .ndim = 4, .device_type = FATTN_DEVICE_CPU};
  const int64_t shape[4] = {BATCH, SEQLEN, NHEADS, HEADDIM};
  int64_t stride = 1;
  for (int i = 3; i >= 0; --i) {
    t.shape[i] = shape[i];
    t.strides[i] = stride;
    stride *= shape[i];
  }
  return t;
}

/* softmax(q k^T / sqrt(headdim)) v for one query of one head, with a causal mask. */
static double expected(const float* q, const float* k, const float* v, int query, int head, int d) {
  double sum = 0, result = 0;
  for (int key = 0; key <= query; ++key) {
    double score = 0;
    for (int e = 0; e < HEADDIM; ++e) score += (double)q[(query * NHEADS + head) * HEADDIM + e] * k[(key * NHEADS + head) * HEADDIM + e];
    const double weight = exp(score / sqrt(HEADDIM));
    sum += weight;
    result += weight * v[(key * NHEADS + head) * HEADDIM + d];
  }
  return result / sum;
}

int main(void) {
  static float q[ELEMENTS], k[ELEMENTS], v[ELEMENTS], o[ELEMENTS];
  for (int i = 0; i < ELEMENTS; ++i) {
    q[i] = sinf(0.37f * (float)i);
    k[i] = cosf(0.61f * (float)i);
    v[i] = sinf(0.11f * (float)i + 1.0f);
  }

  fattn_problem problem = {.struct_size = sizeof problem, .abi_version = FATTN_ABI_VERSION, .pass = FATTN_FORWARD, .causal = 1};
  problem.q = tensor(q);
  problem.k = tensor(k);
  problem.v = tensor(v);
  problem.o = tensor(o);
  fattn_plan* plan = NULL;
  if (fattn_plan_create(&problem, &plan) != FATTN_OK) {
    fprintf(stderr, "%s\n", fattn_last_error());
    return 1;
  }

  fattn_plan_info info = {.struct_size = sizeof info};
  if (fattn_plan_query(plan, &info) != FATTN_OK) return 1;
  const size_t bytes = (info.workspace_bytes + 63) / 64 * 64;
  fattn_buffers buffers = {.struct_size = sizeof buffers, .q = q, .k = k, .v = v, .o = o, .workspace_bytes = bytes};
  buffers.workspace = bytes ? aligned_alloc(64, bytes) : NULL;
  const fattn_status status = fattn_plan_execute(plan, &buffers);
  if (status != FATTN_OK) fprintf(stderr, "%s: %s\n", fattn_status_name(status), fattn_last_error());
  printf("%s, %d threads, workspace of %zu bytes\n", info.kernel, (int)info.num_threads, info.workspace_bytes);
  fattn_plan_destroy(plan);
  free(buffers.workspace);
  if (status != FATTN_OK) return 1;

  double worst = 0;
  for (int query = 0; query < SEQLEN; ++query)
    for (int head = 0; head < NHEADS; ++head)
      for (int d = 0; d < HEADDIM; ++d) {
        const double error = fabs(o[(query * NHEADS + head) * HEADDIM + d] - expected(q, k, v, query, head, d));
        if (!(error <= worst)) worst = error;
      }
  printf("largest error %.1e\n", worst);
  return worst <= 1e-5 ? 0 : 1;
}
