// What a block hides from a consumer's rows (v3/forward_consumer.h): scores that become -Inf before weights are made of them.
#pragma once

#include "kernels/v3/forward_consumer.h"

namespace fattn::v3 {

// Hides what the lane's rows do not see of block `of`. The branches are the warp's: most blocks that rows end in are none that they begin in.
template <class Spec>
__device__ __forceinline__ void Consumer<Spec>::hide(int of) {
  of += visible.first_block(p);
  if constexpr (kMaskAlone) {  // in its words
    const int first = of * kBlockN + lane() % 4 * 2;
    visible.hide_behind(Mask::visible_end(p.call, keys, row + own_row()) - first, Mask::visible_end(p.call, keys, row + own_row() + 8) - first);
  } else if constexpr (kDocuments) {
    hide_other_documents(of);
    if (Mask::visible_end(p.call, keys, row + warp_row()) < (of + 1) * kBlockN) hide_behind(of);
  } else {
    hide_behind(of);
  }
  if constexpr (Mask::kBegins)
    if (Mask::visible_begin(p.call, keys, row + warp_row() + 15) > of * kBlockN) hide_before(of);
}

// Keys behind the last that a row sees.
template <class Spec>
__device__ __forceinline__ void Consumer<Spec>::hide_behind(int of) {
  const int first = of * kBlockN + lane() % 4 * 2;  // this lane's first key
  const int end0 = Mask::visible_end(p.call, keys, row + own_row()) - first, end1 = Mask::visible_end(p.call, keys, row + own_row() + 8) - first;
#pragma unroll
  for (int i = 0; i < kBlockN / 2; ++i)
    if (i / 4 * 8 + i % 2 >= (i % 4 < 2 ? end0 : end1)) s[i] = -kInfinity;
}

// Keys before the first.
template <class Spec>
__device__ __forceinline__ void Consumer<Spec>::hide_before(int of) {
  const int first = of * kBlockN + lane() % 4 * 2;
  const int begin0 = Mask::visible_begin(p.call, keys, row + own_row()) - first,
            begin1 = Mask::visible_begin(p.call, keys, row + own_row() + 8) - first;
#pragma unroll
  for (int i = 0; i < kBlockN / 2; ++i)
    if (i / 4 * 8 + i % 2 < (i % 4 < 2 ? begin0 : begin1)) s[i] = -kInfinity;
}

// Keys of other documents than the row's.
template <class Spec>
__device__ __forceinline__ void Consumer<Spec>::hide_other_documents(int of) {
  if (keys.one_begin <= of && of < keys.one_end) return;
  Keys found = keys;
  if constexpr (kTightest) found.entry = ptx::opaque(found.entry);  // addresses of its own ids are not kept
  const int id0 = found.id_of_query(p.call, row + own_row()), id1 = found.id_of_query(p.call, row + own_row() + 8);
  const int2* const ids = reinterpret_cast<const int2*>(found.ids_of_block(p.call, of)) + lane() % 4;
  if constexpr (kTightDocuments) {  // not all ids at once
    static_assert(kBlockN / 2 <= 32);
    unsigned hidden = 0;
#pragma unroll 1
    for (int n = kBlockN / 8 - 1; n >= 0; --n) {
      const int2 id = ids[n * 4];
      hidden = hidden << 4 | (id.x != id0 ? 1u : 0u) | (id.y != id0 ? 2u : 0u) | (id.x != id1 ? 4u : 0u) | (id.y != id1 ? 8u : 0u);
    }
#pragma unroll
    for (int i = 0; i < kBlockN / 2; ++i)
      if ((hidden & 1u << i) != 0) s[i] = -kInfinity;
  } else {
#pragma unroll
    for (int n = 0; n < kBlockN / 8; ++n) {
      const int2 id = ids[n * 4];
      if (id.x != id0) s[4 * n] = -kInfinity;
      if (id.y != id0) s[4 * n + 1] = -kInfinity;
      if (id.x != id1) s[4 * n + 2] = -kInfinity;
      if (id.y != id1) s[4 * n + 3] = -kInfinity;
    }
  }
}

// Pairs that a mask of pairs does not show.
template <class Spec>
__device__ __forceinline__ void Consumer<Spec>::hide_by_words() {
  if constexpr (kPairOf<Spec>.mask) visible.hide(s, static_cast<unsigned>(pairs_of(p.call).tile_groups));  // which packed sequences have
}

}  // namespace fattn::v3
