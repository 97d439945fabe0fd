// FlashAttention-2 backward in bf16 on AMX for a range of keys: query rows in lanes.
//
// The task's keys are packed once; blocks of 128 query rows of every head go past them, and each meets the keys panel by
// panel. For 32 keys and 32 rows:
//   S^T[key][q] = K Q^T     dP^T[key][q] = V dO^T                                     on AMX
//   P^T = exp2(S^T - lse)   dS^T = P^T (dP^T - delta), both rounded to bf16           on the vector units
// and for the whole panel, so that an accumulator takes several products each time that it is in a tile:
//   dV[key][d] += P^T dO    dK[key][d] += dS^T Q    dQ^T[d][q] += K^T dS^T            on AMX
// dS is kept in two orders: pairs of rows for dK, pairs of keys for dQ.
#pragma once

#include "backend/cpu/amx_exp.h"
#include "backend/cpu/amx_pack.h"
#include "shared/half.h"
#include "shared/lowest.h"

namespace fattn::core::amx {

constexpr int64_t kBackwardRows = 128;  // query rows of a block
constexpr int64_t kSide = 32;           // rows and keys of a square: what a product contracts

struct BackwardLayout {
  int64_t keys, panel, depth, depth_v;  // squares of keys of the task and of a panel; d tiles of Q and K, of V and dO
  int64_t k, v, kt, dk, dv, q, q_pairs, dout, dout_pairs, dq, s, dp, p, ds, ds_keys, finite_k, bytes;  // offsets

  BackwardLayout(int64_t task_k, int64_t block_k, int headdim, int headdim_v) {
    keys = ceil_div(max_of(task_k, 1), kSide);
    panel = min_of(keys, ceil_div(max_of(block_k, 1), kSide));
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
    finite_k = bytes;
    bytes += ceil_div(keys, 64) * 64;
  }

  static constexpr int64_t kSquares = kBackwardRows / kSide;

 private:
  int64_t take(int64_t tiles) {
    const int64_t at = bytes;
    bytes += tiles * kTileBytes;
    return at;
  }
};

class Backward {
 public:
  explicit Backward(const BackwardTask& task)
      : t_(task), at_(task.key_end - task.key_begin, task.block_k, task.headdim, task.headdim_v), scratch_(static_cast<char*>(task.scratch)) {
    log2_scale_ = (task.scale < 0 ? -task.scale : task.scale) * kLog2E;  // a negative scale flips the signs of Q instead
  }

  void run() {
    const TileScope tiles;
    load_keys();
    for (head_ = 0; head_ < t_.group; ++head_)
      for (row_ = 0; row_ < t_.seqlen_q; row_ += kBackwardRows) {
        rows_ = min_of(kBackwardRows, t_.seqlen_q - row_);
        const int64_t visible = limit(row_ + rows_ - 1) - t_.key_begin;
        if (visible <= 0) continue;
        load_rows();
        for (int64_t square = 0; square * kSide < visible; square += at_.panel)
          add_panel(square, min_of(at_.panel, ceil_div(visible, kSide) - square));
        store_dq();
      }
    store_gradient(at_.dk, at_.depth, t_.headdim, t_.scale, static_cast<uint16_t*>(t_.dk), t_.dk_stride);
    store_gradient(at_.dv, at_.depth_v, t_.headdim_v, 1.0f, static_cast<uint16_t*>(t_.dv), t_.dv_stride);
  }

 private:
  static constexpr int64_t kSquares = BackwardLayout::kSquares;

  int64_t limit(int64_t row) const { return max_of(0, min_of(t_.key_end, row + t_.diagonal)); }  // of the keys up to key_end that a row sees
  char* tile(int64_t offset, int64_t index) const { return scratch_ + offset + index * kTileBytes; }
  float* values(int64_t offset, int64_t index) const { return reinterpret_cast<float*>(tile(offset, index)); }
  char& finite_keys(int64_t square) const { return scratch_[at_.finite_k + square]; }

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
      finite_keys(square) = all_finite(ks, t_.k_stride, n, t_.headdim) && all_finite(vs, t_.v_stride, n, t_.headdim_v);
    }
    clear(at_.dk, at_.keys * 4 * at_.depth);
    clear(at_.dv, at_.keys * 4 * at_.depth_v);
    memory_barrier();
  }

  void load_rows() {
    const uint16_t* q = static_cast<const uint16_t*>(t_.q) + head_ * t_.q_head_stride + row_ * t_.q_stride;
    const uint16_t* dout = static_cast<const uint16_t*>(t_.dout) + head_ * t_.dout_head_stride + row_ * t_.dout_stride;
    const float* lse = t_.lse + head_ * t_.lse_head_stride + row_ * t_.lse_stride;
    const float* delta = t_.delta + head_ * t_.delta_head_stride + row_ * t_.delta_stride;
    for (int64_t i = 0; i < kBackwardRows; ++i) {
      const bool empty = i >= rows_ || lse[i * t_.lse_stride] < kLowestLse;
      lse_[i] = empty ? 0.0f : lse[i * t_.lse_stride] * kLog2E * kFixed;
      delta_[i] = empty ? 0.0f : delta[i * t_.delta_stride];
      visible_[i] = empty ? 0 : static_cast<int32_t>(max_of(0, limit(row_ + i) - t_.key_begin));
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
    finite_rows_ = all_finite(q, t_.q_stride, rows_, t_.headdim) && all_finite(dout, t_.dout_stride, rows_, t_.headdim_v);
    clear(at_.dq, kSquares * 4 * at_.depth);
    memory_barrier();
  }

  // Keys of the task that the rows of a square see: the fewest and the most.
  int64_t least_visible(int64_t row_square) const {
    int64_t n = visible_[row_square * kSide];
    for (int64_t i = 1; i < kSide; ++i) n = min_of(n, visible_[row_square * kSide + i]);
    return n;
  }
  int64_t most_visible(int64_t row_square) const {
    int64_t n = 0;
    for (int64_t i = 0; i < kSide; ++i) n = max_of(n, visible_[row_square * kSide + i]);
    return n;
  }

  // Everything that `squares` squares of keys from `first` on give with the block of rows at hand.
  void add_panel(int64_t first, int64_t squares) {
    const int64_t row_squares = ceil_div(rows_, kSide);
    bool finite = finite_rows_;
    for (int64_t square = first; square < first + squares; ++square) finite &= finite_keys(square) != 0;
    int64_t seen[kSquares];  // squares of the panel that each square of rows sees
    bool masked = false;
    for (int64_t r = 0; r < row_squares; ++r) {
      seen[r] = max_of(0, min_of(squares, ceil_div(most_visible(r), kSide) - first));
      masked |= least_visible(r) < (first + squares) * kSide;
    }
    if (masked && !finite) return add_visible(first * kSide, min_of((first + squares) * kSide, t_.key_end - t_.key_begin));

    for (int64_t r = 0; r < row_squares; ++r)
      for (int64_t c = 0; c < seen[r]; ++c) {
        multiply_square(tile(at_.k, (first + c) * 2 * at_.depth), tile(at_.q, r * 2 * at_.depth), at_.depth, tile(at_.s, 0));
        multiply_square(tile(at_.v, (first + c) * 2 * at_.depth_v), tile(at_.dout, r * 2 * at_.depth_v), at_.depth_v, tile(at_.dp, 0));
        memory_barrier();
        if (least_visible(r) >= (first + c + 1) * kSide)
          weigh_square<false>(first + c, c, r);
        else
          weigh_square<true>(first + c, c, r);
        memory_barrier();
      }

    for (int64_t c = 0; c < squares; ++c) {
      int64_t begin = row_squares, end = 0;  // squares of rows that see these keys; those between that do not are computed as zeros
      for (int64_t r = 0; r < row_squares; ++r)
        if (seen[r] > c) {
          begin = min_of(begin, r);
          end = r + 1;
        }
      for (int64_t r = begin; r < end; ++r)
        if (seen[r] <= c) clear_square(c, r);  // NOLINT(clang-analyzer-core.UndefinedBinaryOperatorResult): all r < row_squares are set above
      memory_barrier();
      add_products(tile(at_.p, (c * kSquares + begin) * 2), tile(at_.dout_pairs, begin * 2 * at_.depth_v), end - begin, 2, kTileBytes,
                   2 * at_.depth_v, kTileBytes, at_.depth_v, tile(at_.dv, (first + c) * 4 * at_.depth_v), 2 * at_.depth_v, true);
      add_products(tile(at_.ds, (c * kSquares + begin) * 2), tile(at_.q_pairs, begin * 2 * at_.depth), end - begin, 2, kTileBytes, 2 * at_.depth,
                   kTileBytes, at_.depth, tile(at_.dk, (first + c) * 4 * at_.depth), 2 * at_.depth, true);
    }
    for (int64_t r = 0; r < row_squares; ++r)
      add_products(tile(at_.kt, first * 2 * at_.depth), tile(at_.ds_keys, r * 2), seen[r], 2 * at_.depth, kTileBytes, 2 * kSquares, kTileBytes,
                   at_.depth, tile(at_.dq, r * 4 * at_.depth), 2 * at_.depth, false);
    memory_barrier();
  }

  // to (2 x 2 tiles) = a (2 rows of `depth` tiles) times b (2 columns of `depth` tiles).
  static void multiply_square(const char* a, const char* b, int64_t depth, char* to) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < depth; ++d, a += kTileBytes, b += kTileBytes) {
      _tile_loadd(4, a, kTileRow);
      _tile_loadd(6, b, kTileRow);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b + depth * kTileBytes, kTileRow);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, a + depth * kTileBytes, kTileRow);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, to, kTileRow);
    _tile_stored(1, to + kTileBytes, kTileRow);
    _tile_stored(2, to + 2 * kTileBytes, kTileRow);
    _tile_stored(3, to + 3 * kTileBytes, kTileRow);
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
      _tile_loadd(0, c, kTileRow);
      _tile_loadd(1, c + kTileBytes, kTileRow);
      _tile_loadd(2, c2, kTileRow);
      _tile_loadd(3, c2 + kTileBytes, kTileRow);
      const char* x = walk_b ? a : a + d * 2 * kTileBytes;
      const char* y = walk_b ? b + d * 2 * kTileBytes : b;
      if (walk_b) {
        for (int64_t i = 0; i < n; ++i, x += a_step * kTileBytes, y += b_step * kTileBytes) {
          _tile_loadd(4, x, kTileRow);
          _tile_loadd(6, y, kTileRow);
          _tile_dpbf16ps(0, 4, 6);
          _tile_loadd(7, y + b_pair, kTileRow);
          _tile_dpbf16ps(1, 4, 7);
          _tile_loadd(5, x + a_pair, kTileRow);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
      } else {
        for (int64_t i = 0; i < n; ++i, x += a_step * kTileBytes, y += b_step * kTileBytes) {
          _tile_loadd(4, x, kTileRow);
          _tile_loadd(6, y, kTileRow);
          _tile_dpbf16ps(0, 4, 6);
          _tile_loadd(5, x + a_pair, kTileRow);
          _tile_dpbf16ps(1, 5, 6);
          _tile_loadd(7, y + b_pair, kTileRow);
          _tile_dpbf16ps(2, 4, 7);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
      _tile_stored(0, c, kTileRow);
      _tile_stored(1, c + kTileBytes, kTileRow);
      _tile_stored(2, c2, kTileRow);
      _tile_stored(3, c2 + kTileBytes, kTileRow);
    }
  }

  // P and dS of 32 keys (square `keys` of the task, `c` of the panel) and 32 rows (square r of the block).
  template <bool masked>
  void weigh_square(int64_t keys, int64_t c, int64_t r) {
    const float *s = values(at_.s, 0), *dp = values(at_.dp, 0);
    char *p = tile(at_.p, (c * kSquares + r) * 2), *ds = tile(at_.ds, (c * kSquares + r) * 2), *ds_keys = tile(at_.ds_keys, (c * kSquares + r) * 2);
    const __m512 scale = _mm512_set1_ps(log2_scale_ * kFixed);
    const __m512 lse[2] = {_mm512_load_ps(lse_ + r * kSide), _mm512_load_ps(lse_ + r * kSide + 16)};
    const __m512 delta[2] = {_mm512_load_ps(delta_ + r * kSide), _mm512_load_ps(delta_ + r * kSide + 16)};
    const __m512i skipped = _mm512_set1_epi32(static_cast<int>(keys * kSide)), half = _mm512_set1_epi32(0x8000);
    const __m512i visible[2] = {_mm512_sub_epi32(_mm512_load_si512(visible_ + r * kSide), skipped),
                                _mm512_sub_epi32(_mm512_load_si512(visible_ + r * kSide + 16), skipped)};
    for (int row = 0; row < 16; ++row) {
      __m512i rounded[2][2];  // dS of the keys row, row + 16 and of the two halves of the rows
      for (int key = 0; key < 2; ++key) {
        __m512 w[2];
        for (int q = 0; q < 2; ++q) {
          const int at = (key * 2 + q) * 256 + row * 16;
          const __m512 u = _mm512_fmsub_ps(_mm512_load_ps(s + at), scale, lse[q]);
          w[q] = _mm512_mask_mov_ps(exp2_fixed(u), _mm512_cmp_ps_mask(u, u, _CMP_UNORD_Q), u);
          __m512 x = _mm512_mul_ps(w[q], _mm512_sub_ps(_mm512_load_ps(dp + at), delta[q]));
          if (masked) {
            const __mmask16 sees = _mm512_cmpgt_epi32_mask(visible[q], _mm512_set1_epi32(key * 16 + row));
            w[q] = _mm512_maskz_mov_ps(sees, w[q]);
            x = _mm512_maskz_mov_ps(sees, x);
          }
          rounded[key][q] = _mm512_add_epi32(_mm512_castps_si512(x), half);
        }
        store_row(p + key * kTileBytes, row, pair_bf16(w[0], w[1]));
        store_row(ds + key * kTileBytes, row, _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(rounded[key][0], 16), rounded[key][1]));
      }
      for (int q = 0; q < 2; ++q)
        store_row(ds_keys + q * kTileBytes, row, _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(rounded[0][q], 16), rounded[1][q]));
    }
  }

  void clear_square(int64_t c, int64_t r) const {
    for (int64_t row = 0; row < 32; ++row) {
      store_row(tile(at_.p, (c * kSquares + r) * 2), row, _mm512_setzero_si512());
      store_row(tile(at_.ds, (c * kSquares + r) * 2), row, _mm512_setzero_si512());
    }
  }

  static float dot(const uint16_t* a, const uint16_t* b, int n) {
    float sum = 0;
    for (int d = 0; d < n; ++d) sum += bf16_to_float(a[d]) * bf16_to_float(b[d]);
    return sum;
  }

  // The keys [begin, end) of the task, element by element over visible pairs only: 0 * inf is NaN, so inputs that are not
  // finite must not meet the zero weights of pairs that are masked.
  void add_visible(int64_t begin, int64_t end) {
    for (int64_t i = 0; i < rows_; ++i)
      for (int64_t j = begin; j < min_of(end, visible_[i]); ++j) {
        const uint16_t* q = static_cast<const uint16_t*>(t_.q) + head_ * t_.q_head_stride + (row_ + i) * t_.q_stride;
        const uint16_t* dout = static_cast<const uint16_t*>(t_.dout) + head_ * t_.dout_head_stride + (row_ + i) * t_.dout_stride;
        const uint16_t* k = static_cast<const uint16_t*>(t_.k) + (t_.key_begin + j) * t_.k_stride;
        const uint16_t* v = static_cast<const uint16_t*>(t_.v) + (t_.key_begin + j) * t_.v_stride;
        const float w = _mm512_cvtss_f32(exp2_accurate(_mm512_set1_ps(dot(q, k, t_.headdim) * t_.scale * kLog2E - lse_[i] / kFixed)));
        const float ds = w * (dot(dout, v, t_.headdim_v) - delta_[i]);
        for (int d = 0; d < t_.headdim_v; ++d) values(at_.dv, j / 16 * 2 * at_.depth_v + d / 16)[j % 16 * 16 + d % 16] += w * bf16_to_float(dout[d]);
        for (int d = 0; d < t_.headdim; ++d) {
          values(at_.dk, j / 16 * 2 * at_.depth + d / 16)[j % 16 * 16 + d % 16] += ds * bf16_to_float(q[d]);
          values(at_.dq, i / 16 * 2 * at_.depth + d / 16)[d % 16 * 16 + i % 16] += ds * bf16_to_float(k[d]);
        }
      }
    memory_barrier();
  }

  // Adds the block's dQ, transposed back, to memory.
  void store_dq() const {
    float* dq = t_.dq + head_ * t_.dq_head_stride + row_ * t_.dq_stride;
    const __m512 scale = _mm512_set1_ps(t_.scale);
    for (int64_t i = 0; i * 16 < rows_; ++i)
      for (int64_t d = 0; d < t_.headdim; d += 16) {
        const float* from = values(at_.dq, i * 2 * at_.depth + d / 16);
        const __mmask16 lanes = first_lanes16(t_.headdim - d);
        __m512i x[16];
        for (int r = 0; r < 16; ++r) x[r] = _mm512_load_si512(from + r * 16);
        transpose16(x);
        for (int64_t r = 0; r < min_of(16, rows_ - i * 16); ++r) {
          float* to = dq + (i * 16 + r) * t_.dq_stride + d;
          _mm512_mask_storeu_ps(to, lanes, _mm512_fmadd_ps(_mm512_castsi512_ps(x[r]), scale, _mm512_maskz_loadu_ps(lanes, to)));
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
  const BackwardLayout at_;
  char* const scratch_;
  float log2_scale_;
  // Of the block of rows at hand:
  int64_t head_ = 0, row_ = 0, rows_ = 0;
  bool finite_rows_ = true;
  alignas(64) float lse_[kBackwardRows];  // in fixed-point log2 units
  alignas(64) float delta_[kBackwardRows];
  alignas(64) int32_t visible_[kBackwardRows];  // keys of the task that a row sees
};

static size_t backward_scratch_bytes(const KernelShape& shape) {
  return static_cast<size_t>(BackwardLayout(shape.task_k, shape.block_k, shape.headdim, shape.headdim_v).bytes);
}

static void backward_bf16(const BackwardTask& task) {
  if (task.key_begin < task.key_end) Backward(task).run();
}

}  // namespace fattn::core::amx
