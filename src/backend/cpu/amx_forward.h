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
#pragma once

#include "backend/cpu/amx_exp.h"
#include "backend/cpu/amx_nonfinite.h"
#include "backend/cpu/amx_options.h"
#include "shared/half.h"

namespace fattn::core::amx {

constexpr int64_t kUnit = 32;            // keys of one step: what a product contracts
constexpr float kBoundedScore = 40.0f;   // of |score| in log2 units: weights stay within 2^-40 .. 2^40
constexpr int kBoundedValue = 187 << 7;  // 2^60 as bf16: products with such weights stay finite
constexpr float kFiniteScore = 1e30f;    // scores below cannot overflow to infinity or NaN on the way
constexpr float kFiniteSquares = 1e36f, kNormMargin = 1.001f;
constexpr float kLazy = 8.0f * kFixed;  // the maximum is raised when it is exceeded by 2^8: weights up to 2^8 do no harm

enum class Softmax {
  kBounded,        // shift 0
  kOnline,         // running maximum
  kPropagate,      // running maximum, scores may be infinite or NaN
  kWhole,          // the same, and pairs may be hidden, by -inf; the maximum is one of scores, not in fixed point, which a bias of -3e38 would leave
  kPropagateSome,  // and of rows that have seen bounded scores alone as kBounded has it
  kWholeSome,
};
constexpr bool has_whole_scores(Softmax kind) { return kind == Softmax::kWhole || kind == Softmax::kWholeSome; }
constexpr bool is_for_some(Softmax kind) { return kind == Softmax::kPropagateSome || kind == Softmax::kWholeSome; }

// Of a block of keys, what a query tile computes.
struct TileKeys {
  int64_t begin, end;  // units
  bool hidden, mixed;  // does the mask hide any of these pairs, are they of several documents?
};

struct ForwardLayout {
  int64_t tiles, units, depth, groups, values;  // query tiles; units of a block; d tiles of Q and K; groups of 4 d tiles of V, d tiles in them
  int64_t q, k, v, s, p, acc, sum, rounded, max, norm, softmax, calm, keys, mask_words, dropout_words, paged;  // offsets
  int64_t squares, wild_values, codes, marks, coded, bytes;                                                    // likewise

  // inputs: scores depend on more than q k, or weights are dropped.
  ForwardLayout(int64_t rows, int64_t block_k, int headdim, int headdim_v, bool inputs, bool in_pages) {
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
    rounded = take(tiles * kTileRow);
    max = take(tiles * kTileRow);
    norm = take(tiles * static_cast<int64_t>(sizeof(float)));
    softmax = take(tiles * static_cast<int64_t>(sizeof(Softmax)));
    calm = take(tiles * static_cast<int64_t>(sizeof(uint16_t)));
    keys = take(tiles * static_cast<int64_t>(sizeof(TileKeys)));
    mask_words = take(inputs ? tiles * units * kTileRow : 0);
    dropout_words = take(inputs ? vec::dropout_rows(step() * kUnit) * kTileRow : 0);
    squares = take(units * kUnit * static_cast<int64_t>(sizeof(float)));
    wild_values = take(units * static_cast<int64_t>(sizeof(uint32_t)));
    codes = take(units * values * kTileBytes);
    marks = take(units * static_cast<int64_t>(sizeof(uint32_t)));
    coded = take(units * values);
    paged = take(in_pages ? kUnit * vec::copy_stride(max_of(headdim, headdim_v)) * static_cast<int64_t>(sizeof(uint16_t)) : 0);
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
      FATTN_TILE_ZERO(4);
      FATTN_TILE_ZERO(5);
    }
    for (int64_t i = begin; i < end; ++i) {
      FATTN_TILE_LOAD(6, q + i * kTileBytes, kTileRow);
      FATTN_TILE_LOAD(7, k + i * kTileBytes, kTileRow);
      FATTN_TILE_DOT(4, 7, 6);
      FATTN_TILE_LOAD(7, k + (depth() + i) * kTileBytes, kTileRow);
      FATTN_TILE_DOT(5, 7, 6);
    }
    if (end < depth()) return;
    FATTN_TILE_STORE(4, s, kTileRow);
    FATTN_TILE_STORE(5, s + kTileBytes, kTileRow);
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
    FATTN_TILE_LOAD(0, acc, kTileRow);
    FATTN_TILE_LOAD(1, acc + kTileBytes, kTileRow);
    FATTN_TILE_LOAD(2, acc + 2 * kTileBytes, kTileRow);
    FATTN_TILE_LOAD(3, acc + 3 * kTileBytes, kTileRow);
  }
  FATTN_AMX_INLINE_MEMBER void portion() {
    if (groups == 0) return;
    FATTN_TILE_LOAD(6, p, kTileRow);
    FATTN_TILE_LOAD(7, v, kTileRow);
    FATTN_TILE_DOT(0, 7, 6);
    FATTN_TILE_LOAD(7, v + kTileBytes, kTileRow);
    FATTN_TILE_DOT(1, 7, 6);
    FATTN_TILE_LOAD(7, v + 2 * kTileBytes, kTileRow);
    FATTN_TILE_DOT(2, 7, 6);
    FATTN_TILE_LOAD(7, v + 3 * kTileBytes, kTileRow);
    FATTN_TILE_DOT(3, 7, 6);
    p += kTileBytes;
    v += value_stride;
    if (--left > 0) return;
    if (store) {
      FATTN_TILE_STORE(0, acc, kTileRow);
      FATTN_TILE_STORE(1, acc + kTileBytes, kTileRow);
      FATTN_TILE_STORE(2, acc + 2 * kTileBytes, kTileRow);
      FATTN_TILE_STORE(3, acc + 3 * kTileBytes, kTileRow);
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

  void load_queries() {
    const uint16_t* q = static_cast<const uint16_t*>(t_.q);
    for (int64_t tile = 0; tile < at_.tiles; ++tile) {
      const int64_t row = first_row(tile);
      const __m512 squares = pack_transposed(q + row * t_.q_stride, t_.q_stride, min_of(kLanes, t_.row_end - row), t_.headdim,
                                             t_.scale < 0 ? 0x80008000u : 0u, scratch_ + at_.q + tile * at_.depth * kTileBytes);
      norm(tile) = largest_norm(squares);
      softmax(tile) = has_bias() ? Softmax::kWhole : Softmax::kBounded;
      calm_rows(tile) = has_bias() ? 0 : 0xffff;
      _mm512_store_ps(sum(tile), _mm512_setzero_ps());
      _mm512_store_ps(sum_of_rounded(tile), _mm512_setzero_ps());
      _mm512_store_ps(max(tile), _mm512_set1_ps(has_bias() ? kMinusInfinity : 0.0f));
      for (int64_t r = 0; r < at_.values * 16; ++r) store_row(acc(tile), r, _mm512_setzero_si512());
    }
    const int64_t packed = ceil_div(t_.headdim_v, 32) * 2;  // the d tiles of V that load_keys writes; the rest of a group stays zero
    for (int64_t unit = 0; unit < at_.units; ++unit)
      for (int64_t r = packed * 16; r < at_.values * 16; ++r) store_row(scratch_ + at_.v + unit * value_stride(), r, _mm512_setzero_si512());
  }

  // An upper bound of the norm of every row; NaN or infinity if an element is.
  static float largest_norm(__m512 squares) {
    if (_mm512_cmp_ps_mask(squares, _mm512_set1_ps(kFiniteSquares), _CMP_NLE_UQ)) return __builtin_inff();
    return kNormMargin * _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(_mm512_reduce_max_ps(squares))));
  }

  // What each tile computes of the block at `key`; the hull of that.
  TileKeys place_tiles(int64_t key) {
    TileKeys all{at_.units, 0, false, false};
    for (int64_t tile = 0; tile < at_.tiles; ++tile) {
      int64_t begin = seen_begin(tile, key), end = seen_end(tile, key);
      TileKeys keys{0, 0, false, false};
      if (kOptions && options_.documents && begin < end) keys.mixed = narrow_to_documents(tile, key, begin, end);
      if (begin < end) {
        keys.begin = begin / kUnit;
        keys.end = ceil_div(end, kUnit);
      }
      if (kOptions && options_.masked && keys.begin < keys.end) narrow_to_mask(tile, key, keys);
      if (keys.begin < keys.end) {
        all.begin = min_of(all.begin, keys.begin);
        all.end = max_of(all.end, keys.end);
      }
      tile_keys(tile) = keys;
    }
    return all;
  }

  vec::TilePlace place_of(int64_t tile, int64_t key, int64_t begin_unit, int64_t end_unit) const {
    const int64_t begin = begin_unit * kUnit;
    return {first_row(tile), last_row(tile) + 1 - first_row(tile), key + begin, min_of(end_unit * kUnit, block_keys_) - begin};
  }

  // From the first to the last key of the block that may be of a tile's documents. Are they of several?
  bool narrow_to_documents(int64_t tile, int64_t key, int64_t& begin, int64_t& end) const {
    const int32_t* ids = t_.inputs.document_k + key;
    const vec::IdRange rows = vec::ids_of(t_.inputs.document_q, first_row(tile), last_row(tile) + 1);
    const vec::KeyRange some = vec::keys_of(rows, ids, begin, end);
    begin = some.begin;
    end = some.end;
    return begin < end && !vec::are_one(rows, vec::ids_of(ids, begin / kUnit * kUnit, min_of(ceil_div(end, kUnit) * kUnit, block_keys_)));
  }

  // Without the units at either end that the mask hides from all rows.
  void narrow_to_mask(int64_t tile, int64_t key, TileKeys& keys) const {
    uint32_t* words = mask_words(tile);
    keys.hidden = vec::make_mask_words<1>(t_.inputs, 0, place_of(tile, key, keys.begin, keys.end), words + keys.begin * kLanes) != vec::Seen::kAll;
    while (keys.begin < keys.end && is_dead(words + keys.begin * kLanes)) ++keys.begin;
    while (keys.begin < keys.end && is_dead(words + (keys.end - 1) * kLanes)) --keys.end;
  }

  // Of the block at `key` what tiles compute.
  void load_keys(int64_t key, const TileKeys& all) {
    const auto k = vec::KeyRows<uint16_t>::keys(t_), v = vec::KeyRows<uint16_t>::values(t_);
    uint16_t* const paged = reinterpret_cast<uint16_t*>(scratch_ + at_.paged);
    __m512 squares = _mm512_setzero_ps();
    bool finite = true;
    __m512i magnitude = _mm512_setzero_si512();
    for (int64_t unit = all.begin; unit < all.end; ++unit) {
      for (int64_t half = 0; half < 2; ++half) {
        const int64_t at = unit * kUnit + half * kLanes;
        const int64_t rows = min_of(kLanes, block_keys_ - at);
        const vec::Rows<uint16_t> from = k.side_by_side(key + at, rows, t_.headdim, paged);
        const __m512 x = pack_rows(from.data, from.stride, rows, t_.headdim, scratch_ + at_.k + (unit * 2 + half) * at_.depth * kTileBytes);
        finite &= _mm512_cmp_ps_mask(x, _mm512_set1_ps(kFiniteSquares), _CMP_NLE_UQ) == 0;
        _mm512_store_ps(key_squares(unit) + half * kLanes, x);
        squares = _mm512_max_ps(squares, x);
      }
      const int64_t at = unit * kUnit;
      const int64_t rows = min_of(kUnit, block_keys_ - at);
      const vec::Rows<uint16_t> from = v.side_by_side(key + at, rows, t_.headdim_v, paged);
      magnitude =
          _mm512_max_epu16(magnitude, pack_transposed_rows(from.data, from.stride, rows, t_.headdim_v, scratch_ + at_.v + unit * value_stride()));
    }
    key_norm_ = finite ? largest_norm(squares) : __builtin_inff();
    value_bits_ = largest_epu16(magnitude);
    split_ = false;
    if (value_bits_ >= kBoundedValue) look_at_values(key, all);
    memory_barrier();
  }

  // Of large values, which keys have them. Those that are not finite leave V where some pair is hidden: 0 * inf is NaN.
  __attribute__((noinline)) void look_at_values(int64_t key, const TileKeys& all) {
    for (int64_t tile = 0; tile < at_.tiles && value_bits_ >= kInfinityBits; ++tile) split_ |= hides_pairs(tile, key);
    for (int64_t unit = all.begin; unit < all.end; ++unit) {
      __mmask32 wild = 0, coded = 0;
      for (int64_t i = 0; i < at_.values; ++i) {
        char* const tile = scratch_ + at_.v + unit * value_stride() + i * kTileBytes;
        wild |= elements_from(tile, kBoundedValue);
        if (!split_) continue;
        const __mmask32 elements = split_tile(tile, scratch_ + at_.codes + unit * value_stride() + i * kTileBytes, false);
        is_coded(unit, i) = elements != 0;
        coded |= elements;
      }
      wild_values(unit) = in_order(wild);
      marks(unit) = in_order(coded);
    }
  }

  // May pairs of the block at `key` and a tile, or of its units there, be hidden?
  bool hides_pairs(int64_t tile, int64_t key) const {
    const TileKeys& keys = tile_keys(tile);
    return keys.begin < keys.end &&
           (hides_ || whole_end(tile, key) < min_of(keys.end * kUnit, block_keys_) || whole_begin(tile, key) > keys.begin * kUnit);
  }

  // The softmax that the block at `key` needs for a tile; a tile never returns to a simpler one. Rows that have seen bounded scores alone, which are
  // calm, stay as they are: what is hidden from a row changes nothing of it.
  Softmax choose(int64_t tile, int64_t key) {
    if (has_bias()) return Softmax::kWhole;
    const float of_products = norm(tile) * key_norm_ * log2_scale_;  // NaN if infinite times 0
    const float bound = bound_of_score(of_products);
    Softmax wanted = Softmax::kBounded;
    if (!(bound <= kBoundedScore && of_products <= kFiniteScore && value_bits_ < kBoundedValue) && calm_rows(tile)) {
      const auto wild = static_cast<__mmask16>(wild_rows(tile, key) & calm_rows(tile));
      if (wild) leave_bounded(tile, wild);
      calm_rows(tile) = static_cast<uint16_t>(calm_rows(tile) & ~wild);
    }
    if (calm_rows(tile) == 0xffff) return softmax(tile);
    wanted = bound <= kFiniteScore && of_products <= kFiniteScore && calm_rows(tile) == 0 ? Softmax::kOnline : Softmax::kPropagate;
    if (wanted < softmax(tile)) wanted = softmax(tile);
    return hides_ ? Softmax::kWhole : wanted;
  }

  // From the bound of a scaled product, in log2 units.
  float bound_of_score(float bound) const {
    if (kOptions && options_.capped && bound > t_.softcap * kLog2E) bound = t_.softcap * kLog2E;
    if (kOptions && t_.inputs.alibi_slopes) bound += largest_slope_term();
    return bound;
  }

  // The rows of a tile that see a key of the block at `key` whose score may not be bounded, or whose value is large.
  __attribute__((noinline)) __mmask16 wild_rows(int64_t tile, int64_t key) const {
    const TileKeys& keys = tile_keys(tile);
    const Step all{tile, key, keys.begin, keys.end - keys.begin, 0, true, true};
    const SeenKeys seen = seen_keys(all);
    const __m512 factor = _mm512_set1_ps(kNormMargin * norm(tile) * log2_scale_);
    const bool capped = kOptions && options_.capped;
    const __m512 cap = _mm512_set1_ps(capped ? t_.softcap * kLog2E : __builtin_inff());
    const __m512 added = _mm512_set1_ps(kOptions && t_.inputs.alibi_slopes ? largest_slope_term() : 0.0f);
    __mmask16 rows = 0;
    for (int64_t unit = 0; unit < all.units && rows != 0xffff; ++unit) {
      uint32_t wild = value_bits_ >= kBoundedValue ? wild_values(keys.begin + unit) : 0;
      for (int half = 0; half < 2; ++half) {
        const __m512 squares = _mm512_load_ps(key_squares(keys.begin + unit) + half * kLanes);
        const __m512 product = _mm512_mul_ps(_mm512_sqrt_ps(squares), factor), bound = _mm512_add_ps(_mm512_min_ps(product, cap), added);
        const __mmask16 calm = _mm512_cmp_ps_mask(squares, _mm512_set1_ps(kFiniteSquares), _CMP_LE_OQ) &
                               _mm512_cmp_ps_mask(product, _mm512_set1_ps(kFiniteScore), _CMP_LE_OQ) &
                               _mm512_cmp_ps_mask(bound, _mm512_set1_ps(kBoundedScore), _CMP_LE_OQ);
        wild |= static_cast<uint32_t>(static_cast<__mmask16>(~calm)) << 16 * half;
      }
      if (wild) rows |= _mm512_test_epi32_mask(allowed(all, seen, unit), _mm512_set1_epi32(static_cast<int>(wild)));
    }
    return rows;
  }

  bool has_bias() const { return kOptions && t_.inputs.bias; }

  // A bound of what ALiBi takes from the task's scores, in log2 units.
  float largest_slope_term() const {
    const int64_t shift = t_.inputs.shift < 0 ? -t_.inputs.shift : t_.inputs.shift;
    return __builtin_fabsf(t_.inputs.alibi_slopes[0]) * static_cast<float>(t_.row_end + shift + t_.seqlen_k) * kLog2E;
  }

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

  Softmax with_calm_rows(int64_t tile) const {
    const Softmax kind = softmax(tile);
    if (kind == Softmax::kBounded || calm_rows(tile) == 0) return kind;
    return kind == Softmax::kWhole ? Softmax::kWholeSome : Softmax::kPropagateSome;
  }

  // Of these rows, those that have seen a key are shifted by 0, the others by nothing yet.
  void leave_bounded(int64_t tile, __mmask16 rows) {
    const __mmask16 seen = _mm512_cmp_ps_mask(_mm512_load_ps(sum(tile)), _mm512_setzero_ps(), _CMP_GT_OQ);
    _mm512_mask_store_ps(max(tile), rows, _mm512_mask_blend_ps(seen, _mm512_set1_ps(kMinusInfinity), _mm512_setzero_ps()));
  }

  // Keys of a step that each row of its tile sees, and those that all see: [begin, end).
  SeenKeys seen_keys(const Step& step) const {
    alignas(64) int32_t begins[kLanes], ends[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) {
      const int64_t row = min_of(first_row(step.tile) + i, t_.row_end - 1), skipped = step.unit * kUnit;
      const int64_t begin = in_block(first_key(row), step.key), end = in_block(limit(row), step.key);
      begins[i] = static_cast<int32_t>(begin - skipped);
      ends[i] = static_cast<int32_t>(end - skipped);
    }
    return {_mm512_load_si512(begins), _mm512_load_si512(ends)};
  }
  int64_t whole_begin(const Step& step) const {
    return kOptions ? max_of(0, min_of(whole_begin(step.tile, step.key) - step.unit * kUnit, step.units * kUnit)) : 0;
  }
  int64_t whole_end(const Step& step) const { return max_of(0, min_of(whole_end(step.tile, step.key) - step.unit * kUnit, step.units * kUnit)); }
  bool is_whole(const Step& step) const { return whole_begin(step) == 0 && whole_end(step) == step.units * kUnit; }

  // Which keys of a unit of a step rows see, as far as places and, of bounded scores, the mask and documents go.
  __m512i visible(const Step& step, const SeenKeys& seen, int64_t unit) const {
    return softmax(step.tile) == Softmax::kBounded ? allowed(step, seen, unit) : seen.words(unit * kUnit);
  }
  // The same of any scores.
  __m512i allowed(const Step& step, const SeenKeys& seen, int64_t unit) const {
    __m512i words = seen.words(unit * kUnit);
    const TileKeys& keys = tile_keys(step.tile);
    if (!kOptions) return words;
    if (keys.hidden) words = _mm512_and_si512(words, _mm512_loadu_si512(mask_words(step.tile) + (step.unit + unit) * kLanes));
    if (keys.mixed) {
      const int64_t row = first_row(step.tile), rows = last_row(step.tile) + 1 - row, key = (step.unit + unit) * kUnit;
      const int64_t n = min_of(kUnit, block_keys_ - key);
      const int32_t *of_rows = t_.inputs.document_q + row, *of_keys = t_.inputs.document_k + step.key + key;
      if (!vec::are_one(vec::ids_of(of_rows, 0, rows), vec::ids_of(of_keys, 0, n)))
        words = _mm512_and_si512(words, words_of_documents(vec::load_ids(of_rows, rows), of_keys, n));
    }
    return words;
  }

  // Does the softmax of a step see scores other than scaled products? Those that options hide are hidden there unless scores are bounded.
  bool reshapes(const Step& step) const {
    return kOptions && (softmax(step.tile) == Softmax::kBounded ? options_.capped || options_.added : options_.reshapes());
  }

  // The options' scores of a step, in place. Pairs that are hidden become -inf, where options may hide pairs (not of bounded scores); then, or where
  // all rows see the whole step, the result is the largest of each row.
  __attribute__((noinline)) __m512 reshape(const Step& step) const {
    const TileKeys& keys = tile_keys(step.tile);
    const vec::TilePlace at = place_of(step.tile, step.key, step.unit, step.unit + step.units);
    float* s = reinterpret_cast<float*>(scores(step.parity));
    __m512 largest;
    const __m512 none = _mm512_set1_ps(kMinusInfinity);
    bool known = false;  // is the largest that of the scores as they are?
    const auto restart = [&] {
      largest = none;
      known = true;
    };
    if (options_.capped) {
      restart();
      vec::cap_scores<1>(vec::CappedScore(static_cast<double>(options_.scale), t_.softcap), s, at.keys, &largest);
    }
    if (options_.added) {
      restart();
      vec::add_terms<1, vec::bf16>(t_.inputs, 0, at, options_.capped ? 1.0f : options_.scale, s, &largest);
    }
    const bool bounded = softmax(step.tile) == Softmax::kBounded;
    if (keys.hidden && !bounded) {
      restart();
      vec::hide_masked<1>(mask_words(step.tile) + step.unit * kLanes, at.keys, s, &largest);
    }
    if (keys.mixed && !bounded) {
      restart();
      vec::hide_documents<1>(t_.inputs, at, s, &largest);
    }
    if (!hides_ || bounded || (known && is_whole(step))) return largest;
    largest = none;
    const SeenKeys seen = seen_keys(step);
    const int64_t begin = whole_begin(step), end = whole_end(step);
    for (int64_t unit = 0; unit < step.units; ++unit, s += kUnit * kLanes) {
      const bool whole = unit * kUnit >= begin && (unit + 1) * kUnit <= end;
      const __m512i words = seen.words(unit * kUnit);
      for (int r = 0; r < kUnit; ++r) {
        __m512 x = _mm512_load_ps(s + r * kLanes);
        if (!whole) {
          x = _mm512_mask_mov_ps(none, sees(words, r), x);
          _mm512_store_ps(s + r * kLanes, x);
        }
        largest = _mm512_max_ps(x, largest);
      }
    }
    return largest;
  }

  // The largest product of each row of a step among the keys that it sees.
  __m512 largest_of(const Step& step) const {
    const float* s = reinterpret_cast<const float*>(scores(step.parity));
    const __m512 none = _mm512_set1_ps(kMinusInfinity);
    __m512 a = none, b = none;
    if (is_whole(step)) {
      for (int64_t r = 0; r < step.units * kUnit; r += 2) {
        a = _mm512_max_ps(_mm512_load_ps(s + r * kLanes), a);
        b = _mm512_max_ps(_mm512_load_ps(s + (r + 1) * kLanes), b);
      }
      return _mm512_max_ps(a, b);
    }
    const SeenKeys seen = seen_keys(step);
    for (int64_t unit = 0; unit < step.units; ++unit, s += kUnit * kLanes) {
      const __m512i words = seen.words(unit * kUnit);
      for (int r = 0; r < kUnit; ++r) a = _mm512_mask_max_ps(a, sees(words, r), _mm512_load_ps(s + r * kLanes), a);
    }
    return a;
  }

  // Raises the maximum of a tile if the step's scores exceed it by much, and rescales what was summed so far: all earlier
  // products must be in memory, so they are finished first. known: `largest` has the largest scores already.
  template <Softmax kind>
  void raise_max(const Step& step, bool known, __m512 largest, ProductStream& product) {
    const int64_t tile = step.tile;
    const __m512 none = _mm512_set1_ps(kMinusInfinity), old = _mm512_load_ps(max(tile));
    const float to_log2 = has_whole_scores(kind) ? exponent_ : 1.0f / kFixed;
    const float lazy = has_whole_scores(kind) ? lazy_score() : kLazy;
    const __m512 block = has_whole_scores(kind) ? largest : _mm512_mul_ps(known ? largest : largest_of(step), fixed_scale_);
    auto raises = _mm512_cmp_ps_mask(block, _mm512_add_ps(old, _mm512_set1_ps(lazy)), _CMP_GT_OQ);  // a row by its own scores alone
    if (is_for_some(kind)) raises = static_cast<__mmask16>(raises & ~calm_rows(tile));
    if (!raises) return;
    product.finish();
    const __m512 raised = _mm512_mask_mov_ps(old, raises, block);
    _mm512_store_ps(max(tile), raised);
    // Rows without a key so far have nothing to scale, and -inf - -inf would be NaN.
    const __mmask16 seen = _mm512_cmp_ps_mask(old, none, _CMP_NEQ_UQ);
    const __m512 factor = exp2_accurate(_mm512_mul_ps(_mm512_maskz_sub_ps(seen, old, raised), _mm512_set1_ps(to_log2)));
    _mm512_store_ps(sum(tile), _mm512_mul_ps(_mm512_load_ps(sum(tile)), factor));
    _mm512_store_ps(sum_of_rounded(tile), _mm512_mul_ps(_mm512_load_ps(sum_of_rounded(tile)), factor));
    float* o = reinterpret_cast<float*>(acc(tile));
    for (int64_t i = 0; i < at_.values * 16; ++i) _mm512_store_ps(o + i * kLanes, _mm512_mul_ps(_mm512_load_ps(o + i * kLanes), factor));
    memory_barrier();
  }
  // kLazy as a score. (Of a scale of 0, any number: a sum with -inf is to be -inf.)
  float lazy_score() const { return exponent_ > 1e-30f ? 8.0f / exponent_ : 1e30f; }

  // Weight of a vector of scores.
  template <Softmax kind>
  FATTN_AMX_INLINE __m512 weight(__m512 s, __m512 scale, __m512 shift, __mmask16 calm) {
    if (kind == Softmax::kBounded) return exp2_of_product(s, scale);
    const __m512 u = has_whole_scores(kind) ? _mm512_mul_ps(_mm512_sub_ps(s, shift), scale) : _mm512_fmsub_ps(s, scale, shift);
    const __m512 w = exp2_fixed(u);
    if (kind == Softmax::kOnline) return w;
    __m512 or_nan = _mm512_mask_mov_ps(w, _mm512_cmp_ps_mask(u, u, _CMP_UNORD_Q), u);
    if (is_for_some(kind)) or_nan = _mm512_mask_mov_ps(or_nan, calm, exp2_of_product(s, scale));
    // (With a scale of 0, u of a hidden score is NaN.)
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(has_whole_scores(kind) ? s : u, _mm512_set1_ps(kMinusInfinity), _CMP_NEQ_UQ), or_nan);
  }

  // Of the weights of rows so far: as they are (of the first and of the second 16 keys of units), and as they are rounded.
  struct Sums {
    __m512 exact[2], rounded;
  };

  // Weights of one unit, rows [begin, begin + 4) of both accumulators, of pairs that are `seen` if `masked`. `words` are those of its first key's
  // block of random numbers, turned so that bit 0 is that key's.
  template <Softmax kind, bool masked, bool drops>
  FATTN_AMX_INLINE void weigh_rows(const float* s, char* p, int begin, __m512 scale, __m512 shift, __mmask16 calm, const __m512i& seen,
                                   const __m512i (&words)[4], Sums& sums) {
#pragma GCC unroll 4
    for (int r = begin; r < begin + 4; ++r) {
      __m512 a = weight<kind>(_mm512_load_ps(s + r * kLanes), scale, shift, calm);
      __m512 b = weight<kind>(_mm512_load_ps(s + (16 + r) * kLanes), scale, shift, calm);
      if (masked) {
        a = _mm512_maskz_mov_ps(sees(seen, r), a);
        b = _mm512_maskz_mov_ps(sees(seen, 16 + r), b);
      }
      sums.exact[0] = _mm512_add_ps(sums.exact[0], a);
      sums.exact[1] = _mm512_add_ps(sums.exact[1], b);
      __m512i both = pair_bf16(a, b);
      sums.rounded = add_pairs(sums.rounded, both);
      if (drops) {
        a = _mm512_maskz_mov_ps(_mm512_test_epi32_mask(words[r % 8 / 2], _mm512_set1_epi32(1 << dropout_bit(0, r))), a);
        b = _mm512_maskz_mov_ps(_mm512_test_epi32_mask(words[r % 8 / 2], _mm512_set1_epi32(1 << dropout_bit(0, 16 + r))), b);
        both = pair_bf16(a, b);
      }
      store_row(p, r, both);
    }
  }

  // One unit of weights with portions of AMX work between its quarters.
  template <Softmax kind, bool masked, bool drops, int kDepth, int kGroups>
  FATTN_AMX_INLINE_MEMBER void weigh_unit(const float* s, char* p, __m512 scale, __m512 shift, __mmask16 calm, const __m512i& seen,
                                          const __m512i (&words)[4], Sums& sums, ScoreStream<kDepth>& next, ProductStream& product) const {
    const int64_t depth = next.depth(), groups = kGroups ? kGroups : at_.groups;
#pragma GCC unroll 4
    for (int quarter = 0; quarter < 4; ++quarter) {
      for (int64_t i = (quarter * groups + 3) / 4; i < ((quarter + 1) * groups + 3) / 4; ++i) product.portion();
      weigh_rows<kind, masked, drops>(s, p, quarter * 4, scale, shift, calm, seen, words, sums);
      if (next.units > 0 && quarter * depth / 4 < (quarter + 1) * depth / 4) next.portion(quarter * depth / 4, (quarter + 1) * depth / 4);
    }
  }

  template <Softmax kind, int kDepth, int kGroups>
  void weigh(const Step& step, const ScoreStream<kDepth>& next, const ProductStream& product) {
    if constexpr (kOptions) {
      if (options_.drops) return weigh<kind, true, kDepth, kGroups>(step, next, product);
    }
    weigh<kind, false, kDepth, kGroups>(step, next, product);
  }

  // Weights and sums of a tile in the block at `key`, with the scores of the next and the product of the previous tile.
  template <Softmax kind, bool drops, int kDepth, int kGroups>
  __attribute__((noinline)) void weigh(const Step& step, ScoreStream<kDepth> next, ProductStream product) {
    const int64_t tile = step.tile;
    product.start();
    __m512 largest = _mm512_setzero_ps();
    bool known = false;
    if constexpr (kOptions) {
      if (reshapes(step) || drops) product.finish();  // which AMX goes on with meanwhile
      if (reshapes(step)) {
        largest = reshape(step);
        known = is_whole(step);
      }
      if (drops) vec::make_dropout_words<1>(t_.inputs, 0, place_of(tile, step.key, step.unit, step.unit + step.units), dropout_words());
    }
    if (kind != Softmax::kBounded) raise_max<kind>(step, known, largest, product);
    const float* s = reinterpret_cast<const float*>(scores(step.parity));
    char* p = weights(step.parity);
    __m512 shift = _mm512_load_ps(max(tile));
    if (kind != Softmax::kBounded)  // a row without a key has no maximum: its scores are all -inf or not visible
      shift = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(shift, _mm512_set1_ps(kMinusInfinity), _CMP_NEQ_UQ), shift);
    const __m512 scale = fixed_scale_;
    const __mmask16 calm = is_for_some(kind) ? calm_rows(tile) : __mmask16{0};
    Sums sums{{_mm512_load_ps(sum(tile)), _mm512_setzero_ps()}, _mm512_load_ps(sum_of_rounded(tile))};
    // Units that all rows see whole. (kWhole has hidden what they do not.)
    int64_t begin = 0, end = step.units;
    if (!has_whole_scores(kind)) {
      begin = ceil_div(whole_begin(step), kUnit);
      end = whole_end(step) / kUnit;
    }
    if (kOptions && kind == Softmax::kBounded && (tile_keys(tile).hidden || tile_keys(tile).mixed)) end = begin;  // none is known to be
    SeenKeys seen{};
    if (begin > 0 || end < step.units) seen = seen_keys(step);
    __m512i words[4] = {};
    for (int64_t unit = 0; unit < step.units; ++unit, s += 2 * kTileBytes / 4, p += kTileBytes) {
      if constexpr (drops) {
        const int64_t first = step.key + step.unit * kUnit, key = first + unit * kUnit;
        const uint32_t* of_unit = dropout_words() + vec::dropout_word(first, key) * kLanes;
        for (int i = 0; i < 4; ++i)
          words[i] = _mm512_srli_epi32(_mm512_loadu_si512(of_unit + i * kLanes), static_cast<unsigned>(dropout_bit(0, key)));
      }
      const bool whole = unit >= begin && unit < end;
      const __m512i of_unit = whole ? _mm512_set1_epi32(-1) : visible(step, seen, unit);
      if (whole || sees_all(of_unit))
        weigh_unit<kind, false, drops, kDepth, kGroups>(s, p, scale, shift, calm, of_unit, words, sums, next, product);
      else
        weigh_unit<kind, true, drops, kDepth, kGroups>(s, p, scale, shift, calm, of_unit, words, sums, next, product);
    }
    _mm512_store_ps(sum(tile), _mm512_add_ps(sums.exact[0], sums.exact[1]));
    _mm512_store_ps(sum_of_rounded(tile), sums.rounded);
    next.finish();
    product.finish();
    memory_barrier();
  }

  // What the Inf and NaN that left V add to a tile's accumulators, which are in memory.
  __attribute__((noinline)) void add_nonfinite(const Step& step) {
    float* const o = reinterpret_cast<float*>(acc(step.tile));
    const SeenKeys seen = seen_keys(step);
    const auto words_of = [&](int64_t unit) {
      const __m512i words = allowed(step, seen, unit);
      return has_bias() ? without_hidden_by_bias(t_, 0, place_of(step.tile, step.key, step.unit + unit, step.unit + unit + 1), words) : words;
    };
    alignas(64) char kinds[kMostCodeSquares][kTileBytes];
    int64_t units[kMostCodeSquares];
    for (int64_t unit = 0; unit < step.units;) {
      int64_t n = 0;
      for (; unit < step.units && n < kMostCodeSquares; ++unit) {
        const uint32_t marked = marks(step.unit + unit);
        if (marked == 0) continue;
        const __m512i words = words_of(unit);
        if (_mm512_test_epi32_mask(words, _mm512_set1_epi32(static_cast<int>(marked))) == 0) continue;
        const char* p = weights(step.parity) + unit * kTileBytes;
        for (int r = 0; r < 16; ++r) store_row(kinds[n], r, kinds_of(_mm512_load_si512(p + r * kTileRow), sees(words, r), sees(words, 16 + r)));
        units[n++] = step.unit + unit;
      }
      if (n == 0 || all_nan(o, at_.values * kLanes)) continue;
      memory_barrier();
      for (int64_t i = 0; i < at_.values; ++i) {
        bool any = false;
        for (int64_t j = 0; j < n; ++j) any |= is_coded(units[j], i) != 0;
        if (!any) continue;
        alignas(64) float sums[kLanes * kLanes];
        FATTN_TILE_ZERO(0);
        for (int64_t j = 0; j < n; ++j) {
          FATTN_TILE_LOAD(6, kinds[j], kTileRow);
          FATTN_TILE_LOAD(7, scratch_ + at_.codes + units[j] * value_stride() + i * kTileBytes, kTileRow);
          FATTN_TILE_DOT(0, 7, 6);
        }
        FATTN_TILE_STORE(0, sums, kTileRow);
        memory_barrier();
        for (int64_t r = 0; r < kLanes; ++r) vec::add_decoded(sums + r * kLanes, o + (i * kLanes + r) * kLanes);
      }
      memory_barrier();
    }
  }

  // Normalises a tile, transposes it back and stores its rows and their lse.
  void store_tile(int64_t tile) {
    const int64_t row = first_row(tile), rows = min_of(kLanes, t_.row_end - row);
    if (t_.inputs.sink) add_sink(tile);
    const __m512 total = _mm512_load_ps(sum(tile));
    const __mmask16 seen = _mm512_cmp_ps_mask(total, _mm512_setzero_ps(), _CMP_NEQ_UQ);
    // A NaN among the weights is sure to be in their own sum only: rounding may make a number of it.
    const __m512 divisor = _mm512_mask_mov_ps(_mm512_load_ps(sum_of_rounded(tile)), _mm512_cmp_ps_mask(total, total, _CMP_UNORD_Q), total);
    const __m512 inverse = _mm512_maskz_div_ps(seen, _mm512_set1_ps(kOptions ? t_.inputs.dropout_scale : 1.0f), divisor);
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
    __m512 shift = _mm512_mul_ps(_mm512_load_ps(max(tile)), _mm512_set1_ps(softmax(tile) == Softmax::kWhole ? options_.left() : kLn2 / kFixed));
    shift = _mm512_maskz_mov_ps(seen, shift);  // the logarithm of 0 says -inf already
    alignas(64) float lse[kLanes];
    _mm512_store_ps(lse, _mm512_add_ps(shift, log_accurate(total)));
    for (int64_t r = 0; r < rows; ++r) {
      const bool is_sink = t_.inputs.sink && (sum(tile)[r] == 0 || sum(tile)[r] >= vec::kGreatestSink);
      t_.lse[(row + r) * t_.lse_stride] = is_sink ? *t_.inputs.sink : lse[r];
    }
  }
  // To the sums of rows that have weights.
  void add_sink(int64_t tile) {
    const double unit = static_cast<double>(softmax(tile) == Softmax::kWhole ? options_.left() : kLn2 / kFixed);
    for (int64_t r = 0; r < kLanes; ++r) {
      if (sum(tile)[r] == 0) continue;
      const float weight = vec::weight_of_sink(*t_.inputs.sink, static_cast<double>(max(tile)[r]) * unit);
      sum(tile)[r] += weight;
      sum_of_rounded(tile)[r] += weight;
    }
  }

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
