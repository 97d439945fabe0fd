// Where the keys of a paged cache are, as kernels are told. Passed by value; used by the host too.
#pragma once

#include "device_abi/attention_params.h"
#include "device_abi/divisor.h"

namespace fattn {

struct Pages {
  const int* table;              // (batch, columns): numbers of pages
  long long table_stride;        // between batch entries
  long long k_stride, v_stride;  // elements from page to page; the strides of rows are those of the tensors
  int count;                     // pages of k and v
  int size;                      // keys of a page
  Divisor by_size;
};

// The parameters of specialisations with pages, in place of PairParams. Strides of k and v between batch entries are 0, and seqlen_k is what a row of
// the table has room for.
struct PagedParams : PairParams {
  Pages pages;
};

}  // namespace fattn
