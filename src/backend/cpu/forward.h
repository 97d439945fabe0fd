// Forward pass of the CPU backend (FlashAttention-2, algorithm 1: Q blocks outside, K/V blocks inside), and its parts that
// the backward pass shares. A task holds up to a few tiles of kTile query rows, so that a K/V block is read (and widened)
// once for all of them.
#pragma once

#include "backend/cpu/kernels.h"

namespace fattn::core::FATTN_ISA {

// softmax_scale as the kernels apply it. Products take Q with its sign flipped for a negative scale (all zeros for a scale
// of 0), so that Q stays exact; the rest of the scale enters with the exponentials.
struct Scale {
  float sign;        // 1, -1 or 0
  double magnitude;  // |softmax_scale|, 1 for 0
  float factor;      // magnitude * log2(e)
  explicit Scale(float scale)
      : sign(scale == 0.0f ? 0.0f
             : scale < 0   ? -1.0f
                           : 1.0f),
        magnitude(scale == 0.0f ? 1.0 : static_cast<double>(scale < 0 ? -scale : scale)),
        factor(static_cast<float>(magnitude * 1.4426950408889634)) {}
};

// The state of one tile of query rows: Q^T, O^T and the running row maximum and sum.
template <class Ops>
struct ForwardTile {
  typename Ops::Element* q;  // [elements(headdim)][kTile]
  float* o;                  // [headdim_v][kTile]
  float *largest, *sum;      // [kTile]
};

template <class T, class Ops>
struct ForwardScratch {
  using Element = typename Ops::Element;
  ForwardTile<Ops> tiles[16];
  Element *k, *v;    // K and V of a block, where they need a buffer
  float* scores;     // S^T of a panel; P^T replaces it for fp32 products
  Element* weights;  // P^T of a panel

  static constexpr int64_t kMaxTiles = 16;
  // Lays the pieces out from base; returns the bytes used.
  size_t lay_out(char* base, int64_t rows, int64_t block_k, int headdim, int headdim_v) {
    Scratch s{base};
    const int64_t n = (rows + kTile - 1) / kTile;
    for (int64_t t = 0; t < n && t < kMaxTiles; ++t) {
      tiles[t].q = s.take<Element>(elements<Ops>(headdim) * kTile);
      tiles[t].o = s.take<float>(static_cast<int64_t>(headdim_v) * kTile);
      tiles[t].largest = s.take<float>(kTile);
      tiles[t].sum = s.take<float>(kTile);
    }
    k = s.take<Element>(Operand<T, Ops>::row_buffer(block_k, headdim));
    v = s.take<Element>(Operand<T, Ops>::column_buffer(block_k, headdim_v));
    scores = s.take<float>(block_k * kPanel);
    weights = Ops::kPair == 1 ? reinterpret_cast<Element*>(scores) : s.take<Element>(elements<Ops>(block_k) * kPanel);
    return s.used;
  }
};

// Scores are products q k; `factor` = |softmax_scale| log2(e) makes them exponents of 2. The maximum is subtracted first: the
// difference is exact where it is small, which is where the weight is large, and the largest weight is exactly 1.

// S^T -> P^T for fp32 products, in place. Returns the sums of the block in block_sum.
template <int kVecs>
FATTN_INLINE void exponentials(OpsF32, float* scores, float* weights, int64_t n, float factor, const F32* largest, F32* block_sum) {
  constexpr int64_t kStride = kVecs * kLanes;
  const F32 f = set1(factor);
  F32 total[kVecs];
  FATTN_UNROLL
  for (int w = 0; w < kVecs; ++w) total[w] = zero();
  for (int64_t key = 0; key < n; ++key) FATTN_UNROLL
  for (int w = 0; w < kVecs; ++w) {
    const F32 p = exp2(mul(sub(load(scores + key * kStride + w * kLanes), largest[w]), f));
    total[w] = add(total[w], p);
    store(weights + key * kStride + w * kLanes, p);
  }
  FATTN_UNROLL
  for (int w = 0; w < kVecs; ++w) block_sum[w] = total[w];
}

#ifdef FATTN_DOT
// The same for bf16 products: weights in pairs of keys. An odd last key is paired with 0.
template <int kVecs>
FATTN_INLINE void exponentials(OpsDot, float* scores, uint32_t* weights, int64_t n, float factor, const F32* largest, F32* block_sum) {
  constexpr int64_t kStride = kVecs * kLanes;
  const F32 f = set1(factor);
  F32 total[kVecs];
  FATTN_UNROLL
  for (int w = 0; w < kVecs; ++w) total[w] = zero();
  for (int64_t key = 0; key < n; key += 2) FATTN_UNROLL
  for (int w = 0; w < kVecs; ++w) {
    const float* at = scores + key * kStride + w * kLanes;
    const F32 p0 = exp2_coarse(mul(sub(load(at), largest[w]), f));
    const F32 p1 = key + 1 < n ? exp2_coarse(mul(sub(load(at + kStride), largest[w]), f)) : zero();
    total[w] = add(total[w], add(p0, p1));
    store_pairs(weights + key / 2 * kStride + w * kLanes, make_pairs(p0, p1));
  }
  FATTN_UNROLL
  for (int w = 0; w < kVecs; ++w) block_sum[w] = total[w];
}
FATTN_INLINE float weight_at(OpsDot, const uint32_t* weights, int64_t stride, int64_t key, int64_t lane) {
  const uint32_t pair = weights[key / 2 * stride + lane];
  return __builtin_bit_cast(float, key % 2 == 0 ? pair << 16 : pair & 0xffff0000u);
}
#endif
FATTN_INLINE float weight_at(OpsF32, const float* weights, int64_t stride, int64_t key, int64_t lane) { return weights[key * stride + lane]; }

FATTN_INLINE float to_float(float x) { return x; }
FATTN_INLINE float to_float(f16 x) { return f16_to_float(x.bits); }
FATTN_INLINE float to_float(bf16 x) { return bf16_to_float(x.bits); }

// O^T of a panel that the diagonal crosses, where V holds an Inf or NaN: a weight of 0 must not meet it, so only the keys
// that a row sees are summed. Rare, hence scalar.
template <class T, class Ops>
void weigh_visible(const T* v, int64_t v_stride, int headdim_v, const typename Ops::Element* weights, int64_t stride, int64_t keys,
                   int64_t first_hidden, int64_t lanes, const float* alpha, float* o) {
  for (int64_t lane = 0; lane < lanes; ++lane) {
    const int64_t seen = first_hidden + lane < keys ? first_hidden + lane : keys;
    for (int64_t d = 0; d < headdim_v; ++d) {
      float sum = o[d * kTile + lane] * alpha[lane];
      for (int64_t key = 0; key < seen; ++key) sum += weight_at(Ops{}, weights, stride, key, lane) * to_float(v[key * v_stride + d]);
      o[d * kTile + lane] = sum;
    }
  }
}

// A block of keys [0, keys) for one panel of kVecs vectors of query rows, the first of which is lane 0 here. Lane i sees
// the keys below first_hidden + i. `poisoned`: V has an Inf or NaN at a key that some row of the tile does not see.
template <class T, class Ops, int kVecs>
__attribute__((noinline)) void forward_panel(const ForwardTask& task, const ForwardTile<Ops>& tile, int first_vec, ForwardScratch<T, Ops>& scratch,
                                             Scalars k, Scalars v, const T* v_rows, int64_t keys, int64_t first_hidden, bool poisoned, float factor) {
  constexpr int64_t kStride = kVecs * kLanes;
  const int lane0 = first_vec * kLanes;
  const int64_t last = first_hidden + kStride - 1;  // keys that the panel's last row sees
  const int64_t n = keys < last ? keys : last;
  if (n <= 0) return;
  // Keys that every row sees; at the diagonal a multiple of the micro-kernel's 6 rows.
  const int64_t whole = first_hidden < 0 ? 0 : first_hidden < n ? first_hidden / 6 * 6 : n;

  F32 top[kVecs], old[kVecs], unused[kVecs];
  for (int w = 0; w < kVecs; ++w) top[w] = old[w] = unused[w] = load(tile.largest + lane0 + w * kLanes);
  const int64_t steps = elements<Ops>(task.headdim);
  product_by_row<Ops, kVecs>(k, whole, tile.q + lane0, steps, scratch.scores, kStride, top);
  if (whole < n) {
    const F32 hidden = set1(minus_infinity());
    product_by_row<Ops, kVecs>(Scalars{k.data + whole * k.stride, k.stride}, n - whole, tile.q + lane0, steps, scratch.scores + whole * kStride,
                               kStride, unused);
    for (int64_t key = whole; key < n; ++key)
      for (int w = 0; w < kVecs; ++w) {
        float* at = scratch.scores + key * kStride + w * kLanes;
        const F32 s = keep_from(load(at), static_cast<int>(key - first_hidden + 1 - w * kLanes), hidden);
        top[w] = max(top[w], s);
        store(at, s);
      }
  }

  // A row that has seen nothing yet has the maximum -inf; subtracting 0 instead keeps -inf - -inf = NaN away.
  F32 safe[kVecs], alpha[kVecs], block_sum[kVecs];
  for (int w = 0; w < kVecs; ++w) {
    store(tile.largest + lane0 + w * kLanes, top[w]);
    safe[w] = where_equal(top[w], set1(minus_infinity()), zero(), top[w]);
    alpha[w] = exp2(mul(sub(old[w], safe[w]), set1(factor)));
  }
  exponentials<kVecs>(Ops{}, scratch.scores, scratch.weights, n, factor, safe, block_sum);
  for (int w = 0; w < kVecs; ++w) {
    float* sum = tile.sum + lane0 + w * kLanes;
    store(sum, fma(load(sum), alpha[w], block_sum[w]));
  }
  if (poisoned) {
    float alphas[kStride];
    for (int w = 0; w < kVecs; ++w) store(alphas + w * kLanes, alpha[w]);
    weigh_visible<T, Ops>(v_rows, task.v_stride, task.headdim_v, scratch.weights, kStride, n, first_hidden, kStride, alphas, tile.o + lane0);
    return;
  }
  product_by_column<Ops, kVecs>(v, task.headdim_v, scratch.weights, kStride, elements<Ops>(n), tile.o + lane0, alpha);
}

// o = O / sum, lse = log(sum) + largest; a row without keys gives 0 and -inf.
template <class T, class Ops>
void finish_tile(const ForwardTask& task, const ForwardTile<Ops>& tile, int64_t row0, int64_t rows, const Scale& scale) {
  float inverse[kTile];
  for (int i = 0; i < kTile; ++i) inverse[i] = tile.sum[i] == 0.0f ? 0.0f : 1.0f / tile.sum[i];
  T* o = static_cast<T*>(task.o) + row0 * task.o_stride;
  unpack_transposed(tile.o, rows, task.headdim_v, [&](int64_t row, int64_t d, F32 x, int64_t columns) {
    store_n(o + row * task.o_stride + d, mul(x, set1(inverse[row])), columns);
  });
  if (!task.lse) return;
  for (int64_t i = 0; i < rows; ++i) {
    const double lse = static_cast<double>(tile.largest[i]) * scale.magnitude + 0.69314718055994530942 * log2_of(tile.sum[i]);
    task.lse[(row0 + i) * task.lse_stride] = tile.sum[i] == 0.0f ? minus_infinity() : static_cast<float>(lse);
  }
}

template <class T, class Ops>
void forward_task(const ForwardTask& task) {
  ForwardScratch<T, Ops> scratch;
  const int64_t rows = task.row_end - task.row_begin;
  scratch.lay_out(static_cast<char*>(task.scratch), rows, task.block_k, task.headdim, task.headdim_v);
  const int64_t tiles = (rows + kTile - 1) / kTile;

  const Scale scale(task.scale);
  const T* q = static_cast<const T*>(task.q);
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t row0 = task.row_begin + t * kTile;
    const int64_t here = task.row_end - row0 < kTile ? task.row_end - row0 : kTile;
    ForwardTile<Ops>& tile = scratch.tiles[t];
    pack_lanes(Ops{}, q + row0 * task.q_stride, task.q_stride, here, task.headdim, scale.sign, tile.q);
    for (int64_t i = 0; i < static_cast<int64_t>(task.headdim_v) * kTile; i += kLanes) store(tile.o + i, zero());
    for (int i = 0; i < kTile; ++i) {
      tile.largest[i] = minus_infinity();
      tile.sum[i] = 0.0f;
    }
  }

  const int64_t seen = task.row_end - 1 + task.diagonal;  // keys that the last row sees
  const int64_t keys = seen < task.seqlen_k ? seen : task.seqlen_k;
  for (int64_t key0 = 0; key0 < keys; key0 += task.block_k) {
    const int64_t block = keys - key0 < task.block_k ? keys - key0 : task.block_k;
    const T* k_rows = static_cast<const T*>(task.k) + key0 * task.k_stride;
    const T* v_rows = static_cast<const T*>(task.v) + key0 * task.v_stride;
    const Scalars k = Operand<T, Ops>::row_scalars(k_rows, task.k_stride, block, task.headdim, scratch.k);
    const Scalars v = Operand<T, Ops>::column_scalars(v_rows, task.v_stride, block, task.headdim_v, scratch.v);
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t row0 = task.row_begin + t * kTile;
      const int64_t here = task.row_end - row0 < kTile ? task.row_end - row0 : kTile;
      const int vecs = static_cast<int>((here + kLanes - 1) / kLanes);
      const int64_t first_hidden = row0 + task.diagonal - key0;  // for the tile's first row
      const int64_t seen_by_all = first_hidden < 0 ? 0 : first_hidden;
      const bool poisoned =
          seen_by_all < block && any_nonfinite(v_rows + seen_by_all * task.v_stride, task.v_stride, block - seen_by_all, task.headdim_v);
      const auto panel = [&](int w, auto count) {
        forward_panel<T, Ops, decltype(count)::value>(task, scratch.tiles[t], w, scratch, k, v, v_rows, block, first_hidden + w * kLanes, poisoned,
                                                      scale.factor);
      };
      if (kPanelVecs == 4 && first_hidden < block) {
        // Half panels at the diagonal, which need fewer keys each.
        for (int w = 0; w < vecs; w += 2) {
          if (w + 2 <= vecs)
            panel(w, VecCount<2>{});
          else
            panel(w, VecCount<1>{});
        }
      } else {
        for_panels(0, vecs, panel);
      }
    }
  }
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t row0 = task.row_begin + t * kTile;
    finish_tile<T, Ops>(task, scratch.tiles[t], row0, task.row_end - row0 < kTile ? task.row_end - row0 : kTile, scale);
  }
}

template <class T, class Ops>
size_t forward_scratch_bytes(const KernelShape& shape) {
  ForwardScratch<T, Ops> scratch;
  return scratch.lay_out(nullptr, shape.rows, shape.block_k, shape.headdim, shape.headdim_v);
}

}  // namespace fattn::core::FATTN_ISA
