// Where keys are: side by side, or in pages (KeyPages). Vectors load rows where they are as long as the keys of a step lie in one page, or in pages
// that follow each other; other steps have their rows copied, which changes no bit.
#pragma once

#include "backend/cpu/kernels.h"
#include "backend/cpu/operands.h"

namespace fattn::core::FATTN_ISA {

// Rows that lie `stride` elements apart.
template <class T>
struct Rows {
  const T* data;
  int64_t stride;
};

// The keys, or values, of one key head.
template <class T>
struct KeyRows {
  const T* base;  // of key 0, or of page 0
  int64_t stride;
  const int32_t* table;  // null: no pages
  int64_t size, page_stride;

  template <class Task>
  static KeyRows keys(const Task& task, int64_t offset = 0) {
    return {static_cast<const T*>(task.k) + offset, task.k_stride, task.pages.table, task.pages.size, task.pages.k_stride};
  }
  template <class Task>
  static KeyRows values(const Task& task, int64_t offset = 0) {
    return {static_cast<const T*>(task.v) + offset, task.v_stride, task.pages.table, task.pages.size, task.pages.v_stride};
  }

  const T* at(int64_t key) const { return table ? base + table[key / size] * page_stride + key % size * stride : base + key * stride; }

  // How many of the `most` keys from `key` on lie `stride` apart.
  int64_t run(int64_t key, int64_t most) const {
    if (!table) return most;
    const int32_t* page = table + key / size;
    int64_t n = size - key % size;
    for (; n < most && (page[1] - int64_t{page[0]}) * page_stride == size * stride; ++page) n += size;
    return n < most ? n : most;
  }

  // Whether steps from this key on are worth taking run by run: no run of pages ends within a few keys.
  bool in_long_runs(int64_t key) const { return !table || (size % 8 == 0 && key % 8 == 0); }

  // Of n keys from `key` on, `width` elements each: where they are, or copied to `buffer`, which has copy_stride(width) elements for each.
  Rows<T> side_by_side(int64_t key, int64_t n, int64_t width, T* buffer) const {
    if (n <= 0) return {base, stride};
    if (run(key, n) == n) return {at(key), stride};
    const int64_t to_stride = copy_stride(width);
    for (int64_t i = 0; i < n;) {
      const T* from = at(key + i);
      const int64_t end = i + run(key + i, n - i);
      for (; i < end; ++i, from += stride) __builtin_memcpy(buffer + i * to_stride, from, static_cast<size_t>(width) * sizeof(T));
    }
    return {buffer, to_stride};
  }
};

// Keys that are wanted soon: NextRows, run by run.
template <class T>
struct NextKeys {
  NextRows rows;
  KeyRows<T> from{};
  int64_t key = 0, end = 0, width = 0;  // keys that no run has yet; elements of a row

  NextKeys() = default;  // none
  NextKeys(const KeyRows<T>& keys, int64_t begin, int64_t n, int64_t elements) : from(keys), key(begin), end(begin + n), width(elements) { refill(); }

  // Begins the next run where one is done.
  void refill() {
    if (rows.rows > 0 || key >= end) return;
    const int64_t n = from.run(key, end - key);
    rows = NextRows(from.at(key), from.stride, n, width);
    key += n;
  }
  void fetch(int64_t some) {
    for (refill(); some > 0 && rows.rows > 0; refill()) {
      const int64_t here = some < rows.rows ? some : rows.rows;
      rows.fetch(here);
      some -= here;
    }
  }
};

}  // namespace fattn::core::FATTN_ISA
