// P^T and dS^T of kernels/v2/backward.h, of a chunk of queries, in the registers of a warp, from S^T and dP^T; and dbias, which is dS. Spec: see
// there.
#pragma once

#include "device_abi/attention_params.h"
#include "device_abi/lowest.h"
#include "kernels/constants.h"
#include "kernels/pair.h"
#include "kernels/ptx/convert.h"
#include "kernels/ptx/math.h"
#include "kernels/ptx/reduce.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/ptx/shared_pair.h"
#include "kernels/tile/for_each.h"
#include "kernels/v2/backward_place.h"
#include "kernels/v2/term_tile.h"

namespace fattn::v2 {

using tile::Constant;

template <class Spec>
struct BackwardScores : BackwardPlace<Spec> {
  using Place = BackwardPlace<Spec>;
  // clang-format off
  using Place::kWindow, Place::kCapped, Place::kMasked, Place::kPair, Place::kHides, Place::kStaged, Place::kTerms, Place::kKeys, Place::kKeyTiles;
  using Place::kChunkTiles, typename Place::Element, Place::p, Place::lane, Place::key_group, Place::batch, Place::first_key, Place::diagonal;
  using Place::left_diagonal, Place::seqlen_k, Place::term_tile_at, Place::kWholeWeights, typename Place::Fine, Place::kFine, Place::kRoundedLater;
  // clang-format on
  using Place::Place;

  // Zeros in place of the pairs that the mask hides, or that are beyond the last key or query, whatever was computed for them: such a query was
  // loaded as zeros, which an Inf in k makes NaN.
  __device__ void hide(unsigned (&bits)[kChunkTiles / 2][kKeyTiles][4], int first_query) const {
    const int key = first_key + key_group * kKeys + lane / 4, query = first_query + lane % 4 * 2;
    const int keys_left = seqlen_k() - key, queries_left = p.seqlen_q - query, reach = query + diagonal - key;
    const int lead = kWindow ? query + left_diagonal - key : 0;
#pragma unroll
    for (int j = 0; j < kChunkTiles; ++j)
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int key_step = 16 * i + 8 * half;
          unsigned& pair = bits[j / 2][i][j % 2 * 2 + half];  // two neighbouring queries
          if (key_step >= keys_left || 8 * j >= queries_left) pair = 0;
          if (8 * j + 1 >= queries_left) pair &= 0x0000ffffu;
          if constexpr (kMasked) {
            if (key_step - 8 * j > reach) pair &= 0xffff0000u;
            if (key_step - 8 * j - 1 > reach) pair &= 0x0000ffffu;
          }
          if constexpr (kWindow) {
            if (key_step - 8 * j < lead) pair &= 0xffff0000u;
            if (key_step - 8 * j - 1 < lead) pair &= 0x0000ffffu;
          }
        }
  }

  // What rounding takes from two weights.
  __device__ static unsigned rest_of(float low, float high, unsigned rounded) {
    return ptx::pack2<Element>(low - ptx::low_float<Element>(rounded), high - ptx::high_float<Element>(rounded));
  }

  // What exponents subtract for a row, by which weights are times Fine::kUnit with kFine. A row without a gradient: its weights are 0.
  __device__ static float exponent_of(float lse) {
    if (lse < kLowestLse) return kInfinity;
    return kFine ? fmaf(lse, kLog2e, -Fine::kExponent) : lse * kLog2e;
  }

  // Two weights as they go to the second role, and as dV takes them, or will when they are rounded later.
  __device__ static unsigned sent_pair(float low, float high) { return kFine ? Fine::encode(low, high) : ptx::pack2<Element>(low, high); }
  __device__ static unsigned own_pair(float low, float high) {
    if constexpr (kRoundedLater) return Fine::encode(low, high);
    const unsigned pair = ptx::pack2<Element>(low, high);
    return kFine ? Fine::scaled(pair) : pair;
  }

  // P^T = exp2(S^T * scale - lse), as fragments: the accumulators of two neighbouring 16 x 8 blocks are one 16 x 16 A fragment. kCapped: and from the
  // capped S^T what dS^T is made of, P^T (1 - T^2), as `sloped`. kWholeWeights: `rest`, what rounding takes from what dS^T is made of.
  __device__ void weights(const float (&s)[kKeyTiles][kChunkTiles][4], unsigned lse_at, unsigned (&p_bits)[kChunkTiles / 2][kKeyTiles][4],
                          unsigned (&sloped)[kChunkTiles / 2][kKeyTiles][4], [[maybe_unused]] unsigned (&rest)[kChunkTiles / 2][kKeyTiles][4]) const {
    const float scale = kCapped ? p.softmax_scale_log2 : p.softmax_scale * kLog2e;
#pragma unroll
    for (int j = 0; j < kChunkTiles; ++j) {
      const float2 lse = ptx::ld_shared_f32x2(lse_at + 4 * (8 * j + lane % 4 * 2));
      const float lse_log2[2] = {exponent_of(lse.x), exponent_of(lse.y)};
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i) {
        float w[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) w[e] = ptx::ex2(s[i][j][e] * scale - lse_log2[e % 2]);
#pragma unroll
        for (int half = 0; half < 2; ++half) p_bits[j / 2][i][j % 2 * 2 + half] = own_pair(w[2 * half], w[2 * half + 1]);
        if constexpr (kCapped) {
#pragma unroll
          for (int e = 0; e < 4; ++e) w[e] *= fmaf(-s[i][j][e], s[i][j][e], 1.0f);
        }
        if constexpr (kCapped || (kFine && !kRoundedLater)) {
#pragma unroll
          for (int half = 0; half < 2; ++half) sloped[j / 2][i][j % 2 * 2 + half] = sent_pair(w[2 * half], w[2 * half + 1]);
        }
        if constexpr (kWholeWeights) {
          const auto& sent = kCapped ? sloped : p_bits;
#pragma unroll
          for (int half = 0; half < 2; ++half)
            rest[j / 2][i][j % 2 * 2 + half] = rest_of(w[2 * half], w[2 * half + 1], sent[j / 2][i][j % 2 * 2 + half]);
        }
      }
    }
  }

  // The same with terms or dropout, of queries from `row` of the block at `first_query` on: what dV is made of, and what the second role gets.
  __device__ void pair_weights(const float (&s)[kKeyTiles][kChunkTiles][4], int stage, unsigned lse_at, int head, int first_query, int row,
                               unsigned (&p_bits)[kChunkTiles / 2][kKeyTiles][4], unsigned (&sent)[kChunkTiles / 2][kKeyTiles][4],
                               [[maybe_unused]] unsigned (&rest)[kChunkTiles / 2][kKeyTiles][4]) const {
    constexpr float kLn2 = 0.693147180559945309f;
    // What may hide is in units of scores, ALiBi alone in those of log2.
    const float scale =
        kHides ? (kCapped ? p.softmax_scale_log2 * kLn2 : p.softmax_scale) : (kCapped ? p.softmax_scale_log2 : p.softmax_scale * kLog2e);
    const Terms<kPair, Element> terms(p, batch, head, seqlen_k());
    const Dropout<kPair> dropout(p, batch, head);
    const int key = first_key + key_group * kKeys + lane / 4, query = first_query + row + lane % 4 * 2;
    TransposedTermReader<kPair, Element, kTerms, kKeyTiles> reader(term_tile_at(stage), terms, key_group * kKeys, row, lane);
    [[maybe_unused]] float distance = 0, slope = 0;  // of the lane's first pair
    if constexpr (kPair.alibi) {
      distance = static_cast<float>(query + terms.shift - key);
      slope = kHides ? -terms.natural_slope : -terms.slope;
    }
    // Which pairs stay, of two score tiles and the keys of a block of random numbers.
    constexpr int kBlocks = (kKeys + core::kDropoutBlock - 1) / core::kDropoutBlock;
    static_assert(kKeys % core::kDropoutBlock == 0 || core::kDropoutBlock % kKeys == 0);
    const int group_key = first_key + key_group * kKeys;
    [[maybe_unused]] unsigned kept[kPair.dropout ? kBlocks : 1];
    const auto make_kept = [&](int j) {
      if constexpr (kPair.dropout) {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          kept[block] = dropout.kept_transposed(query + 8 * j, group_key / core::kDropoutBlock + block, lane);
          if constexpr (kKeys < core::kDropoutBlock) kept[block] >>= group_key % core::kDropoutBlock / 8;
        }
      }
    };
    // Score tiles j of 8 queries; may_hide: some of their pairs may be hidden. Those of a row without a gradient are marked likewise.
    const auto weigh = [&](auto may_hide, int j) {
      constexpr bool kMayHide = decltype(may_hide)::value != 0;
      const float2 lse = ptx::ld_shared_f32x2(lse_at + 4 * (8 * j + lane % 4 * 2));
      const float lse_log2[2] = {exponent_of(lse.x), exponent_of(lse.y)};
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float w[2];
          unsigned marks = 0;
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float score = s[i][j][2 * half + e];
            [[maybe_unused]] const float step = static_cast<float>(8 * j + e - 16 * i - 8 * half);
            if constexpr (kHides) {
              // Rows and keys behind the last get what another one has, or something else, and are hidden later.
              const int query_here = min(query + 8 * j + e, p.seqlen_q - 1), key_here = min(key + 16 * i + 8 * half, seqlen_k() - 1);
              float term = 0;
              if constexpr (kStaged) {
                term = reader.term(i, half, j, e);
                if constexpr (kPair.documents)
                  if (terms.document_q[query_here] != terms.document_k[key_here]) term = -kInfinity;
              } else {
                term = terms.natural(query_here, key_here);
              }
              if (kMayHide && (term == -kInfinity || lse_log2[e] == kInfinity)) marks |= 0x8000u << 16 * e;
              if constexpr (kPair.alibi) term = fmaf(slope, fabsf(distance + step), term);
              w[e] = ptx::ex2(fmaf(fmaf(score, scale, term), kLog2e, -lse_log2[e]));
            } else if constexpr (kPair.alibi && Spec::kCausal) {  // no key that is seen is behind its query
              w[e] = ptx::ex2(fmaf(score, scale, fmaf(slope, step, slope * distance - lse_log2[e])));
            } else if constexpr (kPair.alibi) {
              w[e] = ptx::ex2(fmaf(score, scale, fmaf(slope, fabsf(distance + step), -lse_log2[e])));
            } else {
              w[e] = ptx::ex2(score * scale - lse_log2[e]);
            }
            if (kMayHide && (marks >> 16 * e & 0x8000u) != 0) w[e] = 0;  // whatever the score and the row's lse are
          }
          unsigned& weights = p_bits[j / 2][i][j % 2 * 2 + half];
          weights = own_pair(w[0], w[1]);
          unsigned& to = sent[j / 2][i][j % 2 * 2 + half];
          to = kFine && !kRoundedLater && !kCapped ? sent_pair(w[0], w[1]) : weights;
          if constexpr (kCapped) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              w[e] *= fmaf(-s[i][j][2 * half + e], s[i][j][2 * half + e], 1.0f);
              if (kMayHide && kPair.dropout && (marks >> 16 * e & 0x8000u) != 0) w[e] = 0;  // not NaN: a mark is -0 there
            }
            to = sent_pair(w[0], w[1]);
          }
          if constexpr (kWholeWeights) rest[j / 2][i][j % 2 * 2 + half] = rest_of(w[0], w[1], to);
          to |= marks;
          if constexpr (kPair.dropout) {
            const unsigned halves = kept_halves(kept[i / 4], j % 2, i % 4 * 2 + half);
            weights &= halves;
            to |= ~halves & 0x80008000u;
          }
        }
      }
    };
#pragma unroll
    for (int j = 0; j < kChunkTiles; j += 2) {
      make_kept(j);
      if constexpr (kStaged) reader.next(j);
      if constexpr (kStaged && decltype(reader)::kTells) {
        if (!reader.hides()) {
          weigh(Constant<0>{}, j);
          weigh(Constant<0>{}, j + 1);
          continue;
        }
      }
      weigh(Constant<kHides>{}, j);
      weigh(Constant<kHides>{}, j + 1);
    }
  }

  __device__ static void copy(unsigned (&to)[kChunkTiles / 2][kKeyTiles][4], const unsigned (&from)[kChunkTiles / 2][kKeyTiles][4]) {
#pragma unroll
    for (int j = 0; j < kChunkTiles / 2; ++j)
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) to[j][i][e] = from[j][i][e];
  }

  // What the second role got, and what it is multiplied by: dP - row_sum, in units of Fine::kUnit with kFine.
  __device__ static float low_weight(unsigned pair) { return kFine ? Fine::low(pair) : ptx::low_float<Element>(pair); }
  __device__ static float high_weight(unsigned pair) { return kFine ? Fine::high(pair) : ptx::high_float<Element>(pair); }
  static constexpr float kPart = kFine ? Fine::kPart : 1.0f;
  __device__ static float difference(float dp, float row_sum_part) { return kFine ? fmaf(dp, kPart, -row_sum_part) : dp - row_sum_part; }

  // dS^T = P^T (dP^T - row_sum), in place of P^T. read(bits, j, i) reads P^T of 16 x 16 pairs, just before it is needed.
  template <class Read>
  __device__ void score_gradients(const float (&dp)[kKeyTiles][kChunkTiles][4], unsigned row_sum_at, unsigned (&bits)[kChunkTiles / 2][kKeyTiles][4],
                                  const Read& read) const {
#pragma unroll
    for (int j = 0; j < kChunkTiles; ++j) {
      float2 row_sum = ptx::ld_shared_f32x2(row_sum_at + 4 * (8 * j + lane % 4 * 2));
      row_sum.x *= kPart;
      row_sum.y *= kPart;
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i) {
        if (j % 2 == 0) read(bits[j / 2][i], j / 2, i);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          unsigned& pair = bits[j / 2][i][j % 2 * 2 + half];
          pair = ptx::pack2<Element>(low_weight(pair) * difference(dp[i][j][2 * half], row_sum.x),
                                     high_weight(pair) * difference(dp[i][j][2 * half + 1], row_sum.y));
        }
      }
    }
  }

  // The same with marks and dropout; dS in fp32 takes the place of dP, for dbias.
  __device__ void pair_score_gradients(float (&dp)[kKeyTiles][kChunkTiles][4], unsigned row_sum_at,
                                       unsigned (&bits)[kChunkTiles / 2][kKeyTiles][4]) const {
    if constexpr (kHides && !kPair.dropout && !kPair.mask && !kPair.documents) {
      unsigned marks = 0;
#pragma unroll
      for (int j = 0; j < kChunkTiles / 2; ++j)
#pragma unroll
        for (int i = 0; i < kKeyTiles; ++i) marks |= bits[j][i][0] | bits[j][i][1] | bits[j][i][2] | bits[j][i][3];
      if (ptx::vote_all((marks & 0x80008000u) == 0)) return marked_gradients(Constant<0>{}, dp, row_sum_at, bits);
    }
    marked_gradients(Constant<kHides>{}, dp, row_sum_at, bits);
  }
  // has_hidden: some pairs may be marked as hidden.
  template <class HasHidden>
  __device__ void marked_gradients(HasHidden, float (&dp)[kKeyTiles][kChunkTiles][4], unsigned row_sum_at,
                                   unsigned (&bits)[kChunkTiles / 2][kKeyTiles][4]) const {
#pragma unroll
    for (int j = 0; j < kChunkTiles; ++j) {
      const float2 row_sums = ptx::ld_shared_f32x2(row_sum_at + 4 * (8 * j + lane % 4 * 2));
      const float row_sum[2] = {row_sums.x * kPart, row_sums.y * kPart};
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          unsigned& pair = bits[j / 2][i][j % 2 * 2 + half];
          float* const ds = &dp[i][j][2 * half];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float marked = e == 0 ? low_weight(pair) : high_weight(pair);
            const int sign = static_cast<int>(__float_as_uint(marked));  // below 0: dropped or hidden, and -0: hidden
            float gradient = ds[e];
            if constexpr (kPair.dropout) gradient = sign < 0 ? 0.0f : gradient * pairs_of(p).dropout_scale;
            ds[e] = fabsf(marked) * difference(gradient, row_sum[e]);
            if (HasHidden::value != 0 && (kPair.dropout ? sign == static_cast<int>(0x80000000u) : sign < 0)) ds[e] = 0;
          }
          pair = ptx::pack2<Element>(ds[0], ds[1]);
        }
    }
  }

  // Either of the two where gradients are in fp32, of P^T before it was rounded. read_rest(bits, j, i) reads the rest of 16 x 16 pairs; all of `bits`
  // are read before.
  template <class ReadRest>
  __device__ void whole_score_gradients(float (&dp)[kKeyTiles][kChunkTiles][4], unsigned row_sum_at, unsigned (&bits)[kChunkTiles / 2][kKeyTiles][4],
                                        const ReadRest& read_rest) const {
    constexpr bool kMarked = kHides || kPair.dropout;
#pragma unroll
    for (int j = 0; j < kChunkTiles; j += 2)
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i) {
        unsigned rest[4];
        read_rest(rest, j / 2, i);
#pragma unroll
        for (int at = 0; at < 4; ++at) {  // two tiles of queries, two halves
          const float2 row_sums = ptx::ld_shared_f32x2(row_sum_at + 4 * (8 * (j + at / 2) + lane % 4 * 2));
          const float row_sum[2] = {row_sums.x, row_sums.y};
          unsigned& pair = bits[j / 2][i][at];
          float* const ds = &dp[i][j + at / 2][at % 2 * 2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float marked = e == 0 ? ptx::low_float<Element>(pair) : ptx::high_float<Element>(pair);
            const float weight =
                (kMarked ? fabsf(marked) : marked) + (e == 0 ? ptx::low_float<Element>(rest[at]) : ptx::high_float<Element>(rest[at]));
            const int sign = static_cast<int>(__float_as_uint(marked));  // as in marked_gradients
            float gradient = ds[e];
            if constexpr (kPair.dropout) gradient = sign < 0 ? 0.0f : gradient * pairs_of(p).dropout_scale;
            ds[e] = weight * (gradient - row_sum[e]);
            if (kHides && (kPair.dropout ? sign == static_cast<int>(0x80000000u) : sign < 0)) ds[e] = 0;
          }
          pair = ptx::pack2<Element>(ds[0], ds[1]);
        }
      }
  }

  // Adds dS of a chunk, of queries from `first_query` on, to dbias, or writes it, where pairs are seen (masked: where not all are). Lanes of
  // neighbouring keys exchange a query each, so that what a lane adds lies side by side.
  __device__ void add_to_dbias(const float (&ds)[kKeyTiles][kChunkTiles][4], int head, int first_query, bool masked) const {
    const PairParams& pairs = pairs_of(p);
    const int odd = lane / 4 & 1;
    const int key = first_key + key_group * kKeys + lane / 4 - odd, query = first_query + lane % 4 * 2 + odd;
    const long long step = pairs.dbias_strides.row * 8;
    float* const first = pairs.dbias + batch * pairs.dbias_strides.batch + head * pairs.dbias_strides.head + query * pairs.dbias_strides.row + key;
    const bool by_pair = ((reinterpret_cast<unsigned long long>(pairs.dbias) / 4 | static_cast<unsigned long long>(pairs.dbias_strides.row) |
                           static_cast<unsigned long long>(pairs.dbias_strides.head) | static_cast<unsigned long long>(pairs.dbias_strides.batch)) &
                          1) == 0;
    const bool alone = pairs.dbias_alone != 0;
    // Calls take(i, half, j, x): of the query 8 j and the keys 16 i + 8 half and the next, from this lane's.
    const auto for_each_pair = [&](const auto& take) {
#pragma unroll
      for (int j = 0; j < kChunkTiles; ++j)
#pragma unroll
        for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float low = ds[i][j][2 * half], high = ds[i][j][2 * half + 1];
            const float got = ptx::shfl_xor(odd ? low : high, 4);
            const float x[2] = {odd ? got : low, odd ? high : got};
            take(i, half, j, x);
          }
    };
    if (by_pair && !masked && !alone) {
      for_each_pair([&](int i, int half, int j, const float(&x)[2]) { ptx::red_add2(first + j * step + 16 * i + 8 * half, x[0], x[1]); });
      return;
    }
    if (by_pair && !masked) {
      for_each_pair([&](int i, int half, int j, const float(&x)[2]) {
        *reinterpret_cast<float2*>(first + j * step + 16 * i + 8 * half) = {x[0], x[1]};
      });
      return;
    }
    for_each_pair([&](int i, int half, int j, const float(&x)[2]) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int its_query = query + 8 * j, its_key = key + 16 * i + 8 * half + e;
        float* const to = first + j * step + 16 * i + 8 * half + e;
        bool seen = its_query < p.seqlen_q && its_key < seqlen_k();
        if (kMasked) seen = seen && its_key <= its_query + diagonal;
        if (kWindow) seen = seen && its_key >= its_query + left_diagonal;
        if (seen) {
          if (alone)
            *to = x[e];
          else
            ptx::red_add(to, x[e]);
        }
      }
    });
  }
};

}  // namespace fattn::v2
