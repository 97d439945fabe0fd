// fp32 rows in shared memory as operands of fp16 matrix instructions: every number is split into two fp16, x * factor = high + low.
//
// With x * factor below 2^15, high keeps 11 bits of it and low, of either sign, the next 11 and more: what is lost is at most 2^-23 of x, or 2^-40 of
// the tile's largest number. The product of two tiles is high * high + high * low + low * high; low * low is left out, some 2^-24 of it.
// `factor` is a power of two that moves the tile's largest number to 2^14, so that the range of fp16 is never left and little of it is unused.
//
// A tile takes two Tiles, high and low, of as many bytes as the fp32 numbers, which are copied there first: the 8 numbers of a unit to where its
// high halves and its low halves will be. The thread that copied a unit splits it, in place.
// Inf becomes high = Inf, low = NaN, and so all that it is multiplied with is NaN: such results are computed again by other means. NaN stays NaN.
// Numbers that are not finite may be cleaned away before, so that rows that do not see them get nothing of them; the caller knows who does.
#pragma once

#include "kernels/constants.h"
#include "kernels/ptx/async_copy.h"
#include "kernels/ptx/async_copy_word.h"
#include "kernels/ptx/convert.h"
#include "kernels/ptx/math.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/ptx/special_registers.h"

namespace fattn::tile {

// Two pairs of fp16 from two numbers.
__device__ __forceinline__ void split2(float x, float y, unsigned& high, unsigned& low) {
  high = ptx::cvt_f16x2(x, y);
  low = ptx::cvt_f16x2(x - ptx::low_float<f16>(high), y - ptx::high_float<f16>(high));
}

// Of a power of two that is neither too large nor too small to have one.
__device__ __forceinline__ float inverse_of(float x) { return __uint_as_float((254u << 23) - __float_as_uint(x)); }

// The power of two that moves `greatest` (finite, not negative) to [2^14, 2^15), and its inverse; both are normal numbers. Zeros are as well with
// any: theirs is that of 2^-6, so that no product with them is taken for a great one (v3/forward_f32_consumer.h).
struct SplitFactor {
  float factor, inverse;
  explicit __device__ __forceinline__ SplitFactor(float greatest) {
    const int exponent = static_cast<int>(__float_as_uint(greatest) >> 23);
    const int field = greatest == 0 ? 127 + 20 : min(127 + 14 + 127 - exponent, 253);
    factor = __uint_as_float(static_cast<unsigned>(field) << 23);
    inverse = inverse_of(factor);
  }
};

// Where the greatest numbers of two tiles could make a score of more than 2^24 (in units of log2, with headdim terms of 2^15 * 2^15), the parts leave
// out more than 2^-16 of a score of their other rows, which may be the ones that count. What undoes the tiles' factors, times softmax_scale *
// log2(e), is then more than this; such rows are computed again.
template <int kHeaddim>
inline constexpr float kGreatestSplitScale = 1.0f / (64 * kHeaddim);
// Of a scale in units of log2 divided by `unit`. NaN is not.
template <int kHeaddim>
__device__ __forceinline__ bool is_trusted(float scale, float unit) {
  return fabsf(scale * unit) <= kGreatestSplitScale<kHeaddim>;
}
template <int kHeaddim>
__device__ __forceinline__ float trusted_or_nan(float scale, float unit) {
  return is_trusted<kHeaddim>(scale, unit) ? scale : kNan;
}

// The greatest magnitude among 8 numbers but for Inf and NaN. Where one is Inf it calls note().
template <class Note>
__device__ __forceinline__ float greatest_noting_infinity(uint4 a, uint4 b, Note&& note) {
  const unsigned bits[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  float greatest = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) greatest = fmaxf(greatest, fabsf(__uint_as_float(bits[i])));  // passes over NaN
  if (greatest == kInfinity) [[unlikely]] {
    note();
    greatest = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float x = fabsf(__uint_as_float(bits[i]));
      if (x < kInfinity) greatest = fmaxf(greatest, x);
    }
  }
  return greatest;
}
__device__ __forceinline__ float greatest_of(uint4 a, uint4 b) {
  return greatest_noting_infinity(a, b, [] {});
}

// What is made 0 before numbers are split.
struct NothingCleaned {
  static __device__ __forceinline__ bool takes(unsigned) { return false; }
};
struct NonfiniteCleaned {
  static __device__ __forceinline__ bool takes(unsigned bits) { return (bits & 0x7f800000u) == 0x7f800000u; }
};
template <class Cleaned>
__device__ __forceinline__ uint4 clean(uint4 x) {
  const auto of = [](unsigned bits) { return Cleaned::takes(bits) ? 0u : bits; };
  return {of(x.x), of(x.y), of(x.z), of(x.w)};
}

__device__ __forceinline__ bool has_infinity(uint4 x) {
  const auto is = [](unsigned bits) { return (bits & 0x7fffffffu) == 0x7f800000u; };
  return is(x.x) || is(x.y) || is(x.z) || is(x.w);
}

// That of numbers which are cleaned if one is not finite; then it calls note().
template <class Cleaned, class Note>
__device__ __forceinline__ float greatest_cleaned(uint4& a, uint4& b, Note&& note) {
  const unsigned bits[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  float greatest = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) greatest = ptx::max_or_nan(greatest, fabsf(__uint_as_float(bits[i])));
  if (!(greatest < kInfinity)) [[unlikely]] {
    a = clean<Cleaned>(a);
    b = clean<Cleaned>(b);
    note();
    greatest = greatest_of(a, b);
  }
  return greatest;
}

// Tile: kRows, kUnits, kBytes, offset(row, unit). kAligned: rows begin at multiples of 16 bytes and kHeaddim is one of 4.
template <class Tile, int kThreads, int kHeaddim, bool kAligned>
struct SplitCopy {
  static constexpr int kUnitsInAll = Tile::kRows * Tile::kUnits;
  static constexpr int kPasses = (kUnitsInAll + kThreads - 1) / kThreads;

  // body(bytes from the tile's start, row, unit) for each unit of this thread.
  template <int kUnroll, class Body>
  static __device__ __forceinline__ void for_each_unit(Body&& body) {
    const int thread = ptx::opaque(static_cast<int>(threadIdx.x));
#pragma unroll kUnroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int index = thread + pass * kThreads, row = index / Tile::kUnits, unit = index % Tile::kUnits;
      if (kUnitsInAll % kThreads == 0 || index < kUnitsInAll) body(Tile::offset(row, unit), row, unit);
    }
  }

  // Rows [0, rows) of `source` into the tile, zeros elsewhere. Asynchronous.
  static __device__ __forceinline__ void copy(unsigned tile, const float* source, long long row_stride, int rows) {
    for_each_unit<kAligned ? 2 : 1>([&](unsigned offset, int row, int unit) {
      const float* from = source + row * row_stride + unit * 8;
      if constexpr (kAligned) {
        ptx::cp_async_16_zfill(tile + offset, from, row < rows && unit * 8 < kHeaddim ? 16 : 0);
        ptx::cp_async_16_zfill(tile + Tile::kBytes + offset, from + 4, row < rows && unit * 8 + 4 < kHeaddim ? 16 : 0);
      } else {
#pragma unroll 1
        for (int i = 0; i < 8; ++i)
          ptx::cp_async_4_zfill(tile + i / 4 * Tile::kBytes + offset + i % 4 * 4, from + i, row < rows && unit * 8 + i < kHeaddim);
      }
    });
  }
  // The same of rows that lie anywhere: row_at(row) is where row `row` begins, and asked for rows that the tile has not, too. Not shared with copy():
  // the compiler then makes other machine code of kernels without it.
  template <class RowAt>
  static __device__ __forceinline__ void copy_rows(unsigned tile, int rows, RowAt&& row_at) {
    for_each_unit<kAligned ? 2 : 1>([&](unsigned offset, int row, int unit) {
      const float* from = row_at(row) + unit * 8;
      if constexpr (kAligned) {
        ptx::cp_async_16_zfill(tile + offset, from, row < rows && unit * 8 < kHeaddim ? 16 : 0);
        ptx::cp_async_16_zfill(tile + Tile::kBytes + offset, from + 4, row < rows && unit * 8 + 4 < kHeaddim ? 16 : 0);
      } else {
#pragma unroll 1
        for (int i = 0; i < 8; ++i)
          ptx::cp_async_4_zfill(tile + i / 4 * Tile::kBytes + offset + i % 4 * 4, from + i, row < rows && unit * 8 + i < kHeaddim);
      }
    });
  }

  // The greatest magnitude among this thread's numbers but for Inf and NaN, once its copies have arrived. Where one is Inf it calls note().
  template <class Note>
  static __device__ __forceinline__ float greatest_noting_infinity(unsigned tile, Note&& note) {
    float greatest = 0;
    for_each_unit<2>([&](unsigned offset, int, int) {
      greatest =
          fmaxf(greatest, tile::greatest_noting_infinity(ptx::ld_shared_16(tile + offset), ptx::ld_shared_16(tile + Tile::kBytes + offset), note));
    });
    return greatest;
  }
  static __device__ __forceinline__ float greatest(unsigned tile) {
    return greatest_noting_infinity(tile, [] {});
  }
  // That of numbers which are cleaned where they stand if one is not finite; then it calls note().
  template <class Cleaned, class Note>
  static __device__ __forceinline__ float greatest_cleaned(unsigned tile, Note&& note) {
    float greatest = 0;
    for_each_unit<2>([&](unsigned offset, int, int) {
      uint4 a = ptx::ld_shared_16(tile + offset), b = ptx::ld_shared_16(tile + Tile::kBytes + offset);
      greatest = fmaxf(greatest, tile::greatest_cleaned<Cleaned>(a, b, [&] {
                         ptx::st_shared_16(tile + offset, a);
                         ptx::st_shared_16(tile + Tile::kBytes + offset, b);
                         note();
                       }));
    });
    return greatest;
  }
  template <class Cleaned>
  static __device__ __forceinline__ float greatest_cleaned(unsigned tile) {
    return greatest_cleaned<Cleaned>(tile, [] {});
  }
  // That of the finite numbers; the others become 0. It calls note(row) for rows with Inf.
  template <class Note>
  static __device__ __forceinline__ float greatest_finite(unsigned tile, Note&& note) {
    float greatest = 0;
    for_each_unit<2>([&](unsigned offset, int row, int) {
      uint4 a = ptx::ld_shared_16(tile + offset), b = ptx::ld_shared_16(tile + Tile::kBytes + offset);
      const uint4 given[2] = {a, b};
      greatest = fmaxf(greatest, tile::greatest_cleaned<NonfiniteCleaned>(a, b, [&] {
                         ptx::st_shared_16(tile + offset, a);
                         ptx::st_shared_16(tile + Tile::kBytes + offset, b);
                         if (has_infinity(given[0]) || has_infinity(given[1])) note(row);
                       }));
    });
    return greatest;
  }

  // Splits this thread's numbers, times `factor`.
  static __device__ __forceinline__ void split(unsigned tile, float factor) {
    for_each_unit<2>([&](unsigned offset, int, int) {
      const uint4 a = ptx::ld_shared_16(tile + offset), b = ptx::ld_shared_16(tile + Tile::kBytes + offset);
      const auto scaled = [&](unsigned bits) { return __uint_as_float(bits) * factor; };
      uint4 high, low;
      split2(scaled(a.x), scaled(a.y), high.x, low.x);
      split2(scaled(a.z), scaled(a.w), high.y, low.y);
      split2(scaled(b.x), scaled(b.y), high.z, low.z);
      split2(scaled(b.z), scaled(b.w), high.w, low.w);
      ptx::st_shared_16(tile + offset, high);
      ptx::st_shared_16(tile + Tile::kBytes + offset, low);
    });
  }
};

}  // namespace fattn::tile
