// The shared memory of a CTA of v3's forward pass in fp32, from its specialisation.
//
// A specialisation is a struct with
//   Mask                  what a query sees (v3/mask.h): FullMask or CausalMask
//   kHeaddim, kHeaddimV   1 to 128, of the tensors
//   kAligned              bases and strides are multiples of 16 bytes and headdims of 4
//   kGroups               consumer warpgroups, of 64 query rows each
//   kStagesK, kStagesV    blocks of keys and of values in shared memory at once
//   kQueriesInRegisters   or in shared memory
//   kProducerRegisters, kConsumerRegisters of a thread
//   kWindow, kCapped      false: v2/forward_f32_again.h asks
#pragma once

#include "device_abi/v3_f32_parts.h"
#include "kernels/ptx/mbarrier.h"
#include "kernels/v3/operand_tile.h"
#include "kernels/v3/ring.h"
#include "kernels/v3/schedule.h"

namespace fattn::v3 {

// The kernel's parameters.
struct ForwardF32Call : TileCall {
  const V3F32Parts& parts;
};

template <class Spec>
struct ForwardF32Shape {
  static constexpr int kGroups = Spec::kGroups, kThreads = 128 * (kGroups + 1), kBlockM = 64 * kGroups, kBlockN = kV3F32Block;
  static constexpr int kDepth = (Spec::kHeaddim + 15) / 16;                                        // steps of q k^T
  static constexpr int kColumnsV = Spec::kHeaddimV <= 64 ? 64 : Spec::kHeaddimV <= 96 ? 96 : 128;  // of o in registers
  using TileQ = OperandTile<64, Spec::kHeaddim>;                                                   // of a warpgroup; high, then low
  using TileK = OperandTile<kBlockN, Spec::kHeaddim>;
  using TileV = OperandTile<kBlockN, Spec::kHeaddimV>;
  static constexpr int kQueryBytes = Spec::kQueriesInRegisters ? 0 : 2 * TileQ::kBytes;
  static constexpr int kKeyBytes = 2 * TileK::kBytes, kValueBytes = 2 * TileV::kBytes;
  static_assert(kKeyBytes == v3_f32_block_bytes(Spec::kHeaddim) && kValueBytes == v3_f32_block_bytes(Spec::kHeaddimV));
  static constexpr int kOffsetK = kGroups * kQueryBytes;
  static constexpr int kOffsetV = kOffsetK + Spec::kStagesK * kKeyBytes;
  static constexpr int kOffsetFactors = kOffsetV + Spec::kStagesV * kValueBytes;  // of each stage of keys, then of values
  static constexpr int kOffsetBarriers = kOffsetFactors + 16 * (Spec::kStagesK + Spec::kStagesV);
  static constexpr int kSharedBytes = kOffsetBarriers + 16 * (Spec::kStagesK + Spec::kStagesV);
};

// Addresses of the barriers. "full" is for who reads a buffer, "empty" for who fills it next.
template <class Spec>
struct BarriersF32 {
  unsigned first;
  __device__ __forceinline__ unsigned k_full(unsigned stage) const { return first + 8 * stage; }
  __device__ __forceinline__ unsigned k_empty(unsigned stage) const { return k_full(Spec::kStagesK + stage); }
  __device__ __forceinline__ unsigned v_full(unsigned stage) const { return k_empty(Spec::kStagesK + stage); }
  __device__ __forceinline__ unsigned v_empty(unsigned stage) const { return v_full(Spec::kStagesV + stage); }

  // By one thread.
  __device__ __forceinline__ void init() const {
    for (unsigned i = 0; i < Spec::kStagesK; ++i) {
      ptx::mbarrier_init(k_full(i), 1);
      ptx::mbarrier_init(k_empty(i), 4 * Spec::kGroups);
    }
    for (unsigned i = 0; i < Spec::kStagesV; ++i) {
      ptx::mbarrier_init(v_full(i), 1);
      ptx::mbarrier_init(v_empty(i), 4 * Spec::kGroups);
    }
    ptx::mbarrier_init_fence();
  }
};

}  // namespace fattn::v3
