// Products of the v3 backward kernel where an operand holds Inf or NaN and some pairs are hidden: these take no part at all, not even as 0 * Inf.
// The operand is multiplied with 0 in place of Inf and NaN. What sees one of those becomes NaN by another product, of 2^127 for each pair that is
// seen and 2^127 for each Inf or NaN, whose terms are 0 or beyond fp32: for dq at once, for dk and dv when the tile is done
// (v3/backward_nonfinite.h). All take as long whatever is how often among them.
//
// Hidden pairs are told by their weight or dS: it is -0, which it is not of others (v3/backward_fragments.h).
#pragma once

#include "kernels/ptx/async_proxy.h"
#include "kernels/ptx/element.h"
#include "kernels/ptx/ldmatrix.h"
#include "kernels/ptx/mma.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/ptx/warp.h"
#include "kernels/v3/backward_fragments.h"
#include "kernels/v3/backward_watch.h"

namespace fattn::v3 {

inline constexpr int kCarefulBarrier = 5;  // named, of the warpgroups of the keys

template <class Element>
__device__ __forceinline__ unsigned without_nonfinite(unsigned pair) {
  return pair & ~nonfinite_halves<Element>(pair);
}
// As bf16: 2^127 for Inf and NaN, 0 for the others.
template <class Element>
__device__ __forceinline__ unsigned marks_of_nonfinite(unsigned pair) {
  return nonfinite_halves<Element>(pair) & 0x7f007f00u;
}
// As bf16: 0 for -0, 2^127 for all others.
__device__ __forceinline__ unsigned marks_of_seen(unsigned pair) {
  const unsigned bits = pair ^ 0x80008000u, any = (((bits & 0x7fff7fffu) + 0x7fff7fffu) | bits) & 0x80008000u;
  return (any >> 15) * 0x7f00u;
}
// Puts 0 in place of Inf and NaN in a tile, by `threads` threads.
template <class Element>
__device__ __forceinline__ void clear_nonfinite(unsigned tile, int bytes, int thread, int threads) {
#pragma unroll 1
  for (int at = 4 * thread; at < bytes; at += 4 * threads) {
    const unsigned from = tile + static_cast<unsigned>(at);
    ptx::st_shared_4(from, without_nonfinite<Element>(ptx::ld_shared_4(from)));
  }
}

// The queries and dout of a block lose their Inf and NaN, when all `threads` threads of the keys' warpgroups have come here: behind S and dP, before
// dV and dK. `thread`: counted from their first.
template <class Element, class TileQ, class TileDout>
__device__ __forceinline__ void clear_block(unsigned q, unsigned dout, int thread, int threads) {
  ptx::warp_sync();
  ptx::bar_sync(kCarefulBarrier, threads);
  clear_nonfinite<Element>(q, TileQ::kBytes, thread, threads);
  clear_nonfinite<Element>(dout, TileDout::kBytes, thread, threads);
  ptx::async_proxy_fence();
  ptx::warp_sync();
  ptx::bar_sync(kCarefulBarrier, threads);
}

// dS of hidden pairs, and of rows without a gradient, becomes -0, whatever 0 * dP was, and a -0 of others 0. `weights`: P, whose sign tells hidden
// pairs; `lse`: where the block's is.
__device__ __forceinline__ void select_seen(unsigned (&gradients)[4][4], const unsigned (&weights)[4][4], unsigned lse) {
  const unsigned from = lse + own_lane() % 4 * 8;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float2 l = ptx::ld_shared_f32x2(from + static_cast<unsigned>(32 * i));
    const unsigned empty = (l.x == kInfinity ? 0x8000u : 0u) | (l.y == kInfinity ? 0x80000000u : 0u);
#pragma unroll
    for (int key = 0; key < 2; ++key) {
      unsigned& pair = gradients[i / 2][i % 2 * 2 + key];
      const unsigned hidden = (weights[i / 2][i % 2 * 2 + key] | empty) & 0x80008000u;
      const unsigned seen = ~((hidden >> 15) * 0xffffu), signs = (pair & 0x7fff7fffu) + 0x7fff7fffu;  // one may stay of what is not 0
      pair = (pair & seen & (signs | 0x7fff7fffu)) | hidden;
    }
  }
}

// Inf becomes NaN, all else stays.
template <int kCount>
__device__ __forceinline__ void infinite_to_nan(float (&d)[kCount]) {
#pragma unroll
  for (float& x : d) x = fmaf(x, 0.0f, x);
}

// dq = dS K of a warp's 16 queries and kCount / 4 * 8 columns. Of dS a row is a key. `k`: where the first 16 columns begin, of 64 that are swizzled.
template <class Element, class TileDs, class TileK, int kCount>
__device__ __forceinline__ void multiply_carefully(float (&dq)[kCount], unsigned ds, FragmentPlace<TileK> k) {
  const unsigned lane = own_lane();
  unsigned from_a = ds + (lane % 8 + lane / 16 * 8) * 128 + ((own_warp_row() / 8 + lane / 8 % 2) ^ lane % 8) * 16, from_b = k.first;
#pragma unroll
  for (float& x : dq) x = 0;
  ptx::warp_sync();
#pragma unroll 1
  for (int left = TileDs::kRows / 16; left > 0; --left) {
    unsigned a[4], nonfinite = 0;
    ptx::ldmatrix_x4_trans(a, from_a);
    const auto for_each_product = [&](auto change, auto multiply) {
#pragma unroll
      for (unsigned n = 0; n < kCount / 8; ++n) {
        unsigned b[4];
        ptx::ldmatrix_x4_trans(b, from_b ^ 32 * n);
#pragma unroll
        for (unsigned& pair : b) pair = change(pair);
        multiply(reinterpret_cast<float(&)[4]>(dq[8 * n]), b[0], b[1]);
        multiply(reinterpret_cast<float(&)[4]>(dq[8 * n + 4]), b[2], b[3]);
      }
    };
    for_each_product(
        [&](unsigned pair) {
          nonfinite = ptx::fma2<Element>(pair, 0, nonfinite);
          return without_nonfinite<Element>(pair);
        },
        [&](float(&d)[4], unsigned low, unsigned high) {
          if constexpr (is_same<Element, bf16>)
            ptx::mma_m16n8k16_bf16(d, a, low, high);
          else
            ptx::mma_m16n8k16_f16(d, a, low, high);
        });
    if (!ptx::vote_all(nonfinite == 0)) {
#pragma unroll
      for (unsigned& pair : a) pair = marks_of_seen(pair);
      for_each_product([](unsigned pair) { return marks_of_nonfinite<Element>(pair); },
                       [&](float(&d)[4], unsigned low, unsigned high) { ptx::mma_m16n8k16_bf16(d, a, low, high); });
    }
    from_a += 2048;
    from_b += 2048;
  }
  infinite_to_nan(dq);
}

}  // namespace fattn::v3
