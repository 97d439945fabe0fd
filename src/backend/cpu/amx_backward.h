// FlashAttention-2 backward in bf16 on AMX for a range of keys: query rows in lanes.
//
// The task's keys are packed once; blocks of 128 query rows of every head go past them, the last rows first, and each meets the keys panel by
// panel. For 32 keys and 32 rows:
//   S^T[key][q] = K Q^T     dP^T[key][q] = V dO^T                                     on AMX
//   P^T = exp2(S^T - lse)   dS^T = P^T (dP^T - delta), both rounded to bf16           on the vector units
// and for the whole panel, so that an accumulator takes several products each time that it is in a tile:
//   dV[key][d] += P^T dO    dK[key][d] += dS^T Q    dQ^T[d][q] += K^T dS^T            on AMX
// dS is kept in two orders: pairs of rows for dK, pairs of keys for dQ.
//
// Where pairs are hidden, Inf and NaN leave the operands of the last three products; codes say what they add (amx_nonfinite.h).
#pragma once

#include "backend/cpu/amx_exp.h"
#include "backend/cpu/amx_nonfinite.h"
#include "backend/cpu/amx_options.h"
#include "backend/cpu/dq_order.h"
#include "device_abi/lowest.h"
#include "shared/half.h"

namespace fattn::core::amx {

constexpr int64_t kBackwardRows = 128;  // query rows of a block
constexpr int64_t kSide = 32;           // rows and keys of a square: what a product contracts

// What left 32 rows of an operand: of which rows, and of which pairs of d tiles.
struct Coded {
  uint32_t rows, pairs;
};

struct BackwardLayout {
  int64_t keys, panel, depth, depth_v;  // squares of keys of the task and of a panel; d tiles of Q and K, of V and dO
  int64_t k, v, kt, dk, dv, q, q_pairs, dout, dout_pairs, dq, s, dp, p, ds, ds_keys, terms, gradient, mask_words, dropout_words;  // offsets
  int64_t kt_codes, q_codes, dout_codes, words, kinds, sums, key_codes, finite_k, bytes;                                          // likewise

  // inputs: scores depend on more than q k, weights are dropped, or the gradient of a bias is wanted.
  BackwardLayout(int64_t task_k, int64_t block_k, int headdim, int headdim_v, bool inputs) {
    keys = ceil_div(max_of(task_k, 1), kSide);
    panel = min_of(min_of(keys, kMostPanel), ceil_div(max_of(block_k, 1), kSide));
    depth = ceil_div(headdim, kTileDepth);
    depth_v = ceil_div(headdim_v, kTileDepth);
    bytes = 0;
    k = take(keys * 2 * depth);
    v = take(keys * 2 * depth_v);
    kt = take(keys * 2 * depth);
    dk = take(keys * 4 * depth);
    dv = take(keys * 4 * depth_v);
    q = take(kSquares * 2 * depth);
    q_pairs = take(kSquares * 2 * depth);
    dout = take(kSquares * 2 * depth_v);
    dout_pairs = take(kSquares * 2 * depth_v);
    dq = take(kSquares * 4 * depth);
    s = take(4);
    dp = take(4);
    p = take(panel * kSquares * 2);
    ds = take(panel * kSquares * 2);
    ds_keys = take(panel * kSquares * 2);
    terms = take(inputs ? 4 : 0);
    gradient = take(inputs ? 4 : 0);
    mask_words = take(inputs ? 1 : 0);
    dropout_words = take(inputs ? 1 : 0);
    kt_codes = take(keys * 2 * depth);
    q_codes = take(kSquares * 2 * depth);
    dout_codes = take(kSquares * 2 * depth_v);
    words = take(ceil_div(panel * kSquares * 2 * kTileRow, kTileBytes));
    kinds = take(2);
    sums = take(4);
    key_codes = bytes;
    bytes += ceil_div(keys * static_cast<int64_t>(sizeof(Coded)), 64) * 64;
    finite_k = bytes;
    bytes += ceil_div(keys, 64) * 64;
  }

  static constexpr int64_t kSquares = kBackwardRows / kSide;
  static constexpr int64_t kMostPanel = 64;

 private:
  int64_t take(int64_t tiles) {
    const int64_t at = bytes;
    bytes += tiles * kTileBytes;
    return at;
  }
};

template <bool kOptions>
class Backward {
 public:
  explicit Backward(const BackwardTask& task)
      : t_(task),
        options_(task),
        hides_(kOptions && options_.hides),
        at_(task.key_end - task.key_begin, task.block_k, task.headdim, task.headdim_v, kOptions && (options_.has_inputs() || task.has_dbias)),
        scratch_(static_cast<char*>(task.scratch)) {
    log2_scale_ = options_.scale * kLog2E;  // a negative scale flips the signs of Q instead
  }

  void run() {
    const TileScope tiles;
    load_keys();
    for (row_ = (ceil_div(t_.seqlen_q, kBackwardRows) - 1) * kBackwardRows; row_ >= 0; row_ -= kBackwardRows)
      for (head_ = 0; head_ < t_.group; ++head_) {
        rows_ = min_of(kBackwardRows, t_.seqlen_q - row_);
        say_begun(t_, row_, row_ + rows_, head_);
        const int64_t keys = t_.key_end - t_.key_begin;
        const int64_t begin = (first_key(row_) - t_.key_begin) / kSide * kSide, end = limit(row_ + rows_ - 1) - t_.key_begin;
        if (begin >= end || !meets_documents(keys)) {
          pass_over(row_, rows_, 0, keys);
          continue;
        }
        load_rows();
        pass_over(row_, rows_, 0, begin);
        for (int64_t square = begin / kSide; square * kSide < end; square += at_.panel)
          add_panel(square, min_of(at_.panel, ceil_div(end, kSide) - square));
        pass_over(row_, rows_, ceil_div(end, kSide) * kSide, keys);
        await_turn(t_, row_, head_);
        store_dq();
      }
    store_gradient(at_.dk, at_.depth, t_.headdim, t_.scale, static_cast<uint16_t*>(t_.dk), t_.dk_stride);
    store_gradient(at_.dv, at_.depth_v, t_.headdim_v, 1.0f, static_cast<uint16_t*>(t_.dv), t_.dv_stride);
  }

 private:
  static constexpr int64_t kSquares = BackwardLayout::kSquares;
  static constexpr char kHasNonfinite = 0, kIsFinite = 1, kIsSplit = 2;

  // Of the task's keys a row sees [first_key, limit).
  int64_t limit(int64_t row) const { return max_of(0, min_of(t_.key_end, row + t_.diagonal)); }
  int64_t first_key(int64_t row) const { return kOptions ? max_of(t_.key_begin, row + t_.left_diagonal) : t_.key_begin; }
  char* tile(int64_t offset, int64_t index) const { return scratch_ + offset + index * kTileBytes; }
  float* values(int64_t offset, int64_t index) const { return reinterpret_cast<float*>(tile(offset, index)); }
  // Of a square of the task's keys: kIsFinite, kHasNonfinite, or kIsSplit, if these left K^T.
  char& finite_keys(int64_t square) const { return scratch_[at_.finite_k + square]; }
  Coded& key_codes(int64_t square) const { return reinterpret_cast<Coded*>(scratch_ + at_.key_codes)[square]; }
  // Which keys of square c of the panel the rows of square r see, of their halves. Kept where Inf and NaN have left.
  __m512i* seen_words(int64_t c, int64_t r) const { return reinterpret_cast<__m512i*>(scratch_ + at_.words) + (c * kSquares + r) * 2; }

  // May some of the block's rows and of the task's keys be of the same document?
  bool meets_documents(int64_t keys) const {
    return !kOptions || !options_.documents || vec::may_meet(ids_of_rows(row_, rows_), ids_of_keys(0, keys));
  }
  vec::IdRange ids_of_rows(int64_t row, int64_t rows) const { return vec::ids_of(t_.inputs.document_q, row, row + rows); }
  vec::IdRange ids_of_keys(int64_t key, int64_t end_key) const {
    return vec::ids_of(t_.inputs.document_k, t_.key_begin + key, t_.key_begin + end_key);
  }

  vec::BiasGradient<vec::bf16> bias_gradient() const { return vec::bias_gradient_of<vec::bf16>(t_, head_); }
  // Nothing comes to the gradient of the bias from these rows and keys of the task.
  void pass_over(int64_t row, int64_t rows, int64_t key, int64_t end_key) const {
    if (kOptions && t_.has_dbias && key < end_key) bias_gradient().pass_over(row, row + rows, t_.key_begin + key, t_.key_begin + end_key);
  }

  static bool all_finite(const uint16_t* x, int64_t stride, int64_t rows, int headdim) {
    __m512i largest = _mm512_setzero_si512();
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t d = 0; d < headdim; d += 32)
        largest = _mm512_max_epu16(largest, _mm512_and_si512(load_row(x, stride, r, rows, d, headdim), _mm512_set1_epi32(0x7fff7fff)));
    return largest_epu16(largest) < kInfinityBits;
  }

  void clear(int64_t offset, int64_t tiles) const {
    for (int64_t r = 0; r < tiles * 16; ++r) store_row(scratch_ + offset, r, _mm512_setzero_si512());
  }

  void load_keys() {
    const uint16_t* k = static_cast<const uint16_t*>(t_.k) + t_.key_begin * t_.k_stride;
    const uint16_t* v = static_cast<const uint16_t*>(t_.v) + t_.key_begin * t_.v_stride;
    for (int64_t square = 0; square < at_.keys; ++square) {
      const uint16_t *ks = k + square * kSide * t_.k_stride, *vs = v + square * kSide * t_.v_stride;
      const int64_t n = min_of(kSide, t_.key_end - t_.key_begin - square * kSide);
      for (int64_t half = 0; half < 2; ++half) {
        pack_rows(ks + half * 16 * t_.k_stride, t_.k_stride, n - half * 16, t_.headdim, tile(at_.k, (square * 2 + half) * at_.depth));
        pack_rows(vs + half * 16 * t_.v_stride, t_.v_stride, n - half * 16, t_.headdim_v, tile(at_.v, (square * 2 + half) * at_.depth_v));
      }
      pack_transposed_rows(ks, t_.k_stride, n, t_.headdim, tile(at_.kt, square * 2 * at_.depth));
      finite_keys(square) = all_finite(ks, t_.k_stride, n, t_.headdim) && all_finite(vs, t_.v_stride, n, t_.headdim_v) ? kIsFinite : kHasNonfinite;
    }
    clear(at_.dk, at_.keys * 4 * at_.depth);
    clear(at_.dv, at_.keys * 4 * at_.depth_v);
    memory_barrier();
  }

  // Rounding to bf16 by an integer addition would make a number of a NaN with ones in its low half.
  static float plain_nan(float x) { return x == x ? x : __builtin_nanf(""); }

  void load_rows() {
    const uint16_t* q = static_cast<const uint16_t*>(t_.q) + head_ * t_.q_head_stride + row_ * t_.q_stride;
    const uint16_t* dout = static_cast<const uint16_t*>(t_.dout) + head_ * t_.dout_head_stride + row_ * t_.dout_stride;
    const float* lse = t_.lse + head_ * t_.lse_head_stride + row_ * t_.lse_stride;
    const float* delta = t_.delta + head_ * t_.delta_head_stride + row_ * t_.delta_stride;
    for (int64_t i = 0; i < kBackwardRows; ++i) {
      const bool empty = i >= rows_ || lse[i * t_.lse_stride] < kLowestLse;
      lse_[i] = empty ? 0.0f : plain_nan(lse[i * t_.lse_stride] * (kOptions ? 1.0f : kLog2E * kFixed));
      delta_[i] = empty ? 0.0f : plain_nan(delta[i * t_.delta_stride]);
      begin_[i] = empty ? 0 : static_cast<int32_t>(min_of(first_key(row_ + i), t_.key_end) - t_.key_begin);
      visible_[i] = empty ? 0 : static_cast<int32_t>(max_of(begin_[i], limit(row_ + i) - t_.key_begin));
    }
    for (int64_t square = 0; square * kSide < rows_; ++square) {
      const uint16_t *qs = q + square * kSide * t_.q_stride, *ds = dout + square * kSide * t_.dout_stride;
      const int64_t n = rows_ - square * kSide;
      for (int64_t half = 0; half < 2; ++half) {
        pack_transposed(qs + half * 16 * t_.q_stride, t_.q_stride, n - half * 16, t_.headdim, t_.scale < 0 ? 0x80008000u : 0u,
                        tile(at_.q, (square * 2 + half) * at_.depth));
        pack_transposed(ds + half * 16 * t_.dout_stride, t_.dout_stride, n - half * 16, t_.headdim_v, 0,
                        tile(at_.dout, (square * 2 + half) * at_.depth_v));
      }
      pack_pairs(qs, t_.q_stride, n, t_.headdim, tile(at_.q_pairs, square * 2 * at_.depth));
      pack_pairs(ds, t_.dout_stride, n, t_.headdim_v, tile(at_.dout_pairs, square * 2 * at_.depth_v));
    }
    split_rows_ = false;
    finite_rows_ = all_finite(q, t_.q_stride, rows_, t_.headdim) && all_finite(dout, t_.dout_stride, rows_, t_.headdim_v);
    clear(at_.dq, kSquares * 4 * at_.depth);
    memory_barrier();
  }

  // Of the task's keys: those that some row of a square sees lie in [seen_begin, seen_end), those that all see are [whole_begin, whole_end).
  struct SquareRows {
    int64_t seen_begin, seen_end, whole_begin, whole_end;
  };
  SquareRows rows_of_square(int64_t r) const {
    SquareRows rows{t_.key_end - t_.key_begin, 0, 0, t_.key_end - t_.key_begin};
    for (int64_t i = r * kSide; i < (r + 1) * kSide; ++i) {
      rows.whole_begin = max_of(rows.whole_begin, begin_[i]);
      rows.whole_end = min_of(rows.whole_end, visible_[i]);
      if (begin_[i] >= visible_[i]) continue;
      rows.seen_begin = min_of(rows.seen_begin, begin_[i]);
      rows.seen_end = max_of(rows.seen_end, visible_[i]);
    }
    return rows;
  }

  // Everything that `squares` squares of keys from `first` on give with the block of rows at hand.
  void add_panel(int64_t first, int64_t squares) {
    const int64_t row_squares = ceil_div(rows_, kSide);
    bool finite = finite_rows_, split = split_rows_;
    for (int64_t square = first; square < first + squares; ++square) {
      finite &= finite_keys(square) == kIsFinite;
      split |= finite_keys(square) == kIsSplit;
    }
    SquareRows rows[kSquares];
    bool masked = hides_;
    for (int64_t r = 0; r < row_squares; ++r) {
      rows[r] = rows_of_square(r);
      masked |= rows[r].whole_end < (first + squares) * kSide || rows[r].whole_begin > first * kSide;
    }
    split |= masked && !finite;
    if (split) split_operands(first, squares);

    uint64_t computed[kSquares] = {};  // bit c: the rows' square with square c of the panel
    for (int64_t r = 0; r < row_squares; ++r) {
      dropout_key_ = -1;
      for (int64_t c = 0; c < squares; ++c) {
        const int64_t begin = (first + c) * kSide, end = begin + kSide;
        if (rows[r].seen_end > begin && rows[r].seen_begin < end &&
            compute_square(first + c, c, r, rows[r].whole_end >= end && rows[r].whole_begin <= begin, split)) {
          computed[r] |= uint64_t{1} << c;
        } else {
          pass_over(row_ + r * kSide, min_of(kSide, rows_ - r * kSide), begin, min_of(end, t_.key_end - t_.key_begin));
        }
      }
    }
    add_products_of_panel(first, squares, row_squares, computed);
    if (split) add_nonfinite(first, squares, row_squares, computed);
    memory_barrier();
  }

  // Inf and NaN leave the rows at hand and the keys of a panel, unless they have.
  __attribute__((noinline)) void split_operands(int64_t first, int64_t squares) {
    const auto split = [&](int64_t operand, int64_t codes, int64_t tiles, bool all_nan, bool rows_in_pairs) {
      Coded coded{0, 0};
      for (int64_t i = 0; i < tiles; ++i) {
        char *const x = tile(operand, i), *const to = tile(codes, i);
        const uint32_t rows = rows_in_pairs ? split_pairs(x, to, all_nan) : in_order(split_tile(x, to, all_nan));
        coded.rows |= rows;
        if (rows) coded.pairs |= 1u << i / 2;
      }
      return coded;
    };
    if (!finite_rows_ && !split_rows_)
      for (int64_t r = 0; r * kSide < rows_; ++r) {
        const int64_t of_q = r * 2 * at_.depth * kTileBytes, of_dout = r * 2 * at_.depth_v * kTileBytes;
        q_codes_[r] = split(at_.q_pairs + of_q, at_.q_codes + of_q, 2 * at_.depth, true, true);  // lse of such a row is no number
        dout_codes_[r] = split(at_.dout_pairs + of_dout, at_.dout_codes + of_dout, 2 * at_.depth_v, false, true);
      }
    split_rows_ = !finite_rows_;
    for (int64_t square = first; square < first + squares; ++square) {
      if (finite_keys(square) != kHasNonfinite) continue;
      const int64_t at = square * 2 * at_.depth * kTileBytes;
      key_codes(square) = split(at_.kt + at, at_.kt_codes + at, 2 * at_.depth, true, false);
      finite_keys(square) = kIsSplit;
    }
    memory_barrier();
  }

  // Where Inf and NaN have left, what they add to the panel's three products: of pairs that count.
  __attribute__((noinline)) void add_nonfinite(int64_t first, int64_t squares, int64_t row_squares, const uint64_t (&computed)[kSquares]) {
    const auto has = [&](int64_t r, int64_t c) { return (computed[r] >> c & 1) != 0; };
    // Do rows of these bits see a key, or any rows keys of these bits?
    const auto rows_count = [&](int64_t c, int64_t r, uint32_t rows) {
      const __m512i* words = seen_words(c, r);
      return (_mm512_test_epi32_mask(words[0], words[0]) & rows) != 0 || (_mm512_test_epi32_mask(words[1], words[1]) & rows >> 16) != 0;
    };
    const auto keys_count = [&](int64_t c, int64_t r, uint32_t keys) {
      const __m512i *words = seen_words(c, r), bits = _mm512_set1_epi32(static_cast<int>(keys));
      return _mm512_test_epi32_mask(words[0], bits) != 0 || _mm512_test_epi32_mask(words[1], bits) != 0;
    };
    const auto add_to_keys = [&](const Coded* coded, int64_t codes, int64_t depth, int64_t acc) {
      for (int64_t c = 0; c < squares; ++c)
        for (int64_t d = 0; d < depth; ++d)
          add_codes(
              row_squares, acc + ((first + c) * 4 * depth + d * 2) * kTileBytes, 2 * depth,
              [&](int64_t r) { return has(r, c) && (coded[r].pairs >> d & 1) != 0 && rows_count(c, r, coded[r].rows); },
              [&](int64_t r) {
                tell_kinds_of_rows(c, r);
                add_products(tile(at_.kinds, 0), tile(codes, (r * depth + d) * 2), 1, 0, kTileBytes, 0, kTileBytes, 1, tile(at_.sums, 0), 2, true);
              });
    };
    if (split_rows_) {
      add_to_keys(dout_codes_, at_.dout_codes, at_.depth_v, at_.dv);
      add_to_keys(q_codes_, at_.q_codes, at_.depth, at_.dk);
    }
    for (int64_t r = 0; r < row_squares; ++r)
      for (int64_t d = 0; d < at_.depth; ++d)
        add_codes(
            squares, at_.dq + (r * 4 * at_.depth + d * 2) * kTileBytes, 2 * at_.depth,
            [&](int64_t c) {
              if (!has(r, c) || finite_keys(first + c) != kIsSplit) return false;
              const Coded& coded = key_codes(first + c);
              return (coded.pairs >> d & 1) != 0 && keys_count(c, r, coded.rows);
            },
            [&](int64_t c) {
              tell_kinds_of_keys(c, r);
              add_products(tile(at_.kt_codes, ((first + c) * at_.depth + d) * 2), tile(at_.kinds, 0), 1, 0, kTileBytes, 0, kTileBytes, 1,
                           tile(at_.sums, 0), 2, false);
            });
  }

  // Adds to two rows of two tiles at `acc`, which lie acc_row tiles apart, what products of codes and kinds say: `product` adds that of a square of n
  // that `counts` to the sums.
  template <class Counts, class Product>
  void add_codes(int64_t n, int64_t acc, int64_t acc_row, const Counts& counts, const Product& product) {
    float *const upper = values(acc, 0), *const lower = values(acc, acc_row), *const sums = values(at_.sums, 0);
    constexpr int64_t kFloats = 2 * kTileBytes / 4;  // of two tiles
    int pending = 0;
    const auto add = [&] {
      memory_barrier();
      for (int64_t i = 0; i < kFloats; i += kLanes) {
        vec::add_decoded(sums + i, upper + i);
        vec::add_decoded(sums + kFloats + i, lower + i);
      }
      pending = 0;
      memory_barrier();
    };
    for (int64_t i = 0; i < n; ++i) {
      if (!counts(i)) continue;
      if (pending == 0) {
        if (all_nan(upper, kFloats / kLanes) && all_nan(lower, kFloats / kLanes)) return;
        clear(at_.sums, 4);
      }
      product(i);
      if (++pending == kMostCodeSquares) add();
    }
    if (pending > 0) add();
  }

  // The kinds of the pairs of square c of the panel and square r of the rows, as P^T lies, and as dS^T lies for dQ, where it matters only which
  // count.
  void tell_kinds_of_rows(int64_t c, int64_t r) const {
    const __m512i* words = seen_words(c, r);
    for (int key = 0; key < kSide; ++key) {
      const char* p = tile(at_.p, (c * kSquares + r) * 2 + key / 16);
      store_row(tile(at_.kinds, key / 16), key % 16, kinds_of(_mm512_load_si512(p + key % 16 * kTileRow), sees(words[0], key), sees(words[1], key)));
    }
    memory_barrier();
  }
  void tell_kinds_of_keys(int64_t c, int64_t r) const {
    const __m512i* words = seen_words(c, r);
    for (int half = 0; half < 2; ++half)
      for (int key = 0; key < 16; ++key)
        store_row(tile(at_.kinds, half), key, kinds_of(_mm512_set1_epi16(kSomeWeight), sees(words[half], key), sees(words[half], 16 + key)));
    memory_barrier();
  }

  // The panel's three products. Each takes the squares from its first to its last one that was computed; others between are zeros.
  void add_products_of_panel(int64_t first, int64_t squares, int64_t row_squares, const uint64_t (&computed)[kSquares]) {
    const auto has = [&](int64_t r, int64_t c) { return (computed[r] >> c & 1) != 0; };
    struct Range {
      int64_t begin, end;
    };
    Range of_keys[BackwardLayout::kMostPanel], of_rows[kSquares];
    for (int64_t c = 0; c < squares; ++c) {
      of_keys[c] = {row_squares, 0};
      for (int64_t r = 0; r < row_squares; ++r)
        if (has(r, c)) of_keys[c] = {min_of(of_keys[c].begin, r), r + 1};
    }
    for (int64_t r = 0; r < row_squares; ++r) {
      of_rows[r] = {squares, 0};
      for (int64_t c = 0; c < squares; ++c)
        if (has(r, c)) of_rows[r] = {min_of(of_rows[r].begin, c), c + 1};
      for (int64_t c = 0; c < squares; ++c)
        if (!has(r, c) && ((of_keys[c].begin < r && r < of_keys[c].end) || (of_rows[r].begin < c && c < of_rows[r].end))) clear_square(c, r);
    }
    memory_barrier();
    for (int64_t c = 0; c < squares; ++c) {
      const auto [begin, end] = of_keys[c];
      add_products(tile(at_.p, (c * kSquares + begin) * 2), tile(at_.dout_pairs, begin * 2 * at_.depth_v), end - begin, 2, kTileBytes,
                   2 * at_.depth_v, kTileBytes, at_.depth_v, tile(at_.dv, (first + c) * 4 * at_.depth_v), 2 * at_.depth_v, true);
      add_products(tile(at_.ds, (c * kSquares + begin) * 2), tile(at_.q_pairs, begin * 2 * at_.depth), end - begin, 2, kTileBytes, 2 * at_.depth,
                   kTileBytes, at_.depth, tile(at_.dk, (first + c) * 4 * at_.depth), 2 * at_.depth, true);
    }
    for (int64_t r = 0; r < row_squares; ++r) {
      const auto [begin, end] = of_rows[r];
      add_products(tile(at_.kt, (first + begin) * 2 * at_.depth), tile(at_.ds_keys, (begin * kSquares + r) * 2), end - begin, 2 * at_.depth,
                   kTileBytes, 2 * kSquares, kTileBytes, at_.depth, tile(at_.dq, r * 4 * at_.depth), 2 * at_.depth, false);
    }
  }

  // Fetches what options read and write of the square of rows after square r, in the next panel after the last one.
  void prefetch_inputs(int64_t keys, int64_t r) const {
    const bool below = (r + 1) * kSide < rows_;
    const int64_t row = below ? r + 1 : 0, key = t_.key_begin + (keys + (below ? 0 : at_.panel)) * kSide;
    const vec::TilePlace next{row_ + row * kSide, min_of(kSide, rows_ - row * kSide), key, min_of(kSide, t_.key_end - key)};
    if (vec::has_pairs(t_.inputs)) vec::prefetch_terms<vec::bf16>(t_.inputs, head_, next, 0, 1);
    if (t_.has_dbias) bias_gradient().prefetch(next, 0, 1);
  }

  // P and dS of square `keys` of the task's keys (`c` of the panel) and square r of the rows, and the bias's gradient. False if a mask or documents
  // hide all of it. `whole`: all rows see all keys, as far as their places go.
  bool compute_square(int64_t keys, int64_t c, int64_t r, bool whole, bool split) {
    SquareOptions with{};
    const vec::TilePlace at{row_ + r * kSide, min_of(kSide, rows_ - r * kSide), t_.key_begin + keys * kSide,
                            min_of(kSide, t_.key_end - t_.key_begin - keys * kSide)};
    if constexpr (kOptions) {
      if (options_.masked) {
        const vec::Seen seen = vec::make_mask_words<2>(t_.inputs, head_, at, mask_words());
        if (seen == vec::Seen::kNone) return false;
        with.masked = seen == vec::Seen::kSome;
      }
      if (options_.documents) {
        const vec::IdRange of_rows = ids_of_rows(at.row, at.rows), of_keys = ids_of_keys(keys * kSide, keys * kSide + at.keys);
        if (!vec::may_meet(of_rows, of_keys)) return false;
        with.mixed = !vec::are_one(of_rows, of_keys);
      }
      with.whole = whole;
      with.split = split;
      prefetch_inputs(keys, r);
    }
    if (split)
      for (int q = 0; q < 2; ++q) seen_words(c, r)[q] = counting_words_of_square(at, keys, r, q, with);
    multiply_square(tile(at_.k, keys * 2 * at_.depth), tile(at_.q, r * 2 * at_.depth), at_.depth, tile(at_.s, 0));
    multiply_square(tile(at_.v, keys * 2 * at_.depth_v), tile(at_.dout, r * 2 * at_.depth_v), at_.depth_v, tile(at_.dp, 0));
    memory_barrier();
    if constexpr (kOptions)
      weigh_with_options(at, keys, c, r, with);
    else if (whole)
      weigh_square<false>(keys, c, r);
    else
      weigh_square<true>(keys, c, r);
    memory_barrier();
    return true;
  }

  // to[32][32] = a (2 rows of `depth` tiles) times b (2 columns of `depth` tiles).
  static void multiply_square(const char* a, const char* b, int64_t depth, char* to) {
    FATTN_TILE_ZERO(0);
    FATTN_TILE_ZERO(1);
    FATTN_TILE_ZERO(2);
    FATTN_TILE_ZERO(3);
    for (int64_t d = 0; d < depth; ++d, a += kTileBytes, b += kTileBytes) {
      FATTN_TILE_LOAD(4, a, kTileRow);
      FATTN_TILE_LOAD(6, b, kTileRow);
      FATTN_TILE_DOT(0, 4, 6);
      FATTN_TILE_LOAD(7, b + depth * kTileBytes, kTileRow);
      FATTN_TILE_DOT(1, 4, 7);
      FATTN_TILE_LOAD(5, a + depth * kTileBytes, kTileRow);
      FATTN_TILE_DOT(2, 5, 6);
      FATTN_TILE_DOT(3, 5, 7);
    }
    FATTN_TILE_STORE(0, to, 2 * kTileRow);
    FATTN_TILE_STORE(1, to + kTileRow, 2 * kTileRow);
    FATTN_TILE_STORE(2, to + 2 * kTileBytes, 2 * kTileRow);
    FATTN_TILE_STORE(3, to + 2 * kTileBytes + kTileRow, 2 * kTileRow);
  }

  // Contracts n squares and adds to d-pairs of accumulators. Squares of a and b are a_step and b_step tiles apart.
  // walk_b: a has two tiles for all d and b two a d-pair (dV, dK: [key][d]); else the other way round (dQ^T: [d][q], where
  // tiles of the accumulator are ordered by q first all the same).
  static void add_products(const char* a, const char* b, int64_t n, int64_t a_step, int64_t a_pair, int64_t b_step, int64_t b_pair, int64_t d_pairs,
                           char* acc, int64_t acc_row, bool walk_b) {
    if (n <= 0) return;
    for (int64_t d = 0; d < d_pairs; ++d) {
      char* c = acc + d * 2 * kTileBytes;
      char* c2 = c + acc_row * kTileBytes;
      // c[0], c[1]: the two d tiles of the first 16 keys or rows; c2: of the second.
      FATTN_TILE_LOAD(0, c, kTileRow);
      FATTN_TILE_LOAD(1, c + kTileBytes, kTileRow);
      FATTN_TILE_LOAD(2, c2, kTileRow);
      FATTN_TILE_LOAD(3, c2 + kTileBytes, kTileRow);
      const char* x = walk_b ? a : a + d * 2 * kTileBytes;
      const char* y = walk_b ? b + d * 2 * kTileBytes : b;
      if (walk_b) {
        for (int64_t i = 0; i < n; ++i, x += a_step * kTileBytes, y += b_step * kTileBytes) {
          FATTN_TILE_LOAD(4, x, kTileRow);
          FATTN_TILE_LOAD(6, y, kTileRow);
          FATTN_TILE_DOT(0, 4, 6);
          FATTN_TILE_LOAD(7, y + b_pair, kTileRow);
          FATTN_TILE_DOT(1, 4, 7);
          FATTN_TILE_LOAD(5, x + a_pair, kTileRow);
          FATTN_TILE_DOT(2, 5, 6);
          FATTN_TILE_DOT(3, 5, 7);
        }
      } else {
        for (int64_t i = 0; i < n; ++i, x += a_step * kTileBytes, y += b_step * kTileBytes) {
          FATTN_TILE_LOAD(4, x, kTileRow);
          FATTN_TILE_LOAD(6, y, kTileRow);
          FATTN_TILE_DOT(0, 4, 6);
          FATTN_TILE_LOAD(5, x + a_pair, kTileRow);
          FATTN_TILE_DOT(1, 5, 6);
          FATTN_TILE_LOAD(7, y + b_pair, kTileRow);
          FATTN_TILE_DOT(2, 4, 7);
          FATTN_TILE_DOT(3, 5, 7);
        }
      }
      FATTN_TILE_STORE(0, c, kTileRow);
      FATTN_TILE_STORE(1, c + kTileBytes, kTileRow);
      FATTN_TILE_STORE(2, c2, kTileRow);
      FATTN_TILE_STORE(3, c2 + kTileBytes, kTileRow);
    }
  }

  // dS of the keys row, row + 16 and of the two halves of the rows, to be cut to bf16: in pairs of rows, and in pairs of keys.
  FATTN_AMX_INLINE void store_gradients(char* ds, char* ds_keys, int row, const __m512i (&rounded)[2][2]) {
    for (int i = 0; i < 2; ++i) {
      store_row(ds + i * kTileBytes, row, _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(rounded[i][0], 16), rounded[i][1]));
      store_row(ds_keys + i * kTileBytes, row, _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(rounded[0][i], 16), rounded[1][i]));
    }
  }

  // P and dS of 32 keys (square `keys` of the task, `c` of the panel) and 32 rows (square r of the block).
  template <bool masked>
  void weigh_square(int64_t keys, int64_t c, int64_t r) {
    const float *s = values(at_.s, 0), *dp = values(at_.dp, 0);
    char *p = tile(at_.p, (c * kSquares + r) * 2), *ds = tile(at_.ds, (c * kSquares + r) * 2), *ds_keys = tile(at_.ds_keys, (c * kSquares + r) * 2);
    const __m512 scale = _mm512_set1_ps(log2_scale_ * kFixed), nan = _mm512_set1_ps(__builtin_nanf(""));
    const __m512 lse[2] = {_mm512_load_ps(lse_ + r * kSide), _mm512_load_ps(lse_ + r * kSide + 16)};
    const __m512 delta[2] = {_mm512_load_ps(delta_ + r * kSide), _mm512_load_ps(delta_ + r * kSide + 16)};
    const __m512i skipped = _mm512_set1_epi32(static_cast<int>(keys * kSide)), half = _mm512_set1_epi32(0x8000);
    const __m512i visible[2] = {_mm512_sub_epi32(_mm512_load_si512(visible_ + r * kSide), skipped),
                                _mm512_sub_epi32(_mm512_load_si512(visible_ + r * kSide + 16), skipped)};
    for (int row = 0; row < 16; ++row) {
      __m512i rounded[2][2];  // dS of the keys row, row + 16 and of the two halves of the rows
#pragma GCC unroll 2
      for (int key = 0; key < 2; ++key) {
        __m512 w[2];
#pragma GCC unroll 2
        for (int q = 0; q < 2; ++q) {
          const int at = (key * 16 + row) * 32 + q * 16;
          const __m512 u = _mm512_fmsub_ps(_mm512_load_ps(s + at), scale, lse[q]);
          w[q] = _mm512_mask_mov_ps(exp2_coarse(u), _mm512_cmp_ps_mask(u, u, _CMP_UNORD_Q), nan);
          __m512 x = _mm512_mul_ps(w[q], _mm512_sub_ps(_mm512_load_ps(dp + at), delta[q]));
          if (masked) {
            const __mmask16 sees = _mm512_cmpgt_epi32_mask(visible[q], _mm512_set1_epi32(key * 16 + row));
            w[q] = _mm512_maskz_mov_ps(sees, w[q]);
            x = _mm512_maskz_mov_ps(sees, x);
          }
          rounded[key][q] = _mm512_add_epi32(_mm512_castps_si512(x), half);
        }
        store_row(p + key * kTileBytes, row, pair_bf16(w[0], w[1]));
      }
      store_gradients(ds, ds_keys, row, rounded);
    }
  }

  // What options make of a square beside products.
  struct SquareOptions {
    bool whole;          // all rows see all keys, as far as their places go
    bool masked, mixed;  // pairs are hidden by the mask, by documents
    bool split;          // Inf and NaN have left operands; seen_words() says which pairs count
  };
  float* terms() const { return values(at_.terms, 0); }         // [32 keys][32 rows]: what is added to capped scores
  float* gradients() const { return values(at_.gradient, 0); }  // likewise, of whole scores
  uint32_t* mask_words() const { return reinterpret_cast<uint32_t*>(tile(at_.mask_words, 0)); }
  uint32_t* dropout_words() const { return reinterpret_cast<uint32_t*>(tile(at_.dropout_words, 0)); }

  // P and dS with options.
  void weigh_with_options(const vec::TilePlace& at, int64_t keys, int64_t c, int64_t r, const SquareOptions& with) {
    const bool apart = options_.capped && options_.added;  // from the scores, which are capped
    float* const scores = apart ? terms() : values(at_.s, 0);
    __m512 unused[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    if (apart)
      for (int64_t i = 0; i < kSide * kSide; i += kLanes) _mm512_store_ps(scores + i, _mm512_setzero_ps());
    if (options_.added) vec::add_terms<2, vec::bf16>(t_.inputs, head_, at, options_.capped ? 1.0f : options_.scale, scores, unused);
    if (options_.drops && dropout_key_ != at.key / kDropoutBlock) {
      dropout_key_ = at.key / kDropoutBlock;
      vec::make_dropout_words<2>(t_.inputs, head_, {at.row, at.rows, dropout_key_ * kDropoutBlock, kDropoutBlock}, dropout_words());
    }
    const bool counts = !with.whole || with.masked || with.mixed || t_.inputs.bias;
    __m512i seen[2];
    for (int q = 0; counts && q < 2; ++q) seen[q] = with.split ? seen_words(c, r)[q] : words_of_square(at, keys, r, q, with);
    const auto weigh = [&](auto capped, auto drops, auto keeps) __attribute__((always_inline)) {
      counts ? weigh_square_with<capped.value, drops.value, true, keeps.value>(keys, c, r, seen, with.split, apart)
             : weigh_square_with<capped.value, drops.value, false, keeps.value>(keys, c, r, seen, with.split, apart);
    };
    const auto weigh_as = [&](auto capped, auto keeps) __attribute__((always_inline)) {
      options_.drops ? weigh(capped, vec::Flag<true>{}, keeps) : weigh(capped, vec::Flag<false>{}, keeps);
    };
    if (options_.capped)
      t_.has_dbias ? weigh_as(vec::Flag<true>{}, vec::Flag<true>{}) : weigh_as(vec::Flag<true>{}, vec::Flag<false>{});
    else
      t_.has_dbias ? weigh_as(vec::Flag<false>{}, vec::Flag<true>{}) : weigh_as(vec::Flag<false>{}, vec::Flag<false>{});
    if (!t_.has_dbias) return;
    bias_gradient().template add<2>(gradients(), at);
  }

  // Which keys of a square half q of its rows sees, as far as places, the mask and documents go.
  __m512i words_of_square(const vec::TilePlace& at, int64_t keys, int64_t r, int q, const SquareOptions& with) const {
    const int64_t row = r * kSide + q * kLanes;
    __m512i words = SeenKeys{_mm512_load_si512(begin_ + row), _mm512_load_si512(visible_ + row)}.words(keys * kSide);
    if (with.masked) words = _mm512_and_si512(words, _mm512_loadu_si512(mask_words() + q * kLanes));
    if (with.mixed) {
      const __m512i ids = vec::load_ids(t_.inputs.document_q + at.row + q * kLanes, at.rows - q * kLanes);
      words = _mm512_and_si512(words, words_of_documents(ids, t_.inputs.document_k + at.key, at.keys));
    }
    return words;
  }

  // The same, and no bias.
  __m512i counting_words_of_square(const vec::TilePlace& at, int64_t keys, int64_t r, int q, const SquareOptions& with) const {
    const __m512i words = words_of_square(at, keys, r, q, with);
    if (!kOptions || !t_.inputs.bias || at.rows <= q * kLanes) return words;
    return without_hidden_by_bias(t_, head_, {at.row + q * kLanes, min_of(kLanes, at.rows - q * kLanes), at.key, at.keys}, words);
  }

  // As weigh_square, with the score's functions of the vector kernels. kCounts: only pairs that are `seen` and no bias hides count, kKeeps: the
  // gradient of whole scores is wanted.
  template <bool kCapped, bool kDrops, bool kCounts, bool kKeeps>
  __attribute__((noinline)) void weigh_square_with(int64_t keys, int64_t c, int64_t r, const __m512i (&seen)[2], bool split, bool apart) {
    const float *s = values(at_.s, 0), *dp = values(at_.dp, 0), *added = apart ? terms() : nullptr;
    float* const to_gradient = gradients();
    char *p = tile(at_.p, (c * kSquares + r) * 2), *ds = tile(at_.ds, (c * kSquares + r) * 2), *ds_keys = tile(at_.ds_keys, (c * kSquares + r) * 2);
    const vec::CappedScore cap(static_cast<double>(options_.scale), kCapped ? t_.softcap : 1.0f);
    const __m512 scale = _mm512_set1_ps(kCapped ? t_.softcap : options_.left()), to_fixed = _mm512_set1_ps(kLog2E * kFixed);
    const __m512 nan = _mm512_set1_ps(__builtin_nanf(""));
    const __m512 drop_scale = _mm512_set1_ps(t_.inputs.dropout_scale);
    const __m512 hidden = _mm512_set1_ps(split ? __builtin_nanf("") : kMinusInfinity);  // by a bias, unless `seen` says it
    const __m512i half = _mm512_set1_epi32(0x8000);
    __m512 lse[2], delta[2];
    for (int q = 0; q < 2; ++q) {
      const int64_t row = r * kSide + q * 16;
      lse[q] = _mm512_load_ps(lse_ + row);
      delta[q] = _mm512_load_ps(delta_ + row);
    }
    // Of the square's first key, in its block of random numbers. A block has four words of a row.
    const int64_t of_block = kDrops ? (t_.key_begin + keys * kSide) % kDropoutBlock : 0;
    const uint32_t* words = dropout_words();
    for (int row = 0; row < 16; ++row) {
      __m512i rounded[2][2];  // dS of the keys row, row + 16 and of the two halves of the rows
#pragma GCC unroll 2
      for (int key = 0; key < 2; ++key) {
        __m512 w[2];
#pragma GCC unroll 2
        for (int q = 0; q < 2; ++q) {
          const int at = (key * 16 + row) * 32 + q * 16;
          const __m512 x = _mm512_load_ps(s + at), t = kCapped ? vec::shaped(cap, x) : x;
          const __m512 term = kCapped && added ? _mm512_load_ps(added + at) : _mm512_setzero_ps();
          // A difference first: scores and lse may be larger than fixed point is.
          const __m512 difference = kCapped && added ? _mm512_fmadd_ps(t, scale, _mm512_sub_ps(term, lse[q])) : _mm512_fmsub_ps(t, scale, lse[q]);
          const __m512 u = _mm512_mul_ps(difference, to_fixed);
          w[q] = _mm512_mask_mov_ps(exp2_coarse(u), _mm512_cmp_ps_mask(u, u, _CMP_UNORD_Q), nan);
          __m512 of_weight = _mm512_load_ps(dp + at), kept = w[q];
          if (kDrops) {
            const int64_t of_key = of_block + key * 16 + row;
            const __m512i word = _mm512_load_si512(words + vec::dropout_word(0, of_key) * kSide + q * 16);
            const __mmask16 stays = _mm512_test_epi32_mask(word, _mm512_set1_epi32(static_cast<int>(1u << dropout_bit(0, of_key))));
            of_weight = _mm512_maskz_mul_ps(stays, of_weight, drop_scale);
            kept = _mm512_maskz_mul_ps(stays, kept, drop_scale);
          }
          __m512 of_score = _mm512_mul_ps(w[q], _mm512_sub_ps(of_weight, delta[q]));
          __m512 of_product = kCapped ? vec::through(cap, t, of_score) : of_score;
          if (kCounts) {
            const __mmask16 hides = _mm512_cmp_ps_mask(kCapped && added ? term : t, hidden, _CMP_EQ_OQ);
            const auto counts = static_cast<__mmask16>(sees(seen[q], key * 16 + row) & ~hides);
            of_score = _mm512_maskz_mov_ps(counts, of_score);
            of_product = _mm512_maskz_mov_ps(counts, of_product);
            kept = _mm512_maskz_mov_ps(counts, kept);
          }
          if (kKeeps) _mm512_store_ps(to_gradient + at, of_score);
          w[q] = kept;
          rounded[key][q] = _mm512_add_epi32(_mm512_castps_si512(of_product), half);
        }
        store_row(p + key * kTileBytes, row, pair_bf16(w[0], w[1]));
      }
      store_gradients(ds, ds_keys, row, rounded);
    }
  }

  void clear_square(int64_t c, int64_t r) const {
    const int64_t offset = (c * kSquares + r) * 2 * kTileBytes;
    clear(at_.p + offset, 2);
    clear(at_.ds + offset, 2);
    clear(at_.ds_keys + offset, 2);
  }

  // Adds the block's dQ, transposed back, to memory, where its sums are in two halves (dq_sums.h).
  void store_dq() const {
    uint16_t* const dq = static_cast<uint16_t*>(t_.dq) + head_ * t_.dq_head_stride + row_ * t_.dq_stride;
    uint16_t* const dq_low = t_.dq_low + head_ * t_.dq_low_head_stride + row_ * t_.dq_low_stride;
    const __m512 scale = _mm512_set1_ps(t_.scale);
    for (int64_t i = 0; i * 16 < rows_; ++i)
      for (int64_t d = 0; d < t_.headdim; d += 16) {
        const float* from = values(at_.dq, i * 2 * at_.depth + d / 16);
        const __mmask16 lanes = first_lanes16(t_.headdim - d);
        __m512i x[16];
        for (int r = 0; r < 16; ++r) x[r] = _mm512_load_si512(from + r * 16);
        transpose16(x);
        for (int64_t r = 0; r < min_of(16, rows_ - i * 16); ++r) {
          uint16_t *high = dq + (i * 16 + r) * t_.dq_stride + d, *low = dq_low + (i * 16 + r) * t_.dq_low_stride + d;
          const __m512i high_half = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, high)), 16);
          const __m512i before = _mm512_or_si512(high_half, _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, low)));
          const __m512i sum = _mm512_castps_si512(_mm512_fmadd_ps(_mm512_castsi512_ps(x[r]), scale, _mm512_castsi512_ps(before)));
          _mm256_mask_storeu_epi16(high, lanes, _mm512_cvtepi32_epi16(_mm512_srli_epi32(sum, 16)));
          _mm256_mask_storeu_epi16(low, lanes, _mm512_cvtepi32_epi16(sum));
        }
      }
  }

  void store_gradient(int64_t offset, int64_t depth, int headdim, float scale, uint16_t* to, int64_t stride) const {
    to += t_.key_begin * stride;
    for (int64_t j = 0; j < t_.key_end - t_.key_begin; ++j)
      for (int64_t d = 0; d < headdim; d += 16) {
        const __m512 x = _mm512_mul_ps(_mm512_load_ps(values(offset, j / 16 * 2 * depth + d / 16) + j % 16 * 16), _mm512_set1_ps(scale));
        _mm256_mask_storeu_epi16(to + j * stride + d, first_lanes16(headdim - d), to_bf16(x));
      }
  }

  const BackwardTask& t_;
  const TaskOptions options_;
  const bool hides_;  // options_.hides, false without options
  const BackwardLayout at_;
  char* const scratch_;
  float log2_scale_;
  // Of the block of rows at hand:
  int64_t head_ = 0, row_ = 0, rows_ = 0;
  bool finite_rows_ = true, split_rows_ = false;  // are Q and dO finite; have Inf and NaN left them?
  Coded q_codes_[kSquares] = {}, dout_codes_[kSquares] = {};
  alignas(64) float lse_[kBackwardRows];  // in fixed-point log2 units; with options as it is
  alignas(64) float delta_[kBackwardRows];
  alignas(64) int32_t begin_[kBackwardRows];  // of the task's keys a row sees [begin_, visible_)
  alignas(64) int32_t visible_[kBackwardRows];
  int64_t dropout_key_ = -1;  // the block of random numbers whose words are there, for the square of rows at hand
};

static size_t backward_scratch_bytes(const KernelShape& shape) {
  return static_cast<size_t>(BackwardLayout(shape.task_k, shape.block_k, shape.headdim, shape.headdim_v, shape.inputs).bytes);
}

static void backward_bf16(const BackwardTask& task) {
  if (task.key_begin >= task.key_end) return;
  if (has_options(task) || task.has_dbias)
    Backward<true>(task).run();
  else
    Backward<false>(task).run();
}

}  // namespace fattn::core::amx
