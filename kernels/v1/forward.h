// Attention forward, FlashAttention as it was published in 2022 (Dao et al., Algorithm 1), on tensor cores: a CTA has one head, its outer loop is
// over blocks of keys and values, its inner loop over tiles of queries. Whatever a row has come to, o and its statistics m and l, is read from global
// memory and written back, rescaled, for every block of keys; that, and the parallelism over batch and heads alone, is what v2 does away with.
//
// A specialisation is a struct with Element (bf16 or f16), kHeaddim and kHeaddimV (1 to 128), kCausal, kAligned (bases and strides are multiples of
// 16 bytes, headdims of 8), kBlockN (keys of a block), kWarps. A warp takes tiles of 16 queries; it meets the others at new blocks of keys only.
#pragma once

#include "device_abi/attention_params.h"
#include "device_abi/v1_state.h"
#include "kernels/constants.h"
#include "kernels/mask.h"
#include "kernels/ptx/barrier.h"
#include "kernels/ptx/math.h"
#include "kernels/ptx/special_registers.h"
#include "kernels/ptx/warp.h"
#include "kernels/tile/for_each.h"
#include "kernels/tile/fragment.h"
#include "kernels/tile/global_load.h"
#include "kernels/v2/careful.h"
#include "kernels/v2/nonfinite.h"

namespace fattn::v1 {

template <class Spec>
class Forward {
  using Bits = unsigned short;
  using Element = typename Spec::Element;
  static constexpr int kThreads = Spec::kWarps * 32, kBlockN = Spec::kBlockN;
  static constexpr int kDepthQ = (Spec::kHeaddim + 15) / 16, kOutTiles = v1_width(Spec::kHeaddimV) / 8, kKeyTiles = kBlockN / 8;
  static constexpr auto kCopyBy = Spec::kAligned ? tile::CopyBy::kAsync : tile::CopyBy::kElements;
  using TileK = tile::SharedTile<kBlockN, tile::round_up(Spec::kHeaddim, 32)>;
  using TileV = tile::SharedTile<kBlockN, tile::round_up(Spec::kHeaddimV, 32)>;
  using CopyK = tile::TileCopy<TileK, kThreads, Spec::kHeaddim, kCopyBy>;
  using CopyV = tile::TileCopy<TileV, kThreads, Spec::kHeaddimV, kCopyBy>;

  const AttentionParams& p;
  const V1State& state;
  const unsigned tile_k, tile_v;
  const core::Mask32 mask;
  const long long batch_head;
  const int batch, head, warp, lane;

  // Neighbouring elements of a row of queries, zeros outside.
  __device__ unsigned pair(const Bits* row, int column, bool inside) const {
    if constexpr (Spec::kAligned) {
      return inside && column < Spec::kHeaddim ? *reinterpret_cast<const unsigned*>(row + column) : 0u;
    } else {
      const unsigned low = inside && column < Spec::kHeaddim ? row[column] : 0u;
      const unsigned high = inside && column + 1 < Spec::kHeaddim ? row[column + 1] : 0u;
      return low | high << 16;
    }
  }

  __device__ void load_keys(int key) const {
    const int head_k = head / p.group, keys = p.seqlen_k - key;
    const Bits* k = static_cast<const Bits*>(p.k) + batch * p.k_strides.batch + head_k * p.k_strides.head + key * p.k_strides.row;
    const Bits* v = static_cast<const Bits*>(p.v) + batch * p.v_strides.batch + head_k * p.v_strides.head + key * p.v_strides.row;
    CopyK::template copy<true>(tile_k, k, p.k_strides.row, keys);
    CopyV::template copy<true>(tile_v, v, p.v_strides.row, keys);
    CopyK::commit();
    CopyK::template wait<0>();
  }

  // s = q k^T; a negative softmax_scale flips the sign, one of 0 makes every score 0.
  __device__ void scores(int row, float (&s)[1][kKeyTiles][4]) const {
    const Bits* q = static_cast<const Bits*>(p.q) + batch * p.q_strides.batch + head * p.q_strides.head + row * p.q_strides.row;
    const int above = row + lane / 4;
    const Bits *first = q + lane / 4 * p.q_strides.row, *second = first + 8 * p.q_strides.row;
    const unsigned k_address = tile::fragment_address_n<TileK>(tile_k, 0, lane);
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) s[0][n][0] = s[0][n][1] = s[0][n][2] = s[0][n][3] = 0;
    tile::for_each<0, kDepthQ>([&](auto d) {
      constexpr int kD = decltype(d)::value;
      const int column = 16 * kD + lane % 4 * 2;
      const unsigned a[4] = {pair(first, column, above < p.seqlen_q), pair(second, column, above + 8 < p.seqlen_q),
                             pair(first, column + 8, above < p.seqlen_q), pair(second, column + 8, above + 8 < p.seqlen_q)};
#pragma unroll
      for (int chunk = 0; chunk < kBlockN / 16; ++chunk) {
        unsigned k[4];
        ptx::ldmatrix_x4(k, TileK::template advance<2 * kD>(k_address) + chunk * 16 * TileK::kRowBytes);
        tile::mma<Element, 80>(s[0][2 * chunk], a, k[0], k[1]);
        tile::mma<Element, 80>(s[0][2 * chunk + 1], a, k[2], k[3]);
      }
    });
    if (p.softmax_scale > 0) return;
    const float sign = p.softmax_scale < 0 ? -1.0f : 0.0f;
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[0][n][e] *= sign;
  }

  // sum = p v. kCareful: rows that do not see the whole block, and Inf or NaN among its values, which must reach those that see them alone.
  template <bool kCareful>
  __device__ void weigh_values(const float (&s)[1][kKeyTiles][4], const VisibleKeys<1, false>& visible, float (&sum)[1][kOutTiles][4]) const {
    const unsigned v_address = tile::fragment_address<TileV>(tile_v, 0, lane);
#pragma unroll
    for (int chunk = 0; chunk < kBlockN / 16; ++chunk) {
      const float(&low)[4] = s[0][2 * chunk];
      const float(&high)[4] = s[0][2 * chunk + 1];
      const unsigned a[4] = {ptx::pack2<Element>(low[0], low[1]), ptx::pack2<Element>(low[2], low[3]), ptx::pack2<Element>(high[0], high[1]),
                             ptx::pack2<Element>(high[2], high[3])};
      tile::for_each<0, kOutTiles / 2>([&](auto d) {
        constexpr int kD = decltype(d)::value;
        unsigned v[4];
        ptx::ldmatrix_x4_trans(v, TileV::template advance<2 * kD>(v_address) + chunk * 16 * TileV::kRowBytes);
        if constexpr (kCareful)
          for (unsigned& x : v) x = v2::without_nonfinite<Element>(x);
        tile::mma<Element, 80>(sum[0][2 * kD], a, v[0], v[1]);
        tile::mma<Element, 80>(sum[0][2 * kD + 1], a, v[2], v[3]);
      });
    }
    if constexpr (kCareful) v2::add_nonfinite<TileV, Element>(sum, tile_v, visible, lane);
  }

  __device__ static float over_row(float x) {
    x = fmaxf(x, ptx::shfl_xor(x, 1));
    return fmaxf(x, ptx::shfl_xor(x, 2));
  }
  __device__ static float sum_of_row(float x) {
    x += ptx::shfl_xor(x, 1);
    return x + ptx::shfl_xor(x, 2);
  }
  // e^(softmax_scale (m - reference)), where m is the lesser or equal; 0 for a row that has seen nothing by then.
  __device__ float decay(float m, float reference) const { return m == -kInfinity ? 0.0f : ptx::ex2((m - reference) * p.softmax_scale_log2); }

  __device__ void store(int row, int column, float low, float high) const {
    if (row >= p.seqlen_q) return;
    Bits* o = static_cast<Bits*>(p.o) + batch * p.o_strides.batch + head * p.o_strides.head + row * p.o_strides.row;
    const unsigned x = ptx::pack2<Element>(low, high);
    if (Spec::kAligned && column < Spec::kHeaddimV) {
      *reinterpret_cast<unsigned*>(o + column) = x;
      return;
    }
    if (column < Spec::kHeaddimV) o[column] = static_cast<Bits>(x);
    if (column + 1 < Spec::kHeaddimV) o[column + 1] = static_cast<Bits>(x >> 16);
  }

  // One step of the inner loop: rows [16 tile, 16 tile + 16) meet the block of keys from `key` on.
  __device__ void meet(int tile, int key, bool nonfinite) const {
    const int row = tile * kV1TileRows;
    const int end = mask.visible_end(min(row + kV1TileRows, p.seqlen_q) - 1);  // of the tile's last row, which sees the most
    const bool first = key == 0, last = key + kBlockN >= end;
    if (key >= end && !first) return;
    const bool whole = key + kBlockN <= mask.visible_end(row);
    // What the rows have come to, asked for early, because it is far away, where registers allow.
    const long long statistic = batch_head * v1_row_tiles(p.seqlen_q) * kV1TileRows + row + lane / 4;
    float4* const o = reinterpret_cast<float4*>(state.o) + ((batch_head * v1_row_tiles(p.seqlen_q) + tile) * kOutTiles) * 32 + lane;
    float4 kept[kOutTiles];
    float old_max[2], old_sum[2];
    const auto fetch = [&] {
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n) kept[n] = first ? float4{0, 0, 0, 0} : o[n * 32];
    };
    if constexpr (Spec::kAligned) fetch();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      old_max[half] = first ? -kInfinity : state.row_max[statistic + 8 * half];
      old_sum[half] = first ? 0.0f : state.row_sum[statistic + 8 * half];
    }
    float s[1][kKeyTiles][4];
    scores(row, s);
    const VisibleKeys<1, false> visible = visible_keys<1, false>(mask, row, key, lane / 4, lane % 4 * 2);
    if (!whole) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[0][n][e] = visible(0, e / 2, n, e % 2) ? s[0][n][e] : -kInfinity;
    }

    // m~, p~ = e^(s - m~), l~ of this block; m and l with what was before.
    float before[2], now[2], m[2];
    bool nothing[2];  // seen in this block
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float greatest = -kInfinity, weights = 0;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) greatest = fmaxf(greatest, fmaxf(s[0][n][2 * half], s[0][n][2 * half + 1]));
      greatest = over_row(greatest);
      const float reference = greatest == -kInfinity ? 0.0f : greatest * p.softmax_scale_log2;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) weights += s[0][n][e] = ptx::ex2(fmaf(s[0][n][e], p.softmax_scale_log2, -reference));
      weights = sum_of_row(weights);
      m[half] = fmaxf(old_max[half], greatest);
      before[half] = old_sum[half] * decay(old_max[half], m[half]);
      nothing[half] = greatest == -kInfinity && weights == 0;
      now[half] = greatest == -kInfinity ? weights : decay(greatest, m[half]);  // weights of scores of -inf are 0, or NaN
      const float sum = before[half] + now[half] * weights;
      const float inverse = sum == 0 ? 0.0f : 1.0f / sum;
      before[half] *= inverse;
      now[half] *= inverse;
      if (lane % 4 == 0) {
        if (last && p.lse != nullptr && row + lane / 4 + 8 * half < p.seqlen_q) {
          const long long at = batch * p.lse_strides.batch + head * p.lse_strides.head + (row + lane / 4 + 8 * half) * p.lse_strides.row;
          p.lse[at] = sum == 0 ? -kInfinity : fmaf(m[half], fabsf(p.softmax_scale), logf(sum));
        }
        if (!last) {
          state.row_max[statistic + 8 * half] = m[half];
          state.row_sum[statistic + 8 * half] = sum;
        }
      }
    }

    float sum[1][kOutTiles][4];
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n) sum[0][n][0] = sum[0][n][1] = sum[0][n][2] = sum[0][n][3] = 0;
    if (nonfinite && !whole) [[unlikely]]
      weigh_values<true>(s, visible_keys<1, false>(mask, row, key, lane / 4, 0), sum);
    else
      weigh_values<false>(s, visible, sum);

    if constexpr (!Spec::kAligned) fetch();
      // o = (l e^(m - m_new) o + e^(m~ - m_new) p~ v) / l_new
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n) {
      float4 x = kept[n];
      x.x = before[0] * x.x + (nothing[0] ? 0.0f : now[0] * sum[0][n][0]);
      x.y = before[0] * x.y + (nothing[0] ? 0.0f : now[0] * sum[0][n][1]);
      x.z = before[1] * x.z + (nothing[1] ? 0.0f : now[1] * sum[0][n][2]);
      x.w = before[1] * x.w + (nothing[1] ? 0.0f : now[1] * sum[0][n][3]);
      if (!last) {
        o[n * 32] = x;
        continue;
      }
      const int column = 8 * n + lane % 4 * 2;
      store(row + lane / 4, column, x.x, x.y);
      store(row + lane / 4 + 8, column, x.z, x.w);
    }
  }

 public:
  __device__ Forward(const AttentionParams& params, const V1State& kept, unsigned shared)
      : p(params),
        state(kept),
        tile_k(shared),
        tile_v(shared + TileK::kBytes),
        mask{params.seqlen_q, params.seqlen_k, Spec::kCausal},
        batch_head(blockIdx.x),
        batch(static_cast<int>(blockIdx.x) / params.nheads),
        head(static_cast<int>(blockIdx.x) % params.nheads),
        warp(ptx::warp_id()),
        lane(static_cast<int>(threadIdx.x) % 32) {}

  __device__ void run() const {
    const int tiles = static_cast<int>(v1_row_tiles(p.seqlen_q));
    int key = 0;
    do {  // once if there are no keys: rows that see nothing are written, too
      if (key > 0) __syncthreads();
      load_keys(key);
      const bool nonfinite =
          Spec::kCausal || key + kBlockN > p.seqlen_k ? ptx::bar_or(v2::copied_nonfinite<CopyV, TileV, Element>(tile_v)) : (__syncthreads(), false);
#pragma unroll 1
      for (int tile = warp; tile < tiles; tile += Spec::kWarps) meet(tile, key, nonfinite);
      key += kBlockN;
    } while (key < p.seqlen_k);
  }
};

template <class Spec>
__device__ __forceinline__ void forward(const AttentionParams& p, const V1State& state) {
  extern __shared__ __align__(1024) unsigned char shared[];
  Forward<Spec>(p, state, ptx::shared_address(shared)).run();
}

}  // namespace fattn::v1
