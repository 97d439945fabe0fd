// Before a pass whose caller asks for it: which of the lists in device memory, offsets of packed sequences and numbers of used keys, is out of range,
// and its first sequence or batch entry that is. The pass itself asks again: a bad entry's outputs are NaN, whatever this says.
#pragma once

#include "device_abi/list_status_params.h"
#include "kernels/pages.h"
#include "kernels/sequence.h"

namespace fattn {

// 0, or as FATTN_LIST_... of fattn.h.
__device__ __forceinline__ int list_code(const ListStatusParams& p, int n) {
  int keys = p.seqlen_k;
  if (p.of_q.offsets != nullptr) {
    if (p.batch == 0) return p.of_q.offsets[0] != 0 ? 1 : p.lengths == nullptr && p.of_k.offsets[0] != 0 ? 2 : 0;
    if (given_rows(p.of_q.offsets, p.of_q.stride, n, p.of_q.total, p.of_q.most).count < 0) return 1;
    if (p.lengths != nullptr) {
      const int begin = p.of_k.offsets[n * p.of_k.stride];
      if (begin < 0 || begin > p.of_k.total) return 2;
      return used_rows(p.of_k.offsets, p.of_k.stride, p.lengths, p.length_stride, n, p.of_k.total, p.of_k.most).count < 0 ? 3 : 0;
    }
    keys = given_rows(p.of_k.offsets, p.of_k.stride, n, p.of_k.total, p.of_k.most).count;
    if (keys < 0) return 2;
  }
  return p.lengths != nullptr && n < p.batch && used_keys(p.lengths, p.length_stride, n, keys) < 0 ? 3 : 0;
}

// The same of a paged cache, of which queries alone may be packed. Without a table nobody reads pages.
__device__ __forceinline__ int list_code(const ListStatusParams& p, const Pages& pages, int n) {
  if (p.of_q.offsets != nullptr) {
    if (p.batch == 0) return p.of_q.offsets[0] != 0 ? 1 : 0;
    if (given_rows(p.of_q.offsets, p.of_q.stride, n, p.of_q.total, p.of_q.most).count < 0) return 1;
  }
  if (n >= p.batch) return 0;
  const int keys = p.lengths == nullptr ? p.seqlen_k : used_keys(p.lengths, p.length_stride, n, p.seqlen_k);
  if (keys < 0) return 3;
  if (pages.table == nullptr) return 0;
  const EntryPages of_entry(pages, n);
  return of_entry.are_pages(0, of_entry.columns_of(keys), 0, 1) ? 0 : 4;
}
__device__ __forceinline__ int list_code(const ListStatusParams& p, const NoPages&, int n) { return list_code(p, n); }

template <class PagesOf = NoPages>
__device__ __forceinline__ void list_status(const ListStatusParams& p, const PagesOf& pages = {}) {
  constexpr int kCodes = is_same<PagesOf, NoPages> ? 4 : 8;
  __shared__ unsigned long long first;  // kCodes times the index, and the code; of none all bits
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) first = ~0ull;
  __syncthreads();
  for (long long n = thread; n < max(p.batch, 1); n += kListStatusThreads) {
    if (const int code = list_code(p, pages, static_cast<int>(n)); code != 0) {
      atomicMin(&first, kCodes * static_cast<unsigned long long>(n) + static_cast<unsigned long long>(code));
      break;
    }
  }
  __syncthreads();
  if (thread != 0) return;
  p.status[0] = first == ~0ull ? 0 : static_cast<int>(first % kCodes);
  p.status[1] = first == ~0ull ? 0 : static_cast<int>(first / kCodes);
}

}  // namespace fattn
