// A consumer warpgroup of v3's forward pass in fp32: 64 rows of queries, whose scores, weights and output stay in registers. While the weights of one
// block are computed, the tensor cores multiply those of the block before with v.
//
// The tensor cores round sums towards zero. So of the three products of parts the two small ones come first, and a block's product with v is summed
// by itself and then added to o in fp32, to nearest; undoing the factor of the block's values costs nothing then.
#pragma once

#include "kernels/ptx/async_proxy.h"
#include "kernels/ptx/barrier.h"
#include "kernels/ptx/special_registers.h"
#include "kernels/ptx/wgmma.h"
#include "kernels/tile/for_each.h"
#include "kernels/tile/split_tile.h"
#include "kernels/v2/forward_f32_again.h"
#include "kernels/v3/forward_f32_shape.h"
#include "kernels/v3/forward_f32_spoilt.h"

namespace fattn::v3 {

using tile::for_each;

// A weight enters the product with v as weight * 2^12, and its reference is renewed where the maximum of the row is more than 3 above it in base 2:
// the greatest is then at most 2^15, and those of usual size are far from the least of fp16. A new reference is the maximum itself: the weight of a
// key that has nearly all of a row is then 1, whose parts are exact.
inline constexpr float kF32WeightFactor = 4096.0f, kF32Patience = 3.0f;

// Beyond this reference score * scale is rounded by more than 2^-5: such rows are computed again.
inline constexpr float kF32GreatestReference = 1048576.0f;

template <class Spec>
struct ConsumerF32 {
  using Shape = ForwardF32Shape<Spec>;
  using Mask = typename Spec::Mask;
  static constexpr int kBlockN = Shape::kBlockN, kDepth = Shape::kDepth, kScores = kBlockN / 2;
  static constexpr bool kQueriesInRegisters = Spec::kQueriesInRegisters;
  static constexpr int kOwnBarrier = 1;  // of each warpgroup by itself, from here on

  const ForwardF32Call& p;
  const unsigned shared;
  const BarriersF32<Spec> barriers;
  const int group;

  float s[kScores];                                      // scores, then weights
  unsigned high[kBlockN / 16][4], low[kBlockN / 16][4];  // weights, split
  float t[Shape::kColumnsV / 2], o[Shape::kColumnsV / 2];
  unsigned q_high[kQueriesInRegisters ? kDepth : 1][4], q_low[kQueriesInRegisters ? kDepth : 1][4];
  float row_scale[2];  // softmax_scale_log2, undoing the factor of the row of q
  float reach;         // the greatest that undoes the factor of a block of keys whose scores are good (tile::kGreatestSplitScale)
  float shift[2];      // minus the reference; inf: no key seen yet
  float sum[2];        // of this lane's weights alone
  float factor[2];     // of o, where references were renewed
  Ring<Spec::kStagesK> k;
  Ring<Spec::kStagesV> v;

  __device__ __forceinline__ ConsumerF32(const ForwardF32Call& call, unsigned shared_address, BarriersF32<Spec> of, int own_group)
      : p(call), shared(shared_address), barriers(of), group(own_group) {}

  // Where the thread is, found again at each call to keep registers free.
  static __device__ __forceinline__ int lane() { return ptx::opaque(static_cast<int>(threadIdx.x)) % 32; }
  // The warp's first row in the tile, and the lane's; its other one is 8 further.
  __device__ __forceinline__ int warp_row() const { return (ptx::opaque(static_cast<int>(threadIdx.x)) - 128) / 32 * 16; }
  __device__ __forceinline__ int own_row() const { return warp_row() + lane() / 4; }

  // --- queries ---

  // The lane's numbers of q: words of the A operand of each step (kernels/ptx/wgmma.h), each of two columns.
  using Queries = float[kDepth][8];
  __device__ __forceinline__ void load_queries(const Place& place, Queries& x) const {
    const auto* const q = static_cast<const float*>(p.call.q) + place.batch * p.call.q_strides.batch + place.head * p.call.q_strides.head;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = place.row + own_row() + 8 * r, first = lane() % 4 * 2;
      const float* const from = q + row * p.call.q_strides.row + first;
#pragma unroll
      for (int unit = 0; unit < 2 * kDepth; ++unit) {  // 8 columns
        float* const to = x[unit / 2] + (unit % 2 * 2 + r) * 2;
        const int left = row < p.call.seqlen_q ? Spec::kHeaddim - unit * 8 - first : 0;  // columns
        if constexpr (Spec::kAligned) {
          const float2 two = left > 0 ? *reinterpret_cast<const float2*>(from + unit * 8) : float2{0, 0};
          to[0] = two.x;
          to[1] = two.y;
        } else {
          to[0] = left > 0 ? from[unit * 8] : 0.0f;
          to[1] = left > 1 ? from[unit * 8 + 1] : 0.0f;
        }
      }
    }
  }

  // Splits them, each row by a factor of its own. A scale that is negative or 0 goes into them: the maximum of the scores is then that of the logits.
  __device__ __forceinline__ void split_queries(const Queries& x) {
    const float sign = p.call.softmax_scale > 0 ? 1.0f : p.call.softmax_scale < 0 ? -1.0f : 0.0f;
    float of_row[2];
    bool infinite = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float greatest = 0;
#pragma unroll
      for (int i = 0; i < 4 * kDepth; ++i) {
        const float a = fabsf(x[i / 4][(i / 2 % 2 * 2 + r) * 2 + i % 2]);
        greatest = a < kInfinity ? fmaxf(greatest, a) : greatest;  // neither Inf nor NaN
        infinite = infinite || a == kInfinity;
      }
      greatest = fmaxf(greatest, ptx::shfl_xor(greatest, 1));
      greatest = fmaxf(greatest, ptx::shfl_xor(greatest, 2));
      const tile::SplitFactor split(greatest);
      of_row[r] = split.factor * sign;
      row_scale[r] = p.call.softmax_scale_log2 * split.inverse;
    }
    reach = infinite ? 0.0f : tile::kGreatestSplitScale<Spec::kHeaddim> / fmaxf(row_scale[0], row_scale[1]);
    if constexpr (!kQueriesInRegisters) ptx::bar_sync(kOwnBarrier + group, 128);  // every warp's products with those before are done
#pragma unroll
    for (int step = 0; step < kDepth; ++step) {
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const float by = of_row[word % 2];
        unsigned of_high, of_low;
        tile::split2(x[step][2 * word] * by, x[step][2 * word + 1] * by, of_high, of_low);
        if constexpr (kQueriesInRegisters) {
          q_high[step][word] = of_high;
          q_low[step][word] = of_low;
        } else {
          constexpr int kUnits = 8;  // of a column
          const int unit = 2 * step + word / 2, row = own_row() % 64 + word % 2 * 8;
          const unsigned to = query_tile() + static_cast<unsigned>(unit / kUnits * Shape::TileQ::kColumnBytes + row * 128 +
                                                                   ((unit % kUnits) ^ (row % 8)) * 16 + lane() % 4 * 4);
          ptx::st_shared_4(to, of_high);
          ptx::st_shared_4(to + Shape::TileQ::kBytes, of_low);
        }
      }
    }
    if constexpr (!kQueriesInRegisters) {
      ptx::async_proxy_fence();
      ptx::bar_sync(kOwnBarrier + group, 128);
    }
  }
  __device__ __forceinline__ unsigned query_tile() const { return shared + static_cast<unsigned>(group * Shape::kQueryBytes); }

  // --- products, of the whole warpgroup ---

  // s = q k^T, in the units of the parts
  __device__ __forceinline__ void issue_scores() {
    ptx::mbarrier_wait(barriers.k_full(k.stage), k.parity);
    ptx::forget(s);
    if constexpr (kQueriesInRegisters) {
      ptx::pin(q_high);
      ptx::pin(q_low);
    }
    const unsigned a = ptx::wgmma_descriptor(query_tile(), 0);
    const unsigned b = ptx::wgmma_descriptor(shared + Shape::kOffsetK, 0) + k.stage * (Shape::kKeyBytes / 16);
    constexpr unsigned kLowA = Shape::TileQ::kBytes / 16, kLowB = Shape::TileK::kBytes / 16;
    ptx::wgmma_fence();
    const auto multiply = [&](auto first, auto a_is_low, unsigned a_at, unsigned b_at) {
      for_each<0, kDepth>([&](auto step) {
        constexpr int kStep = decltype(step)::value;
        constexpr bool kAdds = decltype(first)::value == 0 || kStep > 0;
        if constexpr (kQueriesInRegisters)
          ptx::wgmma<f16, kAdds>(s, decltype(a_is_low)::value != 0 ? q_low[kStep] : q_high[kStep], b_at + Shape::TileK::step(kStep));
        else
          ptx::wgmma<f16, kAdds>(s, a_at + Shape::TileQ::step(kStep), b_at + Shape::TileK::step(kStep));
      });
    };
    using Yes = tile::Constant<1>;
    using No = tile::Constant<0>;
    multiply(Yes{}, Yes{}, a + kLowA, b);
    multiply(No{}, No{}, a, b + kLowB);
    multiply(No{}, No{}, a, b);
    ptx::wgmma_commit();
    k.next();
  }
  // t = weights v, in the units of the parts
  __device__ __forceinline__ void issue_output() {
    ptx::mbarrier_wait(barriers.v_full(v.stage), v.parity);
    ptx::forget(t);
    ptx::pin(high);
    ptx::pin(low);
    const unsigned b = ptx::wgmma_descriptor(shared + Shape::kOffsetV, Shape::TileV::kColumnBytes) + v.stage * (Shape::kValueBytes / 16);
    constexpr unsigned kLow = Shape::TileV::kBytes / 16;
    constexpr int kSteps = kBlockN / 16;
    ptx::wgmma_fence();
    for_each<0, kSteps>([&](auto step) {
      constexpr int kStep = decltype(step)::value;
      ptx::wgmma<f16, (kStep > 0), ptx::Major::kOther>(t, low[kStep], b + static_cast<unsigned>(kStep * 128));
    });
#pragma unroll
    for (int step = 0; step < kSteps; ++step) ptx::wgmma<f16, true, ptx::Major::kOther>(t, high[step], b + kLow + static_cast<unsigned>(step * 128));
#pragma unroll
    for (int step = 0; step < kSteps; ++step) ptx::wgmma<f16, true, ptx::Major::kOther>(t, high[step], b + static_cast<unsigned>(step * 128));
    ptx::wgmma_commit();
    v.next();
  }
  // The scores are there, and what undoes the factor of the keys; at most kPending products are under way still.
  template <int kPending>
  __device__ __forceinline__ float scores_done() {
    ptx::wgmma_wait<kPending>();
    ptx::pin(s);
    const float inverse = ptx::ld_shared_f32(shared + Shape::kOffsetFactors + k.last() * 16);
    ptx::warp_sync();
    if (lane() == 0) ptx::mbarrier_arrive(barriers.k_empty(k.last()));
    return inverse > reach ? kNan : inverse;  // and so o is
  }
  __device__ __forceinline__ void output_done() {
    ptx::wgmma_wait<0>();
    ptx::pin(t);
    ptx::pin(high);
    ptx::pin(low);
    const float inverse = ptx::ld_shared_f32(shared + Shape::kOffsetFactors + (Spec::kStagesK + v.last()) * 16);
    ptx::warp_sync();
    if (lane() == 0) ptx::mbarrier_arrive(barriers.v_empty(v.last()));
#pragma unroll
    for (int i = 0; i < Shape::kColumnsV / 2; ++i) o[i] = fmaf(t[i], inverse, o[i]);
  }

  // --- what is not finite ---

  // The number of the first block of the tile's keys and values among all (V3F32Parts).
  __device__ __forceinline__ int first_block(const Place& at) const { return (at.batch * p.call.nheads_k + at.head_k) * p.parts.blocks; }

  // At the end of a tile, before the next queries: whether a NaN among its scores may be wrong, because q or k holds Inf or scores are beyond
  // `reach`.
  __device__ __forceinline__ bool scores_in_doubt(int nth) const {
    if (ptx::vote_all(sum[0] == sum[0] && sum[1] == sum[1])) [[likely]]
      return false;
    const Place at = dense_place_of<Shape::kBlockM>(p, tile_in_turn<Spec>(p, ptx::opaque(nth)));
    const V3F32Factor* const keys = p.parts.k_factors + first_block(at);
    bool doubt = false;
#pragma unroll 1
    for (int block = own_blocks(at.row) - 1; block >= 0; --block) doubt = doubt || keys[block].odd != 0 || keys[block].inverse > reach;
    return ptx::ballot(doubt) != 0;
  }
  // Adds values that are not finite, which the products took for 0, to what the warp has written of o.
  __device__ __forceinline__ void add_spoilt(const Place& at) const {
    const AttentionParams& call = p.call;
    const int row = at.row + warp_row(), before = first_block(at);
    add_spoilt_columns<Spec>(call,
                             static_cast<float*>(call.o) + at.batch * call.o_strides.batch + at.head * call.o_strides.head + row * call.o_strides.row,
                             row, own_blocks(at.row), p.parts.v_factors + before, p.parts.v_spoilt + before, lane());
  }

  // --- softmax, of each warp ---

  // Hides what the lane's rows do not see of block `of`.
  __device__ __forceinline__ void hide(int row, int of) {
    const int first = of * kBlockN + lane() % 4 * 2;  // this lane's first key
    const int end0 = Mask::visible_end(p.call, Keys<false>{}, row + own_row()) - first,
              end1 = Mask::visible_end(p.call, Keys<false>{}, row + own_row() + 8) - first;
#pragma unroll
    for (int i = 0; i < kScores; ++i)
      if (i / 4 * 8 + i % 2 >= (i % 4 < 2 ? end0 : end1)) s[i] = -kInfinity;
  }

  // Scores become weights, after the references were found or renewed. The result says whether o has to be multiplied by `factor`.
  template <bool kFirst>
  __device__ __forceinline__ bool weigh(float inverse) {
    float top[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) top[i] = fmaxf(s[2 * i], s[2 * i + 1]);
#pragma unroll
    for (int i = 8; i < kScores; i += 8) {
#pragma unroll
      for (int j = 0; j < 4; ++j) top[j] = fmaxf(top[j], fmaxf(s[i + 2 * j], s[i + 2 * j + 1]));
    }
    float scale[2], add[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      scale[r] = row_scale[r] * inverse;
      float x = fmaxf(top[r], top[r + 2]);
      x = fmaxf(x, ptx::shfl_xor(x, 1));
      x = fmaxf(x, ptx::shfl_xor(x, 2));
      const float wanted = -(x * scale[r]);  // perhaps NaN: then no reference
      if constexpr (kFirst) {
        shift[r] = fminf(kInfinity, wanted);
      } else {
        const float before = shift[r];
        const bool renew = wanted < before - kF32Patience;
        shift[r] = renew ? wanted : before;
        factor[r] = renew ? ptx::ex2(wanted - before) : 1.0f;
        sum[r] *= factor[r];
      }
      add[r] = shift[r] == kInfinity ? 0.0f : shift[r];  // weights of a row without a visible key are 0, not NaN
    }
    float partial[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      s[i] = ptx::ex2(fmaf(s[i], scale[i >> 1 & 1], add[i >> 1 & 1]));
      partial[i >> 1 & 3] += s[i];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = (kFirst ? 0.0f : sum[r]) + (partial[r] + partial[r + 2]);
    return !kFirst && !ptx::vote_all(factor[0] == 1.0f && factor[1] == 1.0f);
  }
  __device__ __forceinline__ void rescale() {
#pragma unroll
    for (int i = 0; i < Shape::kColumnsV / 2; ++i) o[i] *= factor[i >> 1 & 1];
  }
  __device__ __forceinline__ void split_weights() {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i)
      tile::split2(s[2 * i] * kF32WeightFactor, s[2 * i + 1] * kF32WeightFactor, high[i / 4][i % 4], low[i / 4][i % 4]);
  }

  // --- tiles ---

  // Blocks that some row of the tile sees, and of the warpgroup. It passes over the others: a stage is waited for before it is freed, so that
  // arrivals count for the right phase.
  __device__ __forceinline__ int own_blocks(int row) const { return block_end<Mask, kBlockN>(p.call, Keys<false>{}, row + group * 64, 64); }
  __device__ __forceinline__ void skip_blocks(int row) {
#pragma unroll 1
    for (int skip = block_end<Mask, kBlockN>(p.call, Keys<false>{}, row, Shape::kBlockM) - own_blocks(row); skip > 0; --skip) {
      ptx::mbarrier_wait(barriers.k_full(k.stage), k.parity);
      ptx::mbarrier_wait(barriers.v_full(v.stage), v.parity);
      if (lane() == 0) {
        ptx::mbarrier_arrive(barriers.k_empty(k.stage));
        ptx::mbarrier_arrive(barriers.v_empty(v.stage));
      }
      k.next();
      v.next();
    }
  }

  // Writes the warp's rows of o and lse. `doubt`: scores_in_doubt().
  __device__ __forceinline__ void finish(int nth, bool doubt) const {
    // Found again rather than kept in registers all the way.
    const Place at = dense_place_of<Shape::kBlockM>(p, tile_in_turn<Spec>(p, ptx::opaque(nth)));
    const AttentionParams& call = p.call;
    v2::RowsAgain again;
    auto* const out = static_cast<float*>(call.o) + at.batch * call.o_strides.batch + at.head * call.o_strides.head;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float all = sum[r] + ptx::shfl_xor(sum[r], 1);
      all += ptx::shfl_xor(all, 2);
      const bool empty = all == 0 && shift[r] == kInfinity;
      [[maybe_unused]] float sinked_lse;
      [[maybe_unused]] const bool lost = all == 0;
      if constexpr (kPairOf<Spec>.sinks) {
        const float sink = sink_of(pairs_of(call), at.head);
        const SinkedRow<> sinked(sink, sink_exponent<false>(call, sink, shift[r]), shift[r], all, empty);
        all = sinked.sum;
        sinked_lse = sinked.lse;
      }
      const float inverse = 1.0f / (all * kF32WeightFactor);
      const int row = at.row + own_row() + 8 * r;
      bool finite = true;
#pragma unroll
      for (int n = 0; n < (Spec::kHeaddimV + 7) / 8; ++n) {
        const float x[2] = {o[4 * n + 2 * r] * inverse, o[4 * n + 2 * r + 1] * inverse};
        finite = finite && v2::is_finite(x[0]) && v2::is_finite(x[1]);
        const int column = 8 * n + lane() % 4 * 2;
        if (row >= call.seqlen_q) continue;
        float* const to = out + row * call.o_strides.row + column;
        if constexpr (Spec::kAligned && Spec::kHeaddimV % 8 == 0) {
          *reinterpret_cast<float2*>(to) = empty ? float2{0, 0} : float2{x[0], x[1]};
        } else {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if (column + e < Spec::kHeaddimV) to[e] = empty ? 0.0f : x[e];
          }
        }
      }
      if (call.lse != nullptr && lane() % 4 == 0 && row < call.seqlen_q) {
        constexpr float kLn2 = 0.693147180559945309f;
        call.lse[at.batch * call.lse_strides.batch + row * call.lse_strides.row + at.head * call.lse_strides.head] =
            kPairOf<Spec>.sinks ? sinked_lse
            : empty             ? -kInfinity
                                : fmaf(-shift[r], kLn2, logf(all));
      }
      bool good = all == all ? finite && fabsf(shift[r]) < kF32GreatestReference : !doubt;  // NaN is right where a number was NaN
      if constexpr (kPairOf<Spec>.sinks) good = good && !lost;
      again.note(r, ptx::ballot(!good && !empty && row < call.seqlen_q));
    }
    add_spoilt(at);
    const core::Mask32 mask{call.seqlen_q, call.seqlen_k, Mask::kCausal};
    constexpr int kRows = kQueriesInRegisters ? 4 : v2::kRowsAgain;  // for which there are registers
    again.for_each<kRows>([&](int row, unsigned wanted) {
      v2::forward_rows_again<Spec, kRows>(call, {at.batch, at.head, at.head_k, at.row}, at.row + warp_row() + row, wanted, mask, lane());
    });
  }

  __device__ __forceinline__ void run() {
    int number = tile_in_turn<Spec>(p, 0);
    if (number < 0) return;
    Queries x;
    load_queries(dense_place_of<Shape::kBlockM>(p, number), x);
    split_queries(x);
    bool doubt = false;
#pragma unroll 1
    for (int nth = 0;; ++nth) {
      const int row = dense_place_of<Shape::kBlockM>(p, number).row;
      if constexpr (Mask::kUneven) skip_blocks(row);
      issue_scores();
      if (nth > 0) finish(nth - 1, doubt);  // beside the product
      int block = own_blocks(row) - 1;
      // Blocks from this one on are not seen whole by every row.
      const int whole = max(0, Mask::visible_end(p.call, Keys<false>{}, row + group * 64)) / kBlockN;
      {
        const float inverse = scores_done<0>();
        if (block >= whole) hide(row, block);
        weigh<true>(inverse);
      }
#pragma unroll
      for (int i = 0; i < Shape::kColumnsV / 2; ++i) o[i] = 0;
      split_weights();
#pragma unroll 1
      for (; block > 0; --block) {
        issue_scores();
        issue_output();
        const float inverse = scores_done<1>();
        if (block - 1 >= whole) hide(row, block - 1);
        const bool moved = weigh<false>(inverse);
        output_done();
        if (moved) rescale();
        split_weights();
      }
      issue_output();
      number = tile_in_turn<Spec>(p, nth + 1);
      // Where registers are left, the next queries come while the last product is under way.
      if (kQueriesInRegisters && number >= 0) load_queries(dense_place_of<Shape::kBlockM>(p, number), x);
      output_done();
      doubt = scores_in_doubt(nth);
      if (number < 0) {
        finish(nth, doubt);
        break;
      }
      if (!kQueriesInRegisters) load_queries(dense_place_of<Shape::kBlockM>(p, number), x);
      split_queries(x);
    }
  }
};

}  // namespace fattn::v3
