// The gradient of a bias, from tiles [key][lane] (score_inputs.h) to rows of keys.
#pragma once

#include "backend/cpu/score_inputs.h"

namespace fattn::core::FATTN_ISA {

// out[row][key] = sums[row][key] + from[key][lane], or kStores, from[key][lane], for the rows and keys of a place; rows of `sums` and `out`, which
// may be the same, are their strides apart, 0 where rows are summed.
template <bool kStores, int kVecs, class Out>
__attribute__((noinline)) void add_transposed(const float* from, const TilePlace& at, const float* sums, int64_t sums_stride, Out* out,
                                              int64_t out_stride) {
  const auto add_block = [&](int64_t key, int w) __attribute__((always_inline)) {
    F32 block[kLanes];
    const int64_t columns = at.keys - key, first = static_cast<int64_t>(w) * kLanes, rows = at.rows - first;
    const float* corner = from + (key * kVecs + w) * kLanes;
    const float* more = kStores ? nullptr : sums + (at.row + first) * sums_stride + at.key + key;
    Out* to = out + (at.row + first) * out_stride + at.key + key;
    if (columns >= kLanes && rows >= kLanes) {
      FATTN_UNROLL
      for (int j = 0; j < kLanes; ++j) block[j] = load(corner + j * kVecs * kLanes);
      transpose(block);
      FATTN_UNROLL
      for (int i = 0; i < kLanes; ++i) store(to + i * out_stride, kStores ? block[i] : add(load(more + i * sums_stride), block[i]));
    } else {
      for (int j = 0; j < kLanes; ++j) block[j] = j < columns ? load(corner + j * kVecs * kLanes) : zero();
      transpose(block);
      for (int64_t i = 0; i < kLanes && i < rows; ++i)
        store_n(to + i * out_stride, kStores ? block[i] : add(load_n(more + i * sums_stride, columns), block[i]), columns);
    }
  };
  if constexpr (kLanes * sizeof(Out) < 64) {  // a cache line has several blocks: all of its own, before other rows take its place in the L1 cache
    for (int w = 0; w < kVecs; ++w)
      for (int64_t key = 0; key < at.keys; key += kLanes) add_block(key, w);
  } else {
    for (int64_t key = 0; key < at.keys; key += kLanes)
      for (int w = 0; w < kVecs; ++w) add_block(key, w);
  }
}

// Where the gradient of a head's bias goes: fp32 sums over those that share it, one after the other, or the tensor itself, T. Who comes first finds
// anything there and stores, with zeros where it computes nothing, which saves a pass that only writes zeros; who comes last writes the tensor, which
// saves one that only converts. Pointers are at row 0, key 0 of the head's.
template <class T>
struct BiasGradient {
  float* sums;
  int64_t sums_stride;
  T* out;
  int64_t out_stride;
  bool first, last;

  // Adds from[key][lane], the rows and keys of a place.
  template <int kVecs>
  void add(const float* from, const TilePlace& at) const {
    if (last && first)
      add_transposed<true, kVecs>(from, at, nullptr, 0, out, out_stride);
    else if (last)
      add_transposed<false, kVecs>(from, at, sums, sums_stride, out, out_stride);
    else if (first)
      add_transposed<true, kVecs>(from, at, nullptr, 0, sums, sums_stride);
    else
      add_transposed<false, kVecs>(from, at, sums, sums_stride, sums, sums_stride);
  }
  // Rows [row, end_row) and keys [begin, end) get nothing.
  void pass_over(int64_t row, int64_t end_row, int64_t begin, int64_t end) const {
    if (!first && !last) return;
    for (; row < end_row; ++row)
      for (int64_t key = begin; key < end; key += kLanes) {
        const F32 sum = first ? zero() : load_n(sums + row * sums_stride + key, end - key);
        if (last)
          store_n(out + row * out_stride + key, sum, end - key);
        else
          store_n(sums + row * sums_stride + key, sum, end - key);
      }
  }
  // Fetches part `part` of `parts` of what `add` will touch.
  void prefetch(const TilePlace& at, int64_t part, int64_t parts) const {
    if (sums_stride > 0 && !(first && last)) prefetch_pairs(sums, 4, sums_stride, at, part, parts);
    if (last) prefetch_pairs(out, static_cast<int64_t>(sizeof(T)), out_stride, at, part, parts);
  }
};

// Of query head `head` of a task's group.
template <class T>
BiasGradient<T> bias_gradient_of(const BackwardTask& task, int64_t head) {
  const bool own = task.dbias_head_stride > 0;
  return {task.dbias_sums ? task.dbias_sums + head * task.dbias_head_stride : nullptr,
          task.dbias_stride,
          task.dbias ? static_cast<T*>(task.dbias) + head * task.dbias_out_head_stride : nullptr,
          task.dbias_out_stride,
          task.first_of_dbias && (head == 0 || own),
          task.last_of_dbias && (head == task.group - 1 || own)};
}

}  // namespace fattn::core::FATTN_ISA
