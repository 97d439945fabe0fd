// One step of v2's forward pass (kernels/v2/forward.h): kStepN keys, of a warp's rows.
//   S = Q K^T    S changed by softcap and terms    what rows do not see hidden, m raised    P = exp2(S scale - m)    O += P V
// Weights are made 16 keys at a time, those of the next 16 between the matrix instructions of these; in brackets what runs there:
//   kExact     S | hidden | m raised | P(0) | settled | O += P(0) V(0) [P(1)] | settled | O += P(1) V(1) [P(2)] | ...
//   otherwise  S [P(0), in two passes over S] | settled | O += P(0) V(0) [P(1)] | settled | ...
// Settled: sums of weights are looked at. Where they dominate a row, the reference that they trusted is raised and they are made again.
#pragma once

#include "device_abi/lowest.h"
#include "kernels/constants.h"
#include "kernels/mask.h"
#include "kernels/pair.h"
#include "kernels/ptx/ldmatrix.h"
#include "kernels/ptx/special_registers.h"
#include "kernels/ptx/warp.h"
#include "kernels/score.h"
#include "kernels/softmax.h"
#include "kernels/tile/for_each.h"
#include "kernels/tile/fragment.h"
#include "kernels/v2/forward_shape.h"
#include "kernels/v2/forward_state.h"
#include "kernels/v2/own_bits.h"

namespace fattn::v2 {

// One step over kStepN keys; the addresses are this lane's, of the first of them. kExact: mask the scores and find their maximum; otherwise every
// key is visible, and the reference is good unless the sums of the weights say that it is not. Without kTerms nothing is added to scores.
// In one piece, its phases as lambdas: as members of a type they gave packed sequences with documents or windows other registers.
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
  const auto scale = [&] {  // scores with terms have softmax_scale already
    return kTerms && !kSloped ? kLog2e : State::kNaturalScale ? w.scale * kLog2e : w.scale;
  };
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
    const float natural = State::kNaturalScale ? w.scale : w.scale * kLn2;
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
    visible.hide(s);
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
          const float its_scale = kTerms ? kLog2e : scale();
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
    weights[chunk % 2].template add_to<own_bits<Spec>()>(w.softmax);
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

}  // namespace fattn::v2
