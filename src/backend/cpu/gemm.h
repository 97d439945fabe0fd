// The matrix micro-kernel of the CPU backend and the three ways in which attention uses it. Everything is computed with
// "queries in lanes": a tile is kTile = 64 query rows, and score tiles are stored transposed, S^T[key][query], so that row
// maxima, sums and rescaling are lane-wise. K and V enter as scalars that are broadcast, so they need no packing.
//
// The micro-kernel keeps 6 rows x kPanelVecs vectors of accumulators in registers: enough independent chains to hide the
// latency of FMA (4 cycles, 2 a cycle), and 10 loads for 24 FMAs.
#pragma once

#include <stdint.h>

namespace fattn::core::FATTN_ISA {

#if defined(__clang__)
#define FATTN_UNROLL _Pragma("unroll")
#define FATTN_UNROLL_2 _Pragma("unroll 2")
#else
#define FATTN_UNROLL _Pragma("GCC unroll 16")
#define FATTN_UNROLL_2 _Pragma("GCC unroll 2")
#endif

constexpr int kTile = 64;
constexpr int kTileVecs = kTile / kLanes;
constexpr int kPanel = kPanelVecs * kLanes;  // lanes of a panel; a tile has kTile / kPanel panels

constexpr int64_t kPanelsOfTile = kTile / kPanel;

// Where lane `lane` of a tile of n rows of kTile lanes begins; its rows are kPanel apart. Such tiles are stored panel by panel, so that what a panel
// walks lies side by side: in rows of kTile lanes, narrow panels would have a few sets of the L1 cache to themselves.
constexpr int64_t lane_offset(int64_t n, int64_t lane) {
  if constexpr (kPanel == kTile) return lane;
  return lane / kPanel * n * kPanel + lane % kPanel;
}

// Products of fp32 scalars.
struct OpsF32 {
  static constexpr int kPair = 1;  // values in an element
  typedef float Element;
  typedef F32 Vec;
  FATTN_INLINE Vec broadcast(const char* p) { return set1(*reinterpret_cast<const float*>(p)); }
  FATTN_INLINE Vec vec(const float* p) { return load(p); }
  FATTN_INLINE F32 multiply_add(Vec a, Vec b, F32 c) { return fma(a, b, c); }
};

#ifdef FATTN_DOT
// Products of bf16 pairs, summed in fp32.
struct OpsDot {
  static constexpr int kPair = 2;
  typedef uint32_t Element;
  typedef Pairs Vec;
  FATTN_INLINE Vec broadcast(const char* p) {
    uint32_t pair;
    __builtin_memcpy(&pair, p, sizeof pair);  // rows of bf16 are aligned to 2 bytes only
    return set1_pair(pair);
  }
  FATTN_INLINE Vec vec(const uint32_t* p) { return load_pairs(p); }
  FATTN_INLINE F32 multiply_add(Vec a, Vec b, F32 c) { return dot(c, a, b); }
};
#endif

// One operand of a product whose elements are broadcast: 4-byte elements (fp32, or a pair of bf16).
struct Scalars {
  const char* data;
  int64_t stride;  // bytes between rows
};

// acc[r][w] += sum over i < n of A(r, i) * b[i][w]. A(r, i) is element i of row r, or row i's element r if transposed.
template <class Ops, bool kTransposed, int kRows, int kVecs>
FATTN_INLINE void multiply(Scalars a, const typename Ops::Element* b, int64_t b_stride, int64_t n, F32 (&acc)[kRows][kVecs]) {
  FATTN_UNROLL_2
  for (int64_t i = 0; i < n; ++i) {
    typename Ops::Vec bv[kVecs];
    FATTN_UNROLL
    for (int w = 0; w < kVecs; ++w) bv[w] = Ops::vec(b + i * b_stride + w * kLanes);
    FATTN_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const typename Ops::Vec x = Ops::broadcast(a.data + (kTransposed ? i * a.stride + r * 4 : r * a.stride + i * 4));
      FATTN_UNROLL
      for (int w = 0; w < kVecs; ++w) acc[r][w] = Ops::multiply_add(x, bv[w], acc[r][w]);
    }
  }
}

// Runs the micro-kernel over `rows` rows, 6 at a time: begin(acc, row) sets the accumulators, end(acc, row) takes them. The last 8 rows are two
// halves where the accumulators of 2 rows are too few to hide the latency.
template <class Ops, bool kTransposed, int kVecs, class Begin, class End>
FATTN_INLINE void sweep(Scalars a, int64_t rows, const typename Ops::Element* b, int64_t b_stride, int64_t n, const Begin& begin, const End& end) {
  const int64_t step = kTransposed ? 4 : a.stride;
  int64_t r = 0;
#define FATTN_BLOCK(R)                                                                     \
  {                                                                                        \
    F32 acc[R][kVecs];                                                                     \
    begin(acc, r);                                                                         \
    multiply<Ops, kTransposed>(Scalars{a.data + r * step, a.stride}, b, b_stride, n, acc); \
    end(acc, r);                                                                           \
    r += R;                                                                                \
  }
  constexpr bool kHalves = kPanelVecs == 2 && kVecs == 2;
  while (r + 6 <= rows && !(kHalves && r + 8 == rows)) FATTN_BLOCK(6)
  if (kHalves && r + 8 == rows) FATTN_BLOCK(4)
  if (r + 4 <= rows) FATTN_BLOCK(4)
  if (r + 2 <= rows) FATTN_BLOCK(2)
  if (r < rows) FATTN_BLOCK(1)
#undef FATTN_BLOCK
}

template <int kRows, int kVecs>
FATTN_INLINE void set_zero(F32 (&acc)[kRows][kVecs]) {
  FATTN_UNROLL
  for (int r = 0; r < kRows; ++r) FATTN_UNROLL
  for (int w = 0; w < kVecs; ++w) acc[r][w] = zero();
}

// to[key][lane] = sum over d of a(key, d) * b[d][lane]; largest[w] = max(largest[w], to[..][w]). For S^T = K Q^T and
// dP^T = V dO^T. One panel of kVecs vectors; rows of b are kPanel apart.
template <class Ops, int kVecs>
__attribute__((noinline)) void product_by_row(Scalars a, int64_t rows, const typename Ops::Element* b, int64_t n, float* to, int64_t to_stride,
                                              F32* largest) {
  F32 top[kVecs];
  FATTN_UNROLL
  for (int w = 0; w < kVecs; ++w) top[w] = largest[w];
  sweep<Ops, false, kVecs>(
      a, rows, b, kPanel, n, [](auto& acc, int64_t) { set_zero(acc); },
      [&](auto& acc, int64_t row) {
        constexpr int kRows = sizeof(acc) / sizeof(acc[0]);
        FATTN_UNROLL
        for (int r = 0; r < kRows; ++r) FATTN_UNROLL
        for (int w = 0; w < kVecs; ++w) {
          store(to + (row + r) * to_stride + w * kLanes, acc[r][w]);
          top[w] = max(top[w], acc[r][w]);
        }
      });
  FATTN_UNROLL
  for (int w = 0; w < kVecs; ++w) largest[w] = top[w];
}

// to[d][lane] = to[d][lane] * scale[lane] + sum over keys of a(key, d) * b[key][lane]. For O^T += V^T P^T and
// dQ^T += K^T dS^T. One panel of kVecs vectors; rows of `to` are kPanel apart.
template <class Ops, int kVecs>
__attribute__((noinline)) void product_by_column(Scalars a, int64_t columns, const typename Ops::Element* b, int64_t b_stride, int64_t n, float* to,
                                                 const F32* scale) {
  sweep<Ops, true, kVecs>(
      a, columns, b, b_stride, n, [](auto& acc, int64_t) { set_zero(acc); },
      [&](auto& acc, int64_t row) {
        constexpr int kRows = sizeof(acc) / sizeof(acc[0]);
        FATTN_UNROLL
        for (int r = 0; r < kRows; ++r) FATTN_UNROLL
        for (int w = 0; w < kVecs; ++w) {
          float* at = to + (row + r) * kPanel + w * kLanes;
          store(at, fma(load(at), scale[w], acc[r][w]));
        }
      });
}

// to[row][c] += sum over i of a(row, i) * b[i][c], one panel of kVecs vectors of columns. For dV += P^T dO, dK += dS^T Q
// and, in decode, O += P V.
template <class Ops, int kVecs>
__attribute__((noinline)) void product_into_rows(Scalars a, int64_t rows, const typename Ops::Element* b, int64_t b_stride, int64_t n, float* to,
                                                 int64_t to_stride) {
  sweep<Ops, false, kVecs>(
      a, rows, b, b_stride, n, [](auto& acc, int64_t) { set_zero(acc); },
      [&](auto& acc, int64_t row) {
        constexpr int kRows = sizeof(acc) / sizeof(acc[0]);
        FATTN_UNROLL
        for (int r = 0; r < kRows; ++r) FATTN_UNROLL
        for (int w = 0; w < kVecs; ++w) {
          float* at = to + (row + r) * to_stride + w * kLanes;
          store(at, add(load(at), acc[r][w]));
        }
      });
}

// The same over `vecs` vectors of columns, panel by panel.
template <class Ops>
FATTN_INLINE void product_into_wide_rows(Scalars a, int64_t rows, const typename Ops::Element* b, int64_t b_stride, int64_t n, float* to,
                                         int64_t to_stride, int64_t vecs) {
  int64_t w = 0;
  for (; w + kPanelVecs <= vecs; w += kPanelVecs)
    product_into_rows<Ops, kPanelVecs>(a, rows, b + w * kLanes, b_stride, n, to + w * kLanes, to_stride);
  if (kPanelVecs == 4 && w + 2 <= vecs) {
    product_into_rows<Ops, 2>(a, rows, b + w * kLanes, b_stride, n, to + w * kLanes, to_stride);
    w += 2;
  }
  if (w < vecs) product_into_rows<Ops, 1>(a, rows, b + w * kLanes, b_stride, n, to + w * kLanes, to_stride);
}

template <bool kValue>
struct Flag {
  static constexpr bool value = kValue;
};

// The vectors [first, last) of a tile, none across the end of a panel: calls body(vector index, vector-count constant) for each.
template <int kCount>
struct Count {
  static constexpr int value = kCount;
};
template <class Body>
FATTN_INLINE void for_panels(int first_vec, int last_vec, const Body& body) {
  int w = first_vec;
  if constexpr (kPanel < kTile)  // the rest of a panel that something else begins
    for (; w % kPanelVecs != 0 && w < last_vec; ++w) body(w, Count<1>{});
  for (; w + kPanelVecs <= last_vec; w += kPanelVecs) body(w, Count<kPanelVecs>{});
  if (kPanelVecs == 4 && w + 2 <= last_vec) {
    body(w, Count<2>{});
    w += 2;
  }
  if (w < last_vec) body(w, Count<1>{});
}

}  // namespace fattn::core::FATTN_ISA
