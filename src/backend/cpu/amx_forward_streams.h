// What the AMX forward kernel (amx_forward.h) is made of: the place of everything in its scratch memory, and the two streams of AMX work, scores and
// products, that it takes portions of.
#pragma once

#include "backend/cpu/amx_exp.h"
#include "backend/cpu/amx_nonfinite.h"
#include "backend/cpu/amx_options.h"
#include "backend/cpu/dropout_words.h"
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

}  // namespace fattn::core::amx
