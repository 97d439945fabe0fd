// Backward, algorithm v2 (FlashAttention-2), main kernel: dk and dv of a block of keys, and its share of dq, which is added up in fp32.
//
// A CTA owns kBlockN keys of one key head and walks over the blocks of kBlockM queries that see them, of all query heads that share the key head.
// Scores are computed transposed (keys are rows), because then the accumulators of P^T and dS^T are, in their registers, the A operands of
//   S^T = K Q^T    P^T = exp2(S^T - lse)    dP^T = V dO^T    dS^T = P^T (dP^T - row_sum)    dV += P^T dO    dK += dS^T Q    dQ += dS K
// Warps form groups; a group owns some of the CTA's keys. In a group one half of the warps computes S^T, P^T and dV, the other dP^T, dS^T and dK:
// all they share is P^T, which goes from the one to the other through shared memory. So a warp holds one accumulator of the keys' gradients and one
// of scores, which allows larger tiles, and of the two warps of a scheduler one multiplies while the other takes exponentials. Warps of the same
// role in a group split the queries of a block and then the columns of dV (dK); what they need of each other's P^T (dS^T) they read back.
// dS^T is in shared memory in any case, for dQ, which all warps compute together one block later, when one barrier a block has made it visible
// (pipelined; otherwise in the same block, with a barrier more).
//
// With softcap dS^T = P^T (1 - T^2) (dP^T - row_sum), T = tanh(...) the capped scores before they are multiplied by softcap: P^T (1 - T^2) goes to
// the second role in place of P^T.
//
// With features of pairs (kernels/pair.h) what goes to the second role is marked by its sign, which weights do not need: of a dropped pair it takes
// nothing of dP^T, and of -0, a pair that bias or mask hides or that is of a row without a gradient, nothing at all.
//
// Spec: Element; kLevel (75, 80); kHeaddim, kHeaddimV; kCausal; kWindow (kCausal is then false); kCapped; kAligned (16-byte copies); kDeterministic;
// kTile (a BackwardTile); kPair, none if it is left out; kStaged: bias and mask of pairs come through shared memory (kernels/v2/term_tile.h), false
// if it is left out.
//
// The parts: v2/backward_place.h (tile, shared memory, loads), backward_scores.h (P^T and dS^T) and here the products and their order.
#pragma once

#include "device_abi/attention_params.h"
#include "device_abi/backward_layout.h"
#include "device_abi/lowest.h"
#include "kernels/constants.h"
#include "kernels/mask.h"
#include "kernels/pair.h"
#include "kernels/ptx/barrier.h"
#include "kernels/ptx/convert.h"
#include "kernels/ptx/ldmatrix.h"
#include "kernels/ptx/math.h"
#include "kernels/ptx/mma.h"
#include "kernels/ptx/reduce.h"
#include "kernels/ptx/semaphore.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/score.h"
#include "kernels/v2/backward_place.h"
#include "kernels/v2/backward_scores.h"
#include "kernels/v2/careful.h"
#include "kernels/v2/dq_accum.h"
#include "kernels/v2/fragment_store.h"
#include "kernels/v2/store_pair.h"
#include "kernels/v2/swizzled_tile.h"
#include "kernels/v2/workspace.h"

namespace fattn::v2 {

template <class Spec>
class Backward : BackwardScores<Spec> {
  using Place = BackwardPlace<Spec>;
  using Scores = BackwardScores<Spec>;
  // clang-format off
  using Place::kTile, Place::kWidth, Place::kWidthV, Place::kBlockM, Place::kBlockN, Place::kThreads, Place::kGroupWarps, Place::kPipelined;
  using Place::kExchange, Place::kWindow, Place::kCapped, Place::kMasked, Place::kPair, Place::kTwoForms, Place::kHides, Place::kByIds;
  using Place::kByDocument, Place::kKeys, Place::kQueries, Place::kChunk, Place::kKeyTiles, Place::kChunkTiles, Place::kColumns, Place::kColumnsV;
  using Place::kSumTiles, Place::kDqRowWarps, Place::kDqRows, Place::kDqColumns, Place::kDqSpan, typename Place::KLoader, typename Place::VLoader;
  using typename Place::Bits, typename Place::Element, Place::p, Place::shared, Place::thread, Place::lane, Place::warp, Place::values;
  using Place::key_group, Place::member, Place::batch, Place::head_k, Place::first_key, Place::first_block, Place::diagonal, Place::left_diagonal;
  using typename Place::Step, Place::after, Place::before, Place::seqlen_k, Place::blocks_end, Place::take_tile, Place::narrow;
  using Place::of_one_document, Place::nth_key_block, Place::at, Place::load_keys, Place::load_queries, Place::commit, Place::wait_for_loads;
  using Place::kAllThreads, Place::kRoleThreads, Place::weights_barrier, Place::role_barrier, Place::q_tile, Place::dout_tile, Place::ds_tile;
  using Place::p_tile, Place::lse_rows;
  using Scores::hide, Scores::weights, Scores::pair_weights, Scores::copy, Scores::score_gradients, Scores::pair_score_gradients;
  using Scores::add_to_dbias;
  // clang-format on

  // ---- compute: products ----
  __device__ static void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    if constexpr (Spec::kLevel < 80) {
      ptx::mma_m16n8k8_f16(d, a[0], a[1], b0);
      ptx::mma_m16n8k8_f16(d, a[2], a[3], b1);
    } else if constexpr (is_same<Element, bf16>) {
      ptx::mma_m16n8k16_bf16(d, a, b0, b1);
    } else {
      ptx::mma_m16n8k16_f16(d, a, b0, b1);
    }
  }

  template <int kRowTiles, int kColumnTiles>
  __device__ static void clear(float (&d)[kRowTiles][kColumnTiles][4]) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) d[i][j][e] = 0;
  }

  template <int kRowTiles, int kColumnTiles>
  __device__ static void fill(float (&d)[kRowTiles][kColumnTiles][4], float x) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) d[i][j][e] = x;
  }

  // d = A B^T over the whole width: A = kKeys rows of K (V), B = kChunk rows of Q (dO).
  template <int kInner>
  __device__ static void multiply_rows(float (&d)[kKeyTiles][kChunkTiles][4], unsigned a_tile, unsigned b_tile,
                                       const BlockAddress<kInner, kInner, LaneOrder::kColumnMajor>& a_at,
                                       const BlockAddress<kInner, kInner, LaneOrder::kRowMajor>& b_at, int b_row) {
#pragma unroll
    for (int k = 0; k < kInner / 16; ++k) {
      unsigned a[kKeyTiles][4];
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i) ptx::ldmatrix_x4(a[i], a_at.at(a_tile, 16 * i, k));
#pragma unroll
      for (int j = 0; j < kChunkTiles / 2; ++j) {
        unsigned b[4];
        ptx::ldmatrix_x4(b, b_at.at(b_tile, b_row + 16 * j, k));
#pragma unroll
        for (int i = 0; i < kKeyTiles; ++i) {
          mma(d[i][2 * j], a[i], b[0], b[1]);
          mma(d[i][2 * j + 1], a[i], b[2], b[3]);
        }
      }
    }
  }

  // d += A B for 16 inner indices (queries): A = fragments of P^T (dS^T), B = 16 rows of dO (Q).
  template <int kSpan, int kInner>
  __device__ static void accumulate(float (&d)[kKeyTiles][kSumTiles][4], const unsigned (&a)[kKeyTiles][4], unsigned b_tile,
                                    const BlockAddress<kInner, kSpan, LaneOrder::kColumnMajor>& b_at, int b_row) {
#pragma unroll
    for (int j = 0; j < kSpan / 16; ++j) {
      unsigned b[4];
      ptx::ldmatrix_x4_trans(b, b_at.at(b_tile, b_row, j));
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i) {
        mma(d[i][2 * j], a[i], b[0], b[1]);
        mma(d[i][2 * j + 1], a[i], b[2], b[3]);
      }
    }
  }

  // sum += A B for the queries of the other warps of this role: A from shared memory.
  template <int kSpan, int kInner>
  __device__ void accumulate_others(float (&sum)[kKeyTiles][kSumTiles][4], unsigned a_tile, unsigned b_tile,
                                    const BlockAddress<kInner, kSpan, LaneOrder::kColumnMajor>& b_at) const {
    ptx::bar_sync(role_barrier(), kRoleThreads);
#pragma unroll
    for (int other = 1; other < kGroupWarps; ++other) {
      const int queries = (member + other) % kGroupWarps * kQueries;
      const BlockAddress<kBlockM, kQueries, LaneOrder::kColumnMajor> a_at(lane, key_group * kKeys, queries);
#pragma unroll
      for (int j = 0; j < kQueries / 16; ++j) {
        unsigned a[kKeyTiles][4];
#pragma unroll
        for (int i = 0; i < kKeyTiles; ++i) ptx::ldmatrix_x4(a[i], a_at.at(a_tile, 16 * i, j));
        accumulate<kSpan, kInner>(sum, a, b_tile + 2 * queries * kInner, b_at, 16 * j);
      }
    }
  }

  // Puts fragments of a chunk where the other role, or the other warps of the role, read them.
  __device__ static void store_chunk(const FragmentStore<kBlockM, kQueries>& store, unsigned tile, int row,
                                     const unsigned (&bits)[kChunkTiles / 2][kKeyTiles][4]) {
#pragma unroll
    for (int j = 0; j < kChunkTiles / 2; ++j)
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i) store.store(tile, 16 * i, row / 16 + j, bits[j][i]);
  }

  // d = NaN where its rows see an Inf or NaN of 16 rows of B, as `seen` says. B: kSpan columns.
  template <int kSpan, int kRowTiles, int kColumnTiles, class Load>
  __device__ static void mark(float (&d)[kRowTiles][kColumnTiles][4], const unsigned (&seen)[kRowTiles][4], const Load& load) {
#pragma unroll
    for (int j = 0; j < kSpan / 16; ++j) {
      unsigned b[4];
      load(b, j);
#pragma unroll
      for (unsigned& pair : b) pair = nonfinite_halves<Element>(pair) & kOnes<Element>;
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          float count[4] = {0, 0, 0, 0};
          mma(count, seen[i], b[2 * n], b[2 * n + 1]);
#pragma unroll
          for (int e = 0; e < 4; ++e)
            if (count[e] != 0) d[i][2 * j + n][e] = kNan;
          ptx::warp_sync();  // no need of it, but the compiler then has fewer operands and counts at once
        }
    }
  }

  // sum += A B for all queries of a block in which pairs are hidden and whose B holds Inf or NaN, in the order of accumulate() and
  // accumulate_others(). Rows without a gradient take no part.
  template <int kSpan, int kInner>
  __device__ void accumulate_careful(float (&sum)[kKeyTiles][kSumTiles][4], unsigned a_tile, unsigned b_tile,
                                     const BlockAddress<kInner, kSpan, LaneOrder::kColumnMajor>& b_at, unsigned lse_at, int first_query,
                                     int head) const {
    if constexpr (kExchange)
      ptx::bar_sync(role_barrier(), kRoleThreads);
    else
      ptx::warp_sync();
    const BlockAddress<kBlockM, kBlockM, LaneOrder::kColumnMajor> a_at(lane, key_group * kKeys, 0);
#pragma unroll 1
    for (int step = 0; step < kBlockM / 16; ++step) {
      const int k = (member * (kQueries / 16) + step) % (kBlockM / 16);
      unsigned a[kKeyTiles][4], found = 0;
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i) ptx::ldmatrix_x4(a[i], a_at.at(a_tile, 16 * i, k));
#pragma unroll
      for (int j = 0; j < kSpan / 16; ++j) {
        unsigned b[4];
        ptx::ldmatrix_x4_trans(b, b_at.at(b_tile, 16 * k, j));
#pragma unroll
        for (unsigned& pair : b) {
          const unsigned nonfinite = nonfinite_halves<Element>(pair);
          found |= nonfinite;
          pair &= ~nonfinite;
        }
#pragma unroll
        for (int i = 0; i < kKeyTiles; ++i) {
          mma(sum[i][2 * j], a[i], b[0], b[1]);
          mma(sum[i][2 * j + 1], a[i], b[2], b[3]);
        }
      }
      if (ptx::vote_all(found == 0)) continue;
      const int own_key = first_key + key_group * kKeys + lane / 4, own_query = 16 * k + lane % 4 * 2;
      const int reach = first_query + own_query + diagonal - own_key;
      [[maybe_unused]] const int lead = kWindow ? reach - diagonal + left_diagonal : 0;
      [[maybe_unused]] const Terms<kPair, Element> terms(p, ptx::opaque(batch), head, seqlen_k());
      const bool some = seen_pairs<Element>(a, [&](int i, int half, int query) {
        const int key = 16 * i + 8 * half;
        if (ptx::ld_shared_f32(lse_at + 4 * (own_query + query)) < kLowestLse) return false;
        if (kWindow && key < lead + query) return false;
        if (kMasked && key > reach + query) return false;
        if ((kPair.lengths || kHides) && own_key + key >= seqlen_k()) return false;
        if constexpr (kHides)  // a query behind the last is all zeros
          return first_query + own_query + query < p.seqlen_q && terms.sees(first_query + own_query + query, own_key + key);
        return true;
      });
      if (some) mark<kSpan>(sum, a, [&](unsigned(&b)[4], int j) { ptx::ldmatrix_x4_trans(b, b_at.at(b_tile, 16 * k, j)); });
    }
  }

  // The first role.
  __device__ void compute_values(float (&dv)[kKeyTiles][kSumTiles][4], int stage, int first_query, bool masked, int head) const {
    const int lane = ptx::opaque(this->lane);
    const BlockAddress<kWidth, kWidth, LaneOrder::kColumnMajor> k_rows(lane, key_group * kKeys, 0);
    const BlockAddress<kWidth, kWidth, LaneOrder::kRowMajor> q_rows(lane, member * kQueries, 0);
    const BlockAddress<kWidthV, kColumnsV, LaneOrder::kColumnMajor> dout_columns(lane, 0, member * kColumnsV);
    const FragmentStore<kBlockM, kQueries> p_store(lane, key_group * kKeys, member * kQueries);
    const unsigned own_dout = dout_tile(stage) + 2 * member * kQueries * kWidthV;
    [[maybe_unused]] const bool plain = kByDocument && of_one_document(first_query);
    // An Inf or NaN in a row of dO makes its row_sum one.
    const bool careful = (((kMasked || kPair.lengths) && masked) || (kHides && !plain)) &&
                         any_nonfinite(shared + kTile.row_sum_offset() + stage * kTile.row_bytes(), kBlockM, lane);
#pragma unroll 1
    for (int row = 0; row < kQueries; row += kChunk) {
      const int query = member * kQueries + row;
      unsigned p_bits[kChunkTiles / 2][kKeyTiles][4], sloped[kChunkTiles / 2][kKeyTiles][4];
      {
        float s[kKeyTiles][kChunkTiles][4];
        clear(s);
        multiply_rows<kWidth>(s, shared, q_tile(stage), k_rows, q_rows, row);  // S^T = K Q^T
        ptx::warp_sync();  // no need of it, but the compiler then keeps this apart from the product: together they want too many registers
        if constexpr (kCapped) cap_scores<true>(reinterpret_cast<float(&)[kKeyTiles * kChunkTiles * 4]>(s), features_of(p).score_factor);
        const unsigned lse_at = lse_rows(stage) + 4 * query;
        if constexpr (kByDocument) {
          if (plain) {
            weights(s, lse_at, p_bits, sloped);
            if constexpr (!kCapped) copy(sloped, p_bits);
          } else {
            pair_weights(s, stage, lse_at, head, first_query, query, p_bits, sloped);
          }
        } else if constexpr (kPair.terms() || kPair.dropout) {
          pair_weights(s, stage, lse_at, head, first_query, query, p_bits, sloped);
        } else {
          weights(s, lse_at, p_bits, sloped);
        }
        if (masked) hide(p_bits, first_query + query);
        if ((kTwoForms || kHides) && masked) hide(sloped, first_query + query);
      }
      store_chunk(p_store, p_tile(), row, kTwoForms || kHides ? sloped : p_bits);
      ptx::bar_sync(weights_barrier(row / kChunk), kAllThreads);
      if constexpr (kTwoForms) {  // once the second role has read it, P^T may be there, for those who read it back
        ptx::bar_sync(weights_barrier(row / kChunk), kAllThreads);
        if (kExchange || careful) store_chunk(p_store, p_tile(), row, p_bits);
      }
      if (careful) continue;
#pragma unroll
      for (int j = 0; j < kChunkTiles / 2; ++j) accumulate<kColumnsV, kWidthV>(dv, p_bits[j], own_dout, dout_columns, row + 16 * j);  // dV += P^T dO
    }
    if (careful)
      accumulate_careful<kColumnsV, kWidthV>(dv, p_tile(), dout_tile(stage), dout_columns, lse_rows(stage), first_query, head);
    else if constexpr (kExchange)
      accumulate_others<kColumnsV, kWidthV>(dv, p_tile(), dout_tile(stage), dout_columns);
  }

  // The second role.
  __device__ void compute_keys(float (&dk)[kKeyTiles][kSumTiles][4], int stage, int first_query, bool masked, int head) const {
    const int lane = ptx::opaque(this->lane);
    const BlockAddress<kWidthV, kWidthV, LaneOrder::kColumnMajor> v_rows(lane, key_group * kKeys, 0);
    const BlockAddress<kWidthV, kWidthV, LaneOrder::kRowMajor> dout_rows(lane, member * kQueries, 0);
    const BlockAddress<kWidth, kColumns, LaneOrder::kColumnMajor> q_columns(lane, 0, member * kColumns);
    const BlockAddress<kBlockM, kQueries, LaneOrder::kColumnMajor> p_read(lane, key_group * kKeys, member * kQueries);
    const FragmentStore<kBlockM, kQueries> ds_store(lane, key_group * kKeys, member * kQueries);
    const unsigned own_q = q_tile(stage) + 2 * member * kQueries * kWidth;
    // An Inf or NaN in a row of Q makes its lse one, unless scores are capped, or biases in the place of all of them leave it low.
    bool careful = ((kMasked || kPair.lengths) && masked) || kHides;
    if (!kCapped) careful = careful && any_nonfinite(lse_rows(stage), kBlockM, lane, kPair.bias != 0 ? kLowestLse : -kInfinity);
    if (kCapped || kPair.bias != 0) careful = careful && !ptx::vote_all(!share_nonfinite<Element>(q_tile(stage), kTile.q_bytes(), lane, 32));
#pragma unroll 1
    for (int row = 0; row < kQueries; row += kChunk) {
      const int query = member * kQueries + row;
      unsigned ds_bits[kChunkTiles / 2][kKeyTiles][4];
      {
        float dp[kKeyTiles][kChunkTiles][4];
        clear(dp);
        multiply_rows<kWidthV>(dp, shared + kTile.v_offset(), dout_tile(stage), v_rows, dout_rows, row);  // dP^T = V dO^T
        ptx::bar_sync(weights_barrier(row / kChunk), kAllThreads);
#pragma unroll
        for (int j = 0; j < kChunkTiles / 2; ++j)
#pragma unroll
          for (int i = 0; i < kKeyTiles; ++i) ptx::ldmatrix_x4(ds_bits[j][i], p_read.at(p_tile(), 16 * i, row / 16 + j));
        if constexpr (kTwoForms) ptx::bar_sync(weights_barrier(row / kChunk), kAllThreads);
        const unsigned row_sum_at = shared + kTile.row_sum_offset() + stage * kTile.row_bytes() + 4 * query;
        if constexpr (kHides || kPair.dropout || kPair.dbias)
          pair_score_gradients(dp, row_sum_at, ds_bits);
        else
          score_gradients(dp, row_sum_at, ds_bits);
        if (masked) hide(ds_bits, first_query + query);
        if constexpr (kPair.dbias) add_to_dbias(dp, head, first_query + query, masked);
      }
      store_chunk(ds_store, ds_tile(stage), row, ds_bits);
      if (careful) continue;
#pragma unroll
      for (int j = 0; j < kChunkTiles / 2; ++j) accumulate<kColumns, kWidth>(dk, ds_bits[j], own_q, q_columns, row + 16 * j);  // dK += dS^T Q
    }
    if (careful)
      accumulate_careful<kColumns, kWidth>(dk, ds_tile(stage), q_tile(stage), q_columns, lse_rows(stage), first_query, head);
    else if constexpr (kExchange)
      accumulate_others<kColumns, kWidth>(dk, ds_tile(stage), q_tile(stage), q_columns);
  }

  __device__ void clear_ds(int stage) const {
    const FragmentStore<kBlockM, kQueries> ds_store(lane, key_group * kKeys, member * kQueries);
    const unsigned zeros[4] = {};
#pragma unroll
    for (int j = 0; j < kQueries / 16; ++j)
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i) ds_store.store(ds_tile(stage), 16 * i, j, zeros);
  }

 public:
  using Scores::Scores;

  __device__ void run() {
    take_tile();
    if (kPair.packed && first_key >= p.seqlen_k) return;
    if constexpr (kByIds) narrow();

    bool keys_nonfinite = false;         // Inf or NaN among the keys; asked under a mask only
    float sum[kKeyTiles][kSumTiles][4];  // dV or dK, by role
    clear(sum);
    if constexpr (kPair.lengths) fill(sum, first_sum<kPair>(p, batch));

    // S^T, P^T of one block; dV. Or dP^T, dS^T; dK.
    const auto compute_block = [&](Step step, int stage) {
      const int first_query = step.block * kBlockM, group_key = first_key + key_group * kKeys;
      const bool hidden = (kMasked && group_key > first_query + kBlockM - 1 + diagonal) ||
                          (kWindow && group_key + kKeys - 1 < first_query + left_diagonal);  // no query of the block sees a key of the group
      const bool masked = first_key + kBlockN > seqlen_k() || first_query + kBlockM > p.seqlen_q ||
                          (kMasked && group_key + kKeys - 1 > first_query + diagonal) ||
                          (kWindow && group_key < first_query + kBlockM - 1 + left_diagonal);
      if (values) {
        if (!hidden) compute_values(sum, stage, first_query, masked, step.head);
      } else {
        if (!hidden)
          compute_keys(sum, stage, first_query, masked, step.head);
        else
          clear_ds(stage);
      }
    };

    // dQ of one block, from everybody's dS^T.
    const auto compute_dq = [&](Step step, int stage) {
      const int lane = ptx::opaque(thread) & 31, dq_row = warp % kDqRowWarps * kDqRows, dq_column = warp / kDqRowWarps * kDqColumns;
      const BlockAddress<kBlockM, kDqRows, LaneOrder::kRowMajor> ds_columns(lane, 0, dq_row);
      const BlockAddress<kWidth, kDqColumns, LaneOrder::kColumnMajor> k_columns(lane, 0, dq_column);
      const long long head = workspace_head<kPair>(static_cast<long long>(batch) * p.nheads + step.head, step.head);
      const int first_row = step.block * kBlockM + dq_row;
      const unsigned row_blocks = workspace_blocks<kPair, kDqAccumRows>(p);
      float* const accum = p.dq_accum + (head * row_blocks + first_row / kDqAccumRows) * (kDqAccumRows * kWidth) + dq_column * kDqAccumRows;
      int* const turn = Spec::kDeterministic ? p.dq_semaphore + 1 + head * workspace_blocks<kPair, kBlockM>(p) + step.block : nullptr;
#pragma unroll
      for (int first = 0; first < kDqColumns; first += kDqSpan) {
        float dq[kDqRows / 16][kDqSpan / 8][4];
        clear(dq);
        if ((kMasked || kHides) && keys_nonfinite &&
            (kHides || first_key + kBlockN - 1 > step.block * kBlockM + diagonal ||
             (kWindow && first_key < step.block * kBlockM + kBlockM - 1 + left_diagonal))) {
#pragma unroll 1
          for (int k = 0; k < kBlockN / 16; ++k) {
            unsigned a[kDqRows / 16][4], found = 0;
#pragma unroll
            for (int i = 0; i < kDqRows / 16; ++i) ptx::ldmatrix_x4_trans(a[i], ds_columns.at(ds_tile(stage), 16 * k, i));
#pragma unroll
            for (int j = 0; j < kDqSpan / 16; ++j) {
              unsigned b[4];
              ptx::ldmatrix_x4_trans(b, k_columns.at(shared, 16 * k, first / 16 + j));
#pragma unroll
              for (unsigned& pair : b) {
                const unsigned nonfinite = nonfinite_halves<Element>(pair);
                found |= nonfinite;
                pair &= ~nonfinite;
              }
#pragma unroll
              for (int i = 0; i < kDqRows / 16; ++i) {
                mma(dq[i][2 * j], a[i], b[0], b[1]);
                mma(dq[i][2 * j + 1], a[i], b[2], b[3]);
              }
            }
            if (ptx::vote_all(found == 0)) continue;
            const int own_query = first_row + lane / 4, own_key = first_key + 16 * k + lane % 4 * 2, reach = own_query + diagonal - own_key;
            [[maybe_unused]] const int lead = kWindow ? reach - diagonal + left_diagonal : 0;
            [[maybe_unused]] const Terms<kPair, Element> terms(p, ptx::opaque(batch), step.head, seqlen_k());
            const bool some = seen_pairs<Element>(a, [&](int i, int half, int key) {
              const int query = 16 * i + 8 * half;
              if (kWindow && key < lead + query) return false;
              if (kMasked && key > reach + query) return false;
              if constexpr (kHides)  // a key behind the last is all zeros
                return own_query + query < p.seqlen_q && own_key + key < seqlen_k() && terms.sees(own_query + query, own_key + key);
              return true;
            });
            if (some) mark<kDqSpan>(dq, a, [&](unsigned(&b)[4], int j) { ptx::ldmatrix_x4_trans(b, k_columns.at(shared, 16 * k, first / 16 + j)); });
          }
        } else
#pragma unroll
          for (int k = 0; k < kBlockN / 16; ++k) {  // dQ = dS K
            unsigned a[kDqRows / 16][4];
#pragma unroll
            for (int i = 0; i < kDqRows / 16; ++i) ptx::ldmatrix_x4_trans(a[i], ds_columns.at(ds_tile(stage), 16 * k, i));
#pragma unroll
            for (int j = 0; j < kDqSpan / 16; ++j) {
              unsigned b[4];
              ptx::ldmatrix_x4_trans(b, k_columns.at(shared, 16 * k, first / 16 + j));
#pragma unroll
              for (int i = 0; i < kDqRows / 16; ++i) {
                mma(dq[i][2 * j], a[i], b[0], b[1]);
                mma(dq[i][2 * j + 1], a[i], b[2], b[3]);
              }
            }
          }
        if (Spec::kDeterministic && first == 0) {  // lower key blocks first: the same order of additions in every run
          if (thread == 0) {
            // Packed sequences whose offsets are out of range may share blocks, which then count too far.
            const auto is_early = [](int x, int own) { return kPair.packed ? x < own : x != own; };
            while (is_early(ptx::ld_acquire(turn), nth_key_block(step.block))) __nanosleep(64);
          }
          __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < kDqRows / 16; ++i) {
          if (first_row + 16 * i < p.seqlen_q) {
#pragma unroll
            for (int j = 0; j < kDqSpan / 8; ++j) add_to_dq(accum + 16 * i * kWidth + (first / 8 + j) * 128, lane, dq[i][j]);
          }
        }
      }
      if constexpr (Spec::kDeterministic) {
        __threadfence();
        __syncthreads();
        if (thread == 0) ptx::red_add_release(turn, 1);
      }
    };

    // ---- the walk over query blocks ----
    // No query sees the keys of a tile behind a batch entry's last.
    const int steps = kPair.lengths && first_key >= seqlen_k() ? 0 : max(0, blocks_end() - first_block) * p.group;
    Step now{head_k * p.group, first_block};
    if (steps > 0) {
      load_keys();
      load_queries(now, 0);
      commit();
    }
    if ((kMasked || kHides) && steps > 0) {
      wait_for_loads();
      keys_nonfinite = ptx::bar_or(share_nonfinite<Element>(shared, kTile.k_bytes(), thread, kThreads));
    }
    for (int i = 0; i < (kPipelined && steps > 0 ? steps + 1 : steps); ++i, now = after(now)) {
      wait_for_loads();
      if constexpr (kPipelined) {
        if (i + 1 < steps) {
          load_queries(after(now), (i + 1) % 2);
          commit();
        }
        const bool late = !Spec::kDeterministic && values;
        if (i > 0 && !late) compute_dq(before(now), (i + 1) % 2);
        if (i < steps) compute_block(now, i % 2);
        if (i > 0 && late) compute_dq(before(now), (i + 1) % 2);
      } else {
        compute_block(now, 0);
        __syncthreads();
        if (i + 1 < steps) {
          load_queries(after(now), 0);
          commit();
        }
        compute_dq(now, 0);
      }
    }
    // ---- finish: dK and dV leave through the shared memory of K and V ----
    if constexpr (kPair.fp32_out) {
      if (values)
        store_fp32_gradient<Spec::kHeaddimV, kColumnsV>(p.dv, p.dv_strides, sum, kPair.dropout ? pairs_of(p).dropout_scale : 1.f, member * kColumnsV);
      else
        store_fp32_gradient<Spec::kHeaddim, kColumns>(p.dk, p.dk_strides, sum, p.softmax_scale, member * kColumns);
      return;
    }
    __syncthreads();
    if (values)
      store_gradient<kWidthV, kColumnsV>(shared + kTile.v_offset(), sum, kPair.dropout ? pairs_of(p).dropout_scale : 1.f, member * kColumnsV);
    else
      store_gradient<kWidth, kColumns>(shared, sum, p.softmax_scale, member * kColumns);
    __syncthreads();
    const KLoader k_loader(thread);
    const VLoader v_loader(thread);
    const int rows = p.seqlen_k - first_key;
    k_loader.template store<kBlockN>(shared, const_cast<Bits*>(at(p.dk, p.dk_strides, batch, head_k, first_key)), p.dk_strides.row, rows);
    v_loader.template store<kBlockN>(shared + kTile.v_offset(), const_cast<Bits*>(at(p.dv, p.dv_strides, batch, head_k, first_key)), p.dv_strides.row,
                                     rows);
  }

 private:
  template <int kInner, int kSpan>
  __device__ void store_gradient(unsigned tile, const float (&d)[kKeyTiles][kSumTiles][4], float scale, int first_column) const {
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
      for (int j = 0; j < kSpan / 8; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = key_group * kKeys + 16 * i + 8 * half + lane / 4;
          ptx::st_shared_4(tile + SwizzledTile<kInner>::offset(row, first_column / 8 + j) + lane % 4 * 4,
                           ptx::pack2<Element>(d[i][j][2 * half] * scale, d[i][j][2 * half + 1] * scale));
        }
  }

  // From registers to `to`.
  template <int kHeaddim, int kSpan>
  __device__ void store_fp32_gradient(void* to, const TensorStrides& s, const float (&d)[kKeyTiles][kSumTiles][4], float scale,
                                      int first_column) const {
    float* const first = static_cast<float*>(to) + batch * s.batch + head_k * s.head + first_key * s.row;
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = key_group * kKeys + 16 * i + 8 * half + lane / 4;
#pragma unroll
        for (int j = 0; j < kSpan / 8; ++j)
          store_pair<kHeaddim, Spec::kAligned>(first + row * s.row, first_column + 8 * j + lane % 4 * 2, d[i][j][2 * half] * scale,
                                               d[i][j][2 * half + 1] * scale, first_key + row < p.seqlen_k);
      }
  }
};

template <class Spec>
__device__ __forceinline__ void backward(const AttentionParams& p) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const auto run = [&](auto& params) { Backward<Spec>(params, ptx::shared_address(shared_memory), static_cast<int>(blockIdx.x)).run(); };
  if constexpr (kPairOf<Spec>.packed) {
    PairParams own = pairs_of(p);
    run(own);
  } else {
    run(p);
  }
}

}  // namespace fattn::v2
