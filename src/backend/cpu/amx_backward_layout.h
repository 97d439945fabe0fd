// Where everything is in the scratch memory of the AMX backward kernel (amx_backward.h).
#pragma once

#include "backend/cpu/amx_exp.h"
#include "backend/cpu/amx_nonfinite.h"
#include "backend/cpu/amx_options.h"
#include "backend/cpu/bias_gradient.h"
#include "backend/cpu/dq_order.h"
#include "backend/cpu/dropout_words.h"
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

}  // namespace fattn::core::amx
