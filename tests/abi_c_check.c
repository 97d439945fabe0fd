/* fattn.h in strict C11: it compiles, and one small attention comes out right. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "fattn/fattn.h"

_Static_assert(sizeof(fattn_tensor) == 88, "fattn_tensor");
_Static_assert(sizeof(fattn_executor) == 24, "fattn_executor");
_Static_assert(sizeof(fattn_merge_part) == 4 * sizeof(fattn_tensor), "fattn_merge_part");

static fattn_tensor tensor(float* data, int64_t seqlen, int64_t headdim) {
  fattn_tensor t;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.dtype = FATTN_F32;
  t.ndim = 4;
  t.device_type = FATTN_DEVICE_CPU;
  t.shape[0] = 1;
  t.shape[1] = seqlen;
  t.shape[2] = 1;
  t.shape[3] = headdim;
  t.strides[0] = seqlen * headdim;
  t.strides[1] = headdim;
  t.strides[2] = headdim;
  t.strides[3] = 1;
  return t;
}

/* Parts with log-sum-exps of 0 and log(3) weigh 1/4 and 3/4. */
static int merge_is_right(void) {
  float o1[1] = {4.0f}, o2[1] = {8.0f}, lse1[1] = {0.0f}, lse2[1] = {1.0986123f};
  fattn_merge_part parts[2];
  fattn_merge_problem p = {.struct_size = sizeof p, .abi_version = FATTN_ABI_VERSION, .nparts = 2};
  memset(parts, 0, sizeof parts);
  parts[0].o = tensor(o1, 1, 1);
  parts[1].o = tensor(o2, 1, 1);
  parts[0].lse = tensor(lse1, 1, 1);
  parts[1].lse = tensor(lse2, 1, 1);
  parts[0].lse.ndim = parts[1].lse.ndim = 3;
  p.parts = parts;
  p.o = parts[0].o;
  if (fattn_merge(&p) != FATTN_OK) {
    printf("%s\n", fattn_last_error());
    return 0;
  }
  if (!(fabsf(o1[0] - 7.0f) <= 1e-5f)) printf("merged o is %.9g, expected 7\n", (double)o1[0]);
  return fabsf(o1[0] - 7.0f) <= 1e-5f;
}

/* (1, 0) turned by a right angle is (0, 1). */
static int rotary_is_right(void) {
  float x[2] = {1.0f, 0.0f}, cosine[1] = {0.0f}, sine[1] = {1.0f};
  fattn_rotary_problem p = {.struct_size = sizeof p, .abi_version = FATTN_ABI_VERSION};
  p.x = p.y = tensor(x, 1, 2);
  p.cos = tensor(cosine, 1, 1);
  p.sin = tensor(sine, 1, 1);
  p.cos.ndim = p.sin.ndim = 2;
  if (fattn_rotary(&p) != FATTN_OK) {
    printf("%s\n", fattn_last_error());
    return 0;
  }
  if (!(x[0] == 0.0f && x[1] == 1.0f)) printf("turned to (%.9g, %.9g), expected (0, 1)\n", (double)x[0], (double)x[1]);
  return x[0] == 0.0f && x[1] == 1.0f;
}

/* A key goes behind the one that is there. */
static int append_is_right(void) {
  float key[2] = {3.0f, 4.0f}, cache[4] = {1.0f, 2.0f, 0.0f, 0.0f}, values[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  fattn_append_problem p = {.struct_size = sizeof p, .abi_version = FATTN_ABI_VERSION, .cache_seqlen = 1};
  p.k = p.v = tensor(key, 1, 2);
  p.k_cache = tensor(cache, 2, 2);
  p.v_cache = tensor(values, 2, 2);
  if (fattn_append(&p) != FATTN_OK) {
    printf("%s\n", fattn_last_error());
    return 0;
  }
  if (!(cache[0] == 1.0f && cache[2] == 3.0f && values[3] == 4.0f))
    printf("the cache is (%.9g, %.9g), expected (1, 3)\n", (double)cache[0], (double)cache[2]);
  return cache[0] == 1.0f && cache[2] == 3.0f && values[3] == 4.0f;
}

int main(void) {
  /* Two keys with the scores 0 and log(3) weigh 1/4 and 3/4. */
  float q[1] = {1.0f}, k[2] = {0.0f, 1.0986123f}, v[2] = {4.0f, 8.0f}, o[1] = {0.0f}, lse[1] = {0.0f};
  fattn_problem p = {.struct_size = sizeof p, .abi_version = FATTN_ABI_VERSION};
  fattn_status status;
  p.q = tensor(q, 1, 1);
  p.k = tensor(k, 2, 1);
  p.v = tensor(v, 2, 1);
  p.o = tensor(o, 1, 1);
  p.lse = tensor(lse, 1, 1);
  p.lse.ndim = 3;
  status = fattn_execute(&p);
  if (status != FATTN_OK) {
    printf("%s: %s\n", fattn_status_name(status), fattn_last_error());
    return 1;
  }
  if (!(fabsf(o[0] - 7.0f) <= 1e-5f) || !(fabsf(lse[0] - 1.3862944f) <= 1e-5f)) {
    printf("o is %.9g, expected 7; lse is %.9g, expected log(4)\n", (double)o[0], (double)lse[0]);
    return 1;
  }
  if (!merge_is_right() || !rotary_is_right() || !append_is_right()) return 1;
  p.struct_size = 8;
  return fattn_execute(&p) == FATTN_ERROR_ABI ? 0 : 1;
}
