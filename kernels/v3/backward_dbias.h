// The gradient of a bias beside a v3 backward pass with heads up to 128 wide, whose registers have no room for it. PTX of sm_90a.
//
// A CTA takes 128 keys and 128 queries of dbias after another. It goes through the batch entries and heads whose dS is added up there (and the blocks
// of queries, where all share a row of dbias), computes S and dP of each once more and keeps the sum in registers:
//   S^T = K Q^T    P^T = exp2(S^T scale + bias - lse)    dP^T = V dO^T    dbias^T += P^T (dP^T - row_sum)
// So an element is written once. Only where there are few tiles for the GPU's multiprocessors, several CTAs (gridDim.y) have a part of those each,
// and add to zeros. Two warpgroups have 64 keys each; a thread of a third one issues loads. Runs behind v3/backward_prepare.h and v3/mask_words.h.
#pragma once

#include "kernels/constants.h"
#include "kernels/pair.h"
#include "kernels/ptx/bulk_copy.h"
#include "kernels/ptx/convert.h"
#include "kernels/ptx/math.h"
#include "kernels/ptx/mbarrier.h"
#include "kernels/ptx/movmatrix.h"
#include "kernels/ptx/reduce.h"
#include "kernels/ptx/set_registers.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/ptx/special_registers.h"
#include "kernels/ptx/warp.h"
#include "kernels/ptx/wgmma.h"
#include "kernels/tile/for_each.h"
#include "kernels/v3/backward_dbias_tiles.h"
#include "kernels/v3/backward_fragments.h"
#include "kernels/v3/backward_schedule.h"
#include "kernels/v3/backward_terms.h"
#include "kernels/v3/load_columns.h"
#include "kernels/v3/operand_tile.h"
#include "kernels/v3/ring.h"

namespace fattn::v3 {

template <class Spec>
struct DbiasLoader {
  using Shape = DbiasShape<Spec>;
  const BackwardCall& p;
  const unsigned shared;
  const DbiasBarriers<Spec> barriers;

  __device__ __forceinline__ void load_keys(unsigned stage, int batch, int head, int key) const {
    using TileK = typename Shape::TileK;
    using TileV = typename Shape::TileV;
    const unsigned barrier = barriers.k_full(stage);
    const ptx::TensorPlace at{0, key, head / p.call.group, batch};
    ptx::mbarrier_arrive_expect(barrier, TileK::kBytes + TileV::kBytes);
    load_columns<TileK>(shared + stage * TileK::kBytes, p.k, barrier, at);
    load_columns<TileV>(shared + Shape::kOffsetV + stage * TileV::kBytes, p.v, barrier, at);
  }
  __device__ __forceinline__ void load_queries(unsigned stage, int batch, int head, int row) const {
    using TileQ = typename Shape::TileQ;
    using TileDout = typename Shape::TileDout;
    const unsigned barrier = barriers.q_full(stage);
    const ptx::TensorPlace at{0, row, head, batch};
    const long long in_workspace = (static_cast<long long>(batch) * p.call.nheads + head) * p.work.row_blocks * kV3BackwardRows + row;
    ptx::mbarrier_arrive_expect(barrier, TileQ::kBytes + TileDout::kBytes + 2 * Shape::kRowBytes);
    load_columns<TileQ>(shared + Shape::kOffsetQ + stage * TileQ::kBytes, p.q, barrier, at);
    ptx::bulk_load(shared + Shape::kOffsetLse + stage * Shape::kRowBytes, p.work.lse_log2 + in_workspace, Shape::kRowBytes, barrier);
    load_columns<TileDout>(shared + Shape::kOffsetDout + stage * TileDout::kBytes, p.dout, barrier, at);
    ptx::bulk_load(shared + Shape::kOffsetRowSum + stage * Shape::kRowBytes, p.call.row_sum + in_workspace, Shape::kRowBytes, barrier);
  }
  Ring<Shape::kKeyStages> keys{};
  Ring<Shape::kStages> queries{};

  __device__ __forceinline__ void run(const DbiasTiles<Spec>& tiles) {
#pragma unroll 1
    for (long long i = tiles.begin; i < tiles.end; ++i) {
      const auto tile = tiles.at(i);
      ptx::mbarrier_wait(barriers.k_empty(keys.stage), keys.parity ^ 1);
      load_keys(keys.stage, tile.batch, tile.head, tiles.key);
      keys.next();
      const int end = min(tile.row + tiles.kRows, p.call.seqlen_q);
#pragma unroll 1
      for (int row = tile.row; row < end; row += Shape::kBlockM) {
        ptx::mbarrier_wait(barriers.q_empty(queries.stage), queries.parity ^ 1);
        load_queries(queries.stage, tile.batch, tile.head, row);
        queries.next();
      }
    }
  }
};

// A warpgroup: its 64 keys.
template <class Spec>
struct DbiasSums {
  using Shape = DbiasShape<Spec>;
  using Element = typename Spec::Element;
  using Mask = typename Spec::Mask;
  static constexpr bool kMask = kPairOf<Spec>.mask, kF32 = kPairOf<Spec>.bias == 2;
  static_assert(kPairOf<Spec>.bias != 0);
  static constexpr float kHidden = -0.0f;  // in place of a weight, of rows without a gradient too: dS is 0 whatever dP is

  const BackwardCall& p;
  const unsigned shared;
  const DbiasBarriers<Spec> barriers;
  DbiasTiles<Spec> tiles;
  const int group;
  const float scale;
  float sum[Shape::kBlocks][32], bias[Shape::kBlocks][32];  // bias in units of log2
  float s[32], dp[32];
  Ring<Shape::kKeyStages> keys;
  Ring<Shape::kStages> queries;
  [[no_unique_address]] MaskWord<Spec, kMask> mask;

  __device__ __forceinline__ DbiasSums(const BackwardCall& params, unsigned shared_address, DbiasBarriers<Spec> of, int own_group)
      : p(params),
        shared(shared_address),
        barriers(of),
        tiles(params, static_cast<int>(blockIdx.x)),
        group(own_group),
        scale(own_scale<typename Spec::Score>(params.call)) {}

  __device__ __forceinline__ int key() const { return tiles.key + 64 * group; }
  // Of s[i] and the like, in a block: the thread's key behind key(), its query behind the block's first.
  static __device__ __forceinline__ int own_key(int i) { return static_cast<int>(own_warp_row() + own_lane() / 4) + 8 * (i % 4 / 2); }
  static __device__ __forceinline__ int own_row(int i) { return i / 4 * 8 + static_cast<int>(own_lane() % 4 * 2) + i % 2; }

  // The bias is that of dbias: what is added up shares it. Of 16 bits two keys of a query are read at once, which are even, like all strides.
  __device__ __forceinline__ void read_bias() {
    const PairParams& call = pairs_of(p.call);
    const TensorStrides& of = call.bias_strides;
    const long long first = tiles.batch * of.batch + tiles.head * of.head;
    if constexpr (kF32) {
#pragma unroll
      for (int block = 0; block < Shape::kBlocks; ++block)
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          const int at_key = key() + own_key(i), row = tiles.row + block * Shape::kBlockM + own_row(i);
          float x = 0;
          if (at_key < call.seqlen_k && row < call.seqlen_q) x = static_cast<const float*>(call.bias)[first + row * of.row + at_key];
          bias[block][i] = x * kLog2e;
        }
    } else {
      const int lane = static_cast<int>(own_lane()), at_key = key() + static_cast<int>(own_warp_row()) + lane % 4 * 2;
      unsigned words[Shape::kBlocks][16];
#pragma unroll
      for (int block = 0; block < Shape::kBlocks; ++block)
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const int row = tiles.row + block * Shape::kBlockM + i / 2 * 8 + lane / 4, own = at_key + i % 2 * 8;
          words[block][i] = 0;
          if (own < call.seqlen_k && row < call.seqlen_q)
            words[block][i] = *reinterpret_cast<const unsigned*>(static_cast<const unsigned short*>(call.bias) + first + row * of.row + own);
        }
#pragma unroll
      for (int block = 0; block < Shape::kBlocks; ++block)
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const unsigned pair = ptx::transposed(words[block][i]);
          bias[block][2 * i] = ptx::low_float<Element>(pair) * kLog2e;
          bias[block][2 * i + 1] = ptx::high_float<Element>(pair) * kLog2e;
        }
    }
  }

  template <class TileA, class TileB, int kWidth, bool kAccumulate>
  __device__ __forceinline__ void issue(float (&d)[32], int offset_a, int offset_b) {
    const unsigned a = ptx::wgmma_descriptor(shared + static_cast<unsigned>(offset_a + 64 * 128 * group), 0) + keys.stage * (TileA::kBytes / 16);
    const unsigned b = ptx::wgmma_descriptor(shared + static_cast<unsigned>(offset_b), 0) + queries.stage * (TileB::kBytes / 16);
    if constexpr (!kAccumulate) ptx::forget(d);
    tile::for_each<0, kWidth / 16>([&](auto step) {
      constexpr int kStep = decltype(step)::value;
      ptx::wgmma<Element, (kAccumulate || kStep > 0)>(d, a + TileA::step(kStep), b + TileB::step(kStep));
    });
    ptx::wgmma_commit();
  }

  template <int kBlock>
  __device__ __forceinline__ void add_block(int batch, int head, int row) {
    ptx::mbarrier_wait(barriers.q_full(queries.stage), queries.parity);
    if constexpr (kMask) mask.read(p, batch, head, row, key());
    begin_dp(dp, shared + Shape::kOffsetRowSum + queries.stage * Shape::kRowBytes);
    ptx::pin(dp);
    ptx::wgmma_fence();
    issue<typename Shape::TileK, typename Shape::TileQ, Spec::kHeaddim, false>(s, 0, Shape::kOffsetQ);
    issue<typename Shape::TileV, typename Shape::TileDout, Spec::kHeaddimV, true>(dp, Shape::kOffsetV, Shape::kOffsetDout);
    ptx::wgmma_wait<1>();
    ptx::pin(s);
    const unsigned lse = shared + Shape::kOffsetLse + queries.stage * Shape::kRowBytes + own_lane() % 4 * 8;
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      const float2 l = ptx::ld_shared_f32x2(lse + static_cast<unsigned>(32 * step));
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float of = bias[kBlock][4 * step + e], its_lse = e % 2 == 0 ? l.x : l.y;
        float& x = s[4 * step + e];
        x = ptx::ex2(__fmaf_rn(x, scale, of - its_lse));
        if (of == -kInfinity || its_lse == kInfinity) x = kHidden;
      }
    }
    if (hides<Mask>(p, Keys<false>{}, key(), row)) for_each_hidden<Mask>(p, Keys<false>{}, key(), row, [&](int i) { s[i] = kHidden; });
    mask.for_each_hidden([&](int i) { s[i] = kHidden; });
    ptx::wgmma_wait<0>();
    ptx::pin(dp);
    ptx::warp_sync();
    if (own_lane() == 0) ptx::mbarrier_arrive(barriers.q_empty(queries.stage));
    queries.next();
#pragma unroll
    for (int i = 0; i < 32; ++i)
      if (static_cast<int>(__float_as_uint(s[i])) >= 0) sum[kBlock][i] = __fmaf_rn(s[i], dp[i], sum[kBlock][i]);
  }

  __device__ __forceinline__ void run(const DbiasTiles<Spec>& of) {
    tiles = of;
    read_bias();
#pragma unroll
    for (int i = 0; i < 32 * Shape::kBlocks; ++i) sum[i / 32][i % 32] = 0;
#pragma unroll 1
    for (long long i = tiles.begin; i < tiles.end; ++i) {
      const auto tile = tiles.at(i);
      ptx::mbarrier_wait(barriers.k_full(keys.stage), keys.parity);
      add_block<0>(tile.batch, tile.head, tile.row);
      if (tile.row + Shape::kBlockM < p.call.seqlen_q) add_block<1>(tile.batch, tile.head, tile.row + Shape::kBlockM);
      if (own_lane() == 0) ptx::mbarrier_arrive(barriers.k_empty(keys.stage));
      keys.next();
    }
    const PairParams& call = pairs_of(p.call);
    if (call.dbias_rows == 1)
      write_row();
    else
      write();
  }

  // Where an element is to go: what several CTAs add to, or dbias itself.
  template <class Add, class Store, class StoreShort>
  __device__ __forceinline__ void choose(Add add, Store store, StoreShort store_short) const {
    const PairParams& call = pairs_of(p.call);
    if (gridDim.y > 1)
      add(call.dbias + tiles.batch * call.dbias_strides.batch + tiles.head * call.dbias_strides.head, call.dbias_strides.row);
    else if (call.dbias == call.dbias_out)
      store(call.dbias + tiles.batch * call.dbias_strides.batch + tiles.head * call.dbias_strides.head, call.dbias_strides.row);
    else
      store_short(
          static_cast<unsigned short*>(call.dbias_out) + tiles.batch * call.dbias_out_strides.batch + tiles.head * call.dbias_out_strides.head,
          call.dbias_out_strides.row);
  }

  __device__ __forceinline__ void write() const {
    const PairParams& call = pairs_of(p.call);
    const auto each = [&](float* to, long long row_stride, auto put) {
#pragma unroll
      for (int block = 0; block < Shape::kBlocks; ++block)
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          const int at_key = key() + own_key(i), row = tiles.row + block * Shape::kBlockM + own_row(i);
          if (at_key < call.seqlen_k && row < call.seqlen_q) put(to + row * row_stride + at_key, sum[block][i]);
        }
    };
    choose([&](float* to, long long stride) { each(to, stride, [](float* at, float x) { ptx::red_add(at, x); }); },
           [&](float* to, long long stride) { each(to, stride, [](float* at, float x) { *at = x; }); },
           [&](unsigned short* to, long long stride) { write_short(to, stride); });
  }
  // Two keys of a query side by side.
  __device__ __forceinline__ void write_short(unsigned short* to, long long stride) const {
    const PairParams& call = pairs_of(p.call);
    const int lane = static_cast<int>(own_lane());
#pragma unroll
    for (int block = 0; block < Shape::kBlocks; ++block) {
      unsigned pairs[16];  // before lanes go different ways
#pragma unroll
      for (int i = 0; i < 16; ++i) pairs[i] = ptx::transposed(ptx::pack2<Element>(sum[block][2 * i], sum[block][2 * i + 1]));
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int row = tiles.row + block * Shape::kBlockM + i / 2 * 8 + lane / 4;
        const int at_key = key() + static_cast<int>(own_warp_row()) + 8 * (i % 2) + lane % 4 * 2;
        unsigned short* const at = to + row * stride + at_key;
        if (row < call.seqlen_q && at_key + 1 < call.seqlen_k && reinterpret_cast<unsigned long long>(at) % 4 == 0) {
          *reinterpret_cast<unsigned*>(at) = pairs[i];
        } else if (row < call.seqlen_q && at_key < call.seqlen_k) {
          at[0] = static_cast<unsigned short>(pairs[i]);
          if (at_key + 1 < call.seqlen_k) at[1] = static_cast<unsigned short>(pairs[i] >> 16);
        }
      }
      ptx::warp_sync();
    }
  }

  // The sum over all queries.
  __device__ __forceinline__ void write_row() const {
    const PairParams& call = pairs_of(p.call);
    float of[2] = {0, 0};  // of key own_key(0), own_key(2)
#pragma unroll
    for (int block = 0; block < Shape::kBlocks; ++block)
#pragma unroll
      for (int i = 0; i < 32; ++i) of[i % 4 / 2] += sum[block][i];
#pragma unroll
    for (float& x : of) {
      x += ptx::shfl_xor(x, 1);
      x += ptx::shfl_xor(x, 2);
    }
    if (own_lane() % 4 != 0) return;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int at_key = key() + own_key(2 * n);
      if (at_key >= call.seqlen_k) continue;
      choose([&](float* to, long long) { ptx::red_add(to + at_key, of[n]); }, [&](float* to, long long) { to[at_key] = of[n]; },
             [&](unsigned short* to, long long) { to[at_key] = static_cast<unsigned short>(ptx::pack2<Element>(of[n], 0.0f)); });
    }
  }
};

template <class Spec>
__device__ __forceinline__ void backward_dbias(const BackwardCall& p) {
  using Shape = DbiasShape<Spec>;
  extern __shared__ __align__(1024) unsigned char memory[];
  const unsigned shared = ptx::shared_address(memory);
  const DbiasBarriers<Spec> barriers{shared + Shape::kOffsetBarriers};
  if (threadIdx.x == 0) barriers.init();
  __syncthreads();
  const int group = ptx::warp_id() / 4;
  if (group == Shape::kGroups) {
    ptx::give_registers_up<Shape::kLoaderRegisters>();
    if (threadIdx.x % 128 != 0) return;
    DbiasLoader<Spec> loader{p, shared, barriers};
    DbiasTiles<Spec>::for_each(p, [&](const DbiasTiles<Spec>& tiles) { loader.run(tiles); });
  } else {
    ptx::take_registers<Shape::kMainRegisters>();
    DbiasSums<Spec> sums(p, shared, barriers, group);
    DbiasTiles<Spec>::for_each(p, [&](const DbiasTiles<Spec>& tiles) { sums.run(tiles); });
  }
}

}  // namespace fattn::v3
