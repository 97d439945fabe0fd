// A CTA of the forward pass in fp32 (kernels/v2/forward_f32.h): what each warp keeps in registers, where it is, and its phases, which are members
// that are defined beside this file; forward_f32.h has the walk over the blocks and includes all.
#pragma once

#include "device_abi/mask.h"
#include "kernels/mask.h"
#include "kernels/pages.h"
#include "kernels/pair.h"
#include "kernels/ptx/special_registers.h"
#include "kernels/sequence.h"
#include "kernels/softmax.h"
#include "kernels/tile/split_tile.h"
#include "kernels/v2/forward_f32_shape.h"
#include "kernels/v2/forward_f32_spoilt.h"
#include "kernels/v2/schedule.h"

namespace fattn::v2 {

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
      seen = blocks_of_documents<Shape::kThreads, Shape::kBlockM, Spec::kBlockN>(pairs_of(p), place, seen, seqlen_k, reinterpret_cast<int*>(shared));
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

  // --- products: forward_f32_products.h ---

  __device__ __forceinline__ void scores(float (&s)[kRowTiles][kStepTiles][4], unsigned k_address);

  // The weights of a step, split: the A operands of p v; and their sums.
  struct Weights {
    unsigned high[kChunks][kRowTiles][4], low[own_bits<Spec>() ? 2 * kChunks : kChunks][kRowTiles][4];  // kOwnBits: and third parts
    float sum[kRowTiles][2];
  };

  template <bool kGuarded>
  __device__ __forceinline__ void weigh(Weights& w, const float (&s)[kRowTiles][kStepTiles][4], float scale) const;
  static __device__ __forceinline__ bool within_limit(const Weights& w);
  __device__ __forceinline__ void add_values(const Weights& w, unsigned v_address, float inverse);

  // --- with kOwnBits: forward_f32_own.h ---

  __device__ __forceinline__ void split_own_queries(float sign);
  template <class Load>
  __device__ __forceinline__ void enter_own_block(int j, int begin, int end, const Load& load_block);
  __device__ __forceinline__ void own_scores(float (&s)[kRowTiles][kStepTiles][4], unsigned k_address);
  static __device__ __forceinline__ void split_own(Weights& w, float x, float y, int chunk, int i, int place);
  __device__ __forceinline__ void add_own_values(const Weights& w, unsigned v_address);

  // Where a step is, for features of pairs: the tile, this lane's first query and first key, and how many keys there are.
  struct StepPairs {
    Place place;
    int row, key, seqlen_k;
  };

  template <bool kExact>
  __device__ __forceinline__ void add_terms(float (&s)[kRowTiles][kStepTiles][4], float scale, const StepPairs& at) const;
  __device__ __forceinline__ void drop(Weights& w, const StepPairs& at);
  template <bool kExact>
  __device__ __forceinline__ void step(unsigned k_offset, unsigned v_offset, float score_scale, float value_inverse, const Visible& visible,
                                       [[maybe_unused]] const StepPairs& at);

  __device__ __forceinline__ OddNotes notes() const { return {tile_q + Shape::kNotesOffset}; }

  __device__ __forceinline__ void add_spoilt(int j, int seqlen_k);
  __device__ __forceinline__ void finish(const core::Mask32& mask) const;

  __device__ __forceinline__ void split_queries(const Place& place, const KeyBlocks& blocks);
  __device__ __forceinline__ void start(int seqlen_k);

 public:
  __device__ __forceinline__ ForwardF32(const AttentionParams& params, unsigned shared) : p(params), tile_q(shared) {}

  __device__ __forceinline__ void run();
};

}  // namespace fattn::v2
