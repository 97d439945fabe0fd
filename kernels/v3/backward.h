// Backward on Hopper, main kernel: dk and dv of a tile of keys, and its share of dq, which is added up in fp32. PTX of sm_90a.
//
// A CTA walks over the blocks of queries that see its keys, of all query heads that share their head. Warpgroup 0 computes dq, the next ones what
// belongs to the keys; loads are issued by TMA, by one thread of a further warpgroup or of the first.
// The parts: v3/backward_shape.h (specialisation, shared memory), backward_schedule.h (tiles), backward_load.h, and backward_dq.h and backward_keys.h
// or, for wide heads, backward_dq_direct.h and backward_roles.h. Before it runs v3/backward_prepare.h, after it v3/backward_finish.h.
#pragma once

#include "kernels/ptx/dependent_launch.h"
#include "kernels/ptx/semaphore.h"
#include "kernels/ptx/set_registers.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/ptx/special_registers.h"
#include "kernels/v3/backward_documents.h"
#include "kernels/v3/backward_dq.h"
#include "kernels/v3/backward_dq_direct.h"
#include "kernels/v3/backward_dropout.h"
#include "kernels/v3/backward_key_weights.h"
#include "kernels/v3/backward_keys.h"
#include "kernels/v3/backward_load.h"
#include "kernels/v3/backward_masked.h"
#include "kernels/v3/backward_role_keys.h"
#include "kernels/v3/backward_role_values.h"
#include "kernels/v3/backward_watch.h"

namespace fattn::v3 {

// Gradients of the first `rows` rows of a tile that nothing is computed for: 0, or another pair of elements. The tile is in entry `batch` of the
// tensors, behind row `first_key`.
template <class Spec>
__device__ __forceinline__ void fill_gradients(const BackwardCall& p, TilePlace tile, int batch, int first_key, int rows, unsigned both) {
  const auto fill = [&](void* tensor, const TensorStrides& s, int columns) {
    auto* const first = static_cast<unsigned short*>(tensor) + batch * s.batch + tile.head_k() * s.head + (first_key + tile.key()) * s.row;
    for (int unit = static_cast<int>(threadIdx.x); unit < rows * (columns / 8); unit += BackwardShape<Spec>::kThreads)
      *reinterpret_cast<uint4*>(first + unit / (columns / 8) * s.row + unit % (columns / 8) * 8) = uint4{both, both, both, both};
  };
  fill(p.call.dk, p.call.dk_strides, p.work.columns);
  fill(p.call.dv, p.call.dv_strides, p.work.columns_v);
  ptx::wait_for_kernel_before();  // the kernel after this one counts on both
}

// Of a tile behind the last key of its batch entry: NaN if the length is out of range.
template <class Spec>
__device__ __forceinline__ void no_keys(const BackwardCall& p, TilePlace tile) {
  const unsigned both = given_length(p.call, tile.batch()) < 0 ? 0x7fff7fffu : 0u;
  fill_gradients<Spec>(p, tile, tile.batch(), 0, min(BackwardShape<Spec>::kBlockN, p.call.seqlen_k - tile.key()), both);
}

// Of a tile of a packed sequence without queries.
template <class Spec>
__device__ __forceinline__ void no_queries(const BackwardCall& p, TilePlace tile) {
  const int rows = min(BackwardShape<Spec>::kBlockN, tile.keys<false, true>().keys - tile.key());
  fill_gradients<Spec>(p, tile, 0, tile.k_begin(), rows, 0);
}

template <class Spec>
__device__ __forceinline__ void backward(const BackwardCall& p) {
  using Shape = BackwardShape<Spec>;
  extern __shared__ __align__(1024) unsigned char memory[];
  const unsigned shared = ptx::shared_address(memory);
  const BackwardBarriers<Spec> barriers{shared + Shape::kOffsetBarriers};
  const TilePlace tile{shared + Shape::kOffsetTile};
  ptx::let_kernel_after_come_up();
  if (Watch<Spec>::kWatches && threadIdx.x == 0) Watch<Spec>{tile}.init();
  if constexpr (Shape::kMaskBlocks) {
    if (threadIdx.x < 32) begin_masked_tile<Spec>(p, shared, barriers, tile, static_cast<int>(threadIdx.x));
  } else if (threadIdx.x == 0) {
    if constexpr (!Shape::kPacked) barriers.init();
    int number = static_cast<int>(blockIdx.x);
    if constexpr (Spec::kDeterministic) {
      // CTAs wait for those of lower keys. Numbers drawn when a CTA starts make sure that those have started.
      ptx::wait_for_kernel_before();
      number = ptx::atomic_add(p.call.dq_semaphore, 1);
    }
    if constexpr (Shape::kPacked) {
      if constexpr (!Spec::kDeterministic) ptx::wait_for_kernel_before();  // the first of them lists the tiles
      const ListedTile listed = listed_tile(p, number);
      barriers.init();  // while it is on its way
      const KeyTile of = packed_key_tile_of<typename Spec::Mask, Shape::kBlockN>(p, listed);
      if constexpr (Shape::kDocuments) {
        write_document_tile<Spec>(p, tile, of);
      } else {
        tile.write<false, true>(of);
        tile.write_limits<typename Spec::Mask, Shape::kKeyGroups>(p, of);
      }
    } else if constexpr (Shape::kDocuments) {
      ptx::wait_for_kernel_before();  // which finds the blocks of queries
      write_document_tile<Spec>(p, tile, key_tile_of<typename Spec::Mask, Shape::kBlockN, Shape::kLengths>(p, number));
    } else {
      tile.write<Shape::kLengths, false>(key_tile_of<typename Spec::Mask, Shape::kBlockN, Shape::kLengths>(p, number));
      if constexpr (BackwardLoader<Spec>::kAhead) BackwardLoader<Spec>(p, shared, barriers).load_ahead(tile);
    }
  }
  __syncthreads();
  if constexpr (Shape::kPacked) {
    if (tile.number() < 0) return;
    if (tile.keys<false, true>().rows == 0) return no_queries<Spec>(p, tile);
    if (ends_inside<Shape>(p, tile)) BackwardLoader<Spec>(p, shared, barriers).load_last_keys(tile);
  }
  if constexpr (Shape::kLengths) {
    int none = tile.key() >= tile.keys<true, false>().keys;
    if constexpr (Shape::kDropout) none = ptx::uniform(none);  // or nothing would be that comes after it
    if (none) return no_keys<Spec>(p, tile);
    if (ends_inside<Shape>(p, tile)) BackwardLoader<Spec>(p, shared, barriers).load_last_keys(tile);
  }

  const int group = ptx::warp_id() / 4;
  if (Spec::kOwnLoader && group == Spec::kGroups + 1) {
    ptx::give_registers_up<Spec::kLoaderRegisters>();
    if (threadIdx.x % 128 == 0) BackwardLoader<Spec>(p, shared, barriers).run(tile);
    if constexpr (Shape::kDropout) {
      const int warp = ptx::warp_id() % 4;
      if (1 <= warp && warp <= Shape::kKeyGroups) KeptBits<Spec>{shared, barriers}.make(p, tile);
    }
  } else if (group == 0) {
    ptx::give_registers_up<Spec::kDqRegisters>();
    if constexpr (Spec::kByRole)
      DirectQueryGradient<Spec>(p, shared, barriers, tile).run();
    else
      QueryGradient<Spec>(p, shared, barriers, tile).run();
  } else {
    ptx::take_registers<Spec::kMainRegisters>();
    if constexpr (!Spec::kByRole)
      KeyGradients<Spec>(p, shared, barriers, tile, group - 1).run();
    else if (group == 1)
      ValueRole<Spec>(p, shared, barriers, tile).run();
    else
      KeyRole<Spec>(p, shared, barriers, tile).run();
  }
}

}  // namespace fattn::v3
