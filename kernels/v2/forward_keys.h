// Which keys a tile of v2's forward pass (kernels/v2/forward.h) meets: how many there are, which of them rows see, and the blocks that any row sees.
#pragma once

#include "device_abi/mask.h"
#include "kernels/mask.h"
#include "kernels/pages.h"
#include "kernels/pair.h"
#include "kernels/v2/forward_shape.h"
#include "kernels/v2/schedule.h"

namespace fattn::v2 {

// -1 where a page or the length is out of range (pages alone).
template <class Spec, class Params>
__device__ __forceinline__ int given_keys_of(const AttentionParams& call, const Params& p, int batch) {
  if constexpr (kPairOf<Spec>.paged)
    return paged_keys<ForwardShape<Spec>::kThreads>(call, batch);
  else
    return keys_of<kPairOf<Spec>>(p, batch);
}

template <class Spec, class Params>
__device__ __forceinline__ core::Mask32 forward_mask(const Params& p, int seqlen_k) {
  if constexpr (Spec::kWindow)
    return window_mask_of<kPairOf<Spec>>(p, seqlen_k);
  else
    return core::Mask32{p.seqlen_q, kPairOf<Spec>.lengths ? seqlen_k : p.seqlen_k, Spec::kCausal};
}

// Ids of documents: the one that all queries of the tile have, if they have one.
struct TileDocument {
  int id = 0;
  bool is_one = false;
};

// The blocks of keys: without those whose documents no query of the tile is of. All threads of the CTA, before anything is in its shared memory.
template <class Spec, class Params>
__device__ __forceinline__ KeyBlocks forward_key_blocks(const Params& p, const Place& place, const core::Mask32& mask, int seqlen_k,
                                                        unsigned char* shared, TileDocument& document) {
  using Shape = ForwardShape<Spec>;
  KeyBlocks seen = key_blocks<Shape::kBlockM, Spec::kBlockN>(mask, place.row);
  if constexpr (kPairOf<Spec>.documents) {
    int* const slots = reinterpret_cast<int*>(shared);
    seen = blocks_of_documents<Shape::kThreads, Shape::kBlockM, Spec::kBlockN>(pairs_of(p), place, seen, seqlen_k, slots);
    document.id = slots[0];
    document.is_one = document.id == slots[1];
    __syncthreads();  // before the queries are where the range was
  }
  return seen;
}

}  // namespace fattn::v2
