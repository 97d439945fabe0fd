// Attention forward in fp32 on Hopper: the roles of v3/forward.h, with every operand split into two fp16 and every product made of three. Before it
// runs v3/forward_f32_split.h, which splits k and v; queries are split by the warps that multiply with them. PTX of sm_90a. The parts:
// forward_f32_shape.h (specialisation, shared memory), schedule.h (tiles), forward_f32_consumer.h.
#pragma once

#include "kernels/ptx/async_proxy.h"
#include "kernels/ptx/bulk_copy.h"
#include "kernels/ptx/dependent_launch.h"
#include "kernels/ptx/set_registers.h"
#include "kernels/v3/forward_f32_consumer.h"
#include "kernels/v3/forward_f32_phases.h"

namespace fattn::v3 {

// The thread that loads: tile by tile blocks of keys and values from the last to the first, keys one block ahead. A block lies in memory as it is
// wanted.
template <class Spec>
__device__ __forceinline__ void load_forward_f32(const ForwardF32Call& p, unsigned shared, BarriersF32<Spec> barriers) {
  using Shape = ForwardF32Shape<Spec>;
  ptx::wait_for_kernel_before();  // which splits
  ptx::async_proxy_fence_all();
  Ring<Spec::kStagesK> k;
  Ring<Spec::kStagesV> v;
  for (int nth = 0;; ++nth) {
    const int number = tile_in_turn<Spec>(p, nth);
    if (number < 0) break;
    const Place place = dense_place_of<Shape::kBlockM>(p, number);
    const long long first = (static_cast<long long>(place.batch) * p.call.nheads_k + place.head_k) * p.parts.blocks;
    const auto load_k = [&](int block) {
      const unsigned full = barriers.k_full(k.stage);
      ptx::mbarrier_wait(barriers.k_empty(k.stage), k.parity ^ 1);
      ptx::mbarrier_arrive_expect(full, Shape::kKeyBytes + 16);
      ptx::bulk_load(shared + Shape::kOffsetK + k.stage * Shape::kKeyBytes, p.parts.k + (first + block) * Shape::kKeyBytes, Shape::kKeyBytes, full);
      ptx::bulk_load(shared + Shape::kOffsetFactors + k.stage * 16, p.parts.k_factors + first + block, 16, full);
      k.next();
    };
    const auto load_v = [&](int block) {
      const unsigned full = barriers.v_full(v.stage);
      ptx::mbarrier_wait(barriers.v_empty(v.stage), v.parity ^ 1);
      ptx::mbarrier_arrive_expect(full, Shape::kValueBytes + 16);
      ptx::bulk_load(shared + Shape::kOffsetV + v.stage * Shape::kValueBytes, p.parts.v + (first + block) * Shape::kValueBytes, Shape::kValueBytes,
                     full);
      ptx::bulk_load(shared + Shape::kOffsetFactors + (Spec::kStagesK + v.stage) * 16, p.parts.v_factors + first + block, 16, full);
      v.next();
    };
    int block = block_end<typename Spec::Mask, Shape::kBlockN>(p.call, Keys<false>{}, place.row, Shape::kBlockM) - 1;
    load_k(block);
    for (; block > 0; --block) {
      load_k(block - 1);
      load_v(block);
    }
    load_v(0);
  }
}

template <class Spec>
__device__ __forceinline__ void forward_f32(const ForwardF32Call& p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const unsigned shared = ptx::shared_address(memory);
  const BarriersF32<Spec> barriers{shared + ForwardF32Shape<Spec>::kOffsetBarriers};
  if (threadIdx.x == 0) barriers.init();
  __syncthreads();
  if (ptx::warp_id() < 4) {
    ptx::give_registers_up<Spec::kProducerRegisters>();
    if (threadIdx.x == 0) load_forward_f32<Spec>(p, shared, barriers);
  } else {
    ptx::take_registers<Spec::kConsumerRegisters>();
    ConsumerF32<Spec>(p, shared, barriers, ptx::warp_id() / 4 - 1).run();
  }
}

}  // namespace fattn::v3
