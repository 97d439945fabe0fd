// A consumer warpgroup of v3's forward pass: 64 rows of queries, whose scores, weights and output stay in its registers.
//   S = Q K^T    P = exp2(S scale - m)    O += P V    o = O / sum    lse = ln 2 (m + log2 sum)
// Blocks of keys follow each other across tiles. Their weights of block j are computed while the tensor cores multiply those of the block before,
// i, which is further to the right; what runs there meanwhile is in brackets:
//   a block      S(j), O += P(i) V(i) issued | S(j) awaited | what rows do not see hidden | P(j) [O] | O awaited
//   a tile       S(first) | P(first) | its other blocks | its last product with
//     joined     S(first of the next tile) issued beside it | lse [both] | P(first) [O] | O awaited, stored | the next tile's blocks
//     alone      lse [O] | O awaited, stored
// Registers decide the form: `s` is scores, then weights; `weights` is the operand of a product under way, which nobody touches.
//
// The phases are members that are defined beside this file, which has what they share and the walk over the tiles; v3/forward.h includes all:
//   forward_products.h   products, turns at the tensor cores, waits
//   forward_hide.h       what a block hides
//   forward_blocks.h     a block: its scores, its weights, and when it takes a maximum
//   forward_tiles.h      which blocks a tile has, how it begins, how the next is joined to it
//   forward_output.h     lse and o
#pragma once

#include "kernels/ptx/barrier.h"
#include "kernels/ptx/special_registers.h"
#include "kernels/v3/alibi.h"
#include "kernels/v3/dropout_bits.h"
#include "kernels/v3/forward_mask_words.h"
#include "kernels/v3/forward_shape.h"
#include "kernels/v3/forward_terms.h"
#include "kernels/v3/forward_wildness.h"
#include "kernels/v3/hidden_values.h"
#include "kernels/v3/schedule.h"
#include "kernels/v3/softmax.h"
#include "kernels/v3/tiles_of_cta.h"

namespace fattn::v3 {

// Named barriers: 1 to kGroups are turns, from kOwnBarrier on one for each warpgroup by itself.
inline constexpr int kOwnBarrier = 8;
inline constexpr int kMostBlocks = 0x7fffffff;

template <class Spec>
struct Consumer {
  using Shape = ForwardShape<Spec>;
  using Element = typename Spec::Element;
  using Mask = typename Spec::Mask;
  using Buffer = QueryBuffer<Spec::kQueryBuffers>;
  using Keys = typename KeysOf<Spec>::Type;
  using Kept = typename KeysOf<Spec>::Kept;
  static constexpr int kBlockN = Shape::kBlockN;
  static constexpr int kGroups = Shape::kGroups;
  static constexpr bool kTurns = Spec::kPingPong && kGroups > 1;
  static constexpr bool kJoin = Spec::kQueryBuffers == 2;  // a tile's first scores are computed beside the last product of the tile before
  static constexpr bool kAlibi = kPairOf<Spec>.alibi, kDropout = kPairOf<Spec>.dropout, kDocuments = kPairOf<Spec>.documents;
  // The tiles of a window are joined across blocks that the warpgroup passes over, if there is room for the values that it has not come to.
  static constexpr bool kJoinsPast = Shape::kSkipsBefore && kJoin && Spec::kStagesV > kGroups;
  static constexpr bool kTerms = kPairTerms<Spec>;  // which hide pairs anywhere
  static constexpr bool kStaged = kStagedTerms<Spec>, kMaskAlone = kTerms && !kStaged;
  static constexpr bool kNothingBehind = is_same<Mask, CausalMask>;  // its row
  // The widest heads have no register to spare beside documents, and with softcap or dropout still fewer. (Packed sequences leave some.)
  static constexpr bool kManyFeatures = kDropout || Spec::Score::kCapped;
  static constexpr bool kTightDocuments = kDocuments && Spec::kHeaddimV > 192 && !(kPairOf<Spec>.packed && kManyFeatures);
  static constexpr bool kTightest = kTightDocuments && kManyFeatures;
  // Whether keys are there is looked at early: that takes a register, which masks do not leave in fp16.
  static constexpr bool kLooksEarly = !(kTightest || (kMaskAlone && kGroups == 3 && kBlockN == 128 && is_same<Element, f16>));
  // Weights are packed when it is known that they stay: scores and packed weights do not fit beside random numbers.
  static constexpr bool kPacksLast =
      kDropout && (!kDocuments || kTightest) && !kTerms && (kGroups == 4 || Spec::kHeaddimV > 192 || (kAlibi && kBlockN == 128));
  // Weights that dominate are brought back by a factor. Softcap leaves four warpgroups no registers for it: they make scores again.
  static constexpr bool kScalesDominant = !(Spec::Score::kCapped && kGroups == 4);
  using Slope = v3::Slope<kAlibi>;
  using DropoutBits = v3::DropoutBits<Spec, kDropout>;
  using Terms = PairTerms<Spec, kStaged>;
  using Visible = VisiblePairs<Spec, kPairOf<Spec>.mask>;
  static_assert(!((kAlibi || kDropout) && Spec::Score::kCapped), "no registers");
  static_assert(!(kTerms && (kAlibi || kDropout || kDocuments || kPairOf<Spec>.packed || Mask::kBegins || Spec::Score::kCapped)), "not built");

  const ForwardCall& p;
  const unsigned shared;
  const Barriers<Spec> barriers;
  const int group;
  const float scale;
  const typename Spec::Score::Curve curve;

  float s[kBlockN / 2];  // scores, then weights
  unsigned weights[kBlockN / 16][4];
  float o[Spec::kHeaddimV / 2];
  float factor[2];
  Softmax<Element, kBlockN> softmax;

  Ring<Spec::kStagesK> k;
  Ring<Spec::kStagesV> v;
  bool k_is_there = false;  // looked at early: the next block of keys has arrived
  Wildness<Spec::Score::kCapped> wildness;
  int row = 0;    // the tile's first
  Kept keys;      // of the tile's batch entry
  int block = 0;  // whose weights are computed; under a mask of pairs counted from the tile's first
  Slope slope;    // of the tile's head

  DropoutBits bits;   // of the block whose weights are computed
  Terms terms;        // likewise
  Visible visible;    // likewise
  bool seen = false;  // with kStaged: each of the warp's rows has seen a key whose score is not that of a bias meant to hide (device_abi/lowest.h)

  // The scale in a register of its own: an operand of every exponential, it would be a uniform register, which costs issue slots. Three warpgroups
  // with blocks of 128 keys have none left beside a mask.
  __device__ __forceinline__ Consumer(const ForwardCall& params, unsigned shared_address, Barriers<Spec> of, int own_group)
      : p(params),
        shared(shared_address),
        barriers(of),
        group(own_group),
        scale(own_scale(params.call.softmax_scale_log2)),
        curve(Spec::Score::curve(params.call)) {}

  static __device__ __forceinline__ float own_scale(float of_call) {
    if constexpr (kAlibi || (kMaskAlone && kGroups * kBlockN < 384))
      return __uint_as_float(__float_as_uint(of_call) + ptx::zero_of_lane());  // a uniform value is found out, exchanged or not
    return ptx::shfl(of_call, static_cast<int>(threadIdx.x) % 32);
  }

  // Where the thread is, found again at each call to keep registers free.
  static __device__ __forceinline__ int lane() { return ptx::opaque(static_cast<int>(threadIdx.x)) % 32; }
  // The warp's first row in the tile, and the lane's; its other one is 8 further.
  __device__ __forceinline__ int warp_row() const { return group * 64 + ptx::opaque(static_cast<int>(threadIdx.x)) / 32 % 4 * 16; }
  __device__ __forceinline__ int own_row() const { return warp_row() + lane() / 4; }
  __device__ __forceinline__ unsigned q_tile(unsigned buffer) const { return shared + buffer * Shape::kQueryBytes; }
  __device__ __forceinline__ unsigned k_tile(unsigned stage) const { return shared + Shape::kOffsetK + stage * Shape::TileK::kBytes; }

  // --- products of the whole warpgroup: forward_products.h ---

  __device__ __forceinline__ void issue_scores(unsigned buffer);    // S = Q K^T
  __device__ __forceinline__ void issue_output();                   // O += P V
  __device__ __forceinline__ void issue_products(unsigned buffer);  // both, in turn
  __device__ __forceinline__ void issue_last_product();
  __device__ __forceinline__ void products_done();
  __device__ __forceinline__ void scores_done();
  __device__ __forceinline__ void output_done();
  __device__ __forceinline__ void wait_k() const;
  __device__ __forceinline__ void wait_v() const;
  __device__ __forceinline__ void free_k() const;
  __device__ __forceinline__ void free_v() const;
  __device__ __forceinline__ void free_queries(unsigned buffer) const;
  __device__ __forceinline__ void wait_turn() const;
  __device__ __forceinline__ void pass_turn() const;

  // --- what a block hides, of each warp: forward_hide.h ---

  __device__ __forceinline__ void hide(int of);
  __device__ __forceinline__ void hide_behind(int of);
  __device__ __forceinline__ void hide_before(int of);
  __device__ __forceinline__ void hide_other_documents(int of);
  __device__ __forceinline__ void hide_by_words();

  // --- a block, of each warp: forward_blocks.h ---

  template <bool kBiasAgain = false>
  __device__ __forceinline__ void while_multiplying(int first_row, int of);
  template <bool kExact>
  __device__ __forceinline__ void add_terms();
  // What scores are multiplied by in the exponential: after a bias they have their own scale.
  __device__ __forceinline__ float exponent_scale() const { return Terms::kAdds ? kLog2e : scale; }
  template <bool kFirst>
  __device__ __forceinline__ bool update(int of);
  __device__ __forceinline__ void pack();
  __device__ __forceinline__ void rescale();
  __device__ __forceinline__ void rescale_if(bool moved);
  __device__ __forceinline__ bool group_is_wild() const;
  template <bool kBehind = false, bool kWhole = false>
  __device__ __forceinline__ void masked_block(unsigned buffer);
  template <bool kBegins, bool kBehind = false>
  __device__ __forceinline__ void whole_block(unsigned buffer);
  template <bool kBegins, bool kByCurve>
  __device__ __forceinline__ bool scores_of_whole_block(unsigned buffer);
  template <bool kBegins>
  __device__ __forceinline__ void keep_weights(unsigned buffer, bool by_tanh, bool good);
  template <bool kBegins>
  __device__ __forceinline__ void weigh_again(unsigned buffer);
  template <bool kBegins, bool kBehind = false>
  __device__ __forceinline__ void whole_blocks(unsigned buffer, int to);

  // --- a tile: forward_tiles.h ---

  // Where the CTA's tile `nth` is, found again rather than kept in registers all the way.
  __device__ __forceinline__ auto place_at(int nth, int number) const { return tile_place<Spec>(p, shared, nth, number); }
  __device__ __forceinline__ int number_of(int nth) const { return tile_number<Spec>(p, shared, nth); }
  __device__ __forceinline__ auto place_again(int nth) const {
    const int again = ptx::opaque(nth);
    return place_at(again, number_of(again));
  }
  __device__ __forceinline__ int own_blocks(int first_row, Keys of) const;
  __device__ __forceinline__ int all_blocks(int first_row, Keys of) const;
  __device__ __forceinline__ int first_of(int first_row, Keys of) const;
  __device__ __forceinline__ int own_begin(int first_row, Keys of) const;
  template <class Place>
  __device__ __forceinline__ void look_at_mask(const Place& place, Keys of);
  __device__ __forceinline__ void look_at_mask_again(int nth);
  __device__ __forceinline__ int beginning(int first_row, Keys of) const;
  __device__ __forceinline__ bool group_has_references() const;
  __device__ __forceinline__ int last_whole_key(int first_row) const;
  __device__ __forceinline__ int last_masked_block() const;
  __device__ __forceinline__ void blocks(unsigned buffer);
  __device__ __forceinline__ void blocks_of_documents(unsigned buffer);
  __device__ __forceinline__ void pass_over(int count);
  __device__ __forceinline__ void skip_blocks(int first_row, Keys of);
  __device__ __forceinline__ int blocks_before() const;
  __device__ __forceinline__ void pass_over_keys(int count);
  __device__ __forceinline__ void pass_over_values(int count);
  __device__ __forceinline__ void first_softmax(int first_row, Keys of, Slope of_head);
  __device__ __forceinline__ void clear_output();
  __device__ __forceinline__ void begin(int first_row, Keys of, Slope of_head, Buffer buffer);
  template <class Place>
  __device__ __forceinline__ void join(int nth, Buffer buffer, Buffer next_buffer, const Place& next_place, Keys next_keys, Slope next_slope);

  // --- what leaves a tile: forward_output.h ---

  // What o is still to be multiplied by; 0 for empty rows.
  struct Inverse {
    float of_row[2];
  };
  __device__ __forceinline__ auto close_rows(int nth) -> Inverse;
  __device__ __forceinline__ void finish(const Inverse& inverse, int nth, unsigned buffer);
  __device__ __forceinline__ void store_output(const Inverse& inverse, int nth);
  __device__ __forceinline__ void hand_output_over(const Inverse& inverse, int nth, unsigned buffer);
  __device__ __forceinline__ void look_for_nan(const unsigned (&zero)[2], const Inverse& inverse, int nth) const;
  template <class T, class Place>
  __device__ __forceinline__ T* row_of_o(const Place& place, int row_of_q) const;
  __device__ __forceinline__ bool has_spoilt_values(int nth) const;
  template <class Place>
  static __device__ __forceinline__ int queries_of(const AttentionParams& call, const Place& place) {
    return keys_of<Spec>(call, place).queries(call);
  }

  // --- all tiles of the CTA ---

  // In one piece: with the end of a tile in a function, windows above headdim 192 had other registers.
  __device__ __forceinline__ void run() {
    if (kTurns && group == 0) ptx::bar_arrive(1, 256);
    bool begun = false;
#pragma unroll 1
    for (int nth = 0;; ++nth) {
      const Buffer buffer(nth), next_buffer(nth + 1);
      if (!begun) {
        const int number = number_of(nth);
        if (number < 0) break;
        const auto place = place_at(nth, number);
        bits.begin(p, place);
        const Keys of = keys_of_warp<Spec>(p.call, place, group, lane());
        look_at_mask(place, of);
        begin(place.row, of, Slope::of(p.call, place), buffer);
      }
      blocks(buffer.stage);
      if constexpr (Shape::kStoreFromRegisters) free_queries(buffer.stage);

      const bool spoilt = kHidesPairs<Spec> && has_spoilt_values(nth);
      const int next = kTrustsValues<Spec> ? tile_in_turn<Spec>(p, nth + 1) : number_of(nth + 1);
      begun = kJoin && next >= 0 && !spoilt;
      const auto next_place = begun ? place_at(nth + 1, next) : decltype(place_at(nth, next)){};
      const int next_row = next_place.row;
      const Keys next_keys = begun ? keys_of_warp<Spec>(p.call, next_place, group, lane()) : Keys{};
      const Slope next_slope = begun ? Slope::of(p.call, next_place) : Slope{};
      // A warpgroup with blocks to pass over could do so here and join as well. That was slower: 320 instead of 341 TFLOP/s (one H200, headdim 128,
      // causal, seqlen 512).
      if constexpr (Spec::kSkip && Mask::kUneven && !kJoinsPast) begun = begun && own_blocks(next_row, next_keys) == all_blocks(next_row, next_keys);
      if (begun) {
        if constexpr (kMaskRanges<Spec>) look_at_mask(next_place, next_keys);  // before the products, while registers are free
        join(nth, buffer, next_buffer, next_place, next_keys, next_slope);
      } else {
        issue_last_product();
        const Inverse inverse = close_rows(nth);
        output_done();
        if constexpr (kHidesPairs<Spec>)
          if (SpoiltNotes<Spec>{shared}.kinds(nth) != 0) [[unlikely]]
            add_spoilt_values<Spec>(o, p, place_again(nth), warp_row(), ptx::opaque(nth), SpoiltNotes<Spec>{shared}, lane());
        finish(inverse, nth, buffer.stage);
        if constexpr (Shape::kSkipsBefore) pass_over(blocks_before());
        if constexpr (kTrustsValues<Spec>)
          if (next < 0 && tile_in_turn<Spec>(p, nth) >= 0) {
            ptx::warp_sync();
            if (lane() == 0) SpoiltNotes<Spec>{shared}.all_done(nth + 1);
          }
      }
    }
  }
};

}  // namespace fattn::v3
