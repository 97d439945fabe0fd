// Masks of the v3 kernels: which keys a row sees, [visible_begin, visible_end), and which rows see a key, [first_row, row_end). None of them falls
// from row to row, or from key to key.
#pragma once

#include "device_abi/attention_params.h"
#include "device_abi/mask.h"
#include "kernels/mask.h"
#include "kernels/pair.h"

namespace fattn::v3 {

// How many keys there are: seqlen_k, or what a batch entry has (PairFeatures::lengths); and queries, which packed sequences have of their own.
template <bool kLengths, bool kPacked = false>
struct Keys {
  static __device__ __forceinline__ Keys of(const AttentionParams&, int) { return {}; }
  __device__ __forceinline__ int count(const AttentionParams& p) const { return p.seqlen_k; }
  __device__ __forceinline__ int queries(const AttentionParams& p) const { return p.seqlen_q; }
};
template <>
struct Keys<true, false> {
  int keys;
  static __device__ __forceinline__ Keys of(const AttentionParams& p, int batch) { return {max(given_length(p, batch), 0)}; }
  __device__ __forceinline__ int count(const AttentionParams&) const { return keys; }
  __device__ __forceinline__ int queries(const AttentionParams& p) const { return p.seqlen_q; }
};
template <>
struct Keys<false, true> {
  int keys, rows;
  __device__ __forceinline__ int count(const AttentionParams&) const { return keys; }
  __device__ __forceinline__ int queries(const AttentionParams&) const { return rows; }
};

struct FullMask {
  static constexpr bool kUneven = false;  // every row sees all keys
  static constexpr bool kCausal = false;  // no row sees a key behind the one that it is aligned with
  static constexpr bool kBegins = false;  // every row sees the first key, and every key but the hidden ones is seen by the last row
  static constexpr bool kEnds = false;    // backward: the blocks of queries that a tile of keys meets go on to the last
  template <class Keys>
  static __device__ __forceinline__ int visible_end(const AttentionParams& p, Keys keys, int) {
    return keys.count(p);
  }
  template <class Keys>
  static __device__ __forceinline__ int first_row(const AttentionParams&, Keys, int) {
    return 0;
  }
};

// Of batch entries with lengths: there are hidden keys.
struct EntryMask : FullMask {
  static constexpr bool kUneven = true;
};

struct CausalMask {
  static constexpr bool kUneven = true;
  static constexpr bool kCausal = true;
  static constexpr bool kBegins = false;
  static constexpr bool kEnds = false;
  template <class Keys>
  static __device__ __forceinline__ int visible_end(const AttentionParams& p, Keys keys, int row) {
    return core::Mask32{keys.queries(p), keys.count(p), true}.visible_end(row);
  }
  template <class Keys>
  static __device__ __forceinline__ int first_row(const AttentionParams& p, Keys keys, int key) {
    return max(0, key - keys.count(p) + keys.queries(p));
  }
};

// With a beginning or an end or both. Rows behind the last, which a tile may have, see what the last sees: a row that sees nothing costs more.
struct WindowMask {
  static constexpr bool kUneven = true;
  static constexpr bool kCausal = false;
  static constexpr bool kBegins = true;
  static constexpr bool kEnds = true;
  static __device__ __forceinline__ int visible_begin(const AttentionParams& p, Keys<false>, int row) {
    return window_mask(p).visible_begin(min(row, p.seqlen_q - 1));
  }
  static __device__ __forceinline__ int visible_end(const AttentionParams& p, Keys<false>, int row) {
    return window_mask(p).visible_end(min(row, p.seqlen_q - 1));
  }
  static __device__ __forceinline__ int visible_begin(const AttentionParams& p, Keys<true> keys, int row) {
    return window_mask(p, keys.keys).visible_begin(min(row, p.seqlen_q - 1));
  }
  static __device__ __forceinline__ int visible_end(const AttentionParams& p, Keys<true> keys, int row) {
    return window_mask(p, keys.keys).visible_end(min(row, p.seqlen_q - 1));
  }
  static __device__ __forceinline__ int visible_begin(const AttentionParams& p, Keys<false, true> keys, int row) {
    return of_sequence(p, keys).visible_begin(min(row, keys.rows - 1));
  }
  static __device__ __forceinline__ int visible_end(const AttentionParams& p, Keys<false, true> keys, int row) {
    return of_sequence(p, keys).visible_end(min(row, keys.rows - 1));
  }
  static __device__ __forceinline__ int first_row(const AttentionParams& p, Keys<false>, int key) { return window_mask(p).first_row(key); }
  static __device__ __forceinline__ int row_end(const AttentionParams& p, Keys<false>, int key) { return window_mask(p).row_end(key); }
  static __device__ __forceinline__ int first_row(const AttentionParams& p, Keys<true> keys, int key) {
    return window_mask(p, keys.keys).first_row(key);
  }
  static __device__ __forceinline__ int row_end(const AttentionParams& p, Keys<true> keys, int key) { return window_mask(p, keys.keys).row_end(key); }
  static __device__ __forceinline__ int first_row(const AttentionParams& p, Keys<false, true> keys, int key) {
    return of_sequence(p, keys).first_row(key);
  }
  static __device__ __forceinline__ int row_end(const AttentionParams& p, Keys<false, true> keys, int key) {
    return of_sequence(p, keys).row_end(key);
  }

 private:
  static __device__ __forceinline__ core::Mask32 of_sequence(const AttentionParams& p, Keys<false, true> keys) {
    const FeatureParams& features = static_cast<const FeatureParams&>(p);
    return {keys.rows, keys.keys, false, features.window_left, features.window_right};
  }
};

// Backward, of documents: the keys that a mask shows may begin anywhere, and so may the queries. `Pairs`: the mask itself.
template <class Mask>
struct DocumentMask : Mask {
  using Pairs = Mask;
  static constexpr bool kUneven = true;
  static constexpr bool kBegins = true;
  static constexpr bool kEnds = true;
  template <class Keys>
  static __device__ __forceinline__ int visible_begin(const AttentionParams& p, Keys keys, int row) {
    if constexpr (Mask::kBegins) return Mask::visible_begin(p, keys, row);
    return 0;
  }
  template <class Keys>
  static __device__ __forceinline__ int row_end(const AttentionParams& p, Keys keys, int key) {
    if constexpr (Mask::kBegins) return Mask::row_end(p, keys, key);
    return keys.queries(p);
  }
};

// Backward, of a mask of pairs beside the mask: a tile of keys meets no blocks of queries in front and behind that hide all its pairs.
template <class Mask>
struct PairsMask : Mask {
  static constexpr bool kEnds = true;
};

// Which keys a row sees, of masks that need not begin.
template <class Mask, class Keys>
__device__ __forceinline__ int visible_begin(const AttentionParams& p, Keys keys, int row) {
  if constexpr (Mask::kBegins) return Mask::visible_begin(p, keys, row);
  return 0;
}
// And which rows a key.
template <class Mask, class Keys>
__device__ __forceinline__ int row_end(const AttentionParams& p, Keys keys, int key) {
  if constexpr (Mask::kBegins) return Mask::row_end(p, keys, key);
  return keys.queries(p);
}

}  // namespace fattn::v3
