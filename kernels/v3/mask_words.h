// A mask of pairs in the v3 kernels. A kernel before them makes bits of the mask's bytes: of 64 queries and 64 keys a word for each thread of a
// warpgroup, of its 32 pairs. So what is read in the loop is one word a thread and 64 keys, side by side.
//
// Bit i is that of pair s[i], set if the mask shows it or there is no such pair. Accumulators of a warpgroup have queries as rows in the forward
// pass, and keys backward (v3/backward_fragments.h).
#pragma once

#include "kernels/pair.h"
#include "kernels/ptx/dependent_launch.h"
#include "shared/v3_mask_words.h"

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
  // The number of a block of queries and keys.
  __device__ __forceinline__ int block(int batch, int head, int row, int key) const {
    const int of_head = (of_entries() ? batch * heads() : 0) + (of_heads() ? head : 0);
    return (of_head * row_blocks() + (of_rows() ? row / kV3MaskSide : 0)) * key_blocks() + key / kV3MaskSide;
  }
  // The word of thread 0.
  __device__ __forceinline__ unsigned* words(int number) const {
    return static_cast<unsigned*>(p.tiles) + static_cast<long long>(number) * kV3MaskThreads;
  }
  __device__ __forceinline__ unsigned* words(int batch, int head, int row, int key) const { return words(block(batch, head, row, key)); }
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

// The kernel before: a CTA takes a block of queries and kV3MaskCtaKeys keys, first as rows of bits, 16 keys in a unit.
template <bool kForward>
__device__ __forceinline__ void mask_words(const PairParams& p) {
  constexpr int kUnits = kV3MaskCtaKeys / 16, kPitch = kUnits + 2;  // of shared memory, in units: lanes of different rows meet no bank twice
  __shared__ unsigned short units[kV3MaskSide * kPitch];
  ptx::let_kernel_after_come_up();
  const MaskWordsPlace<kForward> place{p};
  const int thread = static_cast<int>(threadIdx.x), ctas = (p.seqlen_k + kV3MaskCtaKeys - 1) / kV3MaskCtaKeys;
  const int of_rows = static_cast<int>(blockIdx.x) / ctas, first_key = (static_cast<int>(blockIdx.x) - of_rows * ctas) * kV3MaskCtaKeys;
  const int of_head = of_rows / place.row_blocks(), first_row = (of_rows - of_head * place.row_blocks()) * kV3MaskSide;
  const int batch = of_head / place.heads(), head = of_head - batch * place.heads();
  const unsigned char* const mask = p.pair_mask + batch * p.pair_mask_strides.batch + head * p.pair_mask_strides.head;
#pragma unroll
  for (int i = 0; i < kV3MaskSide * kUnits / kV3MaskThreads; ++i) {
    const int index = i * kV3MaskThreads + thread, row = index / kUnits, unit = index % kUnits;
    const int key = first_key + 16 * unit, exist = min(16, p.seqlen_k - key);
    const unsigned char* const from = mask + (first_row + row) * p.pair_mask_strides.row + key;
    unsigned bits = 0xffffu;
    if (exist > 0 && first_row + row < p.seqlen_q) {
      if (exist == 16 && (reinterpret_cast<unsigned long long>(from) & 15) == 0) {
        const uint4 x = *reinterpret_cast<const uint4*>(from);
        bits = bits_of_bytes(x.x) | bits_of_bytes(x.y) << 4 | bits_of_bytes(x.z) << 8 | bits_of_bytes(x.w) << 12;
      } else {
        for (int n = 0; n < exist; ++n)
          if (from[n] == 0) bits &= ~(1u << n);
      }
    }
    units[row * kPitch + unit] = static_cast<unsigned short>(bits);
  }
  __syncthreads();
  const int warp = thread / 32, lane = thread % 32;
#pragma unroll
  for (int block = 0; block < kV3MaskCtaKeys / kV3MaskSide; ++block) {
    const int key = first_key + kV3MaskSide * block;
    if (key >= (kForward ? place.key_blocks() * kV3MaskSide : p.seqlen_k)) break;
    place.words(batch, head, first_row, key)[thread] =
        kForward ? word_of_two_queries<kPitch>(units + 4 * block, warp, lane) : word_of_two_keys<kPitch>(units + 4 * block, warp, lane);
  }
  ptx::wait_for_kernel_before();  // so that who waits for this one sees what that one wrote, too
}

}  // namespace fattn::v3
