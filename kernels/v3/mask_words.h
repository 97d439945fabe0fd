// A mask of pairs in the v3 kernels. A kernel before them makes bits of the mask's bytes: of 64 queries and 64 keys a word for each thread of a
// warpgroup, of its 32 pairs. So what is read in the loop is one word a thread and 64 keys, side by side.
//
// Bit i is that of pair s[i], set if the mask shows it or there is no such query; keys that there are not are hidden forward, and shown backward.
// Accumulators of a warpgroup have queries as rows in the forward pass, and keys backward (v3/backward_fragments.h). Forward it says besides where
// the blocks begin and end that show anything (v3/masked_keys.h), and backward which blocks do (v3/backward_masked.h).
#pragma once

#include "device_abi/v3_mask_words.h"
#include "kernels/pair.h"
#include "kernels/ptx/barrier.h"
#include "kernels/ptx/dependent_launch.h"
#include "kernels/ptx/warp.h"

namespace fattn::v3 {

// Where the words are. A mask that batch entries, heads or rows share has them once.
template <bool kForward>
struct MaskWordsPlace {
  const PairParams& p;

  __device__ __forceinline__ bool of_entries() const { return p.pair_mask_strides.batch != 0; }
  __device__ __forceinline__ bool of_heads() const { return p.pair_mask_strides.head != 0; }
  __device__ __forceinline__ bool of_rows() const { return p.pair_mask_strides.row != 0; }
  __device__ __forceinline__ int heads() const { return of_heads() ? p.nheads : 1; }
  __device__ __forceinline__ int row_blocks() const { return of_rows() ? (p.seqlen_q + kV3MaskSide - 1) / kV3MaskSide : 1; }
  __device__ __forceinline__ int key_blocks() const { return v3_mask_key_blocks(p.seqlen_k, kForward); }
  __device__ __forceinline__ int number_of(int batch, int head) const { return (of_entries() ? batch * heads() : 0) + (of_heads() ? head : 0); }
  // The number of a block of queries and keys.
  __device__ __forceinline__ int block(int batch, int head, int row, int key) const {
    return (number_of(batch, head) * row_blocks() + (of_rows() ? row / kV3MaskSide : 0)) * key_blocks() + key / kV3MaskSide;
  }
  // The word of thread 0.
  __device__ __forceinline__ unsigned* words(int number) const {
    return static_cast<unsigned*>(p.tiles) + static_cast<long long>(number) * kV3MaskThreads;
  }
  __device__ __forceinline__ unsigned* words(int batch, int head, int row, int key) const { return words(block(batch, head, row, key)); }
  // Forward: the number of range `part` of a block of queries, and where it is.
  __device__ __forceinline__ int range(int batch, int head, int row, int part) const {
    return (number_of(batch, head) * row_blocks() + (of_rows() ? row / kV3MaskSide : 0)) * v3_mask_ctas(p.seqlen_k, kForward) + part;
  }
  __device__ __forceinline__ unsigned* range(int number) const { return static_cast<unsigned*>(p.tiles) - 1 - number; }
  // Backward: whether the first block of queries shows something of the 64 keys from `key` on; that of the next block is a byte before it.
  __device__ __forceinline__ unsigned char* shows(int batch, int head, int key) const {
    const long long number = (static_cast<long long>(number_of(batch, head)) * key_blocks() + key / kV3MaskSide) * row_blocks();
    return static_cast<unsigned char*>(p.tiles) - 1 - number;
  }
};

// Of four bytes a bit each: whether it is not 0.
__device__ __forceinline__ unsigned bits_of_bytes(unsigned x) {
  const unsigned highest = (x | ((x & 0x7f7f7f7fu) + 0x7f7f7f7fu)) >> 7 & 0x01010101u;
  return highest * 0x00204081u >> 21 & 15u;
}

// A thread's word of a block, from `units` of the mask's first row and the block's first keys: backward, where it has two keys and 16 queries,
template <int kPitch>
__device__ __forceinline__ unsigned word_of_two_keys(const unsigned short* units, int warp, int lane) {
  unsigned word = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const unsigned of_keys = units[(8 * i + lane % 4 * 2 + e) * kPitch + warp] >> lane / 4;
      word |= ((of_keys & 1u) | (of_keys >> 6 & 4u)) << (4 * i + e);
    }
  return word;
}
// and forward, where it has two queries and of each 8 keys two.
template <int kPitch>
__device__ __forceinline__ unsigned word_of_two_queries(const unsigned short* units, int warp, int lane) {
  unsigned word = 0;
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int unit = 0; unit < 4; ++unit) {
      const unsigned of_row = units[(16 * warp + 8 * r + lane / 4) * kPitch + unit] >> lane % 4 * 2;
      word |= ((of_row & 3u) | (of_row >> 4 & 0x30u)) << (8 * unit + 2 * r);
    }
  return word;
}

// Of 16 bytes.
__device__ __forceinline__ unsigned bits_of_bytes(uint4 x) {
  return bits_of_bytes(x.x) | bits_of_bytes(x.y) << 4 | bits_of_bytes(x.z) << 8 | bits_of_bytes(x.w) << 12;
}

// What a team takes as rows of bits, 16 keys in a unit; `mask`: its first pair. The result is not 0 if the thread, which has one unit of its rows,
// saw a pair that the mask shows.
template <bool kForward, int kUnits, int kPitch>
__device__ __forceinline__ unsigned mask_units(const PairParams& p, unsigned short* units, const unsigned char* mask, int rows, int keys,
                                               int thread) {
  constexpr int kLoads = kV3MaskSide * kUnits / kV3MaskThreads;
  const long long row_bytes = p.pair_mask_strides.row;
  const int row = thread / kUnits, unit = thread % kUnits;
  constexpr int kRows = kV3MaskThreads / kUnits;  // at once
  static_assert(kV3MaskThreads % kUnits == 0);
  mask += row * row_bytes + 16 * unit;
  units += row * kPitch + unit;
  const bool aligned = ((reinterpret_cast<unsigned long long>(mask) | static_cast<unsigned long long>(row_bytes)) & 15) == 0;
  if (aligned && keys >= 16 * kUnits) {
    uint4 x[kLoads];  // all on their way at once
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      x[i] = {0, 0, 0, 0};
      if (row + i * kRows < rows) x[i] = *reinterpret_cast<const uint4*>(mask + i * kRows * row_bytes);
    }
    unsigned shown = 0;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const unsigned bits = bits_of_bytes(x[i]);
      units[i * kRows * kPitch] = static_cast<unsigned short>(row + i * kRows < rows ? bits : 0xffffu);
      shown |= bits;
    }
    return shown;
  }
  unsigned shown = 0;
  // Compared by itself: ptxas 13.0 takes the predicate of max(0, min(16, left)) for that of the result's being 16, and it is not.
  const int left = keys - 16 * unit;
  const bool whole = left >= 16;
  const unsigned of_keys = whole ? 0xffffu : left > 0 ? (1u << left) - 1 : 0, beyond = kForward ? 0 : 0xffffu & ~of_keys;
#pragma unroll 1
  for (int i = 0; i < kLoads; ++i) {
    const unsigned char* const from = mask + i * kRows * row_bytes;
    unsigned bits = of_keys;
    if (left > 0 && row + i * kRows < rows) {
      if (whole && aligned) {
        bits = bits_of_bytes(*reinterpret_cast<const uint4*>(from));
      } else {
        for (int n = 0; n < 16 && n < left; ++n)
          if (from[n] == 0) bits &= ~(1u << n);
      }
      shown |= bits;
    }
    units[i * kRows * kPitch] = static_cast<unsigned short>(bits | beyond);
  }
  return shown;
}

// The kernel before: a CTA takes a block of queries and v3_mask_cta_keys() keys, a team of its threads kV3MaskTeamKeys of them at a time. kCausal:
// where no query sees one of them, nothing is written, and what is read there is hidden again.
template <bool kForward, bool kCausal>
__device__ __forceinline__ void mask_words(const PairParams& p) {
  constexpr int kTeams = v3_mask_teams(kForward), kCtaKeys = v3_mask_cta_keys(kForward);
  constexpr int kUnits = kV3MaskTeamKeys / 16, kPitch = kUnits + 2;  // of shared memory, in units: lanes of different rows meet no bank twice
  constexpr int kUnitsOfBlock = kV3MaskSide / 16;
  __shared__ unsigned short memory[kTeams][kV3MaskSide * kPitch];
  __shared__ int first_shown, end_shown;              // forward
  __shared__ unsigned shown_of[kV3MaskThreads / 32];  // backward, of a warp's rows: the units that show something
  ptx::let_kernel_after_come_up();
  const MaskWordsPlace<kForward> place{p};
  const int team = static_cast<int>(threadIdx.x) / kV3MaskThreads, thread = static_cast<int>(threadIdx.x) % kV3MaskThreads;
  const int ctas = v3_mask_ctas(p.seqlen_k, kForward), of_rows = static_cast<int>(blockIdx.x) / ctas;
  const int cta_key = (static_cast<int>(blockIdx.x) - of_rows * ctas) * kCtaKeys;
  const int of_head = of_rows / place.row_blocks(), first_row = (of_rows - of_head * place.row_blocks()) * kV3MaskSide;
  const int batch = of_head / place.heads(), head = of_head - batch * place.heads();
  const long long at = batch * p.pair_mask_strides.batch + head * p.pair_mask_strides.head + first_row * p.pair_mask_strides.row;
  int end_key = min(cta_key + kCtaKeys, p.seqlen_k);
  if (kCausal && place.of_rows()) end_key = min(end_key, first_row + kV3MaskSide + p.seqlen_k - p.seqlen_q);
  if constexpr (kForward) {
    if (threadIdx.x == 0) first_shown = kV3MaskMostBlocks, end_shown = 0;
    __syncthreads();
  }
  const int warp = thread / 32, lane = thread % 32;
  unsigned short* const units = memory[team];
  for (int first_key = cta_key + team * kV3MaskTeamKeys; first_key < end_key; first_key += kTeams * kV3MaskTeamKeys) {
    const unsigned shown =
        mask_units<kForward, kUnits, kPitch>(p, units, p.pair_mask + at + first_key, p.seqlen_q - first_row, p.seqlen_k - first_key, thread);
    unsigned of_units = ptx::ballot(shown != 0);  // half a warp has the units of a row
    of_units = (of_units | of_units >> 16) & 0xffffu;
    if constexpr (!kForward) {
      if (lane == 0) shown_of[warp] = of_units;
    } else {
      if (lane == 0 && of_units != 0) {
        const int first_block = first_key / kV3MaskSide;
        atomicMin(&first_shown, first_block + (__ffs(static_cast<int>(of_units)) - 1) / kUnitsOfBlock);
        atomicMax(&end_shown, first_block + (31 - __clz(static_cast<int>(of_units))) / kUnitsOfBlock + 1);
      }
    }
    ptx::bar_sync(1 + team, kV3MaskThreads);
    if constexpr (!kForward) {
      const int key = first_key + kV3MaskSide * thread;
      if (thread < kV3MaskTeamKeys / kV3MaskSide && key < p.seqlen_k) {
        const unsigned of_team = shown_of[0] | shown_of[1] | shown_of[2] | shown_of[3];
        *(place.shows(batch, head, key) - first_row / kV3MaskSide) = (of_team >> kUnitsOfBlock * thread & ((1u << kUnitsOfBlock) - 1)) != 0;
      }
    }
#pragma unroll
    for (int block = 0; block < kV3MaskTeamKeys / kV3MaskSide; ++block) {
      const int key = first_key + kV3MaskSide * block;
      if (key >= (kForward ? place.key_blocks() * kV3MaskSide : p.seqlen_k)) break;
      place.words(batch, head, first_row, key)[thread] = kForward ? word_of_two_queries<kPitch>(units + kUnitsOfBlock * block, warp, lane)
                                                                  : word_of_two_keys<kPitch>(units + kUnitsOfBlock * block, warp, lane);
    }
    if constexpr (kForward) ptx::bar_sync(1 + team, kV3MaskThreads);  // the next keys' units take their place
  }
  if constexpr (kForward) {
    __syncthreads();
    if (threadIdx.x == 0) *place.range(static_cast<int>(blockIdx.x)) = v3_mask_range(first_shown, end_shown);
  }
  ptx::wait_for_kernel_before();  // so that who waits for this one sees what that one wrote, too
}

}  // namespace fattn::v3
