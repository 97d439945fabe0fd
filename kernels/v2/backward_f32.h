// Backward in fp32 on the matrix instructions for fp16, main kernel: the products of v2/backward.h, with every operand split into two fp16 and every
// product made of three (tile/split_tile.h). Level 80.
//
// A CTA owns kBlockN keys of one key head and walks over the blocks of kBlockM queries that see them, of all query heads that share the key head:
//   S^T = K Q^T    P^T = exp(S^T - lse)    dP^T = V dO^T    dS^T = P^T (dP^T - row_sum)    dV += P^T dO    dK += dS^T Q    dQ += dS K
// Each group of keys has two warps. One computes S^T, P^T and dV, the other dP^T, dS^T and dK; P^T goes from the one to the other through shared
// memory as it is, in fp32. dS^T, split, is in shared memory for dQ, which all warps compute together when the block is done. What comes from shared
// memory was scaled by powers of two, the keys once and the queries block by block, and is scaled back when it is added to a gradient in fp32.
//
// With softcap P^T (1 - T^2) goes to the second warp in place of P^T, T the capped scores before they are multiplied by softcap. With features of
// pairs (kernels/pair.h) it is marked by its sign: of a dropped pair the second warp takes nothing of dP^T, and of -0, a pair that bias or mask
// hides, nothing at all. Dropout's scale comes last: dP^T - row_sum is taken in units of it.
//
// Spec: kHeaddim, kHeaddimV; kCausal; kWindow (kCausal is then false); kCapped; kAligned (16-byte copies); kDeterministic; kTile (a BackwardF32Tile);
// kPair, none if it is left out.
//
// The parts: v2/backward_f32_place.h (tile, shared memory, loads, splitting), backward_f32_scores.h (P^T) and here the products and their order.
#pragma once

#include "device_abi/attention_params.h"
#include "device_abi/backward_f32_layout.h"
#include "device_abi/backward_layout.h"
#include "kernels/mask.h"
#include "kernels/pair.h"
#include "kernels/ptx/async_copy.h"
#include "kernels/ptx/barrier.h"
#include "kernels/ptx/ldmatrix.h"
#include "kernels/ptx/reduce.h"
#include "kernels/ptx/semaphore.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/ptx/shared_pair.h"
#include "kernels/tile/split_product.h"
#include "kernels/tile/split_tile.h"
#include "kernels/v2/backward_f32_again.h"
#include "kernels/v2/backward_f32_place.h"
#include "kernels/v2/backward_f32_scores.h"
#include "kernels/v2/dq_accum.h"
#include "kernels/v2/fragment_store.h"
#include "kernels/v2/swizzled_tile.h"
#include "kernels/v2/workspace.h"

namespace fattn::v2 {

template <class Spec>
class BackwardF32 : BackwardF32Scores<Spec> {
  using Place = BackwardF32Place<Spec>;
  using Scores = BackwardF32Scores<Spec>;
  // clang-format off
  using Place::kTile, Place::kWidth, Place::kWidthV, Place::kBlockM, Place::kBlockN, Place::kSplitBefore, Place::kWindow, Place::kCapped;
  using Place::kMasked, Place::kPair, Place::kHides, typename Place::TileK, typename Place::TileV, typename Place::TileQ, typename Place::TileDout;
  using typename Place::TileDs, Place::kKeys, Place::kChunk, Place::kChunks, Place::kKeyTiles, Place::kChunkTiles, Place::kDepths, Place::kParts;
  using Place::kColumns, Place::kColumnsV, Place::kSumTiles, Place::kDqRowWarps, Place::kDqRows, Place::kDqColumns, Place::kDqSpan;
  using Place::kWeightFactor, Place::kGradientFactor, Place::p, Place::shared, Place::stage, Place::this_thread, Place::this_lane, Place::this_warp;
  using Place::computes_values, Place::this_group, Place::batch, Place::head_k, Place::first_key, Place::part, Place::query_inverse;
  using Place::dout_inverse, Place::key_inverse, Place::value_inverse, Place::found_params, typename Place::Step, Place::after, Place::seqlen_q;
  using Place::seqlen_k, Place::diagonal, Place::left_diagonal, Place::first_block, Place::blocks_end, Place::mask, Place::nth_key_block;
  using Place::take_tile, Place::at, Place::v_tile, Place::q_tile, Place::dout_tile, Place::lse_at, Place::row_sum_at, Place::ds_tile;
  using Place::load_keys, Place::load_queries, Place::split_keys, Place::split_queries, Place::clear_infinite_keys, Place::infinite_keys;
  using Scores::dropout_scale, Scores::kept_share, Scores::hide, Scores::spoil, Scores::weights, Scores::pair_weights, Scores::add_to_dbias;
  // clang-format on

  // ---- compute: products ----
  template <int kRowTiles, int kColumnTiles>
  __device__ static void clear(float (&d)[kRowTiles][kColumnTiles][4]) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) d[i][j][e] = 0;
  }

  // d = A B^T over the whole width: A = kKeys rows of K (V), B = kChunk rows of Q (dO).
  template <class TileA, class TileB, int kInner>
  __device__ static void multiply_rows(float (&d)[kKeyTiles][kChunkTiles][4], unsigned a_tile, unsigned b_tile,
                                       const BlockAddress<kInner, kInner, LaneOrder::kColumnMajor>& a_at,
                                       const BlockAddress<kInner, kInner, LaneOrder::kRowMajor>& b_at, int b_row) {
    float high[kChunkTiles][kKeyTiles][4], low[kChunkTiles][kKeyTiles][4];
    clear(high);
    clear(low);
#pragma unroll
    for (int k = 0; k < kInner / 16; ++k) {
      unsigned a_high[kKeyTiles][4], a_low[kKeyTiles][4];
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i) {
        ptx::ldmatrix_x4(a_high[i], a_at.at(a_tile, 16 * i, k));
        ptx::ldmatrix_x4(a_low[i], a_at.at(a_tile + TileA::kBytes, 16 * i, k));
      }
#pragma unroll
      for (int j = 0; j < kChunkTiles / 2; ++j) {
        unsigned b_high[4], b_low[4];
        ptx::ldmatrix_x4(b_high, b_at.at(b_tile, b_row + 16 * j, k));
        ptx::ldmatrix_x4(b_low, b_at.at(b_tile + TileB::kBytes, b_row + 16 * j, k));
#pragma unroll
        for (int half = 0; half < 2; ++half)
          tile::multiply_split(high[2 * j + half], low[2 * j + half], a_high, a_low, b_high + 2 * half, b_low + 2 * half);
      }
    }
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
      for (int j = 0; j < kChunkTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) d[i][j][e] = high[j][i][e] + low[j][i][e];
  }

  // A chunk of P^T or dS^T as A operands.
  struct Fragments {
    unsigned high[kDepths][kKeyTiles][4], low[kDepths][kKeyTiles][4];
    __device__ Fragments(const float (&x)[kKeyTiles][kChunkTiles][4], float factor) {
#pragma unroll
      for (int j = 0; j < kChunkTiles; ++j)
#pragma unroll
        for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            tile::split2(x[i][j][2 * half] * factor, x[i][j][2 * half + 1] * factor, high[j / 2][i][j % 2 * 2 + half],
                         low[j / 2][i][j % 2 * 2 + half]);
    }
  };

  // sum += A B * factor * factor2 for kChunk queries, in kSpan columns: A = P^T (dS^T), B = rows of dO (Q).
  template <class TileB, int kInner, int kSpan>
  __device__ static void accumulate(float (&sum)[kKeyTiles][kSumTiles][4], const Fragments& a, unsigned b_tile,
                                    const BlockAddress<kInner, kSpan, LaneOrder::kColumnMajor>& b_at, float factor, float factor2) {
#pragma unroll
    for (int j = 0; j < kSpan / 16; ++j) {
      unsigned b_high[kDepths][4], b_low[kDepths][4];
#pragma unroll
      for (int depth = 0; depth < kDepths; ++depth) {
        ptx::ldmatrix_x4_trans(b_high[depth], b_at.at(b_tile, 16 * depth, j));
        ptx::ldmatrix_x4_trans(b_low[depth], b_at.at(b_tile + TileB::kBytes, 16 * depth, j));
      }
      float t[kKeyTiles][2][4];
      tile::product_split(t, a.high, a.low, b_high, b_low);
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[i][2 * j + half][e] = fmaf(t[i][half][e] * factor, factor2, sum[i][2 * j + half][e]);
    }
  }

  // A chunk of P^T in shared memory: every lane writes its own numbers, and the same lane of the other warp reads them.
  __device__ unsigned p_slot(int chunk) const {
    return shared + kTile.p_offset() + static_cast<unsigned>((this_group() * kChunks + chunk) * kKeys * kChunk * 4 + this_lane() * 16);
  }
  // Barriers of a key group, one a chunk: the chunk is written, and the first warp goes on to the next. (Arriving without waiting would do, but
  // compute-sanitizer's racecheck then finds hazards in any program.)
  __device__ int weights_barrier(int chunk) const { return 1 + this_group() * kChunks + chunk; }

  __device__ void compute_values(float (&dv)[kKeyTiles][kSumTiles][4], int first_query, bool masked, [[maybe_unused]] int head) const {
    const int lane = this_lane(), key_group = this_group();
    const BlockAddress<kWidth, kWidth, LaneOrder::kColumnMajor> k_rows(lane, key_group * kKeys, 0);
    const BlockAddress<kWidth, kWidth, LaneOrder::kRowMajor> q_rows(lane, 0, 0);
    const BlockAddress<kWidthV, kColumnsV, LaneOrder::kColumnMajor> dout_columns(lane, 0, part * kColumnsV);
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int row = chunk * kChunk;
      float s[kKeyTiles][kChunkTiles][4];
      multiply_rows<TileK, TileQ, kWidth>(s, shared, q_tile() + static_cast<unsigned>(row * TileQ::kPitch), k_rows, q_rows, 0);  // S^T = K Q^T
      if (const unsigned keys = infinite_keys(); keys != 0) [[unlikely]]
        spoil(s, keys);
      const auto send = [&](const float(&x)[kKeyTiles][kChunkTiles][4]) {
        const unsigned p_at = p_slot(chunk);
#pragma unroll
        for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
          for (int j = 0; j < kChunkTiles; ++j)
            ptx::st_shared_16(p_at + (i * kChunkTiles + j) * 512, uint4{__float_as_uint(x[i][j][0]), __float_as_uint(x[i][j][1]),
                                                                        __float_as_uint(x[i][j][2]), __float_as_uint(x[i][j][3])});
      };
      if constexpr (kCapped || kPair.terms() || kPair.dropout) {
        float sent[kKeyTiles][kChunkTiles][4];
        pair_weights(s, sent, lse_at() + 4 * row, head, first_query + row);
        send(sent);  // what the mask hides the second warp hides again
        if (masked) hide(s, first_query + row);
      } else {
        weights(s, lse_at() + 4 * row);
        if (masked) hide(s, first_query + row);
        send(s);
      }
      ptx::bar_sync(weights_barrier(chunk), 64);
      const Fragments fragments(s, kWeightFactor);
      accumulate<TileDout, kWidthV, kColumnsV>(dv, fragments, dout_tile() + static_cast<unsigned>(row * TileDout::kPitch), dout_columns,
                                               1 / kWeightFactor, dout_inverse);  // dV += P^T dO
    }
  }

  __device__ void compute_keys(float (&dk)[kKeyTiles][kSumTiles][4], int first_query, bool masked, [[maybe_unused]] int head) const {
    const int lane = this_lane(), key_group = this_group();
    const BlockAddress<kWidthV, kWidthV, LaneOrder::kColumnMajor> v_rows(lane, key_group * kKeys, 0);
    const BlockAddress<kWidthV, kWidthV, LaneOrder::kRowMajor> dout_rows(lane, 0, 0);
    const BlockAddress<kWidth, kColumns, LaneOrder::kColumnMajor> q_columns(lane, 0, part * kColumns);
    const FragmentStore<kBlockM, kBlockM> ds_store(lane, key_group * kKeys, 0);
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int row = chunk * kChunk;
      float ds[kKeyTiles][kChunkTiles][4];
      multiply_rows<TileV, TileDout, kWidthV>(ds, v_tile(), dout_tile() + static_cast<unsigned>(row * TileDout::kPitch), v_rows, dout_rows,
                                              0);  // dP^T = V dO^T
      ptx::bar_sync(weights_barrier(chunk), 64);
      const unsigned p_at = p_slot(chunk);
      const unsigned row_sum_at = this->row_sum_at() + 4 * row;
      const float dout_factor = tile::inverse_of(dout_inverse),
                  value_gradient_factor = tile::inverse_of(value_inverse()) * (kGradientFactor * (kPair.dropout ? kept_share() : 1.0f));
#pragma unroll
      for (int j = 0; j < kChunkTiles; ++j) {
        const float2 row_sum = ptx::ld_shared_f32x2(row_sum_at + 4 * (8 * j + lane % 4 * 2));
        const float scaled[2] = {row_sum.x * dout_factor * value_gradient_factor, row_sum.y * dout_factor * value_gradient_factor};
#pragma unroll
        for (int i = 0; i < kKeyTiles; ++i) {
          const uint4 bits = ptx::ld_shared_16(p_at + (i * kChunkTiles + j) * 512);
          const float weight[4] = {__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z), __uint_as_float(bits.w)};
#pragma unroll
          for (int e = 0; e < 4; ++e) {  // dS^T = P^T (dP^T - row_sum)
            if constexpr (kPair.dropout) {
              const bool dropped = __float_as_uint(weight[e]) >> 31 != 0;
              const bool hidden = kHides && __float_as_uint(weight[e]) == 0x80000000u;
              const float gradient = fmaf(dropped ? 0.0f : ds[i][j][e], kGradientFactor, -scaled[e % 2]);
              ds[i][j][e] = hidden ? 0.0f : fabsf(weight[e]) * gradient;
            } else {
              ds[i][j][e] = weight[e] * fmaf(ds[i][j][e], kGradientFactor, -scaled[e % 2]);
              if (kHides && __float_as_uint(weight[e]) == 0x80000000u) ds[i][j][e] = 0;
            }
          }
        }
      }
      if (masked) hide(ds, first_query + row);
      if constexpr (kPair.dbias)
        if (part == 0)  // CTAs that share their keys have the same dS^T
          add_to_dbias(ds, head, first_query + row, masked, dropout_scale() / kGradientFactor, dout_inverse * value_inverse());
      const Fragments fragments(ds, 1.0f);
#pragma unroll
      for (int depth = 0; depth < kDepths; ++depth)
#pragma unroll
        for (int i = 0; i < kKeyTiles; ++i) store_ds(ds_store, 16 * i, chunk * kDepths + depth, fragments.high[depth][i], fragments.low[depth][i]);
      accumulate<TileQ, kWidth, kColumns>(dk, fragments, q_tile() + static_cast<unsigned>(row * TileQ::kPitch), q_columns,
                                          query_inverse / kGradientFactor, dout_inverse * value_inverse());  // dK += dS^T Q
    }
  }

  __device__ void store_ds(const FragmentStore<kBlockM, kBlockM>& to, int row, int block, const unsigned (&high)[4], const unsigned (&low)[4]) const {
    to.store(ds_tile(), row, block, high);
    to.store(ds_tile() + TileDs::kBytes, row, block, low);
  }

  __device__ void clear_ds() const {
    const FragmentStore<kBlockM, kBlockM> ds_store(this_lane(), this_group() * kKeys, 0);
    const unsigned zeros[4] = {};
#pragma unroll 1
    for (int j = 0; j < kBlockM / 16; ++j)
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i) store_ds(ds_store, 16 * i, j, zeros, zeros);
  }

  // dQ of one block, from everybody's dS^T.
  __device__ void compute_dq(Step step) const {
    const auto& p = found_params();
    const int lane = this_lane(), warp = this_warp(), dq_row = warp % kDqRowWarps * kDqRows,
              dq_column = part * kColumns + warp / kDqRowWarps * kDqColumns;
    const BlockAddress<kBlockM, kDqRows, LaneOrder::kRowMajor> ds_columns(lane, 0, dq_row);
    const BlockAddress<kWidth, kDqColumns, LaneOrder::kColumnMajor> k_columns(lane, 0, dq_column);
    const long long batch_head = static_cast<long long>(batch) * p.nheads + step.head;
    const int first_row = step.block * kBlockM + dq_row;
    float* const accum = p.dq_accum + workspace_accum<kPair, kWidth>(p, batch_head, step.head, dq_accum_head(p.seqlen_q, kWidth)) +
                         static_cast<long long>(first_row / kDqAccumRows) * (kDqAccumRows * kWidth) + dq_column * kDqAccumRows;
    int* const turn = Spec::kDeterministic
                          ? p.dq_semaphore + 1 + workspace_head<kPair>(batch_head, step.head) * workspace_blocks<kPair, kBlockM>(p) + step.block
                          : nullptr;
    constexpr int kTiles = kDqRows / 16;
    const float factor = key_inverse() / kGradientFactor * dropout_scale(), factor2 = dout_inverse * value_inverse();
#pragma unroll
    for (int first = 0; first < kDqColumns; first += kDqSpan) {
      float high[kDqSpan / 8][kTiles][4], low[kDqSpan / 8][kTiles][4];
      clear(high);
      clear(low);
#pragma unroll
      for (int k = 0; k < kBlockN / 16; ++k) {  // dQ = dS K
        unsigned a_high[kTiles][4], a_low[kTiles][4];
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          ptx::ldmatrix_x4_trans(a_high[i], ds_columns.at(ds_tile(), 16 * k, i));
          ptx::ldmatrix_x4_trans(a_low[i], ds_columns.at(ds_tile() + TileDs::kBytes, 16 * k, i));
        }
#pragma unroll
        for (int j = 0; j < kDqSpan / 16; ++j) {
          unsigned b_high[4], b_low[4];
          ptx::ldmatrix_x4_trans(b_high, k_columns.at(shared, 16 * k, first / 16 + j));
          ptx::ldmatrix_x4_trans(b_low, k_columns.at(shared + TileK::kBytes, 16 * k, first / 16 + j));
#pragma unroll
          for (int half = 0; half < 2; ++half)
            tile::multiply_split(high[2 * j + half], low[2 * j + half], a_high, a_low, b_high + 2 * half, b_low + 2 * half);
        }
      }
      if (Spec::kDeterministic && first == 0) {  // lower key blocks first: the same order of additions in every run
        if (this_thread() == 0) {
          while (ptx::ld_acquire(turn) < nth_key_block(step.block) * kParts) __nanosleep(64);
        }
        __syncthreads();
      }
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        if (first_row + 16 * i < seqlen_q()) {
#pragma unroll
          for (int j = 0; j < kDqSpan / 8; ++j) {
            float dq[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) dq[e] = (high[j][i][e] + low[j][i][e]) * factor * factor2;
            add_to_dq(accum + 16 * i * kWidth + (first / 8 + j) * 128, lane, dq);
          }
        }
      }
    }
    if constexpr (Spec::kDeterministic) {
      __threadfence();
      __syncthreads();
      if (this_thread() == 0) ptx::red_add_release(turn, 1);
    }
  }

  // Writes this warp's rows of dV or dK, this part of their columns; what is computed again is a row with all columns, by whichever part needs it.
  template <bool kIsDk>
  __device__ void store_gradient(const float (&d)[kKeyTiles][kSumTiles][4], float scale) const {
    const auto& p = found_params();
    const void* const tensor = kIsDk ? p.dk : p.dv;
    const TensorStrides& strides = kIsDk ? p.dk_strides : p.dv_strides;
    constexpr int kAll = kIsDk ? Spec::kHeaddim : Spec::kHeaddimV, kOwn = kIsDk ? kColumns : kColumnsV;
    const int lane = this_lane(), key_group = this_group();
    RowsAgain again;
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int first = first_key + key_group * kKeys + 16 * i + 8 * half, key = first + lane / 4;
        float* const row = const_cast<float*>(at(tensor, strides, batch, head_k, key));
        bool good = true;
#pragma unroll
        for (int n = 0; n < kOwn / 8; ++n) {
          const float x[2] = {d[i][n][2 * half] * scale, d[i][n][2 * half + 1] * scale};
          good = good && is_finite(x[0]) && is_finite(x[1]);
          const int column = part * kOwn + 8 * n + lane % 4 * 2;
          if (key >= p.seqlen_k) continue;
          if constexpr (Spec::kAligned && kAll % 2 == 0) {
            if (column < kAll) *reinterpret_cast<float2*>(row + column) = float2{x[0], x[1]};
          } else {
#pragma unroll
            for (int e = 0; e < 2; ++e)
              if (column + e < kAll) row[column + e] = x[e];
          }
        }
        again.note(2 * i + half, ptx::ballot(!good && key < p.seqlen_k));
      }
    if (kPair.lengths && given_length(p, batch) < 0) return;                            // NaN it shall be
    constexpr int kRows = kAll > 128 && kPair.alibi && kPair.dropout ? 4 : kRowsAgain;  // for which there are registers
    again.for_each<kRows>([&](int row, unsigned wanted) {
      key_rows_again<Spec, kIsDk, kRows>(p, mask(), batch, head_k, first_key + key_group * kKeys + row, wanted, lane);
    });
  }

  // The block behind `now`; kSplitBefore: to the other stage, which nobody reads any more.
  __device__ void load_next(Step now) {
    const Step next = after(now);
    if (next.head >= (head_k + 1) * p.group) return;
    if constexpr (kSplitBefore) stage ^= 1;
    load_queries(next);
    if constexpr (kSplitBefore) stage ^= 1;
  }

 public:
  using Scores::Scores;

  __device__ void run() {
    take_tile();
    if (kPair.packed && first_key >= p.seqlen_k) return;
    float sum[kKeyTiles][kSumTiles][4];  // dV or dK, by role
    clear(sum);
    if constexpr (kPair.lengths) {
      const float first = first_sum<kPair>(p, batch);
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
        for (int j = 0; j < kSumTiles; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[i][j][e] = first;
    }

    const bool any = first_block() < blocks_end() && (!kPair.lengths || first_key < seqlen_k());  // some query sees these keys
    Step now{head_k * p.group, first_block()};
    if (any) {
      clear_infinite_keys();
      load_keys();
      load_queries(now);
      ptx::cp_async_wait<1>();
      split_keys();
      __syncthreads();  // all have read the greatest numbers
    }
    while (any && now.head < (head_k + 1) * p.group) {
      ptx::cp_async_wait<0>();
      if constexpr (kSplitBefore) {
        __syncthreads();
        split_queries();
        load_next(now);
      } else {
        split_queries();
        __syncthreads();
      }
      const int first_query = now.block * kBlockM, group_key = first_key + this_group() * kKeys;
      const bool hidden = (kMasked && group_key > first_query + kBlockM - 1 + diagonal()) ||
                          (kWindow && group_key + kKeys - 1 < first_query + left_diagonal());  // no query of the block sees a key of the group
      const bool masked = first_key + kBlockN > seqlen_k() || first_query + kBlockM > seqlen_q() ||
                          (kMasked && group_key + kKeys - 1 > first_query + diagonal()) ||
                          (kWindow && group_key < first_query + kBlockM - 1 + left_diagonal());
      if (computes_values()) {
        if (!hidden) compute_values(sum, first_query, masked, now.head);
      } else {
        if (!hidden)
          compute_keys(sum, first_query, masked, now.head);
        else
          clear_ds();
      }
      __syncthreads();
      if constexpr (kSplitBefore) {
        compute_dq(now);
        stage ^= 1;
      } else {
        load_next(now);
        compute_dq(now);
      }
      now = after(now);
    }
    if (computes_values())
      store_gradient<false>(sum, dropout_scale());
    else
      store_gradient<true>(sum, p.softmax_scale * dropout_scale());
  }
};

template <class Spec>
__device__ __forceinline__ void backward_f32(const AttentionParams& p) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  if constexpr (kPairOf<Spec>.packed) {
    OwnParams own{pairs_of(p), p};
    BackwardF32<Spec>(own, ptx::shared_address(shared_memory)).run();
  } else {
    BackwardF32<Spec>(p, ptx::shared_address(shared_memory)).run();
  }
}

// With q and dout split before.
template <class Spec>
__device__ __forceinline__ void backward_f32(const AttentionParams& p, const BackwardF32Parts& parts) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  if constexpr (kPairOf<Spec>.packed) {
    OwnParams own{pairs_of(p), p};
    BackwardF32<Spec>(own, ptx::shared_address(shared_memory), parts).run();
  } else {
    BackwardF32<Spec>(p, ptx::shared_address(shared_memory), parts).run();
  }
}

}  // namespace fattn::v2
