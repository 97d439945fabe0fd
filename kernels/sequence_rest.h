// Behind a pass over packed sequences: rows that no sequence's results are in. Behind the last sequence they are as rows that see nothing (0, lse
// -Inf); where offsets are out of range, from the one to the other, and behind the last, NaN. kLengths: the queries of a sequence whose keys are out
// of range are NaN too; the gradients of keys that no sequence uses are 0, or NaN if some sequence is out of range, whose keys nobody knows.
// kPaged: keys are in pages; the pass itself knows which of these are out of range.
#pragma once

#include "device_abi/sequence_rest_params.h"
#include "kernels/constants.h"
#include "kernels/ptx/barrier.h"
#include "kernels/ptx/dependent_launch.h"
#include "kernels/sequence.h"

namespace fattn {

// Rows [begin, end) of the outputs of `part`, every `step`-th from begin + first on, by all threads of a CTA.
__device__ __forceinline__ void fill_rows(const RestOfRows& part, long long begin, long long end, long long first, long long step, bool nan) {
  const int thread = static_cast<int>(threadIdx.x);
  for (long long row = begin + first; row < end; row += step) {
#pragma unroll
    for (const RestOutput& output : part.outputs) {
      if (output.to == nullptr) continue;
      for (int i = thread; i < part.heads * output.columns; i += kRestThreads)
        output.to[row * output.row_stride + i / output.columns * output.head_stride + i % output.columns] = nan ? 0x7fff : 0;  // NaN in either dtype
    }
    if (part.lse == nullptr) continue;
    for (int head = thread; head < part.heads; head += kRestThreads)
      part.lse[row * part.lse_row_stride + head * part.lse_head_stride] = nan ? __uint_as_float(0x7fffffffu) : -kInfinity;
  }
}

inline constexpr int kRestKeys = kRestThreads;  // that a CTA looks at together

// Of sequences that say how many keys they use: rows of dk and dv that are nobody's. All threads of a CTA.
__device__ __forceinline__ void fill_unused_keys(const SequenceRestParams& p, bool nan) {
  const RestOfRows& keys = p.parts[1];
  if (keys.outputs[0].to == nullptr) return;
  __shared__ unsigned char used[kRestKeys];
  const int thread = static_cast<int>(threadIdx.x);
  for (long long first = static_cast<long long>(blockIdx.x) * kRestKeys; first < keys.total; first += static_cast<long long>(gridDim.x) * kRestKeys) {
    const long long end = min(keys.total, first + kRestKeys);
    __syncthreads();
    used[thread] = 0;
    __syncthreads();
    for (int n = thread; n < p.batch; n += kRestThreads) {
      const Rows q = given_rows(p.parts[0].offsets, p.parts[0].stride, n, p.parts[0].total, p.parts[0].most);
      const Rows k = used_rows(keys.offsets, keys.stride, p.lengths, p.length_stride, n, keys.total, keys.most);
      if (q.count < 0 || k.count < 0) continue;
      for (long long row = max(first, static_cast<long long>(k.begin)); row < min(end, static_cast<long long>(k.begin) + k.count); ++row)
        used[row - first] = 1;
    }
    __syncthreads();
    for (long long row = first; row < end; ++row)
      if (used[row - first] == 0) fill_rows(keys, row, row + 1, 0, 1, nan);
  }
}

template <bool kLengths, bool kPaged = false>
__device__ __forceinline__ void sequence_rest(const SequenceRestParams& p) {
  const int cta = static_cast<int>(blockIdx.x), ctas = static_cast<int>(gridDim.x);
  constexpr int kParts = kLengths ? 1 : 2;  // whose rows lie one sequence behind the other
  const auto good_rows = [&](int part, int n) {
    const RestOfRows& of = p.parts[part];
    return given_rows(of.offsets, of.stride, n, of.total, of.most).count >= 0;
  };
  const auto good = [&](int n) { return good_rows(0, n) && (kLengths || good_rows(1, n)); };
  const auto good_keys = [&](int n) {
    const RestOfRows& of = p.parts[1];
    if constexpr (kPaged) return used_keys(p.lengths, p.length_stride, n, of.most) >= 0;
    return used_rows(of.offsets, of.stride, p.lengths, p.length_stride, n, of.total, of.most).count >= 0;
  };
  bool bad = false, bad_keys = false;  // any of them; all threads of all CTAs ask for all sequences together
  for (int n = static_cast<int>(threadIdx.x); n < p.batch; n += kRestThreads) {
    bad = bad || !good(n);
    if constexpr (kLengths) bad_keys = bad_keys || !good_keys(n);
  }
  bad = ptx::bar_or(bad);
  if constexpr (kLengths) bad_keys = ptx::bar_or(bad_keys);
#if __CUDA_ARCH__ >= 900
  ptx::wait_for_kernel_before();  // none of the pass's kernels writes offsets
#endif
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const RestOfRows& part = p.parts[i];
    const long long last = part.offsets[p.batch * part.stride];
    const bool nan = bad || (p.batch == 0 && last != 0);
    fill_rows(part, nan ? max(0ll, min(last, part.total)) : last, part.total, cta, ctas, nan);
    if (p.batch == 0 && nan) fill_rows(part, 0, min(max(0ll, last), part.total), cta, ctas, true);
  }
  if constexpr (kLengths) {
    if constexpr (!kPaged) fill_unused_keys(p, bad || bad_keys);
    if (!bad && !bad_keys) return;
  } else {
    if (!bad) return;
  }
  for (int n = cta; n < p.batch; n += ctas) {
    if (good(n) && (!kLengths || good_keys(n))) continue;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const RestOfRows& part = p.parts[i];
      const long long begin = part.offsets[n * part.stride], end = part.offsets[(n + 1) * part.stride];
      const long long low = n == 0 ? 0 : min(begin, end), high = max(begin, end);  // the first begins with the first row
      fill_rows(part, max(0ll, low), min(part.total, high), 0, 1, true);
    }
  }
}

}  // namespace fattn
