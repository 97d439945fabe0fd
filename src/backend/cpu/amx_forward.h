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
#pragma once

#include "backend/cpu/amx_exp.h"
#include "backend/cpu/amx_pack.h"
#include "shared/half.h"

namespace fattn::core::amx {

constexpr int64_t kUnit = 32;            // keys of one step: what a product contracts
constexpr float kBoundedScore = 40.0f;   // of |score| in log2 units: weights stay within 2^-40 .. 2^40
constexpr int kBoundedValue = 187 << 7;  // 2^60 as bf16: products with such weights stay finite
constexpr float kFiniteScore = 1e30f;    // scores below cannot overflow to infinity or NaN on the way
constexpr float kLazy = 8.0f * kFixed;   // the maximum is raised when it is exceeded by 2^8: weights up to 2^8 do no harm

enum class Softmax {
  kBounded,    // shift 0
  kOnline,     // running maximum
  kPropagate,  // running maximum, scores may be infinite or NaN
};

struct ForwardLayout {
  int64_t tiles, units, depth, groups, values;  // query tiles; units of a block; d tiles of Q and K; groups of 4 d tiles of V, d tiles in them
  int64_t q, k, v, s, p, acc, sum, max, norm, softmax, bytes;  // offsets

  ForwardLayout(int64_t rows, int64_t block_k, int headdim, int headdim_v) {
    tiles = ceil_div(max_of(rows, 1), kLanes);
    units = ceil_div(max_of(block_k, 1), kUnit);
    depth = ceil_div(headdim, kTileDepth);
    groups = ceil_div(headdim_v, 4 * kLanes);
    values = groups * 4;
    bytes = 0;
    k = take(units * 2 * depth * kTileBytes);
    v = take(units * values * kTileBytes);
    s = take(2 * step() * 2 * kTileBytes);
    p = take(2 * step() * kTileBytes);
    q = take(tiles * depth * kTileBytes);
    acc = take(tiles * values * kTileBytes);
    sum = take(tiles * kTileRow);
    max = take(tiles * kTileRow);
    norm = take(tiles * static_cast<int64_t>(sizeof(float)));
    softmax = take(tiles * static_cast<int64_t>(sizeof(Softmax)));
  }

  int64_t step() const { return groups == 1 ? 2 : 4; }  // units of a step: accumulators that do not stay in tiles want longer ones

 private:
  int64_t take(int64_t size) {
    const int64_t at = bytes;
    bytes += ceil_div(size, 64) * 64;
    return at;
  }
};

// Scores of one query tile, unit after unit. kDepth: d tiles, 0 if known at run time only.
template <int kDepth>
struct ScoreStream {
  const char *q, *k;
  char* s;
  int64_t run_depth, units = 0;

  FATTN_AMX_INLINE_MEMBER int64_t depth() const { return kDepth ? kDepth : run_depth; }

  // d tiles [begin, end) of the next unit.
  FATTN_AMX_INLINE_MEMBER void portion(int64_t begin, int64_t end) {
    if (begin == 0) {
      _tile_zero(4);
      _tile_zero(5);
    }
    for (int64_t i = begin; i < end; ++i) {
      _tile_loadd(6, q + i * kTileBytes, kTileRow);
      _tile_loadd(7, k + i * kTileBytes, kTileRow);
      _tile_dpbf16ps(4, 7, 6);
      _tile_loadd(7, k + (depth() + i) * kTileBytes, kTileRow);
      _tile_dpbf16ps(5, 7, 6);
    }
    if (end < depth()) return;
    _tile_stored(4, s, kTileRow);
    _tile_stored(5, s + kTileBytes, kTileRow);
    k += 2 * depth() * kTileBytes;
    s += 2 * kTileBytes;
    --units;
  }
  FATTN_AMX_INLINE_MEMBER void finish() {
    while (units > 0) portion(0, depth());
  }
};

// Adds V^T P^T of one query tile to its accumulators: a portion is one unit of keys times a group of four d tiles.
struct ProductStream {
  const char *v, *p;
  char* acc;
  int64_t units, value_stride, groups;  // units of keys; bytes between units of v; groups to do
  bool load, store;                     // whether the accumulators come from and go to memory, or stay in the tiles
  int64_t left = 0;                     // units to do of this group

  FATTN_AMX_INLINE_MEMBER void start() {
    if (groups == 0) return;
    left = units;
    if (!load) return;
    _tile_loadd(0, acc, kTileRow);
    _tile_loadd(1, acc + kTileBytes, kTileRow);
    _tile_loadd(2, acc + 2 * kTileBytes, kTileRow);
    _tile_loadd(3, acc + 3 * kTileBytes, kTileRow);
  }
  FATTN_AMX_INLINE_MEMBER void portion() {
    if (groups == 0) return;
    _tile_loadd(6, p, kTileRow);
    _tile_loadd(7, v, kTileRow);
    _tile_dpbf16ps(0, 7, 6);
    _tile_loadd(7, v + kTileBytes, kTileRow);
    _tile_dpbf16ps(1, 7, 6);
    _tile_loadd(7, v + 2 * kTileBytes, kTileRow);
    _tile_dpbf16ps(2, 7, 6);
    _tile_loadd(7, v + 3 * kTileBytes, kTileRow);
    _tile_dpbf16ps(3, 7, 6);
    p += kTileBytes;
    v += value_stride;
    if (--left > 0) return;
    if (store) {
      _tile_stored(0, acc, kTileRow);
      _tile_stored(1, acc + kTileBytes, kTileRow);
      _tile_stored(2, acc + 2 * kTileBytes, kTileRow);
      _tile_stored(3, acc + 3 * kTileBytes, kTileRow);
    }
    p -= units * kTileBytes;
    v += 4 * kTileBytes - units * value_stride;
    acc += 4 * kTileBytes;
    --groups;
    start();
  }
  FATTN_AMX_INLINE_MEMBER void finish() {
    while (groups > 0) portion();
  }
};

class Forward {
 public:
  explicit Forward(const ForwardTask& task)
      : t_(task), at_(task.row_end - task.row_begin, task.block_k, task.headdim, task.headdim_v), scratch_(static_cast<char*>(task.scratch)) {
    const float scale = task.scale < 0 ? -task.scale : task.scale;  // a negative scale flips the signs of Q instead
    log2_scale_ = scale * kLog2E;
    fixed_scale_ = _mm512_set1_ps(log2_scale_ * kFixed);
  }

  void run() {
    const TileScope tiles;
    load_queries();
    const int64_t visible = limit(t_.row_end - 1), block = at_.units * kUnit;
    for (int64_t key = 0; key < visible; key += block) {
      load_keys(key, min_of(key + block, visible));
      int64_t first = 0;
      while (limit(last_row(first)) <= key) ++first;
      if (at_.depth == 2 && at_.groups == 1)
        attend<2, 1>(key, first);
      else if (at_.depth == 4 && at_.groups == 2)
        attend<4, 2>(key, first);
      else
        attend<0, 0>(key, first);
    }
    memory_barrier();
    for (int64_t tile = 0; tile < at_.tiles; ++tile) store_tile(tile);
  }

 private:
  int64_t limit(int64_t row) const { return max_of(0, min_of(t_.seqlen_k, row + t_.diagonal)); }  // keys that a row sees
  int64_t first_row(int64_t tile) const { return t_.row_begin + tile * kLanes; }
  int64_t last_row(int64_t tile) const { return min_of(first_row(tile) + kLanes, t_.row_end) - 1; }
  float* sum(int64_t tile) const { return reinterpret_cast<float*>(scratch_ + at_.sum) + tile * kLanes; }
  float* max(int64_t tile) const { return reinterpret_cast<float*>(scratch_ + at_.max) + tile * kLanes; }
  float& norm(int64_t tile) const { return reinterpret_cast<float*>(scratch_ + at_.norm)[tile]; }
  Softmax& softmax(int64_t tile) const { return reinterpret_cast<Softmax*>(scratch_ + at_.softmax)[tile]; }
  char* acc(int64_t tile) const { return scratch_ + at_.acc + tile * at_.values * kTileBytes; }
  char* scores(int64_t parity) const { return scratch_ + at_.s + parity * at_.step() * 2 * kTileBytes; }
  char* weights(int64_t parity) const { return scratch_ + at_.p + parity * at_.step() * kTileBytes; }
  int64_t value_stride() const { return at_.values * kTileBytes; }

  // Keys of the block at `key` that the last, or the first, row of a tile sees.
  int64_t most_keys(int64_t tile, int64_t key) const { return max_of(0, min_of(limit(last_row(tile)) - key, block_keys_)); }
  int64_t least_keys(int64_t tile, int64_t key) const { return max_of(0, min_of(limit(first_row(tile)) - key, block_keys_)); }

  void load_queries() {
    const uint16_t* q = static_cast<const uint16_t*>(t_.q);
    for (int64_t tile = 0; tile < at_.tiles; ++tile) {
      const int64_t row = first_row(tile);
      const __m512 squares = pack_transposed(q + row * t_.q_stride, t_.q_stride, min_of(kLanes, t_.row_end - row), t_.headdim,
                                             t_.scale < 0 ? 0x80008000u : 0u, scratch_ + at_.q + tile * at_.depth * kTileBytes);
      norm(tile) = largest_norm(squares);
      softmax(tile) = Softmax::kBounded;
      _mm512_store_ps(sum(tile), _mm512_setzero_ps());
      _mm512_store_ps(max(tile), _mm512_setzero_ps());
      for (int64_t r = 0; r < at_.values * 16; ++r) store_row(acc(tile), r, _mm512_setzero_si512());
    }
    const int64_t packed = ceil_div(t_.headdim_v, 32) * 2;  // the d tiles of V that load_keys writes; the rest of a group stays zero
    for (int64_t unit = 0; unit < at_.units; ++unit)
      for (int64_t r = packed * 16; r < at_.values * 16; ++r) store_row(scratch_ + at_.v + unit * value_stride(), r, _mm512_setzero_si512());
  }

  // An upper bound of the norm of every row; NaN or infinity if an element is.
  static float largest_norm(__m512 squares) {
    if (_mm512_cmp_ps_mask(squares, _mm512_set1_ps(1e36f), _CMP_NLE_UQ)) return __builtin_inff();
    return 1.001f * _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(_mm512_reduce_max_ps(squares))));
  }

  void load_keys(int64_t begin, int64_t end) {
    const uint16_t* k = static_cast<const uint16_t*>(t_.k) + begin * t_.k_stride;
    const uint16_t* v = static_cast<const uint16_t*>(t_.v) + begin * t_.v_stride;
    block_keys_ = end - begin;
    __m512 squares = _mm512_setzero_ps();
    bool finite = true;
    __m512i magnitude = _mm512_setzero_si512();
    for (int64_t unit = 0; unit * kUnit < block_keys_; ++unit) {
      for (int64_t half = 0; half < 2; ++half) {
        const int64_t key = unit * kUnit + half * kLanes;
        const __m512 x = pack_rows(k + key * t_.k_stride, t_.k_stride, block_keys_ - key, t_.headdim,
                                   scratch_ + at_.k + (unit * 2 + half) * at_.depth * kTileBytes);
        finite &= _mm512_cmp_ps_mask(x, _mm512_set1_ps(1e36f), _CMP_NLE_UQ) == 0;
        squares = _mm512_max_ps(squares, x);
      }
      const int64_t key = unit * kUnit;
      magnitude = _mm512_max_epu16(magnitude, pack_transposed_rows(v + key * t_.v_stride, t_.v_stride, block_keys_ - key, t_.headdim_v,
                                                                   scratch_ + at_.v + unit * value_stride()));
    }
    key_norm_ = finite ? largest_norm(squares) : __builtin_inff();
    value_bits_ = largest_epu16(magnitude);
    memory_barrier();
  }

  // The softmax that this block needs for a tile; a tile never returns to a simpler one.
  Softmax choose(int64_t tile) const {
    const float bound = norm(tile) * key_norm_ * log2_scale_;  // NaN if infinite times 0
    Softmax wanted = Softmax::kPropagate;
    if (bound <= kBoundedScore && value_bits_ < kBoundedValue)
      wanted = Softmax::kBounded;
    else if (bound <= kFiniteScore)
      wanted = Softmax::kOnline;
    return wanted < softmax(tile) ? softmax(tile) : wanted;
  }

  // One step of a query tile: units [unit, unit + units) of the block at `key`. Buffers alternate.
  struct Step {
    int64_t tile, key, unit, units, parity;
    bool last;  // of this tile in this block
  };

  Step step_at(int64_t tile, int64_t key, int64_t unit, int64_t parity) const {
    if (tile >= at_.tiles) return {tile, key, 0, 0, parity, true};
    const int64_t end = ceil_div(most_keys(tile, key), kUnit), units = min_of(at_.step(), end - unit);
    return {tile, key, unit, units, parity, unit + units == end};
  }
  Step step_after(const Step& s) const {
    return s.last ? step_at(s.tile + 1, s.key, 0, 1 - s.parity) : step_at(s.tile, s.key, s.unit + s.units, 1 - s.parity);
  }

  template <int kDepth>
  ScoreStream<kDepth> score_stream(const Step& s) const {
    return {scratch_ + at_.q + s.tile * at_.depth * kTileBytes, scratch_ + at_.k + s.unit * 2 * at_.depth * kTileBytes, scores(s.parity), at_.depth,
            s.units};
  }
  ProductStream product_stream(const Step& s) const {
    const bool stay = at_.groups == 1 && softmax(s.tile) == Softmax::kBounded && !element_wise(s.tile, s.key);
    return {scratch_ + at_.v + s.unit * value_stride(),
            weights(s.parity),
            acc(s.tile),
            s.units,
            value_stride(),
            at_.groups,
            !stay || s.unit == 0,
            !stay || s.last};
  }

  // The block of keys at `key` against the tiles from `first` on: the three stages, one step apart.
  template <int kDepth, int kGroups>
  void attend(int64_t key, int64_t first) {
    Step step = step_at(first, key, 0, 0);
    score_stream<kDepth>(step).finish();
    ProductStream product{};
    while (step.units > 0) {
      const Step next = step_after(step);
      if (step.unit == 0) {
        const Softmax kind = choose(step.tile);
        if (kind != Softmax::kBounded && softmax(step.tile) == Softmax::kBounded) leave_bounded(step.tile);
        softmax(step.tile) = kind;
      }
      switch (softmax(step.tile)) {
        case Softmax::kBounded: weigh<Softmax::kBounded, kDepth, kGroups>(step, score_stream<kDepth>(next), product); break;
        case Softmax::kOnline: weigh<Softmax::kOnline, kDepth, kGroups>(step, score_stream<kDepth>(next), product); break;
        case Softmax::kPropagate: weigh<Softmax::kPropagate, kDepth, kGroups>(step, score_stream<kDepth>(next), product); break;
      }
      product = product_stream(step);
      if (element_wise(step.tile, key)) {
        add_visible(step);
        product.groups = 0;
      }
      step = next;
    }
    product.start();
    product.finish();
  }

  // 0 * inf is NaN: values that are not finite must not meet the zero weights of keys that a row does not see.
  bool element_wise(int64_t tile, int64_t key) const { return value_bits_ >= kInfinityBits && least_keys(tile, key) < most_keys(tile, key); }

  // Rows that have seen a key are shifted by 0, the others by nothing yet.
  void leave_bounded(int64_t tile) {
    const __mmask16 seen = _mm512_cmp_ps_mask(_mm512_load_ps(sum(tile)), _mm512_setzero_ps(), _CMP_GT_OQ);
    _mm512_store_ps(max(tile), _mm512_mask_blend_ps(seen, _mm512_set1_ps(-__builtin_inff()), _mm512_setzero_ps()));
  }

  // Keys of the block, less `skipped` ones, that each row of a tile sees.
  __m512i visible_keys(int64_t tile, int64_t key, int64_t skipped) const {
    alignas(64) int32_t n[kLanes];
    for (int64_t i = 0; i < kLanes; ++i)
      n[i] = static_cast<int32_t>(max_of(0, min_of(limit(min_of(first_row(tile) + i, t_.row_end - 1)) - key, block_keys_) - skipped));
    return _mm512_load_si512(n);
  }

  // Raises the maximum of a tile if the step's scores exceed it by much, and rescales what was summed so far: all earlier
  // products must be in memory, so they are finished first.
  void raise_max(const Step& step, ProductStream& product) {
    const int64_t tile = step.tile, begin = step.unit * kUnit;
    const float* s = reinterpret_cast<const float*>(scores(step.parity));
    const int64_t full = max_of(0, min_of(least_keys(tile, step.key) - begin, step.units * kUnit));
    const int64_t most = min_of(most_keys(tile, step.key) - begin, step.units * kUnit);
    const __m512 none = _mm512_set1_ps(-__builtin_inff());
    __m512 a = none, b = none;
    const int64_t full_pairs = full / 32 * 32;
    for (int64_t r = 0; r < full_pairs; r += 2) {
      a = _mm512_max_ps(_mm512_load_ps(s + r * kLanes), a);
      b = _mm512_max_ps(_mm512_load_ps(s + (r + 1) * kLanes), b);
    }
    const __m512i visible = visible_keys(tile, step.key, begin);
    for (int64_t r = full_pairs; r < most; ++r)
      a = _mm512_mask_max_ps(a, _mm512_cmpgt_epi32_mask(visible, _mm512_set1_epi32(static_cast<int>(r))), _mm512_load_ps(s + r * kLanes), a);
    const __m512 block = _mm512_mul_ps(_mm512_max_ps(a, b), fixed_scale_), old = _mm512_load_ps(max(tile));
    if (!_mm512_cmp_ps_mask(block, _mm512_add_ps(old, _mm512_set1_ps(kLazy)), _CMP_GT_OQ)) return;
    product.finish();
    const __m512 raised = _mm512_max_ps(block, old);
    _mm512_store_ps(max(tile), raised);
    // Rows without a key so far have nothing to scale, and -inf - -inf would be NaN.
    const __mmask16 seen = _mm512_cmp_ps_mask(old, none, _CMP_NEQ_UQ);
    const __m512 factor = exp2_accurate(_mm512_mul_ps(_mm512_maskz_sub_ps(seen, old, raised), _mm512_set1_ps(1.0f / kFixed)));
    _mm512_store_ps(sum(tile), _mm512_mul_ps(_mm512_load_ps(sum(tile)), factor));
    float* o = reinterpret_cast<float*>(acc(tile));
    for (int64_t i = 0; i < at_.values * 16; ++i) _mm512_store_ps(o + i * kLanes, _mm512_mul_ps(_mm512_load_ps(o + i * kLanes), factor));
    memory_barrier();
  }

  // Weight of a vector of scores.
  template <Softmax kind>
  FATTN_AMX_INLINE __m512 weight(__m512 s, __m512 scale, __m512 shift) {
    if (kind == Softmax::kBounded) return exp2_of_magic(_mm512_fmadd_ps(s, scale, _mm512_set1_ps(kMagic)));
    const __m512 u = _mm512_fmsub_ps(s, scale, shift);
    const __m512 w = exp2_fixed(_mm512_max_ps(u, _mm512_set1_ps(kSmallestExponent)));
    if (kind == Softmax::kOnline) return w;
    const __m512 visible = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(u, _mm512_set1_ps(-__builtin_inff()), _CMP_NEQ_UQ), w);
    return _mm512_mask_mov_ps(visible, _mm512_cmp_ps_mask(u, u, _CMP_UNORD_Q), u);
  }

  // Weights of one unit, rows [begin, begin + 4) of both accumulators; `visible` is relative to the unit.
  template <Softmax kind, bool masked>
  FATTN_AMX_INLINE void weigh_rows(const float* s, char* p, int begin, __m512 scale, __m512 shift, __m512i visible, __m512& sum0, __m512& sum1) {
    for (int r = begin; r < begin + 4; ++r) {
      __m512 a = weight<kind>(_mm512_load_ps(s + r * kLanes), scale, shift), b = weight<kind>(_mm512_load_ps(s + (16 + r) * kLanes), scale, shift);
      if (masked) {
        a = _mm512_maskz_mov_ps(_mm512_cmpgt_epi32_mask(visible, _mm512_set1_epi32(r)), a);
        b = _mm512_maskz_mov_ps(_mm512_cmpgt_epi32_mask(visible, _mm512_set1_epi32(16 + r)), b);
      }
      sum0 = _mm512_add_ps(sum0, a);
      sum1 = _mm512_add_ps(sum1, b);
      store_row(p, r, pair_bf16(a, b));
    }
  }

  // One unit of weights with portions of AMX work between its quarters.
  template <Softmax kind, bool masked, int kDepth, int kGroups>
  FATTN_AMX_INLINE_MEMBER void weigh_unit(const float* s, char* p, __m512 scale, __m512 shift, __m512i visible, __m512& sum0, __m512& sum1,
                                          ScoreStream<kDepth>& next, ProductStream& product) const {
    const int64_t depth = next.depth(), groups = kGroups ? kGroups : at_.groups;
#pragma GCC unroll 4
    for (int quarter = 0; quarter < 4; ++quarter) {
      for (int64_t i = (quarter * groups + 3) / 4; i < ((quarter + 1) * groups + 3) / 4; ++i) product.portion();
      weigh_rows<kind, masked>(s, p, quarter * 4, scale, shift, visible, sum0, sum1);
      if (next.units > 0 && quarter * depth / 4 < (quarter + 1) * depth / 4) next.portion(quarter * depth / 4, (quarter + 1) * depth / 4);
    }
  }

  // Weights and sums of a tile in the block at `key`, with the scores of the next and the product of the previous tile.
  template <Softmax kind, int kDepth, int kGroups>
  __attribute__((noinline)) void weigh(const Step& step, ScoreStream<kDepth> next, ProductStream product) {
    const int64_t tile = step.tile;
    product.start();
    if (kind != Softmax::kBounded) raise_max(step, product);
    const float* s = reinterpret_cast<const float*>(scores(step.parity));
    char* p = weights(step.parity);
    __m512 shift = _mm512_load_ps(max(tile));
    if (kind != Softmax::kBounded)  // a row without a key has no maximum: its scores are all -inf or not visible
      shift = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(shift, _mm512_set1_ps(-__builtin_inff()), _CMP_NEQ_UQ), shift);
    const __m512 scale = fixed_scale_;
    __m512 sum0 = _mm512_load_ps(sum(tile)), sum1 = _mm512_setzero_ps();
    const int64_t full = max_of(0, min_of(least_keys(tile, step.key) / kUnit - step.unit, step.units));
    for (int64_t unit = 0; unit < full; ++unit, s += 2 * kTileBytes / 4, p += kTileBytes)
      weigh_unit<kind, false, kDepth, kGroups>(s, p, scale, shift, _mm512_setzero_si512(), sum0, sum1, next, product);
    if (full < step.units) {
      const __m512i visible = visible_keys(tile, step.key, step.unit * kUnit);
      for (int64_t unit = full; unit < step.units; ++unit, s += 2 * kTileBytes / 4, p += kTileBytes)
        weigh_unit<kind, true, kDepth, kGroups>(s, p, scale, shift, _mm512_sub_epi32(visible, _mm512_set1_epi32(static_cast<int>(unit * kUnit))),
                                                sum0, sum1, next, product);
    }
    _mm512_store_ps(sum(tile), _mm512_add_ps(sum0, sum1));
    next.finish();
    product.finish();
    memory_barrier();
  }

  // The product stage with visible keys only, element by element.
  void add_visible(const Step& step) {
    const int64_t tile = step.tile, key = step.key + step.unit * kUnit;
    const uint16_t* p = reinterpret_cast<const uint16_t*>(weights(step.parity));
    const uint16_t* v = reinterpret_cast<const uint16_t*>(scratch_ + at_.v + step.unit * value_stride());
    float* o = reinterpret_cast<float*>(acc(tile));
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const int64_t n = min_of(limit(min_of(first_row(tile) + lane, t_.row_end - 1)) - key, step.units * kUnit);
      for (int64_t j = 0; j < n; ++j) {
        const int64_t unit = j / kUnit, r = j % 16, half = j % kUnit / 16;
        const float w = bf16_to_float(p[((unit * 16 + r) * kLanes + lane) * 2 + half]);
        for (int64_t d = 0; d < t_.headdim_v; ++d) o[d * kLanes + lane] += w * bf16_to_float(v[unit * value_stride() / 2 + d * 32 + r * 2 + half]);
      }
    }
    memory_barrier();
  }

  // Normalises a tile, transposes it back and stores its rows and their lse.
  void store_tile(int64_t tile) {
    const int64_t row = first_row(tile), rows = min_of(kLanes, t_.row_end - row);
    const __m512 total = _mm512_load_ps(sum(tile));
    const __mmask16 seen = _mm512_cmp_ps_mask(total, _mm512_setzero_ps(), _CMP_NEQ_UQ);
    const __m512 inverse = _mm512_maskz_div_ps(seen, _mm512_set1_ps(1.0f), total);
    uint16_t* o = static_cast<uint16_t*>(t_.o) + row * t_.o_stride;
    const float* from = reinterpret_cast<const float*>(acc(tile));
    for (int64_t d = 0; d < t_.headdim_v; d += 16, from += 16 * kLanes) {
      __m512i x[16];
      for (int i = 0; i < 16; ++i) x[i] = _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(from + i * kLanes), inverse));
      transpose16(x);
      const __mmask16 lanes = first_lanes16(t_.headdim_v - d);
      for (int64_t r = 0; r < rows; ++r) _mm256_mask_storeu_epi16(o + r * t_.o_stride + d, lanes, to_bf16(_mm512_castsi512_ps(x[r])));
    }
    if (!t_.lse) return;
    __m512 shift = _mm512_mul_ps(_mm512_load_ps(max(tile)), _mm512_set1_ps(kLn2 / kFixed));
    shift = _mm512_maskz_mov_ps(seen, shift);  // the logarithm of 0 says -inf already
    alignas(64) float lse[kLanes];
    _mm512_store_ps(lse, _mm512_add_ps(shift, log_accurate(total)));
    for (int64_t r = 0; r < rows; ++r) t_.lse[(row + r) * t_.lse_stride] = lse[r];
  }

  const ForwardTask& t_;
  const ForwardLayout at_;
  char* const scratch_;
  float log2_scale_;
  __m512 fixed_scale_;
  // Of the block of keys at hand:
  int64_t block_keys_ = 0;
  float key_norm_ = 0;  // bound of the norm of every key
  int value_bits_ = 0;  // largest magnitude of a value, as bf16
};

static size_t forward_scratch_bytes(const KernelShape& shape) {
  return static_cast<size_t>(ForwardLayout(shape.rows, shape.block_k, shape.headdim, shape.headdim_v).bytes);
}

static void forward_bf16(const ForwardTask& task) {
  if (task.row_begin < task.row_end) Forward(task).run();
}

}  // namespace fattn::core::amx
