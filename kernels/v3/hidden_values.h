// Inf and NaN in values that a row does not see. Their weight is 0, but 0 * Inf is NaN: such rows are computed again without the hidden keys, one
// after the other from global memory, into the tile of o in shared memory. Seldom used: it has few registers, and time does not matter.
#pragma once

#include "kernels/ptx/convert.h"
#include "kernels/ptx/math.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/ptx/warp.h"
#include "kernels/v3/schedule.h"
#include "kernels/v3/softmax.h"

namespace fattn::v3 {

// Keys, values or queries of one head in global memory.
template <class Element>
struct GlobalRows {
  const unsigned short* first;
  long long stride;
  __device__ __forceinline__ unsigned short bits(int row, int column) const { return first[row * stride + column]; }
  __device__ __forceinline__ float value(int row, int column) const { return ptx::to_float<Element>(bits(row, column)); }
};
template <class Element>
__device__ __forceinline__ GlobalRows<Element> rows_of(const void* tensor, const TensorStrides& strides, int batch, int head) {
  return {static_cast<const unsigned short*>(tensor) + batch * strides.batch + head * strides.head, strides.row};
}

template <class Element>
inline constexpr unsigned kExponentBits = is_same<Element, bf16> ? 0x7f80u : 0x7c00u;
template <class Element>
__device__ __forceinline__ bool is_nan(unsigned short bits) {
  return (bits & 0x7fffu) > kExponentBits<Element>;
}

// Whether one of the keys [begin, end) has a value that is no number. All lanes of a warp together, as below.
template <class Element>
__device__ __forceinline__ bool any_nonfinite(const GlobalRows<Element>& v, int begin, int end, int columns, int lane) {
  bool finite = true;
#pragma unroll 1
  for (int key = begin; key < end; ++key) {
#pragma unroll 1
    for (int column = lane; column < columns; column += 32)
      finite = finite && (v.bits(key, column) & kExponentBits<Element>) != kExponentBits<Element>;
  }
  return !ptx::vote_all(finite);
}

// The score of a query and a key, as the softmax takes it. All lanes of a warp together.
template <class Spec>
__device__ __forceinline__ float score_of(const ForwardCall& p, const GlobalRows<typename Spec::Element>& q, int row,
                                          const GlobalRows<typename Spec::Element>& k, int key, int lane) {
  float score[1] = {0};
#pragma unroll 1
  for (int c = lane; c < p.work.columns; c += 32) score[0] = fmaf(q.value(row, c), k.value(key, c), score[0]);
#pragma unroll 1
  for (int lanes = 1; lanes < 32; lanes *= 2) score[0] += ptx::shfl_xor(score[0], lanes);
  Spec::Score::apply(score, p.call);
  return score[0] * p.call.softmax_scale_log2;
}

// The NaN of row `row` of o, which sees the keys [0, end): computed again, unless a visible NaN is among its values. `line`: the row in the tile of
// o, whose columns of 64 elements are `column_bytes` apart; `in_tile`: its number there, by which it is swizzled.
template <class Spec>
__device__ __forceinline__ void row_again(const ForwardCall& p, const Place& place, int row, int end, unsigned line, int in_tile, int column_bytes,
                                          int lane) {
  using Element = typename Spec::Element;
  const AttentionParams& call = p.call;
  const auto q = rows_of<Element>(call.q, call.q_strides, place.batch, place.head);
  const auto k = rows_of<Element>(call.k, call.k_strides, place.batch, place.head_k);
  const auto v = rows_of<Element>(call.v, call.v_strides, place.batch, place.head_k);
#pragma unroll 1
  for (int first = 0; first < p.work.columns_v; first += 32) {
    const int column = first + lane;
    const unsigned at = line + static_cast<unsigned>(column / 64 * column_bytes + ((column / 8 % 8) ^ (in_tile % 8)) * 16 + column % 8 * 2);
    bool wrong = column < p.work.columns_v && is_nan<Element>(ptx::ld_shared_2(at));
#pragma unroll 1
    for (int key = 0; key < end && !ptx::vote_all(!wrong); ++key) wrong = wrong && !is_nan<Element>(v.bits(key, column));
    if (ptx::vote_all(!wrong)) continue;
    float greatest = -kInfinity;
#pragma unroll 1
    for (int key = 0; key < end; ++key) greatest = fmaxf(greatest, score_of<Spec>(p, q, row, k, key, lane));
    float o = 0, sum = 0;
#pragma unroll 1
    for (int key = 0; key < end; ++key) {
      const float weight = ptx::ex2(score_of<Spec>(p, q, row, k, key, lane) - greatest);
      sum += weight;
      if (wrong) o = fmaf(weight, v.value(key, column), o);
    }
    if (wrong) ptx::st_shared_2(at, static_cast<unsigned short>(ptx::pack2<Element>(o * ptx::rcp(sum), 0.0f)));
  }
}

}  // namespace fattn::v3
