// Paged caches: key j of a batch entry is row j % size of page table[entry, j / size]. Nothing is read by a number that is no page's.
#pragma once

#include "device_abi/attention_params.h"
#include "kernels/pair.h"

namespace fattn {

__device__ __forceinline__ const Pages& pages_of(const AttentionParams& call) { return static_cast<const PagedParams&>(call).pages; }

// In the place of Pages, of specialisations without.
struct NoPages {};

// The rows of a batch entry's keys.
class EntryPages {
  const Pages& pages_;
  const int* const table_;

  __device__ __forceinline__ int divide(int key) const {
    return static_cast<int>(__umulhi(2 * static_cast<unsigned>(key), pages_.size_factor) >> pages_.size_shift);
  }

 public:
  __device__ __forceinline__ EntryPages(const Pages& pages, int batch) : pages_(pages), table_(pages.table + batch * pages.table_stride) {}

  struct Row {
    int page, row;
    __device__ __forceinline__ long long offset(long long page_stride, long long row_stride) const { return page * page_stride + row * row_stride; }
  };
  __device__ __forceinline__ Row operator()(int key) const {
    const int nth = divide(key);
    return {__ldg(table_ + nth), key - nth * pages_.size};
  }
  // Of a key and a value, in elements from the head's first one.
  __device__ __forceinline__ long long of_key(int key, long long row_stride) const { return (*this)(key).offset(pages_.k_stride, row_stride); }
  __device__ __forceinline__ long long of_value(int key, long long row_stride) const { return (*this)(key).offset(pages_.v_stride, row_stride); }

  __device__ __forceinline__ bool has(int page) const { return static_cast<unsigned>(page) < static_cast<unsigned>(pages_.count); }
  // Whether the table's numbers [begin, end), of which each of `threads` threads looks at its own, are pages.
  __device__ __forceinline__ bool are_pages(int begin, int end, int thread, int threads) const {
    bool good = true;
#pragma unroll 4
    for (int nth = begin + thread; nth < end; nth += threads) {
      const bool is_page = has(__ldg(table_ + nth));  // before it is asked for, so that the loads do not wait for each other
      good = good && is_page;
    }
    return good;
  }
  // How many numbers `keys` keys take.
  __device__ __forceinline__ int columns_of(int keys) const { return divide(keys + pages_.size - 1); }
};

// How many keys batch entry `batch` has; -1 if its length is out of range, or one of its pages: what the entry gets is NaN. All threads of a CTA.
template <int kThreads>
__device__ __forceinline__ int paged_keys(const AttentionParams& call, int batch) {
  const PairParams& p = pairs_of(call);
  const int keys = p.lengths == nullptr ? p.seqlen_k : p.lengths[batch * p.length_stride];
  bool good = 0 <= keys && keys <= p.seqlen_k;
  if (good) {
    const EntryPages pages(pages_of(call), batch);
    good = pages.are_pages(0, pages.columns_of(keys), static_cast<int>(threadIdx.x), kThreads);
  }
  return __syncthreads_and(good) != 0 ? keys : -1;
}

}  // namespace fattn
