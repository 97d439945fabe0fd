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

// Of 16 bytes.
__device__ __forceinline__ unsigned bits_of_bytes(uint4 x) {
  return bits_of_bytes(x.x) | bits_of_bytes(x.y) << 4 | bits_of_bytes(x.z) << 8 | bits_of_bytes(x.w) << 12;
}

// What a CTA takes as rows of bits, 16 keys in a unit; `mask`: its first pair.
template <int kUnits, int kPitch>
__device__ __forceinline__ void mask_units(const PairParams& p, unsigned short* units, const unsigned char* mask, int rows, int keys, int thread) {
  constexpr int kLoads = kV3MaskSide * kUnits / kV3MaskThreads;
  const long long row_bytes = p.pair_mask_strides.row;
  const int row = thread / kUnits, unit = thread % kUnits;
  constexpr int kRows = kV3MaskThreads / kUnits;  // at once
  static_assert(kV3MaskThreads % kUnits == 0);
  mask += row * row_bytes + 16 * unit;
  units += row * kPitch + unit;
  const bool aligned = ((reinterpret_cast<unsigned long long>(mask) | static_cast<unsigned long long>(row_bytes)) & 15) == 0;
  if (aligned && rows >= kV3MaskSide && keys >= 16 * kUnits) {
    uint4 x[kLoads];  // all on their way at once
#pragma unroll
    for (int i = 0; i < kLoads; ++i) x[i] = *reinterpret_cast<const uint4*>(mask + i * kRows * row_bytes);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) units[i * kRows * kPitch] = static_cast<unsigned short>(bits_of_bytes(x[i]));
    return;
  }
  const int exist = min(16, keys - 16 * unit);
#pragma unroll 1
  for (int i = 0; i < kLoads; ++i) {
    const unsigned char* const from = mask + i * kRows * row_bytes;
    unsigned bits = 0xffffu;
    if (exist > 0 && row + i * kRows < rows) {
      if (exist == 16 && aligned) {
        bits = bits_of_bytes(*reinterpret_cast<const uint4*>(from));
      } else {
        for (int n = 0; n < exist; ++n)
          if (from[n] == 0) bits &= ~(1u << n);
      }
    }
    units[i * kRows * kPitch] = static_cast<unsigned short>(bits);
  }
}

// The kernel before: a CTA takes a block of queries and kV3MaskCtaKeys keys. kCausal: where no query sees one of them, nothing is written, and what
// is read there is hidden again.
template <bool kForward, bool kCausal>
__device__ __forceinline__ void mask_words(const PairParams& p) {
  constexpr int kUnits = kV3MaskCtaKeys / 16, kPitch = kUnits + 2;  // of shared memory, in units: lanes of different rows meet no bank twice
  __shared__ unsigned short units[kV3MaskSide * kPitch];
  ptx::let_kernel_after_come_up();
  const MaskWordsPlace<kForward> place{p};
  const int thread = static_cast<int>(threadIdx.x), ctas = (p.seqlen_k + kV3MaskCtaKeys - 1) / kV3MaskCtaKeys;
  const int of_rows = static_cast<int>(blockIdx.x) / ctas, first_key = (static_cast<int>(blockIdx.x) - of_rows * ctas) * kV3MaskCtaKeys;
  const int of_head = of_rows / place.row_blocks(), first_row = (of_rows - of_head * place.row_blocks()) * kV3MaskSide;
  const int batch = of_head / place.heads(), head = of_head - batch * place.heads();
  const long long at = batch * p.pair_mask_strides.batch + head * p.pair_mask_strides.head + first_row * p.pair_mask_strides.row;
  if (kCausal && place.of_rows() && first_key >= first_row + kV3MaskSide + p.seqlen_k - p.seqlen_q) return ptx::wait_for_kernel_before();
  mask_units<kUnits, kPitch>(p, units, p.pair_mask + at + first_key, p.seqlen_q - first_row, p.seqlen_k - first_key, thread);
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
