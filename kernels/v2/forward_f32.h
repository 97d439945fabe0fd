// Attention forward in fp32 on the matrix instructions for fp16: the walk of v2/forward.h, with every operand split into two fp16 and every product
// made of three (tile/split_tile.h). Level 80.
//
// What comes from shared memory was scaled, block by block, by a power of two; scores and products with v are scaled back where they are used in fp32
// anyway. Products are summed over few keys by the matrix instructions, which round towards zero, and then added to o to nearest.
//
// A specialisation is a struct with
//   kHeaddim, kHeaddimV            1 to 256
//   kCausal                        keys after the query are hidden
//   kWindow                        keys outside a window (FeatureParams) are hidden; kCausal is then false
//   kCapped                        softcap (kernels/score.h)
//   kAligned                       bases and strides are multiples of 16 bytes and headdims of 4
//   kWarps, kRowTiles              warps of a CTA, 16-row tiles of a warp
//   kBlockN, kStages               keys of a block, blocks in shared memory at once (1 or 2)
//   kStepN                         keys whose scores are in registers at once
//   kQueriesInRegisters            or read from shared memory for every step
//   kCtas                          CTAs that an SM is to hold
//   kPair                          features of pairs (kernels/pair.h); none if it is left out
#pragma once

#include "kernels/documents.h"
#include "kernels/mask.h"
#include "kernels/pages.h"
#include "kernels/pair.h"
#include "kernels/ptx/special_registers.h"
#include "kernels/score.h"
#include "kernels/sequence.h"
#include "kernels/softmax.h"
#include "kernels/tile/for_each.h"
#include "kernels/tile/fragment.h"
#include "kernels/tile/split_product.h"
#include "kernels/tile/split_tile.h"
#include "kernels/v2/forward_f32_again.h"
#include "kernels/v2/forward_f32_spoilt.h"
#include "kernels/v2/greatest.h"
#include "kernels/v2/schedule.h"

namespace fattn::v2 {

using tile::for_each;
using tile::round_up;
using tile::SharedTile;

// Shared memory of a CTA: the queries, then kStages pairs of keys and values, then the greatest numbers that each warp found, the scale of the
// queries, the place of the tile, and where its sequence begins.
template <class Spec>
struct ForwardF32Shape {
  static constexpr int kThreads = Spec::kWarps * 32;
  static constexpr int kWarpRows = Spec::kRowTiles * 16;
  static constexpr int kBlockM = Spec::kWarps * kWarpRows;
  using TileQ = SharedTile<kBlockM, round_up(Spec::kHeaddim, 32)>;
  using TileK = SharedTile<Spec::kBlockN, round_up(Spec::kHeaddim, 32)>;
  using TileV = SharedTile<Spec::kBlockN, round_up(Spec::kHeaddimV, 32)>;
  static constexpr int kQueryBytes = 2 * TileQ::kBytes;
  static constexpr int kValueOffset = 2 * TileK::kBytes;  // in a stage
  static constexpr int kStageBytes = kValueOffset + 2 * TileV::kBytes;
  static constexpr int kGreatestOffset = kQueryBytes + Spec::kStages * kStageBytes;
  static constexpr int kQueryScaleOffset = kGreatestOffset + 8 * Spec::kWarps;
  static constexpr int kPlaceOffset = kQueryScaleOffset + 4;  // three numbers
  static constexpr int kNotesOffset = kPlaceOffset + 12;      // OddNotes
  static constexpr int kFirstKeyOffset = kNotesOffset + 12;   // of packed sequences alone
};

// A weight enters the product with v as weight * 2^12: at its usual size, 1 or less, it is far from the least of fp16, and up to 15 it is below the
// greatest. Above that the reference is renewed.
inline constexpr float kWeightFactor = 4096.0f, kGreatestWeight = 15.0f;

// Beyond this reference the rounding of score * scale makes an odd number of the greatest weight, and the product of a row that has hardly another
// one is then off by what split products leave out. Such rows are computed again in specialisations with features, but for terms: those may be as
// large on purpose, to hide.
inline constexpr float kGreatestReference = 2048.0f;

template <class Spec>
class ForwardF32 {
  using Shape = ForwardF32Shape<Spec>;
  using TileQ = typename Shape::TileQ;
  using TileK = typename Shape::TileK;
  using TileV = typename Shape::TileV;
  using CopyQ = tile::SplitCopy<TileQ, Shape::kThreads, Spec::kHeaddim, Spec::kAligned>;
  using CopyK = tile::SplitCopy<TileK, Shape::kThreads, Spec::kHeaddim, Spec::kAligned>;
  using CopyV = tile::SplitCopy<TileV, Shape::kThreads, Spec::kHeaddimV, Spec::kAligned>;
  static constexpr int kRowTiles = Spec::kRowTiles, kStepN = Spec::kStepN;
  static constexpr int kDepthQ = (Spec::kHeaddim + 15) / 16;   // steps of 16 along headdim
  static constexpr int kDepthO = (Spec::kHeaddimV + 15) / 16;  // pairs of output tiles of 8 columns
  static constexpr int kStepTiles = kStepN / 8;                // score tiles of 8 keys
  static constexpr int kChunks = kStepN / 16;                  // 16 keys: the depth of one mma of p v
  static constexpr bool kWide = kRowTiles * kDepthO > 8;       // o takes half of the registers
  static constexpr PairFeatures kPair = kPairOf<Spec>;
  static constexpr bool kNotesOdd = Spec::kHeaddimV <= 192;  // above no register is left for it: what is not finite is computed again
  static constexpr bool kWindow = Spec::kWindow, kTerms = kPair.terms();
  static constexpr bool kRanges = kWindow || kPair.documents;  // the first blocks may be seen by no row
  using Visible = VisibleKeys<kRowTiles, kWindow>;
  static_assert(Spec::kBlockN % kStepN == 0 && kStepN % 16 == 0 && (Spec::kStages == 1 || Spec::kStages == 2));

  const AttentionParams& p;  // of packed sequences OwnParams
  const unsigned tile_q;
  float o[kRowTiles][2 * kDepthO][4];
  Softmax<kRowTiles> softmax;
  unsigned q[Spec::kQueriesInRegisters ? kDepthQ : 1][2][kRowTiles][4];  // high, low
  unsigned q_address, k_address, v_address;                              // of this lane, in the queries and in stage 0
  unsigned kept[kPair.dropout ? kRowTiles : 1];                          // with dropout: which pairs stay, of its block kept_of
  int kept_of;

  __device__ __forceinline__ const AttentionParams& call() const {
    if constexpr (kPair.packed)
      return static_cast<const typename OwnTypes<kPair.paged>::WithCall&>(p).call;
    else
      return p;
  }

  // softmax_scale_log2 (kCapped: score_factor), undoing the factor of the queries. In shared memory, because registers are few.
  __device__ __forceinline__ float query_scale() const { return ptx::ld_shared_f32(tile_q + Shape::kQueryScaleOffset); }

  // Which keys a row sees. Without a causal mask all, but with wide outputs the compiler is not told: it then keeps fewer things in registers.
  __device__ __forceinline__ core::Mask32 visible_mask(int seqlen_k) const {
    if constexpr (kWindow)
      return window_mask_of<kPair>(p, seqlen_k);
    else
      return {p.seqlen_q, kPair.lengths ? seqlen_k : p.seqlen_k, Spec::kCausal, -1, Spec::kCausal || !kWide ? -1 : ptx::opaque(p.seqlen_q)};
  }

  // The blocks of keys that the tile meets: without those whose documents no query of the tile is of.
  __device__ __forceinline__ KeyBlocks blocks_of(const Place& place, const core::Mask32& mask, [[maybe_unused]] int seqlen_k) const {
    KeyBlocks seen = key_blocks<Shape::kBlockM, Spec::kBlockN>(mask, place.row);
    if constexpr (kPair.documents) {
      extern __shared__ __align__(1024) unsigned char shared[];
      const PairParams& pairs = pairs_of(p);
      const IdRange range =
          common_range<Shape::kThreads>(pairs.document_q + place.batch * pairs.document_q_stride + place.row,
                                        min(Shape::kBlockM, p.seqlen_q - place.row), pairs.document_k + place.batch * pairs.document_k_stride,
                                        seen.begin * Spec::kBlockN, min(seen.end * Spec::kBlockN, seqlen_k), reinterpret_cast<int*>(shared));
      seen.end = (range.end + Spec::kBlockN - 1) / Spec::kBlockN;
      seen.begin = range.begin / Spec::kBlockN;
      if (range.begin == range.end) seen.begin = seen.end = 0;
      __syncthreads();  // before the queries are where the range was
    }
    return seen;
  }

  // The tile's place, with features of pairs: of wide outputs from shared memory, where its first warp put it.
  __device__ __forceinline__ Place place_again(const Place& place) const {
    if constexpr (!kWide) return place;
    const auto number = [&](int i) { return static_cast<int>(ptx::ld_shared_4(tile_q + Shape::kPlaceOffset + 4 * i)); };
    return {number(0), number(1), 0, number(2)};
  }

  // s = q k^T of kStepN keys from `k_address`, in the units of the split operands.
  __device__ __forceinline__ void scores(float (&s)[kRowTiles][kStepTiles][4], unsigned k_address) {
    // With queries from shared memory all keys of the step take part in each read of them; otherwise 16 at a time, which takes fewer registers.
    constexpr int kGroup = Spec::kQueriesInRegisters ? 1 : kChunks;
    const unsigned q_address = ptx::opaque(this->q_address);
#pragma unroll
    for (int first = 0; first < kChunks; first += kGroup) {
      float high[2 * kGroup][kRowTiles][4] = {}, low[2 * kGroup][kRowTiles][4] = {};
      for_each<0, kDepthQ>([&](auto d) {
        constexpr int kD = decltype(d)::value, kUnit = 2 * kD;
        if constexpr (kWide && kD % 2 == 0) ptx::warp_sync();  // as in add_values()
        unsigned loaded[2][kRowTiles][4];
        if constexpr (!Spec::kQueriesInRegisters) {
          const unsigned from = TileQ::template advance<kUnit>(q_address);
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) {
            ptx::ldmatrix_x4(loaded[0][i], from + i * 16 * TileQ::kRowBytes);
            ptx::ldmatrix_x4(loaded[1][i], from + i * 16 * TileQ::kRowBytes + TileQ::kBytes);
          }
        }
        auto& a = Spec::kQueriesInRegisters ? q[Spec::kQueriesInRegisters ? kD : 0] : loaded;
#pragma unroll
        for (int chunk = 0; chunk < kGroup; ++chunk) {
          unsigned k_high[4], k_low[4];
          const unsigned from = TileK::template advance<kUnit>(k_address) + (first + chunk) * 16 * TileK::kRowBytes;
          ptx::ldmatrix_x4(k_high, from);
          ptx::ldmatrix_x4(k_low, from + TileK::kBytes);
#pragma unroll
          for (int half = 0; half < 2; ++half)
            tile::multiply_split(high[2 * chunk + half], low[2 * chunk + half], a[0], a[1], k_high + 2 * half, k_low + 2 * half);
        }
      });
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int n = 0; n < 2 * kGroup; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) s[i][2 * first + n][e] = high[n][i][e] + low[n][i][e];
        }
      }
    }
  }

  // The weights of a step, split: the A operands of p v; and their sums.
  struct Weights {
    unsigned high[kChunks][kRowTiles][4], low[kChunks][kRowTiles][4];
    float sum[kRowTiles][2];
  };

  // kGuarded: rows without a reference get weights of 0; otherwise Inf or NaN, which within_limit() sees.
  template <bool kGuarded>
  __device__ __forceinline__ void weigh(Weights& w, const float (&s)[kRowTiles][kStepTiles][4], float scale) const {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float shift = kGuarded && softmax.shift[i][half] == kInfinity ? 0.0f : softmax.shift[i][half];
        // Rounded as the reference was: its own score then has the weight 1, which split products keep whole.
        const auto exponent = [&](float score) { return __fadd_rn(__fmul_rn(score, scale), shift); };
        float sum = 0;
#pragma unroll
        for (int n = 0; n < kStepTiles; ++n) {
          const float x = ptx::ex2(exponent(s[i][n][2 * half])), y = ptx::ex2(exponent(s[i][n][2 * half + 1]));
          sum += x + y;
          tile::split2(x * kWeightFactor, y * kWeightFactor, w.high[n / 2][i][n % 2 * 2 + half], w.low[n / 2][i][n % 2 * 2 + half]);
        }
        w.sum[i][half] = sum;
      }
    }
  }

  // False for NaN too.
  static __device__ __forceinline__ bool within_limit(const Weights& w) {
    float all = 0;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) all = fmaxf(all, fmaxf(w.sum[i][0], w.sum[i][1]));
    bool number = true;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) number = number && w.sum[i][0] == w.sum[i][0] && w.sum[i][1] == w.sum[i][1];
    return ptx::vote_all(number && all <= kGreatestWeight);
  }

  // o += p v.
  __device__ __forceinline__ void add_values(const Weights& w, unsigned v_address, float inverse) {
    for_each<0, kDepthO>([&](auto d) {
      constexpr int kD = decltype(d)::value;
      unsigned v_high[kChunks][4], v_low[kChunks][4];
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const unsigned from = TileV::template advance<2 * kD>(v_address) + chunk * 16 * TileV::kRowBytes;
        ptx::ldmatrix_x4_trans(v_high[chunk], from);
        ptx::ldmatrix_x4_trans(v_low[chunk], from + TileV::kBytes);
      }
      // No need of it, but the compiler then takes fewer operands at once: with as many as it likes, wide outputs leave it too few registers.
      if constexpr (kWide && kD % 2 == 1) ptx::warp_sync();
      float t[kRowTiles][2][4];
      tile::product_split(t, w.high, w.low, v_high, v_low);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int e = 0; e < 4; ++e) o[i][2 * kD + half][e] = fmaf(t[i][half][e], inverse, o[i][2 * kD + half][e]);
        }
      }
    });
  }

  // Where a step is, for features of pairs: the tile, this lane's first query and first key, and how many keys there are.
  struct StepPairs {
    Place place;
    int row, key, seqlen_k;
  };

  // Scores in units of log2 with their terms. Rows behind the last, and in a block with kExact keys, get what another one has.
  template <bool kExact>
  __device__ __forceinline__ void add_terms(float (&s)[kRowTiles][kStepTiles][4], float scale, const StepPairs& at) const {
    const Terms<kPair, f16> terms(p, at.place.batch, at.place.head, at.seqlen_k);  // no bias is of 16 bits here
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int query = min(at.row + 16 * i + 8 * half, p.seqlen_q - 1);
#pragma unroll
        for (int n = 0; n < kStepTiles; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int key = at.key + 8 * n + e;
            float& score = s[i][n][2 * half + e];
            score = with_term<kPair.hides()>(score, scale, terms(query, kExact ? min(key, at.seqlen_k - 1) : key));
          }
        }
      }
    }
  }

  // Drops weights of a step, once their sums are taken. A block of random numbers is several steps.
  __device__ __forceinline__ void drop(Weights& w, const StepPairs& at) {
    static_assert(core::kDropoutBlock % kStepN == 0);
    const int block = at.key / core::kDropoutBlock, first = at.key % core::kDropoutBlock / 8;
    if (kept_of != block) {
      const Dropout<kPair> dropout(p, at.place.batch, at.place.head);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) kept[i] = dropout.kept_of_rows(at.row + 16 * i, at.key);
      kept_of = block;
    }
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      const unsigned bits = kept[i] >> first;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < kStepTiles; ++n) {
          const unsigned halves = kept_halves(bits, half, n);
          w.high[n / 2][i][n % 2 * 2 + half] &= halves;
          w.low[n / 2][i][n % 2 * 2 + half] &= halves;
        }
      }
    }
  }

  // One step over kStepN keys; which begin at these bytes from the first stage. kExact: mask the scores and find their maximum; otherwise every
  // key is visible, and the reference is good unless the sums of the weights say that it is not. `score_scale`: what makes scores of those of the
  // split operands, in units of log2, or, kCapped, in those of tanh.
  template <bool kExact>
  __device__ __forceinline__ void step(unsigned k_offset, unsigned v_offset, float score_scale, float value_inverse, const Visible& visible,
                                       [[maybe_unused]] const StepPairs& at) {
    float s[kRowTiles][kStepTiles][4];
    scores(s, k_address + k_offset);
    float scale = score_scale;
    if constexpr (Spec::kCapped) {
      cap_scores_closely(reinterpret_cast<float(&)[kRowTiles * kStepTiles * 4]>(s), score_scale);
      scale = p.softmax_scale_log2;
    }
    if constexpr (kTerms) {
      add_terms<kExact>(s, scale, at);
      scale = 1;
    }
    if constexpr (kExact) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int n = 0; n < kStepTiles; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) s[i][n][e] = visible(i, e / 2, n, e % 2) ? s[i][n][e] : -kInfinity;
        }
      }
      softmax.template raise<false>(s, 0, kStepTiles, scale, o);
    }
    Weights w;
    weigh<kExact>(w, s, scale);
    if constexpr (!kExact) {
      if (!within_limit(w)) [[unlikely]] {
        softmax.template raise<false>(s, 0, kStepTiles, scale, o);
        weigh<true>(w, s, scale);
      }
    }
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) softmax.sum[i][half] += w.sum[i][half];
    }
    if constexpr (kPair.dropout) drop(w, at);
    add_values(w, v_address + v_offset, value_inverse);
  }

  __device__ __forceinline__ OddNotes notes() const { return {tile_q + Shape::kNotesOffset}; }

  // Adds the values of block j that are not finite to the rows that see them.
  __device__ __forceinline__ void add_spoilt(int j, int seqlen_k) {
    // Found again rather than kept in registers all the way, unless that takes more of them.
    constexpr bool kLengthsAlone = kPair.lengths && !kPair.packed && !Spec::kCausal && !kWindow;
    constexpr bool kKept = !kTerms && (kLengthsAlone || (kWindow && Spec::kCapped) || (kPair.packed && !Spec::kAligned));
    const core::Mask32 mask = visible_mask(kKept ? seqlen_k : ptx::opaque(seqlen_k));
    const Place place = place_of<Shape::kBlockM>(call(), ptx::opaque(static_cast<int>(blockIdx.x)));
    const auto& p = entry_params<kPair, float>(call(), place.batch);
    const auto [warp, lane] = ptx::thread_place();
    const int row = place.row + warp * Shape::kWarpRows + lane / 4;
    const Terms<kPair, f16> terms(p, place.batch, place.head, mask.seqlen_k);
    add_spoilt_values<kRowTiles, Spec::kHeaddimV>(
        value_rows<kPair.paged>(p, place.batch, place.head_k), j * Spec::kBlockN, min((j + 1) * Spec::kBlockN, mask.seqlen_k), lane,
        [&](int i, int n, int half, int e) -> float& { return o[i][n][2 * half + e]; },
        [&](int i, int half) { return row + 16 * i + 8 * half < p.seqlen_q; },
        [&](int i, int half, int key) {
          const int query = row + 16 * i + 8 * half;
          if (query >= p.seqlen_q || key >= mask.visible_end(query) || (kWindow && key < mask.visible_begin(query))) return false;
          return !kPair.hides() || terms.sees(query, key);
        });
  }

  // Writes the warp's rows of o and lse.
  __device__ __forceinline__ void finish(const core::Mask32& mask) const {
    // Found again rather than kept in registers all the way.
    const Place place = place_of<Shape::kBlockM>(call(), ptx::opaque(static_cast<int>(blockIdx.x)));
    const auto& p = entry_params<kPair, float>(call(), place.batch);
    const auto [warp, lane] = ptx::thread_place();
    const int first = place.row + warp * Shape::kWarpRows;
    float* const out = static_cast<float*>(p.o) + place.batch * p.o_strides.batch + place.head * p.o_strides.head;
    RowsAgain again;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum = softmax.sum[i][half];
        sum += ptx::shfl_xor(sum, 1);
        sum += ptx::shfl_xor(sum, 2);
        if constexpr (kPair.lengths && !kPair.paged) sum += first_sum<kPair>(p, place.batch);
        // With scores beyond 1e8 the greatest weight may be rounded to 0: such rows are not empty. (Above headdim 192 no register is left to see it.)
        const bool empty = sum == 0 && (Spec::kHeaddimV > 192 || softmax.shift[i][half] == kInfinity);
        [[maybe_unused]] float sinked_lse;
        [[maybe_unused]] const bool lost = sum == 0;
        if constexpr (kPair.sinks) {
          const float sink = sink_of(pairs_of(p), place.head);
          const SinkedRow<> sinked(sink, sink_exponent<(kTerms || Spec::kCapped || Spec::kHeaddimV > 192)>(p, sink, softmax.shift[i][half]),
                                   softmax.shift[i][half], sum, empty);
          sum = sinked.sum;
          sinked_lse = sinked.lse;
        }
        const float inverse = (kPair.dropout ? pairs_of(p).dropout_scale : 1.0f) / (sum * kWeightFactor);
        const int row = first + i * 16 + half * 8 + lane / 4;
        bool near = true, finite = true;
        if constexpr ((kWindow || kPair.any()) && !kTerms && !Spec::kCapped) near = fabsf(softmax.shift[i][half]) < kGreatestReference;
#pragma unroll
        for (int n = 0; n < (Spec::kHeaddimV + 7) / 8; ++n) {
          const float x[2] = {o[i][n][2 * half] * inverse, o[i][n][2 * half + 1] * inverse};
          finite = finite && is_finite(x[0]) && is_finite(x[1]);
          const int column = 8 * n + lane % 4 * 2;
          if (row >= p.seqlen_q) continue;
          float* to = out + row * p.o_strides.row + column;
          if constexpr (Spec::kAligned && Spec::kHeaddimV % 8 == 0) {
            *reinterpret_cast<float2*>(to) = empty ? float2{0, 0} : float2{x[0], x[1]};
          } else {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              if (column + e < Spec::kHeaddimV) to[e] = empty ? 0.0f : x[e];
            }
          }
        }
        if (p.lse != nullptr && lane % 4 == 0 && row < p.seqlen_q) {
          constexpr float kLn2 = 0.693147180559945309f;
          p.lse[place.batch * p.lse_strides.batch + row * p.lse_strides.row + place.head * p.lse_strides.head] =
              kPair.sinks ? sinked_lse
              : empty     ? -kInfinity
                          : fmaf(-softmax.shift[i][half], kLn2, logf(sum));
        }
        // NaN is right where a number was NaN, and what is not finite where values were not.
        bool good = !kNotesOdd ? near && finite : sum == sum ? near && (finite || notes().some_spoilt()) : !notes().scores_in_doubt();
        if constexpr (kPair.sinks) good = good && !lost;
        again.note(2 * i + half, ptx::ballot(!good && !empty && row < p.seqlen_q));
      }
    }
    if constexpr (kPair.paged) {
      if (mask.seqlen_k < 0) return;  // NaN it shall be
    } else {
      if (kPair.lengths && given_length(p, place.batch) < 0) return;
    }
    constexpr int kRows = Spec::kHeaddimV <= 192 ? kRowsAgain : 4;  // for which there are registers
    again.for_each<kRows>([&](int row, unsigned wanted) { forward_rows_again<Spec, kRows>(p, place, first + row, wanted, mask, lane); });
  }

 public:
  __device__ __forceinline__ ForwardF32(const AttentionParams& params, unsigned shared) : p(params), tile_q(shared) {}

  __device__ __forceinline__ void run() {
    const Place place = place_of<Shape::kBlockM>(call(), static_cast<int>(blockIdx.x));
    const int seqlen_k = [&] {  // -1, of which a mask makes no keys, where a page or the length is out of range
      if constexpr (kPair.paged)
        return paged_keys<Shape::kThreads>(call(), place.batch);
      else
        return keys_of<kPair>(p, place.batch);
    }();
    const core::Mask32 mask = visible_mask(seqlen_k);
    const KeyBlocks blocks = blocks_of(place, mask, seqlen_k);
    // load: block j goes to stage j mod kStages.
    const auto load_block = [&](int j, [[maybe_unused]] bool is_first) {
      const unsigned stage = tile_q + Shape::kQueryBytes + static_cast<unsigned>(j % Spec::kStages) * Shape::kStageBytes;
      const long long key = static_cast<long long>(j) * Spec::kBlockN;
      const int keys = (kPair.lengths ? seqlen_k : p.seqlen_k) - j * Spec::kBlockN;
      // Found again rather than kept in registers all the way: the addresses, with wide outputs all that leads to them.
      const Place from = kWide ? place_of<Shape::kBlockM>(call(), ptx::opaque(static_cast<int>(blockIdx.x))) : place;
      const int batch = ptx::opaque(from.batch), head = ptx::opaque(from.head_k);
      const auto* k = static_cast<const float*>(p.k) + batch * p.k_strides.batch + head * p.k_strides.head;
      const auto* v = static_cast<const float*>(p.v) + batch * p.v_strides.batch + head * p.v_strides.head;
      if constexpr (kPair.packed && !kPair.paged)
        if (!is_first) {  // likewise, from where its sequence begins
          const int first = static_cast<int>(ptx::ld_shared_4(tile_q + Shape::kFirstKeyOffset));
          k = static_cast<const float*>(call().k) + first * p.k_strides.row + head * p.k_strides.head;
          v = static_cast<const float*>(call().v) + first * p.v_strides.row + head * p.v_strides.head;
        }
      if constexpr (kPair.paged) {
        const EntryPages pages(pages_of(call()), batch);
        const auto nth = [&](int row) { return static_cast<int>(key) + min(row, keys - 1); };
        CopyK::copy_rows(stage, keys, [&](int row) { return k + pages.of_key(nth(row), p.k_strides.row); });
        CopyV::copy_rows(stage + Shape::kValueOffset, keys, [&](int row) { return v + pages.of_value(nth(row), p.v_strides.row); });
      } else {
        CopyK::copy(stage, k + key * p.k_strides.row, p.k_strides.row, keys);
        CopyV::copy(stage + Shape::kValueOffset, v + key * p.v_strides.row, p.v_strides.row, keys);
      }
      ptx::cp_async_commit();
    };
    const auto* queries =
        static_cast<const float*>(p.q) + place.batch * p.q_strides.batch + place.head * p.q_strides.head + place.row * p.q_strides.row;
    if (threadIdx.x == 0) notes().clear();
    CopyQ::copy(tile_q, queries, p.q_strides.row, p.seqlen_q - place.row);
    ptx::cp_async_commit();
    if (blocks.end > 0) load_block(blocks.end - 1, true);

    __syncthreads();  // for the notes
    // The queries, split. A scale that is negative or 0 goes into them: the maximum of the scores is then that of the logits.
    if (blocks.end > 0)
      ptx::cp_async_wait<1>();
    else
      ptx::cp_async_wait<0>();
    const tile::SplitFactor query_factor(
        greatest_of_all<Spec::kWarps>(tile_q + Shape::kGreatestOffset, CopyQ::greatest_noting_infinity(tile_q, [&] { notes().doubt_scores(); }), 0)
            .x);
    const float sign = p.softmax_scale > 0 ? 1.0f : p.softmax_scale < 0 ? -1.0f : 0.0f;
    CopyQ::split(tile_q, query_factor.factor * sign);
    const float query_scale_log2 = [&] {
      if constexpr (Spec::kCapped)
        return features_of(p).score_factor;
      else
        return p.softmax_scale_log2;
    }();
    if (threadIdx.x == 0) {
      ptx::st_shared_f32(tile_q + Shape::kQueryScaleOffset, query_scale_log2 * query_factor.inverse);
      if constexpr (kPair.any() && kWide) {
        ptx::st_shared_4(tile_q + Shape::kPlaceOffset, static_cast<unsigned>(place.batch));
        ptx::st_shared_4(tile_q + Shape::kPlaceOffset + 4, static_cast<unsigned>(place.head));
        ptx::st_shared_4(tile_q + Shape::kPlaceOffset + 8, static_cast<unsigned>(place.row));
      }
      if constexpr (kPair.packed && !kPair.paged)
        ptx::st_shared_4(tile_q + Shape::kFirstKeyOffset,
                         static_cast<unsigned>(given_sequence<kPair.lengths>(pairs_of(call()), place.batch).k.begin));
    }
    __syncthreads();

    softmax.start();
    if constexpr (kPair.paged)
      if (seqlen_k < 0) softmax.spoil();
    if constexpr (kPair.dropout) kept_of = -1;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int n = 0; n < 2 * kDepthO; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o[i][n][e] = 0;
      }
    }
    {
      const auto [warp, lane] = ptx::thread_place();
      q_address = tile::fragment_address<TileQ>(tile_q, warp * Shape::kWarpRows, lane);
      k_address = tile::fragment_address_n<TileK>(tile_q + Shape::kQueryBytes, 0, lane);
      v_address = tile::fragment_address<TileV>(tile_q + Shape::kQueryBytes + Shape::kValueOffset, 0, lane);
    }
    if constexpr (Spec::kQueriesInRegisters) {
      for_each<0, kDepthQ>([&](auto d) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          const unsigned from = TileQ::template advance<2 * decltype(d)::value>(q_address) + i * 16 * TileQ::kRowBytes;
          ptx::ldmatrix_x4(q[decltype(d)::value][0][i], from);
          ptx::ldmatrix_x4(q[decltype(d)::value][1][i], from + TileQ::kBytes);
        }
      });
    }

    // Makes block j visible to all, split, and loads the next one where no one reads any more. Returns what the splitting of k and v is undone with.
    const auto enter_block = [&](int j) {
      if constexpr (Spec::kStages == 1) {
        if (j != blocks.end - 1) {
          __syncthreads();
          load_block(j, false);
        }
      }
      ptx::cp_async_wait<0>();
      const unsigned stage = tile_q + Shape::kQueryBytes + static_cast<unsigned>(j % Spec::kStages) * Shape::kStageBytes;
      const auto greatest_of_block = [&] {
        const unsigned values = stage + Shape::kValueOffset;
        if constexpr (kNotesOdd)
          return greatest_of_all<Spec::kWarps>(tile_q + Shape::kGreatestOffset,
                                               CopyK::greatest_noting_infinity(stage, [&] { notes().doubt_scores(); }),
                                               CopyV::template greatest_cleaned<tile::NonfiniteCleaned>(values, [&] { notes().spoil(j); }));
        else
          return greatest_of_all<Spec::kWarps>(tile_q + Shape::kGreatestOffset, CopyK::greatest(stage), CopyV::greatest(values));
      };
      const float2 greatest = greatest_of_block();
      if constexpr (Spec::kStages == 2) {
        if (j > (kRanges ? blocks.begin : 0)) load_block(j - 1, false);
      }
      const tile::SplitFactor key_factor(greatest.x), value_factor(greatest.y);
      CopyK::split(stage, key_factor.factor);
      CopyV::split(stage + Shape::kValueOffset, value_factor.factor);
      const bool trusted =
          !kNotesOdd || tile::is_trusted<Spec::kHeaddim>(query_scale() * key_factor.inverse, Spec::kCapped ? p.softmax_scale_log2 : 1.0f);
      if (!trusted) notes().doubt_scores();
      __syncthreads();
      return float2{trusted ? key_factor.inverse : kNan, value_factor.inverse};
    };

    // compute: first the blocks that not all rows see whole (or just the first one, to find the references), then the others.
    const auto compute_block = [&](auto exact, int j) {
      constexpr bool kExact = decltype(exact)::value != 0;
      const float2 inverse = enter_block(j);
      const unsigned stage = static_cast<unsigned>(j % Spec::kStages) * Shape::kStageBytes;
#pragma unroll 1
      for (int nth = Spec::kBlockN / kStepN - 1; nth >= 0; --nth) {
        const int key = j * Spec::kBlockN + nth * kStepN;
        Visible visible;
        StepPairs at;
        if constexpr (kExact) {
          const auto [warp, lane] = ptx::thread_place();
          const Place here = kWide ? place_of<Shape::kBlockM>(call(), ptx::opaque(static_cast<int>(blockIdx.x))) : place;
          const int row = here.row + warp * Shape::kWarpRows;
          if (key >= mask.visible_end(row + Shape::kWarpRows - 1)) continue;  // hidden from all rows of the warp
          if (kWindow && key + kStepN <= mask.visible_begin(row)) continue;
          visible = visible_keys<kRowTiles, kWindow>(mask, row, key, lane / 4, lane % 4 * 2);
        }
        if constexpr (kTerms || kPair.dropout) {
          const auto [warp, lane] = ptx::thread_place();
          at.place = place_again(place);
          at.row = at.place.row + warp * Shape::kWarpRows + lane / 4;
          at.key = key + lane % 4 * 2;
          at.seqlen_k = seqlen_k;
        }
        step<kExact>(stage + static_cast<unsigned>(nth * kStepN * TileK::kRowBytes), stage + static_cast<unsigned>(nth * kStepN * TileV::kRowBytes),
                     query_scale() * inverse.x, inverse.y, visible, at);
      }
      if constexpr (kNotesOdd)
        if (notes().spoilt(j)) [[unlikely]]
          add_spoilt(j, seqlen_k);
    };
    int j = blocks.end - 1;
    if constexpr (kRanges) {
      const int exact_from = min(blocks.whole_end, blocks.end - 1);
#pragma unroll 1
      for (; j >= blocks.begin; --j) {
        if (j >= exact_from || j < blocks.whole_begin)
          compute_block(tile::Constant<1>{}, j);
        else
          compute_block(tile::Constant<0>{}, j);
      }
    } else {
#pragma unroll 1
      for (; j >= min(blocks.whole_end, blocks.end - 1) && j >= 0; --j) compute_block(tile::Constant<1>{}, j);
#pragma unroll 1
      for (; j >= 0; --j) compute_block(tile::Constant<0>{}, j);
    }
    finish(mask);
  }
};

template <class Spec>
__device__ __forceinline__ void forward_f32(const AttentionParams& p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  if constexpr (kPairOf<Spec>.packed) {
    const Place place = place_of<ForwardF32Shape<Spec>::kBlockM>(p, static_cast<int>(blockIdx.x));
    const typename OwnTypes<kPairOf<Spec>.paged>::WithCall own{entry_params<kPairOf<Spec>, float>(p, place.batch), p};
    if (place.row >= own.seqlen_q) return;
    ForwardF32<Spec>(own, ptx::shared_address(shared)).run();
  } else {
    ForwardF32<Spec>(p, ptx::shared_address(shared)).run();
  }
}

}  // namespace fattn::v2
