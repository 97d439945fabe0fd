// What a product reads besides the tile: keys and values as broadcast scalars, and the scratch memory they may need.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace fattn::core::FATTN_ISA {

// Numbers of a whole vector, for the compiler's operators. (Of more than one, g++ 12 makes moves through memory and general registers.)
typedef uint32_t Words __attribute__((vector_size(sizeof(U32))));

// Hands out pieces of a worker's scratch, 64-byte aligned. From a null base it only counts.
struct Scratch {
  char* base;
  size_t used = 0;
  template <class T>
  T* take(int64_t count) {
    T* p = base ? reinterpret_cast<T*>(base + used) : nullptr;
    used += static_cast<size_t>(round_up(count * static_cast<int64_t>(sizeof(T)), 64));
    return p;
  }
};

constexpr int64_t kLineBytes = 64;

// Rows that are wanted soon, fetched into the L2 cache some at a time, between products. In the order of memory: only then do the processor's own
// fetches join in, which may be more than a core's misses of its L1 cache (Zen 4: 10 GB/s by those alone, 20 with both).
struct NextRows {
  const char *line = nullptr, *end = nullptr;  // the next line, and the end of its row
  int64_t bytes = 0, gap = 0, rows = 0;        // of a row; from its end to the next; that are left

  NextRows() = default;  // none
  template <class T>
  NextRows(const T* from, int64_t stride, int64_t n_rows, int64_t n)
      : line(reinterpret_cast<const char*>(from)),
        end(reinterpret_cast<const char*>(from + n)),
        bytes(n * static_cast<int64_t>(sizeof(T))),
        gap((stride - n) * static_cast<int64_t>(sizeof(T))),
        rows(n_rows) {}
  __attribute__((always_inline)) void fetch_lines(int64_t some) {
    for (; some > 0 && rows > 0; --some) {
      __builtin_prefetch(line, 0, 2);
      line += kLineBytes;
      if (line < end) continue;
      line = end + gap;
      end = line + bytes;
      --rows;
    }
  }
  void fetch(int64_t some) {
    for (const int64_t left = rows - some; rows > 0 && rows > left;) fetch_lines(1);
  }
};

FATTN_INLINE float minus_infinity() { return -__builtin_inff(); }

template <class Ops>
constexpr int64_t elements(int64_t n) {
  return (n + Ops::kPair - 1) / Ops::kPair;
}

// Elements between the rows of a copy: an odd number of cache lines, so that a column of it spreads over all sets of the
// L1 cache.
constexpr int64_t copy_stride(int64_t n) {
  const int64_t width = round_up(n, 16);
  return width / 16 % 2 == 0 ? width + 16 : width;
}

// Operands of type T for products of kind Ops. `row_scalars`: A(r, i) = from[r][i], reduced along the row (K in Q K^T).
// `column_scalars`: reduced along the rows (V in P V). Both use the tensor itself where its layout allows, else `buffer`.
template <class T, class Ops>
struct Operand;

// fp32 rows are copied only if they lie apart: as (batch, seqlen, heads, headdim) has them, the keys of a block fall into
// a few sets of the L1 cache and into a page each, which costs 10 to 20% of the time; contiguous rows are faster in place,
// and so are those up to `in_place` elements apart, if the caller says so. 16-bit tensors are widened to fp32, once per
// block and task.
template <class T>
struct Operand<T, OpsF32> {
  static constexpr int64_t row_buffer(int64_t rows, int64_t n) { return rows * copy_stride(n); }
  static constexpr int64_t column_buffer(int64_t rows, int64_t n) { return rows * copy_stride(n); }
  FATTN_INLINE Scalars row_scalars(const T* from, int64_t stride, int64_t rows, int64_t n, float* buffer, int64_t in_place = 0) {
    if (sizeof(T) == sizeof(float) && (stride <= copy_stride(n) || stride <= in_place)) return {reinterpret_cast<const char*>(from), stride * 4};
    copy_rows(from, stride, rows, n, buffer, copy_stride(n));
    return {reinterpret_cast<const char*>(buffer), copy_stride(n) * 4};
  }
  FATTN_INLINE Scalars column_scalars(const T* from, int64_t stride, int64_t rows, int64_t n, float* buffer, int64_t in_place = 0) {
    return row_scalars(from, stride, rows, n, buffer, in_place);
  }
};

#ifdef FATTN_DOT
// bf16 rows are already pairs along the row; an odd width needs a copy with a zero behind. Along the rows, two rows are
// interleaved.
template <>
struct Operand<bf16, OpsDot> {
  static constexpr int64_t row_buffer(int64_t rows, int64_t n) { return n % 2 == 0 ? 0 : rows * elements<OpsDot>(n); }
  static constexpr int64_t column_buffer(int64_t rows, int64_t n) { return elements<OpsDot>(rows) * copy_stride(n); }
  FATTN_INLINE Scalars row_scalars(const bf16* from, int64_t stride, int64_t rows, int64_t n, uint32_t* buffer, int64_t = 0) {
    if (n % 2 == 0) return {reinterpret_cast<const char*>(from), stride * 2};
    const int64_t width = elements<OpsDot>(n);
    for (int64_t r = 0; r < rows; ++r) {
      buffer[r * width + width - 1] = from[r * stride + n - 1].bits;
      __builtin_memcpy(buffer + r * width, from + r * stride, static_cast<size_t>(n - 1) * 2);
    }
    return {reinterpret_cast<const char*>(buffer), width * 4};
  }
  FATTN_INLINE Scalars column_scalars(const bf16* from, int64_t stride, int64_t rows, int64_t n, uint32_t* buffer, int64_t = 0) {
    const int64_t width = copy_stride(n);
    for (int64_t r = 0; r < rows; r += 2)
      for (int64_t d = 0; d < n; d += kLanes) {
        const F32 lo = load_n(from + r * stride + d, n - d);
        const F32 hi = r + 1 < rows ? load_n(from + (r + 1) * stride + d, n - d) : zero();
        store_pairs(buffer + r / 2 * width + d, make_pairs_exact(lo, hi));
      }
    return {reinterpret_cast<const char*>(buffer), width * 4};
  }
};
#endif

// to[d][lane] for d < n, kTile lanes by lane_offset, times sign (1, -1 or 0): Q^T and dO^T as the vector operand of a product along d.
template <class T>
FATTN_INLINE void pack_lanes(OpsF32, const T* from, int64_t stride, int64_t rows, int64_t n, float sign, float* to) {
  pack_transposed(from, stride, rows, n, sign, to);
}

#ifdef FATTN_DOT
// to[d / 2][lane]: pairs along d.
FATTN_INLINE void pack_lanes(OpsDot, const bf16* from, int64_t stride, int64_t rows, int64_t n, float sign, uint32_t* to) {
  const F32 f = set1(sign);
  for (int lane = 0; lane < kTile; lane += kLanes)
    for (int64_t d = 0; d < n; d += kLanes) {
      F32 block[kLanes];
      for (int i = 0; i < kLanes; ++i) block[i] = lane + i < rows ? mul(load_n(from + (lane + i) * stride + d, n - d), f) : zero();
      transpose(block);
      for (int64_t i = 0; i < kLanes && d + i < n; i += 2)
        store_pairs(to + lane_offset(elements<OpsDot>(n), lane) + (d + i) / 2 * kPanel, make_pairs_exact(block[i], block[i + 1]));
    }
}
#endif

}  // namespace fattn::core::FATTN_ISA
