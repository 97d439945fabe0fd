// dq of heads that are complete goes from the fp32 accumulators to its tensor while the main kernel computes later heads.
//
// The accumulators are a ring, small enough to stay in L2: key heads come in generations of work.generation, and four generations have a place at
// once. The CTAs of generation g convert the dq of generation g - 2, a part at each block of queries, by the warpgroup of dq, and leave zeros, for
// generation g + 2. Before that they wait until all CTAs of generation g - 2 are done, with their own conversions too: a generation is about as many
// CTAs as run at once, so they are. What the last two generations leave is the last kernel's (v3/backward_finish.h), which is also told of Inf and
// NaN and looks for rows without a gradient.
//
// CTAs come up in the order of their numbers, on every GPU there is, though the PTX ISA does not promise it; a number drawn from memory, as in
// deterministic kernels, would cost each CTA about a microsecond (an estimate). So whoever waits does so for those that have come up.
#pragma once

#include "kernels/constants.h"
#include "kernels/ptx/async_proxy.h"
#include "kernels/ptx/barrier.h"
#include "kernels/ptx/bulk_copy.h"
#include "kernels/ptx/convert.h"
#include "kernels/ptx/dependent_launch.h"
#include "kernels/ptx/semaphore.h"
#include "kernels/ptx/warp.h"
#include "kernels/v3/backward_schedule.h"
#include "kernels/v3/backward_shape.h"
#include "kernels/v3/backward_store.h"

namespace fattn::v3 {

// words[j] of lane q of four neighbours becomes words[q] of lane j.
__device__ __forceinline__ void exchange_among_four(unsigned (&words)[4], int lane) {
#pragma unroll
  for (int distance = 1; distance <= 2; distance *= 2) {
    const bool upper = (lane & distance) != 0;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int low = distance == 1 ? 2 * pair : pair, high = low + distance;
      const unsigned received = ptx::shfl_xor(upper ? words[low] : words[high], distance);
      words[low] = upper ? received : words[low];
      words[high] = upper ? words[high] : received;
    }
  }
}

template <class Spec>
struct EarlierHead {
  using Element = typename Spec::Element;
  using Mask = typename Spec::Mask;
  static constexpr int kParts = Spec::kHeaddim / 32;  // of a block: 32 columns of its 64 rows
  static constexpr int kBarrier = 1;                  // named, of the warpgroup of dq

  const BackwardCall& p;
  const TilePlace tile;
  const int thread;
  int left = 0, more = 0;  // parts; and how many there are beyond one for each of the CTA's own blocks of queries
  int place;               // the thread's of the next part, in dq_accum, counted in 16 bytes
  unsigned short* dq;      // where its octet of columns is, in the first of its rows
  int part, row;           // of the next one: in its block, and the block's first row
  float4 x[4];             // what was loaded of it: as in wgmma's accumulators, two columns of every 8, of two rows

  __device__ __forceinline__ EarlierHead(const BackwardCall& params, TilePlace of_keys)
      : p(params), tile(of_keys), thread(static_cast<int>(threadIdx.x) % 128) {}

  __device__ __forceinline__ int own() const { return tile.batch() * p.call.nheads_k + tile.head_k(); }
  // How much of a head the tiles before `number` convert: in proportion to their blocks of queries. All of it, exactly, before the one behind the
  // last.
  __device__ __forceinline__ int converted_before(int number) const {
    const float all = static_cast<float>(p.call.group * p.work.row_blocks * kParts), tiles = static_cast<float>(p.work.key_tiles);
    if constexpr (Mask::kCausal) {
      const float rest = tiles - static_cast<float>(number);
      return __float2int_rd(all * (1.0f - __fdiv_rn(rest * (rest + 1.0f), tiles * (tiles + 1.0f))));
    }
    return __float2int_rd(all * __fdiv_rn(static_cast<float>(number), tiles));
  }

  __device__ __forceinline__ int own_column() const { return thread % 4 * 8; }
  __device__ __forceinline__ int in_block_row() const { return thread / 32 * 16 + thread % 32 / 4; }

  // By all of the warpgroup, before anything is added to dq.
  __device__ __forceinline__ void begin() {
    ptx::wait_for_kernel_before();  // which sets the counts to 0
    const AttentionParams& call = p.call;
    const int generation = p.work.generation, nth = own() - 2 * generation;
    if (nth < 0) return;
    if (thread == 0) {
      const int* const count = p.work.finished + (1 + nth / generation);  // behind the flag
      while (ptx::ld_acquire(count) < generation * p.work.key_tiles) __nanosleep(32);
      ptx::async_proxy_fence_all();  // their zeros are before what this thread's copies add
    }
    ptx::bar_sync(kBarrier, 128);
    const int first = converted_before(tile.number());
    left = converted_before(tile.number() + 1) - first;
    more = left - tile.blocks() * call.group;
    const int batch = nth / call.nheads_k, block = first / kParts, in_group = block / p.work.row_blocks;
    const int head = (nth - batch * call.nheads_k) * call.group + in_group;
    part = first - block * kParts;
    row = (block - in_group * p.work.row_blocks) * kV3BackwardRows;
    place = (ring_block(p, batch, head - in_group) * kParts + first) * 512 + thread;
    dq = static_cast<unsigned short*>(call.dq) + batch * call.dq_strides.batch + head * call.dq_strides.head +
         (row + in_block_row()) * call.dq_strides.row + 32 * part + own_column();
    if (left > 0) load();
  }

  __device__ __forceinline__ float4* accum() const { return reinterpret_cast<float4*>(p.call.dq_accum) + place; }

  __device__ __forceinline__ void load() {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = __ldcg(accum() + i * 128);
  }
  __device__ __forceinline__ void store() {
#pragma unroll
    for (int i = 0; i < 4; ++i) __stcg(accum() + i * 128, float4{0, 0, 0, 0});
    float zero = 0;  // or NaN
#pragma unroll
    for (int i = 0; i < 4; ++i) zero = fmaf(x[i].x, 0.0f, fmaf(x[i].y, 0.0f, fmaf(x[i].z, 0.0f, fmaf(x[i].w, 0.0f, zero))));
    if (!(zero == 0.0f)) [[unlikely]]
      p.work.finished[0] = 1;  // the last kernel looks for rows without a gradient
    const float factor = gradient_factor<kPairOf<Spec>>(p.call, true);
    const int first_row = row + in_block_row();
    const bool exists = 32 * part + own_column() < p.work.columns;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      unsigned words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        words[j] = i == 0 ? ptx::pack2<Element>(x[j].x * factor, x[j].y * factor) : ptx::pack2<Element>(x[j].z * factor, x[j].w * factor);
      exchange_among_four(words, thread);
      if (exists && first_row + 8 * i < p.call.seqlen_q)
        *reinterpret_cast<uint4*>(dq + 8 * i * p.call.dq_strides.row) = uint4{words[0], words[1], words[2], words[3]};
    }
    advance();
  }
  __device__ __forceinline__ void advance() {
    --left;
    place += 512;
    dq += 32;
    if (++part < kParts) return;
    part = 0;
    row += kV3BackwardRows;
    dq += kV3BackwardRows * p.call.dq_strides.row - 32 * kParts;
    if (row < p.work.row_blocks * kV3BackwardRows) return;
    dq += p.call.dq_strides.head - row * p.call.dq_strides.row;
    row = 0;
  }
  // One part, and the numbers of the next one are on their way.
  __device__ __forceinline__ void convert() {
    if (left <= 0) return;
    store();
    if (left > 0) load();
  }
  __device__ __forceinline__ void convert_another() {
    if (more <= 0) return;
    --more;
    convert();
  }

  // By all of the warpgroup, when what the CTA adds to dq is on its way, by copies of thread 0.
  __device__ __forceinline__ void finish() {
#pragma unroll 1
    while (left > 0) convert();
    ptx::bar_sync(kBarrier, 128);
    if (thread != 0) return;
    ptx::bulk_wait<0>();  // to ordinary accesses, too, what copies have written can be seen when they are complete
    ptx::red_add_release(p.work.finished + 1 + own() / p.work.generation, 1);  // of all of the warpgroup, by the barrier before
  }
};

}  // namespace fattn::v3
