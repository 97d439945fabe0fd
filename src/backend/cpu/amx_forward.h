// FlashAttention-2 forward in bf16 on AMX: query rows in lanes.
//
// Query rows are cut into tiles of 16, keys into blocks that are packed for AMX once a task and stay in the L2 cache. A
// query tile goes through a block in steps of 64 or 128 keys, in three stages:
//   scores    S^T[key][q] = K Q^T           A = K rows, B = Q^T; on AMX
//   weights   P^T = exp2(S^T - max), sums   lane-wise over keys on the vector units; pairs of keys make B tiles
//   product   O^T[d][q] += V^T P^T          A = V^T; on AMX
// AMX works asynchronously to the vector units, so the loop computes the weights of one step while it feeds AMX with the
// scores of the next step and the product of the previous one, in small portions that the out-of-order window can hold.
// All that is written in between stays in the L1 cache, where AMX is four times as fast to store as in L2.
//
// Without a bound on the scores a running maximum is needed (Milakov and Gimelshein 2018). |s| <= |q| |k| (Cauchy and
// Schwarz) often proves that exp2 can neither overflow nor lose a weight; then the shift is 0, which softmax permits,
// and the maximum and all rescaling vanish.
//
// The largest weight of a row is then not 1, and what rounding it to bf16 does to the product would not be done to the sum: so o is divided by the
// sum of the weights as they are rounded, while lse has that of the weights themselves.
//
// Options change a step's scores in place before its weights are taken, while AMX has the product of the step before to do. What a mask or documents
// hide from bounded scores waits until then.
//
// The phases are members that are defined beside this file, which has the order of the work; isa_amx.cpp includes all.
#pragma once

#include "backend/cpu/amx_forward_streams.h"

namespace fattn::core::amx {

template <bool kOptions>
class Forward {
 public:
  explicit Forward(const ForwardTask& task)
      : t_(task),
        options_(task),
        hides_(kOptions && options_.hides),
        at_(task.row_end - task.row_begin, task.block_k, task.headdim, task.headdim_v, kOptions && options_.has_inputs(),
            task.pages.table != nullptr),
        scratch_(static_cast<char*>(task.scratch)) {
    log2_scale_ = options_.scale * kLog2E;  // a negative scale flips the signs of Q instead
    exponent_ = (kOptions ? options_.left() : options_.scale) * kLog2E;
    fixed_scale_ = _mm512_set1_ps(exponent_ * kFixed);
  }

  void run() {
    const TileScope tiles;
    load_queries();
    int64_t begin = 0, end = limit(t_.row_end - 1);
    if (kOptions) {
      begin = first_key(t_.row_begin);
      const ScoreInputs& in = t_.inputs;
      if (options_.documents) {
        const vec::KeyRange some = vec::keys_of(vec::ids_of(in.document_q, t_.row_begin, t_.row_end), in.document_k, begin, end);
        begin = some.begin;
        end = some.end;
      }
      begin -= begin % kDropoutBlock;
    }
    const int64_t block = at_.units * kUnit;
    for (int64_t key = begin; key < end; key += block) {
      block_keys_ = min_of(block, end - key);
      const TileKeys all = place_tiles(key);
      if (all.begin >= all.end) continue;
      load_keys(key, all);
      if (at_.depth == 2 && at_.groups == 1)
        attend<2, 1>(key);
      else if (at_.depth == 4 && at_.groups == 2)
        attend<4, 2>(key);
      else
        attend<0, 0>(key);
    }
    memory_barrier();
    for (int64_t tile = 0; tile < at_.tiles; ++tile) store_tile(tile);
  }

 private:
  // A row sees the keys [first_key, limit).
  int64_t limit(int64_t row) const { return max_of(0, min_of(t_.seqlen_k, row + t_.diagonal)); }
  int64_t first_key(int64_t row) const { return kOptions ? max_of(0, row + t_.left_diagonal) : 0; }
  int64_t first_row(int64_t tile) const { return t_.row_begin + tile * kLanes; }
  int64_t last_row(int64_t tile) const { return min_of(first_row(tile) + kLanes, t_.row_end) - 1; }
  float* sum(int64_t tile) const { return reinterpret_cast<float*>(scratch_ + at_.sum) + tile * kLanes; }
  float* sum_of_rounded(int64_t tile) const { return reinterpret_cast<float*>(scratch_ + at_.rounded) + tile * kLanes; }
  float* max(int64_t tile) const { return reinterpret_cast<float*>(scratch_ + at_.max) + tile * kLanes; }
  float& norm(int64_t tile) const { return reinterpret_cast<float*>(scratch_ + at_.norm)[tile]; }
  Softmax& softmax(int64_t tile) const { return reinterpret_cast<Softmax*>(scratch_ + at_.softmax)[tile]; }
  uint16_t& calm_rows(int64_t tile) const { return reinterpret_cast<uint16_t*>(scratch_ + at_.calm)[tile]; }
  float* key_squares(int64_t unit) const { return reinterpret_cast<float*>(scratch_ + at_.squares) + unit * kUnit; }
  uint32_t& wild_values(int64_t unit) const { return reinterpret_cast<uint32_t*>(scratch_ + at_.wild_values)[unit]; }
  uint32_t& marks(int64_t unit) const { return reinterpret_cast<uint32_t*>(scratch_ + at_.marks)[unit]; }
  char& is_coded(int64_t unit, int64_t tile_of_v) const { return scratch_[at_.coded + unit * at_.values + tile_of_v]; }
  TileKeys& tile_keys(int64_t tile) const { return reinterpret_cast<TileKeys*>(scratch_ + at_.keys)[tile]; }
  uint32_t* mask_words(int64_t tile) const { return reinterpret_cast<uint32_t*>(scratch_ + at_.mask_words) + tile * at_.units * kLanes; }
  uint32_t* dropout_words() const { return reinterpret_cast<uint32_t*>(scratch_ + at_.dropout_words); }
  char* acc(int64_t tile) const { return scratch_ + at_.acc + tile * at_.values * kTileBytes; }
  char* scores(int64_t parity) const { return scratch_ + at_.s + parity * at_.step() * 2 * kTileBytes; }
  char* weights(int64_t parity) const { return scratch_ + at_.p + parity * at_.step() * kTileBytes; }
  int64_t value_stride() const { return at_.values * kTileBytes; }

  // A key counted from the block at `key`, within it.
  int64_t in_block(int64_t of_all, int64_t key) const { return max_of(0, min_of(of_all - key, block_keys_)); }
  // Keys of the block at `key` that some row of a tile sees, and that all of them do.
  int64_t seen_begin(int64_t tile, int64_t key) const { return in_block(first_key(first_row(tile)), key); }
  int64_t seen_end(int64_t tile, int64_t key) const { return in_block(limit(last_row(tile)), key); }
  int64_t whole_begin(int64_t tile, int64_t key) const { return in_block(first_key(last_row(tile)), key); }
  int64_t whole_end(int64_t tile, int64_t key) const { return in_block(limit(first_row(tile)), key); }

  // --- queries and keys, and what a tile computes of a block: amx_forward_keys.h ---

  void load_queries();

  // An upper bound of the norm of every row; NaN or infinity if an element is.
  static float largest_norm(__m512 squares) {
    if (_mm512_cmp_ps_mask(squares, _mm512_set1_ps(kFiniteSquares), _CMP_NLE_UQ)) return __builtin_inff();
    return kNormMargin * _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(_mm512_reduce_max_ps(squares))));
  }

  auto place_tiles(int64_t key) -> TileKeys;
  vec::TilePlace place_of(int64_t tile, int64_t key, int64_t begin_unit, int64_t end_unit) const;
  bool narrow_to_documents(int64_t tile, int64_t key, int64_t& begin, int64_t& end) const;
  void narrow_to_mask(int64_t tile, int64_t key, TileKeys& keys) const;
  void load_keys(int64_t key, const TileKeys& all);
  __attribute__((noinline)) void look_at_values(int64_t key, const TileKeys& all);
  bool hides_pairs(int64_t tile, int64_t key) const;

  // --- which softmax a block needs: amx_forward_softmax.h ---

  auto choose(int64_t tile, int64_t key) -> Softmax;
  float bound_of_score(float bound) const;
  __attribute__((noinline)) __mmask16 wild_rows(int64_t tile, int64_t key) const;
  bool has_bias() const { return kOptions && t_.inputs.bias; }

  float largest_slope_term() const;

  // --- the three stages, one step apart ---

  // One step of a query tile: units [unit, unit + units) of the block at `key`. Buffers alternate.
  struct Step {
    int64_t tile, key, unit, units, parity;
    bool first, last;  // of this tile in this block
  };

  Step step_at(int64_t tile, int64_t key, int64_t unit, int64_t parity) const {
    const TileKeys& keys = tile_keys(tile);
    const int64_t units = min_of(at_.step(), keys.end - unit);
    return {tile, key, unit, units, parity, unit == keys.begin, unit + units == keys.end};
  }
  // The first step of the first tile from `tile` on that has any; without units if none has.
  Step first_step(int64_t tile, int64_t key, int64_t parity) const {
    while (tile < at_.tiles && tile_keys(tile).begin >= tile_keys(tile).end) ++tile;
    if (tile == at_.tiles) return {tile, key, 0, 0, parity, true, true};
    return step_at(tile, key, tile_keys(tile).begin, parity);
  }
  Step step_after(const Step& s) const {
    return s.last ? first_step(s.tile + 1, s.key, 1 - s.parity) : step_at(s.tile, s.key, s.unit + s.units, 1 - s.parity);
  }

  template <int kDepth>
  ScoreStream<kDepth> score_stream(const Step& s) const {
    return {scratch_ + at_.q + s.tile * at_.depth * kTileBytes, scratch_ + at_.k + s.unit * 2 * at_.depth * kTileBytes, scores(s.parity), at_.depth,
            s.units};
  }
  ProductStream product_stream(const Step& s) const {
    const bool stay = at_.groups == 1 && softmax(s.tile) == Softmax::kBounded && !split_;
    return {scratch_ + at_.v + s.unit * value_stride(),
            weights(s.parity),
            acc(s.tile),
            s.units,
            value_stride(),
            at_.groups,
            !stay || s.first,
            !stay || s.last};
  }

  // The block of keys at `key` against the tiles: the three stages, one step apart.
  template <int kDepth, int kGroups>
  void attend(int64_t key) {
    Step step = first_step(0, key, 0);
    score_stream<kDepth>(step).finish();
    ProductStream product{};
    while (step.units > 0) {
      const Step next = step_after(step);
      if (step.first) softmax(step.tile) = choose(step.tile, key);
      switch (with_calm_rows(step.tile)) {
        case Softmax::kBounded: weigh<Softmax::kBounded, kDepth, kGroups>(step, score_stream<kDepth>(next), product); break;
        case Softmax::kOnline: weigh<Softmax::kOnline, kDepth, kGroups>(step, score_stream<kDepth>(next), product); break;
        case Softmax::kPropagate: weigh<Softmax::kPropagate, kDepth, kGroups>(step, score_stream<kDepth>(next), product); break;
        case Softmax::kWhole:
          if constexpr (kOptions) weigh<Softmax::kWhole, kDepth, kGroups>(step, score_stream<kDepth>(next), product);
          break;
        case Softmax::kPropagateSome: weigh<Softmax::kPropagateSome, kDepth, kGroups>(step, score_stream<kDepth>(next), product); break;
        case Softmax::kWholeSome:
          if constexpr (kOptions) weigh<Softmax::kWholeSome, kDepth, kGroups>(step, score_stream<kDepth>(next), product);
          break;
      }
      product = product_stream(step);
      if (split_) add_nonfinite(step);
      step = next;
    }
    product.start();
    product.finish();
  }

  // --- what a step's rows see, and its scores: amx_forward_keys.h, amx_forward_softmax.h ---

  auto with_calm_rows(int64_t tile) const -> Softmax;
  void leave_bounded(int64_t tile, __mmask16 rows);
  SeenKeys seen_keys(const Step& step) const;
  int64_t whole_begin(const Step& step) const {
    return kOptions ? max_of(0, min_of(whole_begin(step.tile, step.key) - step.unit * kUnit, step.units * kUnit)) : 0;
  }
  int64_t whole_end(const Step& step) const { return max_of(0, min_of(whole_end(step.tile, step.key) - step.unit * kUnit, step.units * kUnit)); }
  bool is_whole(const Step& step) const { return whole_begin(step) == 0 && whole_end(step) == step.units * kUnit; }

  // Which keys of a unit of a step rows see, as far as places and, of bounded scores, the mask and documents go.
  __m512i visible(const Step& step, const SeenKeys& seen, int64_t unit) const {
    return softmax(step.tile) == Softmax::kBounded ? allowed(step, seen, unit) : seen.words(unit * kUnit);
  }
  __m512i allowed(const Step& step, const SeenKeys& seen, int64_t unit) const;

  // Does the softmax of a step see scores other than scaled products? Those that options hide are hidden there unless scores are bounded.
  bool reshapes(const Step& step) const {
    return kOptions && (softmax(step.tile) == Softmax::kBounded ? options_.capped || options_.added : options_.reshapes());
  }

  __attribute__((noinline)) __m512 reshape(const Step& step) const;
  __m512 largest_of(const Step& step) const;
  template <Softmax kind>
  void raise_max(const Step& step, bool known, __m512 largest, ProductStream& product);
  // kLazy as a score. (Of a scale of 0, any number: a sum with -inf is to be -inf.)
  float lazy_score() const { return exponent_ > 1e-30f ? 8.0f / exponent_ : 1e30f; }

  // --- weights: amx_forward_weigh.h ---

  template <Softmax kind>
  FATTN_AMX_INLINE __m512 weight(__m512 s, __m512 scale, __m512 shift, __mmask16 calm);

  // Of the weights of rows so far: as they are (of the first and of the second 16 keys of units), and as they are rounded.
  struct Sums {
    __m512 exact[2], rounded;
  };

  template <Softmax kind, bool masked, bool drops>
  FATTN_AMX_INLINE void weigh_rows(const float* s, char* p, int begin, __m512 scale, __m512 shift, __mmask16 calm, const __m512i& seen,
                                   const __m512i (&words)[4], Sums& sums);
  template <Softmax kind, bool masked, bool drops, int kDepth, int kGroups>
  FATTN_AMX_INLINE_MEMBER void weigh_unit(const float* s, char* p, __m512 scale, __m512 shift, __mmask16 calm, const __m512i& seen,
                                          const __m512i (&words)[4], Sums& sums, ScoreStream<kDepth>& next, ProductStream& product) const;
  template <Softmax kind, int kDepth, int kGroups>
  void weigh(const Step& step, const ScoreStream<kDepth>& next, const ProductStream& product);
  template <Softmax kind, bool drops, int kDepth, int kGroups>
  __attribute__((noinline)) void weigh(const Step& step, ScoreStream<kDepth> next, ProductStream product);

  // --- what leaves the task: amx_forward_store.h ---

  __attribute__((noinline)) void add_nonfinite(const Step& step);
  void store_tile(int64_t tile);
  void add_sink(int64_t tile);

  // --- state ---

  const ForwardTask& t_;
  const TaskOptions options_;
  const bool hides_;  // options_.hides, false without options
  const ForwardLayout at_;
  char* const scratch_;
  float log2_scale_, exponent_;  // of products; of scores as they are when weights are taken
  __m512 fixed_scale_;
  // Of the block of keys at hand:
  int64_t block_keys_ = 0;
  float key_norm_ = 0;  // bound of the norm of every key
  int value_bits_ = 0;  // largest magnitude of a value, as bf16
  bool split_ = false;  // have Inf and NaN left V?
};

static size_t forward_scratch_bytes(const KernelShape& shape) {
  return static_cast<size_t>(ForwardLayout(shape.rows, shape.block_k, shape.headdim, shape.headdim_v, shape.inputs, shape.paged).bytes);
}

static void forward_bf16(const ForwardTask& task) {
  if (task.row_begin >= task.row_end) return;
  if (has_options(task))
    Forward<true>(task).run();
  else
    Forward<false>(task).run();
}

}  // namespace fattn::core::amx
