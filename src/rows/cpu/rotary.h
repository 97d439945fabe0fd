// Rotary embeddings of a row: every head's pairs turn by the same angles; and its change to another dtype.
#pragma once

#include <string.h>

#include "rows/cpu/elements.h"

namespace fattn::core::FATTN_ISA::rows {

using fattn::core::rows::kMostHeaddim;
using fattn::core::rows::RotaryRow;

// (a, b) becomes (a cos - b sin, a sin + b cos), each product and sum rounded to fp32. `step` elements lie between one pair and the next, `apart`
// between a and b.
template <int kStep>
FATTN_INLINE void turn(const float* from, int apart, const float* cos, const float* sin, int half, float* to) {
  for (int d = 0; d < half; ++d) {
    const float a = from[d * kStep], b = from[d * kStep + apart];
    to[d * kStep] = a * cos[d] - b * sin[d];
    to[d * kStep + apart] = a * sin[d] + b * cos[d];
  }
}

static void rotary_row(const RotaryRow& t) {
  float cos[kMostHeaddim / 2], sin[kMostHeaddim / 2], from[kMostHeaddim], to[kMostHeaddim];
  const int turned = 2 * t.half, rest = t.headdim - turned;
  with_elements(t.cos, t.cos_dtype, 0, [&](auto* x) { widen(x, t.half, cos); });
  with_elements(t.sin, t.sin_dtype, 0, [&](auto* x) { widen(x, t.half, sin); });
  for (int d = 0; t.inverse && d < t.half; ++d) sin[d] = -sin[d];
  const bool same = t.dtype == t.y_dtype;  // then the rest keeps its bits
  const int computed = same ? turned : t.headdim;
  const int64_t bytes = t.dtype == FATTN_F32 ? 4 : 2;
  for (int64_t h = 0; h < t.heads; ++h) {
    with_elements(t.x, t.dtype, h * t.x_head_stride, [&](auto* x) { widen(x, computed, from); });
    if (same) {
      const char* x = static_cast<const char*>(t.x) + (h * t.x_head_stride + turned) * bytes;
      char* y = static_cast<char*>(t.y) + (h * t.y_head_stride + turned) * bytes;
      if (x != y) memcpy(y, x, static_cast<size_t>(rest * bytes));
    } else {
      memcpy(to + turned, from + turned, static_cast<size_t>(rest) * sizeof(float));
    }
    if (t.interleaved)
      turn<2>(from, 1, cos, sin, t.half, to);
    else
      turn<1>(from, t.half, cos, sin, t.half, to);
    with_elements(t.y, t.y_dtype, h * t.y_head_stride, [&](auto* y) { narrow(to, 1.0f, computed, y); });
  }
}

}  // namespace fattn::core::FATTN_ISA::rows
