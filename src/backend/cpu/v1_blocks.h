// What both passes of algorithm v1 are made of: blocks of rows in fp32, and products of blocks. Unlike the kernels of v2, which have queries in
// lanes, everything lies as the papers write it: S has a row for each query and a column for each key.
#pragma once

#include "backend/cpu/operands.h"
#include "backend/cpu/score.h"

namespace fattn::core::FATTN_ISA {

// Rows of fp32, `stride` apart.
struct Block {
  float* data;
  int64_t stride;

  float* row(int64_t r) const { return data + r * stride; }
  Block from(int64_t r) const { return {row(r), stride}; }
};

// A block in scratch memory, whose rows are whole vectors.
FATTN_INLINE Block take_block(Scratch& scratch, int64_t rows, int64_t columns) {
  const int64_t stride = copy_stride(columns);
  return {scratch.take<float>(rows * stride), stride};
}

FATTN_INLINE void set_zero(Block block, int64_t rows) {
  for (int64_t i = 0; i < rows * block.stride; i += kLanes) store(block.data + i, zero());
}

// Rows of a tensor as a block, zeros behind them.
template <class T>
FATTN_INLINE void load_block(const T* from, int64_t stride, int64_t rows, int64_t columns, Block to) {
  copy_rows(from, stride, rows, columns, to.data, to.stride);
}

// Columns of a transposed block that one panel of the micro-kernel takes lie side by side: element (d, key) is at
// to[key / kPanel * n * kPanel + d * kPanel + key % kPanel]. Keys are filled up with zeros to a multiple of kTile.
constexpr int64_t padded_keys(int64_t keys) { return round_up(keys, kTile); }
template <class T>
void load_transposed(const T* from, int64_t stride, int64_t keys, int64_t n, float factor, float* to) {
  for (int64_t key = 0; key < keys; key += kTile)
    pack_transposed(from + key * stride, stride, keys - key < kTile ? keys - key : kTile, n, factor, to + key * n);
}

// to (rows, kVecs vectors) = a b, or to += a b. a has n columns or, if kTransposed, n rows; b has n rows.
template <bool kTransposed, bool kAdds, int kVecs>
__attribute__((noinline)) void product_panel(Block a, Block b, Block to, int64_t rows, int64_t n) {
  const Scalars scalars{reinterpret_cast<const char*>(a.data), a.stride * static_cast<int64_t>(sizeof(float))};
  sweep<OpsF32, kTransposed, kVecs>(
      scalars, rows, b.data, b.stride, n, [](auto& acc, int64_t) { set_zero(acc); },
      [&](auto& acc, int64_t row) {
        constexpr int kRows = sizeof(acc) / sizeof(acc[0]);
        FATTN_UNROLL
        for (int r = 0; r < kRows; ++r) FATTN_UNROLL
        for (int w = 0; w < kVecs; ++w) {
          float* const at = to.row(row + r) + w * kLanes;
          store(at, kAdds ? add(load(at), acc[r][w]) : acc[r][w]);
        }
      });
}

// to += a b, or a^T b, for all columns of `to`. a^T has its rows as columns.
template <bool kTransposed>
FATTN_INLINE void add_product(Block a, Block b, Block to, int64_t rows, int64_t n, int64_t columns) {
  const auto panel = [&](int64_t c, auto count) {
    product_panel<kTransposed, true, decltype(count)::value>(a, {b.data + c, b.stride}, {to.data + c, to.stride}, rows, n);
  };
  const int64_t end = round_up(columns, kLanes);
  int64_t c = 0;
  for (; c + kPanel <= end; c += kPanel) panel(c, Count<kPanelVecs>{});
  if (kPanelVecs == 4 && c + 2 * kLanes <= end) {
    panel(c, Count<2>{});
    c += 2 * kLanes;
  }
  if (c < end) panel(c, Count<1>{});
}

// to (rows, keys) = a b^T, b as load_transposed leaves it. Columns behind the last key up to a whole panel are products with zeros.
FATTN_INLINE void product_with_keys(Block a, const float* transposed, Block to, int64_t rows, int64_t keys, int64_t n) {
  for (int64_t key = 0; key < keys; key += kPanel)
    product_panel<false, false, kPanelVecs>(a, {const_cast<float*>(transposed) + key * n, kPanel}, {to.data + key, to.stride}, rows, n);
}

// How many of the keys [key, key + keys) row `row` sees, the first ones.
template <class Task>
FATTN_INLINE int64_t keys_seen(const Task& task, int64_t row, int64_t key, int64_t keys) {
  const int64_t seen = row + task.diagonal - key;
  return seen < 0 ? 0 : seen < keys ? seen : keys;
}

// The first block of rows that has one which sees `key`.
template <class Task>
FATTN_INLINE int64_t first_block_of_rows(const Task& task, int64_t key) {
  const int64_t row = key - task.diagonal + 1;
  return row < 0 ? 0 : row / task.rows * task.rows;
}

FATTN_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

FATTN_INLINE float exp2_of_one(float x) {
  float lanes[kLanes];
  store(lanes, exp2(set1(x)));
  return lanes[0];
}

}  // namespace fattn::core::FATTN_ISA
