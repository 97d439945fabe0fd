// Attention forward on Hopper: persistent CTAs, a warp that loads with TMA, one that stores, and warpgroups that compute with wgmma. PTX of sm_90a.
// The parts: v3/forward_shape.h (specialisation, shared memory), schedule.h and tiles_of_cta.h (tiles), block_order.h (their blocks), forward_copy.h
// (loads, stores), forward_values.h (Inf and NaN in values), forward_terms.h (bias), forward_mask_words.h (mask of pairs), forward_consumer.h
// (scores, weights and output, with the files that it names).
#pragma once

#include "kernels/ptx/dependent_launch.h"
#include "kernels/ptx/set_registers.h"
#include "kernels/ptx/shared_memory.h"
#include "kernels/ptx/special_registers.h"
#include "kernels/v3/forward_blocks.h"
#include "kernels/v3/forward_consumer.h"
#include "kernels/v3/forward_copy.h"
#include "kernels/v3/forward_hide.h"
#include "kernels/v3/forward_output.h"
#include "kernels/v3/forward_products.h"
#include "kernels/v3/forward_terms.h"
#include "kernels/v3/forward_tiles.h"
#include "kernels/v3/forward_values.h"
#include "kernels/v3/tiles_of_cta.h"

namespace fattn::v3 {

template <class Spec>
__device__ __forceinline__ void forward(const ForwardCall& p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const unsigned shared = ptx::shared_address(memory);
  const Barriers<Spec> barriers{shared + ForwardShape<Spec>::kOffsetBarriers};
  if (threadIdx.x == 0) {
    if constexpr (kHidesPairs<Spec>) SpoiltNotes<Spec>{shared}.init();
    barriers.init();
  }
  __syncthreads();
  // Which lists the tiles, or their blocks.
  if constexpr (kPairOf<Spec>.packed || kPairOf<Spec>.documents || kPairOf<Spec>.mask) ptx::wait_for_kernel_before();
  if constexpr (kTakesTiles<Spec>) {
    if (threadIdx.x == 0) take_first_tiles<Spec>(p, shared);
    __syncthreads();
  }

  const int warp = ptx::warp_id();
  if (warp < 4) {
    ptx::give_registers_up<Spec::kProducerRegisters>();
    if (threadIdx.x == 0) load_forward<Spec>(p, shared, barriers);
    if (!ForwardShape<Spec>::kStoreFromRegisters && (kPairOf<Spec>.packed ? warp == 1 : threadIdx.x == 32)) store_forward<Spec>(p, shared, barriers);
    if constexpr (kStagedTerms<Spec>)
      if (warp >= 2) load_terms<Spec>(p, shared, barriers, static_cast<int>(threadIdx.x) - 64);
    if constexpr (kHidesPairs<Spec> && !kStagedTerms<Spec>)
      if (warp >= 2) guard_values<Spec>(p, shared, barriers);
  } else {
    ptx::take_registers<Spec::kConsumerRegisters>();
    Consumer<Spec>(p, shared, barriers, warp / 4 - 1).run();
  }
}

}  // namespace fattn::v3
