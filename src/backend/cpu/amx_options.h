// What options add to the AMX kernels, by the functions of the vector kernels (namespace vec): a tile of scores is [key][row] in both.
#pragma once

#include "backend/cpu/amx_tile.h"

namespace fattn::core::amx {

constexpr float kMinusInfinity = -__builtin_inff();

// The options of a task that the inner loops ask for.
struct TaskOptions {
  bool capped, added, masked, documents, drops;
  bool hides;   // may pairs be hidden by more than their place?
  float scale;  // |softmax_scale|, of products

  template <class Task>
  explicit TaskOptions(const Task& task)
      : capped(task.softcap > 0),
        added(vec::adds(task.inputs)),
        masked(task.inputs.mask != nullptr),
        documents(task.inputs.document_q != nullptr),
        drops(task.inputs.dropout_below > 0),
        hides(vec::hides(task.inputs) || documents),
        scale(task.scale < 0 ? -task.scale : task.scale) {}

  bool reshapes() const { return capped || added || masked || documents; }   // are scores more than scaled products?
  bool has_inputs() const { return added || masked || documents || drops; }  // as in KernelShape
  float left() const { return capped || added ? 1.0f : scale; }              // what is left to do to a score after that
};

// Is anything asked for that the kernels without options do not have?
template <class Task>
bool has_options(const Task& task) {
  const TaskOptions options(task);
  return options.reshapes() || options.drops || task.left_diagonal > kNoBegin;
}

// Which of 32 keys 16 rows see is a word a row: bit j of its lane is key j's.
FATTN_AMX_INLINE __mmask16 sees(__m512i words, int key) { return _mm512_test_epi32_mask(words, _mm512_set1_epi32(static_cast<int>(1u << key))); }
FATTN_AMX_INLINE bool sees_all(__m512i words) { return _mm512_cmpneq_epi32_mask(words, _mm512_set1_epi32(-1)) == 0; }

// The keys [begin, end) of 16 rows, in lanes, counted from some key.
struct SeenKeys {
  __m512i begin, end;

  // Of the 32 keys from `first` on.
  FATTN_AMX_INLINE_MEMBER __m512i words(int64_t first) const {
    const __m512i from_first = _mm512_set1_epi32(static_cast<int>(first)), none = _mm512_setzero_si512(), all = _mm512_set1_epi32(-1);
    const __m512i not_before = _mm512_sllv_epi32(all, _mm512_max_epi32(_mm512_sub_epi32(begin, from_first), none));  // a shift by 32 or more gives 0
    return _mm512_andnot_si512(_mm512_sllv_epi32(all, _mm512_max_epi32(_mm512_sub_epi32(end, from_first), none)), not_before);
  }
};

// Of the first n (up to 32) keys of these documents, rows of the documents `rows`.
FATTN_AMX_INLINE __m512i words_of_documents(__m512i rows, const int32_t* ids, int64_t n) {
  __m512i words = _mm512_setzero_si512();
  uint32_t bit = 1;
  for (int64_t key = 0; key < n; ++key, bit <<= 1)
    words = _mm512_mask_or_epi32(words, _mm512_cmpeq_epi32_mask(rows, _mm512_set1_epi32(ids[key])), words, _mm512_set1_epi32(static_cast<int>(bit)));
  return words;
}

// Of the words of a mask, 32 keys of 16 rows: does no row see any?
FATTN_AMX_INLINE bool is_dead(const uint32_t* words) {
  const __m512i x = _mm512_loadu_si512(words);
  return _mm512_test_epi32_mask(x, x) == 0;
}

}  // namespace fattn::core::amx
