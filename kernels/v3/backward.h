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
#include "kernels/v3/backward_dq.h"
#include "kernels/v3/backward_dq_direct.h"
#include "kernels/v3/backward_keys.h"
#include "kernels/v3/backward_load.h"
#include "kernels/v3/backward_roles.h"

namespace fattn::v3 {

template <class Spec>
__device__ __forceinline__ void backward(const BackwardCall& p) {
  using Shape = BackwardShape<Spec>;
  extern __shared__ __align__(1024) unsigned char memory[];
  const unsigned shared = ptx::shared_address(memory);
  const BackwardBarriers<Spec> barriers{shared + Shape::kOffsetBarriers};
  const TilePlace tile{shared + Shape::kOffsetTile};
  ptx::let_kernel_after_come_up();
  if (threadIdx.x == 0) {
    barriers.init();
    int number = static_cast<int>(blockIdx.x);
    if constexpr (Spec::kDeterministic) {
      // CTAs wait for those of lower keys. Numbers drawn when a CTA starts make sure that those have started.
      ptx::wait_for_kernel_before();
      number = ptx::atomic_add(p.call.dq_semaphore, 1);
    }
    tile.write(key_tile_of<typename Spec::Mask, Shape::kBlockN>(p, number));
  }
  __syncthreads();

  const int group = ptx::warp_id() / 4;
  if (Spec::kOwnLoader && group == Spec::kGroups + 1) {
    ptx::give_registers_up<Spec::kLoaderRegisters>();
    if (threadIdx.x % 128 == 0) BackwardLoader<Spec>(p, shared, barriers).run(tile);
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
