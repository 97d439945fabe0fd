// Some rows at once, mostly eight, by IEEE rules from global memory, by one warp: what the passes in fp32 share that compute again where the matrix
// products gave what they may not give (v2/forward_f32_again.h, v2/backward_f32_again.h). Inputs full of Inf take this way for every row, so it is as
// wide as the CUDA cores are: a lane has a row of the other tensor by itself, whose products with all of them it sums up, and then a column of
// theirs.
#pragma once

#include "kernels/ptx/warp.h"
#include "kernels/v2/global_row.h"

namespace fattn::v2 {

inline constexpr int kRowsAgain = 8;

// s[i] = the sum over `count` columns of own[c] * row(min(first + i, last))[c].
template <bool kAligned, int kRows>
__device__ __forceinline__ void products_again(float (&s)[kRows], const float* own, const HeadRows& rows, int first, int last, int count) {
  constexpr int kStep = kAligned ? 4 : 1;
#pragma unroll
  for (float& x : s) x = 0;
#pragma unroll 1
  for (int column = 0; column < count; column += kStep) {
    float x[kStep];
    const auto load = [&](float(&to)[kStep], const float* from) {
      if constexpr (kAligned) {
        const float4 four = *reinterpret_cast<const float4*>(from);
        to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
      } else {
        to[0] = *from;
      }
    };
    load(x, own + column);
    const float* other = rows.row(first) + column;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float y[kStep];
      load(y, other);
#pragma unroll
      for (int j = 0; j < kStep; ++j) s[i] = fmaf(x[j], y[j], s[i]);
      other += first + i < last ? rows.stride : 0;
    }
  }
}

// sum[i][part] += factor of (lane, i) * row(first + lane)[own column of the part], over the first `lanes` lanes whose bit i of `taken` says so. What
// is not taken adds nothing, whatever the row holds.
template <int kColumns, class Rows, int kRows, int kParts>
__device__ __forceinline__ void add_rows_again(float (&sum)[kRows][kParts], const float (&factor)[kRows], unsigned taken, const Rows& rows, int first,
                                               int lanes, int first_column, int lane) {
  constexpr int kAhead = kRows <= 2 ? 1 : kParts <= 2 ? 4 : kParts <= 4 ? 2 : 1;  // rows that are loaded together: few warps do this, and each waits
#pragma unroll 1
  for (int from = 0; from < lanes; from += kAhead) {
    float x[kAhead][kParts];
#pragma unroll
    for (int ahead = 0; ahead < kAhead; ++ahead) {
      const float* const row = rows.row(first + min(from + ahead, lanes - 1)) + first_column + lane;
#pragma unroll
      for (int part = 0; part < kParts; ++part) x[ahead][part] = first_column + lane + 32 * part < kColumns ? row[32 * part] : 0.0f;
    }
#pragma unroll
    for (int ahead = 0; ahead < kAhead; ++ahead) {
      const unsigned bits = from + ahead < lanes ? ptx::shfl(taken, from + ahead) : 0;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float by = ptx::shfl(factor[i], (from + ahead) % 32);
        if ((bits >> i & 1) == 0) continue;
#pragma unroll
        for (int part = 0; part < kParts; ++part) sum[i][part] = fmaf(by, x[ahead][part], sum[i][part]);
      }
    }
  }
}

// Whether some number of the rows in `wanted` is not NaN: nothing changes what is.
template <int kColumns, int kRows, int kParts>
__device__ __forceinline__ bool some_may_change(const float (&sum)[kRows][kParts], unsigned wanted, int first_column, int lane) {
  bool open = false;
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      open = open || ((wanted >> i & 1) != 0 && first_column + lane + 32 * part < kColumns && sum[i][part] == sum[i][part]);
  return ptx::ballot(open) != 0;
}

// Which rows of a warp are to be computed again, of 32 at most. The same in all lanes.
struct RowsAgain {
  unsigned rows = 0;

  // Of a fragment: a row is four lanes'.
  __device__ __forceinline__ void note(int group, unsigned ballot) {
    if (ballot == 0) [[likely]]
      return;
#pragma unroll
    for (int i = 0; i < kRowsAgain; ++i) rows |= (ballot >> (4 * i) & 15) != 0 ? 1u << (kRowsAgain * group + i) : 0u;
  }
  // body(first, wanted), once everybody has written what he has: the warp's rows from `first` on, kRows of them at once, those with a bit in
  // `wanted`.
  template <int kRows, class Body>
  __device__ __forceinline__ void for_each(Body&& body) const {
    if (rows == 0) [[likely]]
      return;
    ptx::warp_sync();
#pragma unroll 1
    for (int first = 0; first < 32; first += kRows) {
      const unsigned wanted = rows >> first & ((1u << kRows) - 1);
      if (wanted != 0) body(first, wanted);
    }
  }
};

}  // namespace fattn::v2
