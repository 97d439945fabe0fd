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

// The keys [begin, begin + length) of 16 rows, in lanes, counted from some key.
struct SeenKeys {
  __m512i begin, length;

  FATTN_AMX_INLINE_MEMBER __mmask16 sees(int key) const { return _mm512_cmplt_epu32_mask(_mm512_sub_epi32(_mm512_set1_epi32(key), begin), length); }
  // Counted from `keys` keys further on.
  FATTN_AMX_INLINE_MEMBER SeenKeys further(int64_t keys) const {
    return {_mm512_sub_epi32(begin, _mm512_set1_epi32(static_cast<int>(keys))), length};
  }
};

// Of the words of a mask, 32 keys of 16 rows: does no row see any?
FATTN_AMX_INLINE bool is_dead(const uint32_t* words) {
  const __m512i x = _mm512_loadu_si512(words);
  return _mm512_test_epi32_mask(x, x) == 0;
}

}  // namespace fattn::core::amx
