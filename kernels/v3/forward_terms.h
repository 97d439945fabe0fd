// Biases in v3's forward pass. Two warps that have nothing else to do copy that of a tile's queries and a block's keys into shared memory, a block or
// more ahead. Consumers read it while the tensor cores multiply, in the layout of their scores. Specialisations without PairFeatures::bias have none
// of this.
#pragma once

#include "kernels/constants.h"
#include "kernels/pair.h"
#include "kernels/ptx/async_copy.h"
#include "kernels/ptx/convert.h"
#include "kernels/ptx/ldmatrix.h"
#include "kernels/ptx/mbarrier.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/ptx/shared_pair.h"
#include "kernels/ptx/warp.h"
#include "kernels/v3/block_order.h"
#include "kernels/v3/forward_shape.h"
#include "kernels/v3/forward_values.h"
#include "kernels/v3/schedule.h"

namespace fattn::v3 {

// The rows and keys of one tensor, of which `keys` exist (the others become 0) and `rows`, at least one (the others are as the last). Asynchronous
// where addresses are multiples of 16 bytes. A row that all queries share is copied once.
template <int kBytes, int kRows, int kKeys, int kPitch, int kUnrolled>
__device__ __forceinline__ void copy_pairs(unsigned tile, const char* first, long long row_bytes, int rows, int keys, int thread) {
  constexpr int kUnit = 16 / kBytes, kUnits = kKeys / kUnit, kRowsAtOnce = kTermThreads / kUnits;
  static_assert(kTermThreads % kUnits == 0);
  const int to = row_bytes == 0 ? 1 : kRows;
  int from_key = 0;  // of what is left for single elements: one unit, or all
  bool one_unit = false;
  if (((reinterpret_cast<unsigned long long>(first) | static_cast<unsigned long long>(row_bytes)) & 15) == 0) {
    // A unit of which some exist is not for cp.async: compute-sanitizer takes it for a read of all its bytes.
    const int exist = min(keys, kKeys), unit = thread % kUnits;
    from_key = exist / kUnit * kUnit;
    one_unit = exist != from_key;
    const char* const from = first + unit * 16;
    const unsigned at = tile + unit * 16;
    if (!one_unit || unit != from_key / kUnit) {
#pragma unroll kUnrolled
      for (int row = thread / kUnits; row < to; row += kRowsAtOnce)
        ptx::cp_async_16_zfill(at + row * kPitch, from + min(row, rows - 1) * row_bytes, unit < from_key / kUnit ? 16 : 0);
    }
    if (!one_unit) return;
  }
#pragma unroll 1
  for (int index = thread; index < to * (one_unit ? kUnit : kKeys); index += kTermThreads) {
    const int row = one_unit ? index / kUnit : index / kKeys, key = from_key + (one_unit ? index % kUnit : index % kKeys);
    const char* const from = first + min(row, rows - 1) * row_bytes + key * kBytes;
    const unsigned at = tile + row * kPitch + key * kBytes;
    const bool exists = key < keys;
    if constexpr (kBytes == 4)
      ptx::st_shared_4(at, exists ? *reinterpret_cast<const unsigned*>(from) : 0u);
    else
      ptx::st_shared_2(at, exists ? *reinterpret_cast<const unsigned short*>(from) : static_cast<unsigned short>(0));
  }
}

// Tile by tile those of each block, in the order in which blocks are computed. kTermThreads threads together, `thread` of them. While a block's is on
// its way they look through the values of the block before (v3/forward_values.h), whose product is wanted later.
template <class Spec>
__device__ __forceinline__ void load_terms(const ForwardCall& p, unsigned shared, Barriers<Spec> barriers, int thread) {
  using Shape = ForwardShape<Spec>;
  constexpr TermTile kTile = Shape::kTermTile;
  constexpr int kBlockN = Shape::kBlockN, kUnrolled = kPairOf<Spec>.mask ? 2 : 4;  // more spills
  static_assert(kTermThreads == kValueThreads);
  Ring<Shape::kStagesTerms> stage;
  ValueGuard<Spec> guard;
  for (int nth = 0;; ++nth) {
    const int number = tile_number<Spec>(p, shared, nth);
    if (number < 0) break;
    const auto place = tile_place<Spec>(p, shared, nth, number);
    const auto keys = keys_of<Spec>(p.call, place);
    const Terms<kPairOf<Spec>, typename Spec::Element> terms(p.call, place.batch, place.head, 0);
    const TileValues values = TileValues::of<Spec>(p, shared, place, nth);
    const int rows = p.call.seqlen_q - place.row, begin = block_begin<typename Spec::Mask, kBlockN>(p.call, keys, place.row);
    const int first = first_block<Spec, Shape::kBlockM>(p.call, keys, place.row);
    for (int block = first; block >= begin; --block) {
      ptx::mbarrier_wait(barriers.terms_empty(stage.stage), stage.parity ^ 1);
      const unsigned tile = shared + Shape::kOffsetTerms + stage.stage * kTile.bytes();
      const int key = block * kBlockN, exist = p.call.seqlen_k - key;
      copy_pairs<kTile.bias_bytes, kTile.rows, kTile.keys, kTile.bias_pitch(), kUnrolled>(
          tile, static_cast<const char*>(terms.bias) + (place.row * terms.bias_row + key) * kTile.bias_bytes, terms.bias_row * kTile.bias_bytes, rows,
          exist, thread);
      ptx::mbarrier_arrive(barriers.terms_full(stage.stage));           // of what is stored at once
      ptx::cp_async_mbarrier_arrive(barriers.terms_full(stage.stage));  // of what is on its way
      stage.next();
      if (block < first) guard.template look_at<false>(p, shared, barriers, values, block + 1);
    }
    guard.look_at(p, shared, barriers, values, begin);
  }
  ptx::cp_async_wait_all();
}

// Without a bias: nothing.
template <class Spec, bool kAny>
struct PairTerms {
  static constexpr bool kAdds = false;
  __device__ __forceinline__ void read(const ForwardCall&, unsigned, Barriers<Spec>, int, int) {}
  template <bool kExact, class Scores>
  __device__ __forceinline__ void apply(Scores&, float) const {}
  __device__ __forceinline__ void free(Barriers<Spec>, int) {}
};

// Those of a lane's pairs of one block.
template <class Spec>
struct PairTerms<Spec, true> {
  using Shape = ForwardShape<Spec>;
  static constexpr TermTile kTile = Shape::kTermTile;
  static constexpr int kBlockN = Shape::kBlockN, kScores = kBlockN / 2;
  static constexpr bool kAdds = true;

  Ring<Shape::kStagesTerms> stage;
  unsigned pairs[kTile.bias_bytes == 2 ? kBlockN / 4 : 1];
  float bias[kTile.bias_bytes == 4 ? kScores : 1];

  // `row`: the warp's first in the tile.
  __device__ __forceinline__ void read(const ForwardCall& p, unsigned shared, Barriers<Spec> barriers, int row, int lane) {
    ptx::mbarrier_wait(barriers.terms_full(stage.stage), stage.parity);
    read_again(p, shared, row, lane);
  }
  // After read(), before free().
  __device__ __forceinline__ void read_again(const ForwardCall& p, unsigned shared, int row, int lane) {
    const PairParams& call = pairs_of(p.call);
    const unsigned tile = shared + Shape::kOffsetTerms + stage.stage * kTile.bytes();
    if constexpr (kTile.bias_bytes == 2) {
      const unsigned at = tile + (call.bias_strides.row == 0 ? 0 : (row + lane % 16) * kTile.bias_pitch()) + lane / 16 * 16;
#pragma unroll
      for (int chunk = 0; chunk < kBlockN / 16; ++chunk) {
        unsigned x[4];
        ptx::ldmatrix_x4(x, at + chunk * 32);
#pragma unroll
        for (int j = 0; j < 4; ++j) pairs[4 * chunk + j] = x[j];
      }
    } else {
      const bool of_all = call.bias_strides.row == 0;
      const unsigned at = tile + (of_all ? 0 : (row + lane / 4) * kTile.bias_pitch()) + lane % 4 * 8, step = of_all ? 0 : 8 * kTile.bias_pitch();
#pragma unroll
      for (int i = 0; i < kScores; i += 2) {
        const float2 x = ptx::ld_shared_f32x2(at + i / 2 % 2 * step + i / 4 * 32);
        bias[i] = x.x;
        bias[i + 1] = x.y;
      }
    }
  }

  // To the scores: bias, after which they have the scale `natural`, and -Inf where it hides them. Unless kExact, a score that is not finite may be
  // NaN there, and a bias as low as kLowestBias be any low number, which is enough where rows have seen keys with others.
  template <bool kExact>
  __device__ __forceinline__ void apply(float (&s)[kScores], float natural) const {
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const float term = term_of(i);
      const float sum = fmaf(s[i], natural, term);
      s[i] = kExact ? or_lowest(sum, term) : sum;
    }
  }

  // The block's are read.
  __device__ __forceinline__ void free(Barriers<Spec> barriers, int lane) {
    ptx::warp_sync();
    if (lane == 0) ptx::mbarrier_arrive(barriers.terms_empty(stage.stage));
    stage.next();
  }

 private:
  __device__ __forceinline__ float term_of(int i) const {
    if constexpr (kTile.bias_bytes == 2) {
      const unsigned pair = pairs[i / 2];
      return i % 2 == 0 ? ptx::low_float<typename Spec::Element>(pair) : ptx::high_float<typename Spec::Element>(pair);
    } else {
      return bias[i];
    }
  }
};

}  // namespace fattn::v3
