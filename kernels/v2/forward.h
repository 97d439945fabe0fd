// Attention forward, FlashAttention-2's algorithm: a CTA holds a tile of queries and walks over blocks of keys from the last to the first; a
// warp owns whole rows, so scores, weights and output never leave its registers. Level 80: cp.async and mma of depth 16; level 75: without.
//
// A specialisation is a struct with
//   Element                        bf16 or f16
//   kLevel                         75 or 80
//   kHeaddim, kHeaddimV            1 to 256
//   kCausal                        keys after the query are hidden
//   kWindow                        keys outside a window (FeatureParams) are hidden; kCausal is then false
//   kCapped                        softcap (kernels/score.h)
//   kAligned                       bases and strides are multiples of 16 bytes and headdims of 8
//   kWarps, kRowTiles              warps of a CTA, 16-row tiles of a warp
//   kBlockN, kStages               keys of a block, blocks in shared memory at once
//   kStaged                        bias and mask of pairs come through shared memory (kernels/v2/term_tile.h); false if it is left out
//   kStepN, kExactN                keys whose scores are in registers at once; the same in blocks that are masked
//   kQueriesInRegisters            or read from shared memory for every step
//   kCtas                          CTAs that an SM is to hold
//   kPair                          features of pairs (kernels/pair.h); none if it is left out
#pragma once

#include "kernels/documents.h"
#include "kernels/mask.h"
#include "kernels/pages.h"
#include "kernels/pair.h"
#include "kernels/ptx/barrier.h"
#include "kernels/ptx/special_registers.h"
#include "kernels/ptx/warp.h"
#include "kernels/score.h"
#include "kernels/sequence.h"
#include "kernels/softmax.h"
#include "kernels/tile/for_each.h"
#include "kernels/tile/fragment.h"
#include "kernels/tile/global_load.h"
#include "kernels/v2/nonfinite.h"
#include "kernels/v2/schedule.h"
#include "kernels/v2/seen_nonfinite.h"
#include "kernels/v2/store_pair.h"
#include "kernels/v2/term_tile.h"

namespace fattn::v2 {

using tile::Constant;
using tile::for_each;
using tile::round_up;
using tile::SharedTile;

// Shared memory of a CTA: the queries (in the end the output), then kStages pairs of keys and values.
template <class Spec>
struct ForwardShape {
  static constexpr int kThreads = Spec::kWarps * 32;
  static constexpr int kWarpRows = Spec::kRowTiles * 16;
  static constexpr int kBlockM = Spec::kWarps * kWarpRows;
  using TileQ = SharedTile<kBlockM, round_up(Spec::kHeaddim, 32)>;
  using TileK = SharedTile<Spec::kBlockN, round_up(Spec::kHeaddim, 32)>;
  using TileV = SharedTile<Spec::kBlockN, round_up(Spec::kHeaddimV, 32)>;
  using TileO = SharedTile<kBlockM, round_up(Spec::kHeaddimV, 32)>;
  static constexpr int kQueryBytes = TileQ::kBytes > TileO::kBytes ? TileQ::kBytes : TileO::kBytes;
  static constexpr int kStageBytes = TileK::kBytes + TileV::kBytes;
  static constexpr int kSharedBytes = kQueryBytes + Spec::kStages * kStageBytes;  // behind it kStages tiles of terms
  static constexpr bool kStaged = is_staged<Spec>();
  static constexpr TermTile kTerms = term_tile<kPairOf<Spec>>(kBlockM, Spec::kBlockN, false);
  static constexpr bool kEntriesTogether = kPairOf<Spec>.bias != 0 || kPairOf<Spec>.mask;
  static constexpr auto kCopyBy = !Spec::kAligned ? tile::CopyBy::kElements : Spec::kLevel < 80 ? tile::CopyBy::kRegisters : tile::CopyBy::kAsync;
};

// What a warp keeps in registers from block to block.
template <class Spec>
struct WarpState {
  static constexpr int kRowTiles = Spec::kRowTiles;
  static constexpr int kDepthQ = (Spec::kHeaddim + 15) / 16;   // steps of 16 along headdim
  static constexpr int kDepthO = (Spec::kHeaddimV + 15) / 16;  // pairs of output tiles of 8 columns

  float o[kRowTiles][2 * kDepthO][4];
  Softmax<kRowTiles> softmax;
  unsigned q[Spec::kQueriesInRegisters ? kDepthQ : 1][kRowTiles][4];
  unsigned q_address, k_address, v_address;  // of this lane, in the queries and in stage 0
  float scale, score_factor;
  float rest;  // Rest::packed() of the last references that were raised, until sums and o have it back
  // With dropout: which pairs stay, of block kept_of of its random numbers, which may be several steps.
  unsigned kept[kRowTiles];
  int kept_of;
  // With terms from shared memory: a row has no reference yet, or that of the lowest biases, beside which scores and terms are made exactly.
  bool low;

  __device__ __forceinline__ void start(const AttentionParams& p) {
    scale = p.softmax_scale_log2;
    if constexpr (Spec::kCapped) score_factor = features_of(p).score_factor;
    if constexpr (kPairOf<Spec>.dropout) kept_of = -1;
    if constexpr (kPairOf<Spec>.hides()) low = true;
    softmax.start();
    rest = 0;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int n = 0; n < 2 * kDepthO; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o[i][n][e] = 0;
      }
    }
  }

  // Before weights of other keys than those whose references were raised are added.
  __device__ __forceinline__ void give_back() {
    if (ptx::vote_all(rest == 0)) return;
    softmax.give_back(rest, o);
    rest = 0;
  }
};

// Features of pairs in one step: this lane's first query and first key, and what there is of both. Empty without such features.
template <class Spec, bool kAny = kPairOf<Spec>.any()>
struct StepPairs {};
template <class Spec>
struct StepPairs<Spec, true> {
  static constexpr PairFeatures kPair = kPairOf<Spec>;
  using Shape = ForwardShape<Spec>;
  using Reader = TermReader<kPair, typename Spec::Element, Shape::kTerms>;
  const Terms<kPair, typename Spec::Element>& terms;
  const Dropout<kPair>& dropout;
  const Reader& reader;
  int row, key, seqlen_q, seqlen_k;
  float ahead;  // of ALiBi in a block that all rows see: -1 if no key is behind its query, 1 if none is before it

  // What is added to the scores of row tile i and 16 keys, but for ALiBi. Rows behind the last, and in a block with kExact keys, get what another one
  // has, or something finite.
  template <bool kExact>
  __device__ __forceinline__ void read(float (&term)[2][4], int i, int chunk) const {
    if constexpr (Shape::kStaged) {
      reader.read(term, i, chunk);
      if constexpr (kPair.documents) {
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            if (terms.document_q[query_of(i, e / 2)] != terms.document_k[key_of<kExact>(2 * chunk + n, e % 2)]) term[n][e] = -kInfinity;
      }
    } else {
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) term[n][e] = terms.natural(query_of(i, e / 2), key_of<kExact>(2 * chunk + n, e % 2));
    }
  }

 private:
  __device__ __forceinline__ int query_of(int i, int half) const { return min(row + 16 * i + 8 * half, seqlen_q - 1); }
  template <bool kExact>
  __device__ __forceinline__ int key_of(int n, int e) const {
    const int column = key + 8 * n + e;
    return kExact ? min(column, seqlen_k - 1) : column;
  }
};

// One step over kStepN keys; the addresses are this lane's, of the first of them. kExact: mask the scores and find their maximum; otherwise every
// key is visible, and the reference is good unless the sums of the weights say that it is not. Without kTerms nothing is added to scores.
template <class Spec, int kStepN, bool kExact, bool kTerms, class Visible>
__device__ __forceinline__ void forward_step(WarpState<Spec>& w, unsigned k_address, unsigned v_address, const Visible& visible,
                                             [[maybe_unused]] const StepPairs<Spec>& pairs) {
  using Shape = ForwardShape<Spec>;
  using State = WarpState<Spec>;
  using Element = typename Spec::Element;
  constexpr int kRowTiles = State::kRowTiles;
  constexpr int kStepTiles = kStepN / 8;  // score tiles of 8 keys
  constexpr int kChunks = kStepN / 16;    // 16 keys: the depth of one mma of p v
  constexpr float kLn2 = 0.693147180559945309f;
  constexpr bool kSloped = kTerms && !kExact && kPairOf<Spec>.alibi && !kPairOf<Spec>.hides();

  if constexpr (kExact && (Spec::kWindow || kPairOf<Spec>.alibi)) w.give_back();  // elsewhere masked steps come first

  // s = q k^T
  const unsigned q_address = ptx::opaque(w.q_address);
  float s[kRowTiles][kStepTiles][4];
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int n = 0; n < kStepTiles; ++n) s[i][n][0] = s[i][n][1] = s[i][n][2] = s[i][n][3] = 0;
  }
  const auto score = [&](auto d, int first_chunk, int last_chunk) {  // one step along headdim, for the chunks of 16 keys [first, last)
    constexpr int kUnit = 2 * decltype(d)::value;
    unsigned loaded[kRowTiles][4];
    if constexpr (!Spec::kQueriesInRegisters) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        ptx::ldmatrix_x4(loaded[i], Shape::TileQ::template advance<kUnit>(q_address) + i * 16 * Shape::TileQ::kRowBytes);
      }
    }
    auto& q = Spec::kQueriesInRegisters ? w.q[Spec::kQueriesInRegisters ? decltype(d)::value : 0] : loaded;
#pragma unroll
    for (int chunk = first_chunk; chunk < last_chunk; ++chunk) {
      unsigned k[4];
      ptx::ldmatrix_x4(k, Shape::TileK::template advance<kUnit>(k_address) + chunk * 16 * Shape::TileK::kRowBytes);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        tile::mma<Element, Spec::kLevel>(s[i][2 * chunk], q[i], k[0], k[1]);
        tile::mma<Element, Spec::kLevel>(s[i][2 * chunk + 1], q[i], k[2], k[3]);
      }
    }
  };

  // What ALiBi adds to the score of row 16 i + 8 half and key 8 n + e is that of the lane's first pair and, while all keys are on one side of their
  // queries, a multiple of the distance from it: it then comes with the exponential. In units of log2.
  [[maybe_unused]] float slope_log2 = 0, first_log2 = 0, sloped_shift[kRowTiles][2];
  [[maybe_unused]] const auto shift_sloped = [&] {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) sloped_shift[i][half] = w.softmax.shift[i][half] + first_log2;
    }
  };
  if constexpr (kSloped) {
    slope_log2 = pairs.ahead * pairs.terms.slope;
    first_log2 = slope_log2 * static_cast<float>(pairs.row + pairs.terms.shift - pairs.key);
    shift_sloped();
  }

  // p = exp2(s * scale - reference) of 16 keys, in pieces of one 16 x 8 tile of scores.
  const auto scale = [&] { return kTerms && !kSloped ? kLog2e : w.scale; };  // scores with terms have softmax_scale already
  constexpr int kPieces = 2 * kRowTiles;
  Weights<kRowTiles> weights[2];
  Rest<kRowTiles> rest{};
  const auto weigh = [&](int chunk, int piece) {
    if constexpr (kSloped) {
      const int i = piece / 2, n = 2 * chunk + piece % 2;
      const float steps[2] = {static_cast<float>(16 * i - 8 * n), static_cast<float>(16 * i + 8 - 8 * n)};
      return weights[chunk % 2].template weigh_sloped<Element>(s[i][n], i, piece % 2, sloped_shift[i], scale(), slope_log2, steps);
    }
    weights[chunk % 2].template weigh<Element, kExact>(s[piece / 2][2 * chunk + piece % 2], piece / 2, piece % 2, w.softmax, scale(), rest);
  };

  // Queries in registers may be used in two passes at no cost: the first weights are then computed between the matrix instructions of the second.
  constexpr bool kTwoPasses = Spec::kQueriesInRegisters && !Spec::kCapped && (!kTerms || kSloped) && !kExact && kRowTiles * kChunks >= 8;
  constexpr int kSplit = kTwoPasses ? kChunks / 2 : 0;
  if constexpr (kTwoPasses) for_each<0, State::kDepthQ>([&](auto d) { score(d, 0, kSplit); });
  for_each<0, State::kDepthQ>([&](auto d) {
    score(d, kSplit, kChunks);
    if constexpr (kTwoPasses) {
      constexpr int kD = decltype(d)::value;
#pragma unroll
      for (int piece = kD * kPieces / State::kDepthQ; piece < (kD + 1) * kPieces / State::kDepthQ; ++piece) weigh(0, piece);
    }
  });

  if constexpr (Spec::kCapped) cap_scores<true>(reinterpret_cast<float(&)[kRowTiles * kStepTiles * 4]>(s), w.score_factor);
  // Where terms come from shared memory, a score that is not finite and hidden is found by its weight, when that is no number: see settle.
  constexpr bool kHidesLate = Shape::kStaged && !kExact;
  [[maybe_unused]] const auto look_for_low = [&] {
    bool good = true;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) good = good && w.softmax.shift[i][0] < -kLowestLse && w.softmax.shift[i][1] < -kLowestLse;
    w.low = !ptx::vote_all(good);
  };
  [[maybe_unused]] const auto add_terms = [&](int chunk) {
    constexpr PairFeatures kPair = kPairOf<Spec>;
    const float natural = w.scale * kLn2;
    [[maybe_unused]] float distance = 0, slope = 0;
    if constexpr (kPair.alibi) {
      distance = static_cast<float>(pairs.row + pairs.terms.shift - pairs.key);
      slope = -pairs.terms.natural_slope;
    }
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      float term[2][4];
      if constexpr (kPair.hides()) pairs.template read<kExact>(term, i, chunk);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& x = s[i][2 * chunk + n][e];
          float its = kPair.hides() ? term[n][e] : 0.0f;
          if constexpr (kPair.alibi) its = fmaf(slope, fabsf(distance + static_cast<float>(16 * i + e / 2 * 8 - 16 * chunk - 8 * n - e % 2)), its);
          x = fmaf(x, natural, its);
          if constexpr (kPair.hides() && !kHidesLate) x = or_lowest(x, its);
        }
      }
    }
  };
  if constexpr (kTerms && !kSloped) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) add_terms(chunk);
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
    rest = w.softmax.template raise<true>(s, 0, kStepTiles, scale(), w.o);
    if constexpr (kTerms && Shape::kStaged) look_for_low();
  }

  // Drops weights of 16 keys, once their sums are taken. Random numbers are those of a block of 64 keys, made when a step begins that is not of the
  // block of the last one; where other steps are whole blocks, nothing is kept from one to the next.
  [[maybe_unused]] const auto drop = [&](int chunk, const auto& pairs) {
    static_assert(core::kDropoutBlock % kStepN == 0);
    constexpr bool kKeeps = Spec::kStepN < core::kDropoutBlock;
    const int block = pairs.key / core::kDropoutBlock;
    if (chunk == 0 && (!kKeeps || w.kept_of != block)) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) w.kept[i] = pairs.dropout.kept_of_rows(pairs.row + 16 * i, pairs.key);
      if constexpr (kKeeps) w.kept_of = block;
    }
    const int first = kStepN < core::kDropoutBlock ? pairs.key % core::kDropoutBlock / 8 : 0;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      const unsigned kept = w.kept[i] >> first;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < 2; ++n) weights[chunk % 2].p[i][2 * n + half] &= kept_halves(kept, half, 2 * chunk + n);
      }
    }
  };

  // Where these weights dominate a row its reference is raised, and they are computed again. Scores without terms are ready to the end of the step:
  // the reference is raised for all of them at once. A NaN that a term hides goes first.
  const auto settle = [&](int chunk) {
    if constexpr (!kExact) {
      if (!weights[chunk % 2].template are_minor<Element>(w.softmax, w.rest) || (kTerms && kHidesLate && w.low)) [[unlikely]] {
        w.give_back();
        if constexpr (kTerms && kHidesLate) {
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) {
            float term[2][4];
            pairs.template read<kExact>(term, i, chunk);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
#pragma unroll
              for (int e = 0; e < 4; ++e) s[i][2 * chunk + n][e] = or_lowest(s[i][2 * chunk + n][e], term[n][e]);
            }
          }
#pragma unroll
          for (int piece = 0; piece < kPieces; ++piece) weigh(chunk, piece);
        }
        const unsigned rows =
            weights[chunk % 2].template dominated<Element>(w.softmax, [](float shift) { return kTerms && kHidesLate && !(shift < -kLowestLse); });
        if (!ptx::vote_all(rows == 0)) {
          if constexpr (kSloped) add_terms(chunk);
          const float its_scale = kTerms ? kLog2e : w.scale;
          const auto its_rest = w.softmax.raise_some(rows, s, 2 * chunk, kTerms ? 2 : kStepTiles - 2 * chunk, its_scale, w.o);
          w.rest = its_rest.packed();
          if constexpr (kTerms && kHidesLate) look_for_low();
#pragma unroll
          for (int piece = 0; piece < kPieces; ++piece)
            weights[chunk % 2].template weigh_some<Element>(rows, s[piece / 2][2 * chunk + piece % 2], piece / 2, piece % 2, w.softmax, its_scale,
                                                            its_rest);
          if constexpr (kSloped) shift_sloped();
        }
      }
    }
    weights[chunk % 2].add_to(w.softmax);
    if constexpr (kPairOf<Spec>.dropout) drop(chunk, pairs);
  };

  // o += p v, 16 keys at a time: the weights of the next 16 are computed between the matrix instructions of these.
  if constexpr (!kTwoPasses) {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) weigh(0, piece);
  }
  settle(0);
  for_each<0, kChunks>([&](auto chunk) {
    constexpr int kChunk = decltype(chunk)::value;
    constexpr bool kMore = kChunk + 1 < kChunks;
    for_each<0, State::kDepthO>([&](auto d) {
      constexpr int kD = decltype(d)::value;
      unsigned v[4];
      ptx::ldmatrix_x4_trans(v, Shape::TileV::template advance<2 * kD>(v_address) + kChunk * 16 * Shape::TileV::kRowBytes);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        tile::mma<Element, Spec::kLevel>(w.o[i][2 * kD], weights[kChunk % 2].p[i], v[0], v[1]);
        tile::mma<Element, Spec::kLevel>(w.o[i][2 * kD + 1], weights[kChunk % 2].p[i], v[2], v[3]);
      }
      if constexpr (kMore) {
#pragma unroll
        for (int piece = kD * kPieces / State::kDepthO; piece < (kD + 1) * kPieces / State::kDepthO; ++piece) weigh(kChunk + 1, piece);
      }
    });
    if constexpr (kMore) settle(kChunk + 1);
  });
  if constexpr (kExact) {  // while no scores take registers
    w.rest = rest.packed();
    w.give_back();
  }
}

// The row of o that is `row` behind the tile's first.
template <class T>
__device__ __forceinline__ T* first_row_of_o(const AttentionParams& p, const Place& place, int row) {
  return static_cast<T*>(p.o) + place.batch * p.o_strides.batch + (place.row + row) * p.o_strides.row + place.head * p.o_strides.head;
}

// Writes the warp's rows of o, through its rows of the query tile so that whole rows are stored, in fp32 from registers, and lse.
template <class Spec>
__device__ __forceinline__ void finish(WarpState<Spec>& w, const AttentionParams& call, unsigned tile_q) {
  using Shape = ForwardShape<Spec>;
  // Found again rather than kept in registers all the way.
  const Place place = place_of<Shape::kBlockM, Shape::kEntriesTogether>(call, ptx::opaque(static_cast<int>(blockIdx.x)));
  const auto& p = entry_params<kPairOf<Spec>>(call, place.batch);
  const auto [warp, lane] = ptx::thread_place();
  using TileO = typename Shape::TileO;
  const int warp_row = warp * Shape::kWarpRows;
  const int rows = p.seqlen_q - place.row - warp_row;  // that exist, from the warp's first
  constexpr int kPitch = TileO::kRowBytes > Shape::TileQ::kRowBytes ? TileO::kRowBytes : Shape::TileQ::kRowBytes;
  const unsigned tile_o = tile_q + static_cast<unsigned>(warp_row * kPitch);
  constexpr bool kFp32Out = kPairOf<Spec>.fp32_out;
  ptx::warp_sync();  // after the warp's last reads of queries

  w.give_back();
#pragma unroll
  for (int i = 0; i < Spec::kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = w.softmax.sum[i][half];
      sum += ptx::shfl_xor(sum, 1);
      sum += ptx::shfl_xor(sum, 2);
      sum += first_sum<kPairOf<Spec>>(p, place.batch);
      const bool empty = sum == 0;
      [[maybe_unused]] float sinked_lse;
      if constexpr (kPairOf<Spec>.sinks) {
        const SinkedRow<> sinked(sink_of(pairs_of(p), place.head), w.softmax.shift[i][half], sum, empty);
        sum = sinked.sum;
        sinked_lse = sinked.lse;
      }
      const float inverse = (kPairOf<Spec>.dropout ? pairs_of(p).dropout_scale : 1.0f) / sum;
      const int row = i * 16 + half * 8 + lane / 4;
      [[maybe_unused]] float* fp32_row = nullptr;
      if constexpr (kFp32Out) fp32_row = first_row_of_o<float>(p, place, warp_row) + row * p.o_strides.row;
#pragma unroll
      for (int n = 0; n < 2 * WarpState<Spec>::kDepthO; ++n) {
        const float low = empty ? 0.0f : w.o[i][n][2 * half] * inverse;
        const float high = empty ? 0.0f : w.o[i][n][2 * half + 1] * inverse;
        if constexpr (kFp32Out)
          store_pair<Spec::kHeaddimV, Spec::kAligned>(fp32_row, n * 8 + lane % 4 * 2, low, high, row < rows);
        else
          ptx::st_shared_4(tile_o + TileO::offset(row, n) + lane % 4 * 4, ptx::pack2<typename Spec::Element>(low, high));
      }
      if (p.lse != nullptr && lane % 4 == 0 && row < rows) {
        constexpr float kLn2 = 0.693147180559945309f;
        p.lse[place.batch * p.lse_strides.batch + (place.row + warp_row + row) * p.lse_strides.row + place.head * p.lse_strides.head] =
            kPairOf<Spec>.sinks ? sinked_lse
            : empty             ? -kInfinity
                                : fmaf(-w.softmax.shift[i][half], kLn2, logf(sum));
      }
    }
  }
  if constexpr (kFp32Out) return;
  ptx::warp_sync();

  auto* o = first_row_of_o<unsigned short>(p, place, warp_row);
  constexpr int kUnits = (Spec::kHeaddimV + 7) / 8;
#pragma unroll 4
  for (int index = lane; index < Shape::kWarpRows * kUnits; index += 32) {
    const int row = index / kUnits, unit = index % kUnits;
    if (row >= rows) break;
    const uint4 x = ptx::ld_shared_16(tile_o + TileO::offset(row, unit));
    unsigned short* to = o + row * p.o_strides.row + unit * 8;
    if constexpr (Spec::kAligned) {
      *reinterpret_cast<uint4*>(to) = x;
    } else {
      const unsigned word[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (unit * 8 + e < Spec::kHeaddimV) to[e] = static_cast<unsigned short>(word[e / 2] >> (e % 2 * 16));
      }
    }
  }
}

template <class Spec>
__device__ __forceinline__ void forward(const AttentionParams& call) {
  using Shape = ForwardShape<Spec>;
  using State = WarpState<Spec>;
  using CopyQ = tile::TileCopy<typename Shape::TileQ, Shape::kThreads, Spec::kHeaddim, Shape::kCopyBy>;
  using CopyK = tile::TileCopy<typename Shape::TileK, Shape::kThreads, Spec::kHeaddim, Shape::kCopyBy>;
  using CopyV = tile::TileCopy<typename Shape::TileV, Shape::kThreads, Spec::kHeaddimV, Shape::kCopyBy>;
  static_assert(Spec::kBlockN % Spec::kStepN == 0 && Spec::kStepN % 16 == 0 && Spec::kBlockN % Spec::kExactN == 0 && Spec::kStages >= 1);

  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned tile_q = ptx::shared_address(shared);
  const unsigned stages = tile_q + Shape::kQueryBytes;
  const Place place = place_of<Shape::kBlockM, Shape::kEntriesTogether>(call, static_cast<int>(blockIdx.x));
  const auto& p = entry_params<kPairOf<Spec>>(call, place.batch);
  if (kPairOf<Spec>.packed && place.row >= p.seqlen_q) return;
  const int given_keys = [&] {
    if constexpr (kPairOf<Spec>.paged)
      return paged_keys<Shape::kThreads>(call, place.batch);
    else
      return keys_of<kPairOf<Spec>>(p, place.batch);
  }();
  const int seqlen_k = kPairOf<Spec>.paged ? max(given_keys, 0) : given_keys;
  const core::Mask32 mask = [&] {
    if constexpr (Spec::kWindow)
      return window_mask_of<kPairOf<Spec>>(p, seqlen_k);
    else
      return core::Mask32{p.seqlen_q, kPairOf<Spec>.lengths ? seqlen_k : p.seqlen_k, Spec::kCausal};
  }();
  // Ids of documents: the one that all queries of the tile have, if they have one.
  constexpr bool kByDocument = kPairOf<Spec>.documents && !kPairOf<Spec>.with_documents(false).terms();
  [[maybe_unused]] int document = 0;
  [[maybe_unused]] bool one_document = false;
  const KeyBlocks blocks = [&] {
    KeyBlocks seen = key_blocks<Shape::kBlockM, Spec::kBlockN>(mask, place.row);
    if constexpr (kPairOf<Spec>.documents) {
      const PairParams& pairs = pairs_of(p);
      const IdRange range =
          common_range<Shape::kThreads>(pairs.document_q + place.batch * pairs.document_q_stride + place.row,
                                        min(Shape::kBlockM, p.seqlen_q - place.row), pairs.document_k + place.batch * pairs.document_k_stride,
                                        seen.begin * Spec::kBlockN, min(seen.end * Spec::kBlockN, seqlen_k), reinterpret_cast<int*>(shared));
      seen.end = (range.end + Spec::kBlockN - 1) / Spec::kBlockN;
      seen.begin = range.begin / Spec::kBlockN;
      if (range.begin == range.end) seen.begin = seen.end = 0;
      document = reinterpret_cast<int*>(shared)[0];
      one_document = document == reinterpret_cast<int*>(shared)[1];
      __syncthreads();  // before the queries are where the range was
    }
    return seen;
  }();

  const auto* q =
      static_cast<const unsigned short*>(p.q) + place.batch * p.q_strides.batch + place.head * p.q_strides.head + place.row * p.q_strides.row;
  // Where a sequence begins is read from memory, and would take each lane's registers.
  const auto of_all = [](const unsigned short* x) {
    if constexpr (kPairOf<Spec>.packed && Spec::kLevel >= 80)
      return ptx::uniform(x);
    else
      return x;
  };
  const auto* k = of_all(static_cast<const unsigned short*>(p.k) + place.batch * p.k_strides.batch + place.head_k * p.k_strides.head);
  const auto* v = of_all(static_cast<const unsigned short*>(p.v) + place.batch * p.v_strides.batch + place.head_k * p.v_strides.head);

  [[maybe_unused]] const Terms<kPairOf<Spec>, typename Spec::Element> terms(p, place.batch, place.head, seqlen_k);
  [[maybe_unused]] const unsigned term_tiles = tile_q + Shape::kSharedBytes;

  // Terms are copied asynchronously even where keys are not.
  const auto commit = [] {
    if constexpr (Shape::kStaged)
      ptx::cp_async_commit();
    else
      CopyK::commit();
  };

  // load: block j goes to stage j mod kStages. Only the last block of a sequence can lack keys, and it is among the first loads.
  const auto load_block = [&](auto bounded, int j) {
    constexpr bool kBounded = decltype(bounded)::value != 0;
    const unsigned stage = stages + static_cast<unsigned>(j % Spec::kStages) * Shape::kStageBytes;
    const long long key = static_cast<long long>(j) * Spec::kBlockN;
    const int keys = (kPairOf<Spec>.lengths ? seqlen_k : p.seqlen_k) - j * Spec::kBlockN;
    if constexpr (kPairOf<Spec>.paged) {
      const EntryPages pages(pages_of(call), place.batch);
      const int first = static_cast<int>(key);
      CopyK::template copy_rows<kBounded>(stage, keys, [&](int row) { return k + pages.of_key(first + row, p.k_strides.row); });
      CopyV::template copy_rows<kBounded>(stage + Shape::TileK::kBytes, keys,
                                          [&](int row) { return v + pages.of_value(first + row, p.v_strides.row); });
    } else {
      CopyK::template copy<kBounded>(stage, k + key * p.k_strides.row, p.k_strides.row, keys);
      CopyV::template copy<kBounded>(stage + Shape::TileK::kBytes, v + key * p.v_strides.row, p.v_strides.row, keys);
    }
    if constexpr (Shape::kStaged)
      copy_terms<kPairOf<Spec>, Shape::kTerms, Shape::kThreads>(term_tiles + static_cast<unsigned>(j % Spec::kStages * Shape::kTerms.bytes()), terms,
                                                                place.row, p.seqlen_q - place.row, static_cast<int>(key), seqlen_k,
                                                                ptx::opaque(static_cast<int>(threadIdx.x)));
  };
  CopyQ::template copy<true>(tile_q, q, p.q_strides.row, p.seqlen_q - place.row);
#pragma unroll
  for (int ahead = 0; ahead < (Spec::kStages > 1 ? Spec::kStages - 1 : 1); ++ahead) {
    if (blocks.end - 1 - ahead >= blocks.begin) load_block(Constant<1>{}, blocks.end - 1 - ahead);
    commit();
  }
  // Makes block j visible to all, frees the stage of block j + 1 and loads the next block into it. Tells whether there is Inf or NaN in its values,
  // if asked to look.
  const auto enter_block = [&](int j, bool look_for_nonfinite) {
    constexpr int kPending = Spec::kStages > 1 ? Spec::kStages - 2 : 0;
    bool nonfinite = false;
    if constexpr (Spec::kStages == 1) {
      if (j != blocks.end - 1) {
        __syncthreads();
        load_block(Constant<0>{}, j);
        commit();
      }
    }
    if constexpr (Shape::kStaged)
      ptx::cp_async_wait<kPending>();
    else
      CopyK::template wait<kPending>();
    if (look_for_nonfinite) {
      const unsigned tile_v = stages + static_cast<unsigned>(j % Spec::kStages) * Shape::kStageBytes + Shape::TileK::kBytes;
      nonfinite = ptx::bar_or(copied_nonfinite<CopyV, typename Shape::TileV, typename Spec::Element>(tile_v));
    } else {
      __syncthreads();
    }
    if constexpr (Spec::kStages > 1) {
      if (j - (Spec::kStages - 1) >= blocks.begin) load_block(Constant<0>{}, j - (Spec::kStages - 1));
      commit();
    }
    return nonfinite;
  };

  if (blocks.end == 0) {  // no block, whose barrier would come after the queries' arrival: they must not overwrite o
    CopyQ::template wait<0>();
    __syncthreads();
  }

  State w;
  w.start(p);
  if constexpr (kPairOf<Spec>.paged)
    if (given_keys < 0) w.softmax.spoil();
  [[maybe_unused]] const Dropout<kPairOf<Spec>> dropout(p, place.batch, place.head);
  const auto [warp, lane] = ptx::thread_place();
  w.q_address = tile::fragment_address<typename Shape::TileQ>(tile_q, warp * Shape::kWarpRows, lane);
  w.k_address = tile::fragment_address_n<typename Shape::TileK>(stages, 0, lane);
  w.v_address = tile::fragment_address<typename Shape::TileV>(stages + Shape::TileK::kBytes, 0, lane);

  [[maybe_unused]] const TermReader<kPairOf<Spec>, typename Spec::Element, Shape::kTerms> reader(term_tiles, terms, warp * Shape::kWarpRows, lane);

  // A scale that is negative or 0 goes into q: the maximum of the scores is then that of the logits.
  if (!(p.softmax_scale > 0)) {
    CopyQ::template wait<0>();
    scale_copied<CopyQ, typename Shape::TileQ, typename Spec::Element>(tile_q, p.softmax_scale < 0 ? -1.0f : 0.0f);
  }
  if constexpr (Spec::kQueriesInRegisters) {
    CopyQ::template wait<0>();
    __syncthreads();
    for_each<0, State::kDepthQ>([&](auto d) {
#pragma unroll
      for (int i = 0; i < Spec::kRowTiles; ++i) {
        ptx::ldmatrix_x4(w.q[decltype(d)::value][i],
                         Shape::TileQ::template advance<2 * decltype(d)::value>(w.q_address) + i * 16 * Shape::TileQ::kRowBytes);
      }
    });
  }

  // Of block j, for ALiBi alone: -1 if none of its keys is behind a query of the tile, 1 if none is before one, otherwise 0.
  const auto ahead = [&](int j) {
    if constexpr (kPairOf<Spec>.alibi) {
      if (Spec::kCausal || place.row + terms.shift >= (j + 1) * Spec::kBlockN - 1) return -1.0f;
      if (place.row + Shape::kBlockM - 1 + terms.shift <= j * Spec::kBlockN) return 1.0f;
    }
    return 0.0f;
  };

  // compute: first the blocks that not all rows see whole (or just the first one, to find the references), then the others.
  const auto compute_block = [&](auto exact, auto with_terms, int j) {
    constexpr bool kExact = decltype(exact)::value != 0, kTerms = decltype(with_terms)::value != 0;
    constexpr int kStepN = kExact ? Spec::kExactN : Spec::kStepN;
    const unsigned stage = static_cast<unsigned>(j % Spec::kStages) * Shape::kStageBytes;
#pragma unroll 1
    for (int step = Spec::kBlockN / kStepN - 1; step >= 0; --step) {
      const unsigned k_address = w.k_address + stage + static_cast<unsigned>(step * kStepN * Shape::TileK::kRowBytes);
      const unsigned v_address = w.v_address + stage + static_cast<unsigned>(step * kStepN * Shape::TileV::kRowBytes);
      const int key = j * Spec::kBlockN + step * kStepN;
      VisibleKeys<Spec::kRowTiles, Spec::kWindow> visible;
      if constexpr (kExact) {
        const auto [warp, lane] = ptx::thread_place();
        const int row = place.row + warp * Shape::kWarpRows;
        if (key >= mask.visible_end(row + Shape::kWarpRows - 1)) continue;  // hidden from all rows of the warp
        if (Spec::kWindow && key + kStepN <= mask.visible_begin(row)) continue;
        visible = visible_keys<Spec::kRowTiles, Spec::kWindow>(mask, row, key, lane / 4, lane % 4 * 2);
      }
      if constexpr (kPairOf<Spec>.any()) {
        const auto [warp, lane] = ptx::thread_place();
        const int row = place.row + warp * Shape::kWarpRows + lane / 4;
        const auto read = [&] {
          if constexpr (Shape::kStaged)
            return reader.at(static_cast<unsigned>(j % Spec::kStages * Shape::kTerms.bytes()), step * kStepN);
          else
            return reader;
        }();
        forward_step<Spec, kStepN, kExact, kTerms>(w, k_address, v_address, visible,
                                                   {terms, dropout, read, row, key + lane % 4 * 2, p.seqlen_q, seqlen_k, ahead(j)});
      } else {
        forward_step<Spec, kStepN, kExact, kTerms>(w, k_address, v_address, visible, {});
      }
    }
  };
  // Hidden keys have weight 0, but 0 * inf is NaN: what is not finite in v goes to the rows that see it, and is cleared.
  const auto add_what_is_not_finite = [&](int j) {
    const unsigned stage = static_cast<unsigned>(j % Spec::kStages) * Shape::kStageBytes;
    const auto sees = [&](float(&term)[2][4], int i, int chunk) {  // -Inf where it does not; nothing of it is kept in registers
      const auto [warp, lane] = ptx::thread_place();
      const int row = place.row + warp * Shape::kWarpRows, key = j * Spec::kBlockN;
      const auto visible = visible_keys<Spec::kRowTiles, Spec::kWindow>(mask, row, key, lane / 4, lane % 4 * 2);
      if constexpr (kPairOf<Spec>.hides()) {
        const auto read = [&] {
          if constexpr (Shape::kStaged)
            return reader.at(static_cast<unsigned>(j % Spec::kStages * Shape::kTerms.bytes()), 0);
          else
            return reader;
        }();
        const StepPairs<Spec> pairs{terms, dropout, read, row + lane / 4, key + lane % 4 * 2, p.seqlen_q, seqlen_k, 0.0f};
        pairs.template read<true>(term, i, chunk);
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (!kPairOf<Spec>.hides()) term[n][e] = 0;
          if (!visible(i, e / 2, 2 * chunk + n, e % 2)) term[n][e] = -kInfinity;
        }
      }
    };
    const unsigned tile_v = stages + stage + Shape::TileK::kBytes;
    add_seen_nonfinite<typename Shape::TileV, typename Spec::Element, Spec::kLevel>(w.o, tile_v, w.v_address + stage, sees);
    __syncthreads();
    clear_copied_nonfinite<CopyV, typename Shape::TileV, typename Spec::Element>(tile_v);
    __syncthreads();
  };
  constexpr Constant<kPairOf<Spec>.terms()> kTerms{};
  const auto masked_block = [&](int j) {
    if (enter_block(j, Spec::kCausal || Spec::kWindow || kPairOf<Spec>.hides())) [[unlikely]]
      add_what_is_not_finite(j);
    compute_block(Constant<1>{}, kTerms, j);
  };
  // Whether all queries of the tile and all keys of a block that exists whole are of one document: no pair is hidden then. The same in all warps.
  [[maybe_unused]] const auto of_one_document = [&](int j) {
    if constexpr (kByDocument) {
      const PairParams& pairs = pairs_of(p);
      const int* const ids = pairs.document_k + place.batch * pairs.document_k_stride + j * Spec::kBlockN;
      bool same = one_document;
#pragma unroll
      for (int key = 0; key < Spec::kBlockN; key += 32) same = same && ids[key + static_cast<int>(threadIdx.x) % 32] == document;
      return ptx::vote_all(same);
    }
    return false;
  };
  const auto whole_block = [&](int j) {
    if constexpr (kByDocument)
      if (of_one_document(j)) {
        enter_block(j, false);
        return compute_block(Constant<0>{}, Constant<0>{}, j);
      }
    if constexpr (kPairOf<Spec>.alibi && !kPairOf<Spec>.hides() && !Spec::kCausal)
      if (ahead(j) == 0) return masked_block(j);  // distances are absolute values there
    const bool nonfinite = enter_block(j, kPairOf<Spec>.hides());
    if constexpr (kPairOf<Spec>.hides())
      if (nonfinite) [[unlikely]]
        add_what_is_not_finite(j);
    compute_block(Constant<0>{}, kTerms, j);
  };
  const int exact_from = min(blocks.whole_end, blocks.end - 1);
  int j = blocks.end - 1;
  if constexpr (Spec::kWindow) {
#pragma unroll 1
    for (; j >= blocks.begin; --j) {
      if (j >= exact_from || j < blocks.whole_begin)
        masked_block(j);
      else
        whole_block(j);
    }
  } else {
#pragma unroll 1
    for (; j >= exact_from && j >= (kPairOf<Spec>.documents ? blocks.begin : 0); --j) masked_block(j);
#pragma unroll 1
    for (; j >= (kPairOf<Spec>.documents ? blocks.begin : 0); --j) whole_block(j);
  }

  // finish: o takes the place of the queries. Each warp writes over its own rows of them, unless rows of o are longer.
  if constexpr (Shape::TileO::kRowBytes > Shape::TileQ::kRowBytes) __syncthreads();
  finish<Spec>(w, call, tile_q);
}

}  // namespace fattn::v2
