/* fattn.h in strict C11: it compiles, and one small attention comes out right. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "fattn/fattn.h"

_Static_assert(sizeof(fattn_tensor) == 88, "fattn_tensor");
_Static_assert(sizeof(fattn_executor) == 24, "fattn_executor");

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
  p.struct_size = 8;
  return fattn_execute(&p) == FATTN_ERROR_ABI ? 0 : 1;
}
