// What leaves a consumer's tile (v3/forward_consumer.h): lse = ln 2 (m + log2 sum), o = O / sum.
#pragma once

#include "kernels/ptx/async_proxy.h"
#include "kernels/ptx/stmatrix.h"
#include "kernels/tile/for_each.h"
#include "kernels/v3/forward_consumer.h"
#include "kernels/v3/store_row.h"

namespace fattn::v3 {

// Closes the softmax of a tile: writes lse.
template <class Spec>
__device__ __forceinline__ auto Consumer<Spec>::close_rows(int nth) -> Inverse {
  const auto place = place_again(nth);
  const AttentionParams& call = p.call;
  Inverse inverse;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = softmax.sum[r] + ptx::shfl_xor(softmax.sum[r], 1);
    sum += ptx::shfl_xor(sum, 2);
    if constexpr (kPairOf<Spec>.lengths) sum += first_sum<kPairOf<Spec>>(call, place.batch);  // NaN if the length is out of range
    [[maybe_unused]] float sinked_lse;
    if constexpr (kPairOf<Spec>.sinks) {
      const SinkedRow<true> sinked(sink_of(pairs_of(call), place.head), -softmax.reference[r], sum, sum == 0);
      sum = sinked.sum;
      sinked_lse = sinked.lse;
    }
    inverse.of_row[r] = sum == 0 ? 0.0f : ptx::rcp(sum);
    if constexpr (kDropout) inverse.of_row[r] *= pairs_of(call).dropout_scale;
    const int at = place.row + own_row() + 8 * r;
    if (call.lse != nullptr && lane() % 4 == 0 && at < queries_of(call, place)) {
      constexpr float kLn2 = 0.693147180559945309f;
      call.lse[place.batch * call.lse_strides.batch + (place.first_query() + at) * call.lse_strides.row + place.head * call.lse_strides.head] =
          kPairOf<Spec>.sinks ? sinked_lse
          : sum == 0          ? -kInfinity
                              : (softmax.reference[r] + ptx::lg2(sum)) * kLn2;
    }
  }
  return inverse;
}

template <class Spec>
__device__ __forceinline__ void Consumer<Spec>::finish(const Inverse& inverse, int nth, unsigned buffer) {
  if (!ptx::vote_all(inverse.of_row[0] != 0 && inverse.of_row[1] != 0)) {  // empty rows, whatever 0 * v was
#pragma unroll
    for (int i = 0; i < Spec::kHeaddimV / 2; ++i)
      if (inverse.of_row[i >> 1 & 1] == 0) o[i] = 0;
  }
  if constexpr (Shape::kStoreFromRegisters)
    store_output(inverse, nth);
  else
    hand_output_over(inverse, nth, buffer);
}

// Stores o.
template <class Spec>
__device__ __forceinline__ void Consumer<Spec>::store_output(const Inverse& inverse, int nth) {
  const auto place = place_again(nth);
  unsigned zero[2];
  tile::for_each<0, 2>([&](auto r) {
    constexpr int kRow = decltype(r)::value;
    const int at = place.row + own_row() + 8 * kRow;
    const int columns = at < queries_of(p.call, place) ? p.work.columns_v : 0;
    if constexpr (kPairOf<Spec>.fp32_out)
      zero[kRow] = store_fp32_row<kRow, kTrustsValues<Spec>>(o, inverse.of_row[kRow], row_of_o<float>(place, at), columns, lane());
    else
      zero[kRow] = store_row<Element, kRow, kTrustsValues<Spec>>(o, inverse.of_row[kRow], row_of_o<unsigned short>(place, at), columns, lane());
  });
  look_for_nan(zero, inverse, nth);
}

// Leaves o to the warp that stores it, in the buffer of the queries.
template <class Spec>
__device__ __forceinline__ void Consumer<Spec>::hand_output_over(const Inverse& inverse, int nth, unsigned buffer) {
  const float inverse0 = inverse.of_row[0], inverse1 = inverse.of_row[1];
  const unsigned line = q_tile(buffer) + static_cast<unsigned>((warp_row() + lane() % 16) * 128);
  ptx::bar_sync(kOwnBarrier + group, 128);  // every warp of the group is done with the queries
  unsigned zero[2] = {0, 0};                // or NaN, if there is a NaN in the lane's part of a row
#pragma unroll
  for (int i = 0; i < Spec::kHeaddimV / 8; i += 2) {
    const unsigned a[4] = {
        ptx::pack2<Element>(o[4 * i] * inverse0, o[4 * i + 1] * inverse0), ptx::pack2<Element>(o[4 * i + 2] * inverse1, o[4 * i + 3] * inverse1),
        ptx::pack2<Element>(o[4 * i + 4] * inverse0, o[4 * i + 5] * inverse0), ptx::pack2<Element>(o[4 * i + 6] * inverse1, o[4 * i + 7] * inverse1)};
    ptx::stmatrix_x4(line + static_cast<unsigned>(i / 8 * Shape::TileO::kColumnBytes + ((i % 8 + lane() / 16) ^ (lane() % 8)) * 16), a);
    if constexpr (kTrustsValues<Spec>) {
#pragma unroll
      for (int e = 0; e < 4; ++e) zero[e % 2] = ptx::fma2<Element>(a[e], 0, zero[e % 2]);
    }
  }
  look_for_nan(zero, inverse, nth);
  ptx::async_proxy_fence();
  ptx::warp_sync();
  if (lane() == 0) ptx::mbarrier_arrive(barriers.o_full(buffer, static_cast<unsigned>(group)));
}

// NaN in a row whose sum is a number came from values, perhaps from hidden ones.
template <class Spec>
__device__ __forceinline__ void Consumer<Spec>::look_for_nan(const unsigned (&zero)[2], const Inverse& inverse, int nth) const {
  if constexpr (kTrustsValues<Spec>) {
    const bool good = ((zero[0] & 0x7fff7fffu) == 0 || !(inverse.of_row[0] > 0)) && ((zero[1] & 0x7fff7fffu) == 0 || !(inverse.of_row[1] > 0));
    if (!ptx::vote_all(good)) [[unlikely]]
      if (lane() == 0 && !SpoiltNotes<Spec>{shared}.looked_through(nth)) SpoiltNotes<Spec>{shared}.compute_again(nth);
  }
}

template <class Spec>
template <class T, class Place>
__device__ __forceinline__ T* Consumer<Spec>::row_of_o(const Place& place, int row_of_q) const {
  if constexpr (kPairOf<Spec>.packed) row_of_q += place.q_begin;
  const TensorStrides& strides = p.call.o_strides;
  return static_cast<T*>(p.call.o) + place.batch * strides.batch + row_of_q * strides.row + place.head * strides.head;
}

// Whether Inf and NaN were taken out of the tile's values: its end then needs the registers that joining it to the next one takes. All of its
// blocks have been looked through by now, but for those that a warpgroup passes over.
template <class Spec>
__device__ __forceinline__ bool Consumer<Spec>::has_spoilt_values(int nth) const {
  wait_v();
  const bool spoilt = SpoiltNotes<Spec>{shared}.kinds(nth) != 0;
  if constexpr (Shape::kSkipsBefore) return !ptx::bar_and(kOwnBarrier + group, 128, !spoilt);
  return spoilt;
}

}  // namespace fattn::v3
