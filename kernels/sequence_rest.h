// Behind a pass over packed sequences: rows that no sequence's results are in. Behind the last sequence they are as rows that see nothing (0, lse
// -Inf); where offsets are out of range, from the one to the other, and behind the last, NaN. kLengths: so are those of a sequence whose number of
// used keys is out of range, which the pass itself took for 0.
#pragma once

#include "kernels/constants.h"
#include "kernels/ptx/barrier.h"
#include "kernels/ptx/dependent_launch.h"
#include "kernels/sequence.h"
#include "shared/sequence_rest_params.h"

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

template <bool kLengths>
__device__ __forceinline__ void sequence_rest(const SequenceRestParams& p) {
  const int cta = static_cast<int>(blockIdx.x), ctas = static_cast<int>(gridDim.x);
  const auto given = [&](const RestOfRows& part, int n) { return given_rows(part.offsets, part.stride, n, part.total, part.most); };
  const auto good = [&](int n) { return given(p.parts[0], n).count >= 0 && given(p.parts[1], n).count >= 0; };
  bool bad = false;  // any of them; all threads of all CTAs ask for all sequences together
  for (int n = static_cast<int>(threadIdx.x); n < p.batch; n += kRestThreads) bad = bad || !good(n);
  bad = ptx::bar_or(bad);
#if __CUDA_ARCH__ >= 900
  ptx::wait_for_kernel_before();  // none of the pass's kernels writes offsets
#endif
  for (const RestOfRows& part : p.parts) {
    const long long last = part.offsets[p.batch * part.stride];
    const bool nan = bad || (p.batch == 0 && last != 0);
    fill_rows(part, nan ? max(0ll, min(last, part.total)) : last, part.total, cta, ctas, nan);
    if (p.batch == 0 && nan) fill_rows(part, 0, min(max(0ll, last), part.total), cta, ctas, true);
  }
  if constexpr (kLengths) {
    for (int n = cta; n < p.batch; n += ctas) {
      const Rows own[] = {given(p.parts[0], n), given(p.parts[1], n)};
      if (own[0].count < 0 || own[1].count < 0 || used_keys(p.lengths, p.length_stride, n, own[1].count) >= 0) continue;
      for (int part = 0; part < 2; ++part) fill_rows(p.parts[part], own[part].begin, own[part].begin + own[part].count, 0, 1, true);
    }
  }
  if (!bad) return;
  for (int n = cta; n < p.batch; n += ctas) {
    if (good(n)) continue;
    for (const RestOfRows& part : p.parts) {
      const long long begin = part.offsets[n * part.stride], end = part.offsets[(n + 1) * part.stride];
      const long long low = n == 0 ? 0 : min(begin, end), high = max(begin, end);  // the first begins with the first row
      fill_rows(part, max(0ll, low), min(part.total, high), 0, 1, true);
    }
  }
}

}  // namespace fattn
