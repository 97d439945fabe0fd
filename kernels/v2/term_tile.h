// Bias and mask of pairs on their way through shared memory: a block's are copied ahead, in 16 bytes each where they lie so, and read in the layout
// of accumulators. Element by element from global memory each pair would wait for its own.
#pragma once

#include "device_abi/lowest.h"
#include "device_abi/term_tile.h"
#include "kernels/constants.h"
#include "kernels/pair.h"
#include "kernels/ptx/async_copy.h"
#include "kernels/ptx/convert.h"
#include "kernels/ptx/ldmatrix.h"
#include "kernels/ptx/math.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/ptx/shared_pair.h"
#include "kernels/ptx/warp.h"

namespace fattn::v2 {

// Whether a specialisation reads them so: Spec::kStaged, false where there is no such member.
template <class Spec>
constexpr bool is_staged() {
  if constexpr (requires { Spec::kStaged; })
    return Spec::kStaged;
  else
    return false;
}

template <PairFeatures kPair>
constexpr TermTile term_tile(int rows, int keys, bool transposed) {
  return {rows, keys, kPair.bias == 0 ? 0 : kPair.bias == 2 ? 4 : 2, kPair.mask, transposed};
}

// The block's rows and keys of one tensor, of which `rows` and `keys` exist; the others become 0. All threads of a CTA together; asynchronous, as one
// cp.async group with what the caller copies besides, unless addresses are no multiples of 16 bytes. A row that all queries share is copied once.
template <int kBytes, int kRows, int kKeys, int kPitch, int kThreads>
__device__ __forceinline__ void copy_pairs(unsigned tile, const void* first, long long row_stride, int rows, int keys, int thread) {
  constexpr int kUnit = 16 / kBytes, kUnits = kKeys / kUnit, kAll = kRows * kUnits;
  const bool shared_row = row_stride == 0;
  // A unit of which some exist is not for cp.async: compute-sanitizer takes it for a read of all its bytes.
  const bool by_unit = (keys >= kKeys || keys % kUnit == 0) &&
                       ((reinterpret_cast<unsigned long long>(first) | static_cast<unsigned long long>(row_stride * kBytes)) & 15) == 0;
  const char* const from = static_cast<const char*>(first);
  if (by_unit) {
#pragma unroll
    for (int pass = 0; pass < (kAll + kThreads - 1) / kThreads; ++pass) {
      const int index = thread + pass * kThreads, row = index / kUnits, unit = index % kUnits;
      if ((kAll % kThreads != 0 && index >= kAll) || (shared_row && row > 0)) break;
      const bool exists = row < rows && unit * kUnit < keys;
      ptx::cp_async_16_zfill(tile + row * kPitch + unit * 16, from + row * row_stride * kBytes + unit * 16, exists ? 16 : 0);
    }
    return;
  }
  constexpr int kAtOnce = 4;  // loads of a thread that wait together
#pragma unroll 1
  for (int begin = thread; begin < (shared_row ? kKeys : kRows * kKeys); begin += kAtOnce * kThreads) {
    unsigned elements[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int index = begin + i * kThreads, row = index / kKeys, key = index % kKeys;
      const long long at = row * row_stride + key;
      elements[i] = 0;
      if (row >= rows || key >= keys) continue;
      if constexpr (kBytes == 4)
        elements[i] = reinterpret_cast<const unsigned*>(from)[at];
      else if constexpr (kBytes == 2)
        elements[i] = reinterpret_cast<const unsigned short*>(from)[at];
      else
        elements[i] = reinterpret_cast<const unsigned char*>(from)[at];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int index = begin + i * kThreads, row = index / kKeys;
      if (kRows * kKeys % (kAtOnce * kThreads) != 0 && row >= kRows) break;
      const unsigned to = tile + row * kPitch + index % kKeys * kBytes;
      if constexpr (kBytes == 4)
        ptx::st_shared_4(to, elements[i]);
      else if constexpr (kBytes == 2)
        ptx::st_shared_2(to, static_cast<unsigned short>(elements[i]));
      else
        ptx::st_shared_1(to, elements[i]);
    }
  }
}

template <PairFeatures kPair, TermTile kTile, int kThreads, class Terms>
__device__ __forceinline__ void copy_terms(unsigned tile, const Terms& terms, long long row, int rows, int key, int keys, int thread) {
  if constexpr (kTile.bias_bytes != 0)
    copy_pairs<kTile.bias_bytes, kTile.rows, kTile.keys, kTile.bias_pitch(), kThreads>(
        tile, static_cast<const char*>(terms.bias) + (row * terms.bias_row + key) * kTile.bias_bytes, terms.bias_row, rows, keys - key, thread);
  if constexpr (kTile.mask)
    copy_pairs<1, kTile.rows, kTile.keys, kTile.mask_pitch(), kThreads>(tile + kTile.mask_offset(), terms.mask + row * terms.mask_row + key,
                                                                        terms.mask_row, rows, keys - key, thread);
}

// A lane's place in the tile of a block whose queries are rows of accumulators. The terms are without ALiBi; -Inf hides a pair.
template <PairFeatures kPair, class Element, TermTile kTile>
struct TermReader {
  unsigned bias_at, mask_at;      // of the warp's first rows and the first keys
  unsigned bias_step, mask_step;  // 16 rows further: nothing where all queries share one

  template <class Terms>
  __device__ __forceinline__ TermReader(unsigned tile, const Terms& terms, int warp_row, int lane) {
    if constexpr (kTile.bias_bytes != 0) {
      const int row = kTile.bias_bytes == 2 ? lane % 16 : lane / 4, key = kTile.bias_bytes == 2 ? lane / 16 * 8 : lane % 4 * 2;
      bias_step = terms.bias_row == 0 ? 0 : 16 * kTile.bias_pitch();
      bias_at = tile + (terms.bias_row == 0 ? 0 : (warp_row + row) * kTile.bias_pitch()) + key * kTile.bias_bytes;
    }
    if constexpr (kTile.mask) {
      mask_step = terms.mask_row == 0 ? 0 : 16 * kTile.mask_pitch();
      mask_at = tile + kTile.mask_offset() + (terms.mask_row == 0 ? 0 : (warp_row + lane / 4) * kTile.mask_pitch()) + lane % 4 * 2;
    }
  }
  // In another tile, `bytes` further, from another key on.
  __device__ __forceinline__ TermReader at(unsigned bytes, int key) const {
    TermReader other = *this;
    if constexpr (kTile.bias_bytes != 0) other.bias_at += bytes + key * kTile.bias_bytes;
    if constexpr (kTile.mask) other.mask_at += bytes + key;
    return other;
  }
  // Of 16 rows and 16 keys: score tile n of 8 keys, elements as in an accumulator.
  __device__ __forceinline__ void read(float (&term)[2][4], int i, int chunk) const {
    if constexpr (kTile.bias_bytes == 2) {
      unsigned pairs[4];
      ptx::ldmatrix_x4(pairs, bias_at + i * bias_step + chunk * 32);
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          term[n][2 * half] = ptx::low_float<Element>(pairs[2 * n + half]);
          term[n][2 * half + 1] = ptx::high_float<Element>(pairs[2 * n + half]);
        }
    } else {
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float2 pair = {0, 0};
          if constexpr (kTile.bias_bytes == 4)
            pair = ptx::ld_shared_f32x2(bias_at + i * bias_step + half * (bias_step / 2) + (16 * chunk + 8 * n) * 4);
          term[n][2 * half] = pair.x;
          term[n][2 * half + 1] = pair.y;
        }
    }
    if constexpr (kTile.mask) {
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const unsigned pair = ptx::ld_shared_2(mask_at + i * mask_step + half * (mask_step / 2) + 16 * chunk + 8 * n);
          if ((pair & 0xffu) == 0) term[n][2 * half] = -kInfinity;
          if (pair < 0x100u) term[n][2 * half + 1] = -kInfinity;
        }
    }
  }
};

// The same where keys are rows of accumulators, for a warp's keys from `first_key` and queries from `first_query` of the block on. Score tile (i, j)
// has 16 keys and 8 queries.
template <PairFeatures kPair, class Element, TermTile kTile, int kKeyTiles>
struct TransposedTermReader {
  unsigned bias_at, mask_at;
  unsigned bias_pitch, mask_pitch;  // a query further: nothing where all share a row
  unsigned pairs[kKeyTiles][4];     // of 16-bit biases: what next() has read

  template <class Terms>
  __device__ __forceinline__ TransposedTermReader(unsigned tile, const Terms& terms, int first_key, int first_query, int lane) {
    if constexpr (kTile.bias_bytes != 0) {
      constexpr bool kMatrix = kTile.bias_bytes == 2;
      bias_pitch = terms.bias_row == 0 ? 0 : kTile.bias_pitch();
      const int query = first_query + (kMatrix ? lane % 8 + lane / 16 * 8 : lane % 4 * 2), key = first_key + (kMatrix ? lane / 8 % 2 * 8 : lane / 4);
      bias_at = tile + query * bias_pitch + key * kTile.bias_bytes;
    }
    if constexpr (kTile.mask) {
      mask_pitch = terms.mask_row == 0 ? 0 : kTile.mask_pitch();
      mask_at = tile + kTile.mask_offset() + (first_query + lane % 4 * 2) * mask_pitch + first_key + lane / 4;
    }
  }
  // Before the terms of score tiles j and j + 1, for an even j.
  __device__ __forceinline__ void next(int j) {
    if constexpr (kTile.bias_bytes == 2) {
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i) ptx::ldmatrix_x4_trans(pairs[i], bias_at + 8 * j * bias_pitch + i * 32);
    }
  }
  // Whether that tells more cheaply than pair by pair that next() has read nothing that hides, or is so low that its row may have no gradient: there
  // is a 16-bit bias alone.
  static constexpr bool kTells = kTile.bias_bytes == 2 && !kTile.mask && !kPair.documents;
  // All lanes of a warp together.
  __device__ __forceinline__ bool hides() const {
    unsigned least = pairs[0][0];
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) least = ptx::min2<Element>(least, pairs[i][e]);
    constexpr float kLow = kLowestLse / 2;  // the rest may be the score
    return !ptx::vote_all(ptx::low_float<Element>(least) > kLow && ptx::high_float<Element>(least) > kLow);
  }
  // Of key lane / 4 + 8 half and query 2 (lane % 4) + e of score tile (i, j), without ALiBi; -Inf hides the pair.
  __device__ __forceinline__ float term(int i, int half, int j, int e) const {
    float its = 0;
    if constexpr (kTile.bias_bytes == 2) {
      const unsigned pair = pairs[i][j % 2 * 2 + half];
      its = e == 0 ? ptx::low_float<Element>(pair) : ptx::high_float<Element>(pair);
    } else if constexpr (kTile.bias_bytes == 4) {
      its = ptx::ld_shared_f32(bias_at + (8 * j + e) * bias_pitch + (16 * i + 8 * half) * 4);
    }
    if constexpr (kTile.mask)
      if (ptx::ld_shared_1(mask_at + (8 * j + e) * mask_pitch + 16 * i + 8 * half) == 0) its = -kInfinity;
    return its;
  }
};

}  // namespace fattn::v2
