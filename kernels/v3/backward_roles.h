// Two warpgroups that compute dv and dk of the CTA's 64 keys, for heads so wide that the registers of one do not hold both. One has
//   S^T = K Q^T    P^T = exp2(S^T scale - lse)    dV += P^T dO
// and leaves P in fp32 in shared memory to the other:
//   dP^T = V dO^T    dS^T = P^T (dP^T - row_sum)    dK += dS^T Q
// In brackets what runs on the tensor cores meanwhile; j is the block:
//   values  S(j), dV(j-1) issued | S(j) awaited | P(j), to shared memory [dV(j-1)] | dV(j-1) awaited
//   keys    dK(j-1), dP(j) issued | dK(j-1) awaited [dP(j)] | dP(j) awaited | dS(j) from P(j), to shared memory
// dK goes before dP because the queries of a block are held longest, from its S to its dK, and there are only two stages of them.
//
// The roles: v3/backward_role_values.h, v3/backward_role_keys.h; here what both have.
#pragma once

#include "kernels/ptx/wgmma.h"
#include "kernels/tile/for_each.h"
#include "kernels/v3/backward_alibi.h"
#include "kernels/v3/backward_careful.h"
#include "kernels/v3/backward_documents.h"
#include "kernels/v3/backward_dropout.h"
#include "kernels/v3/backward_fragments.h"
#include "kernels/v3/backward_schedule.h"
#include "kernels/v3/backward_shape.h"
#include "kernels/v3/backward_store.h"
#include "kernels/v3/backward_terms.h"
#include "kernels/v3/backward_watch.h"
#include "kernels/v3/ring.h"

namespace fattn::v3 {

// With dropout in place of a weight of 0, whose sign may say that it is dropped: -0 is of hidden pairs. It rounds to 0.
inline constexpr unsigned kNoWeight = 1;

// What both have: scores of the tile's rows (K or V) with a block's (Q or dO), and a sum over the queries of a block of the other tile.
template <class Spec>
struct RoleBase {
  using Shape = BackwardShape<Spec>;
  using Element = typename Spec::Element;
  using Mask = typename Spec::Mask;
  using TileDs = typename Shape::TileDs;

  const BackwardCall& p;
  const unsigned shared;
  const BackwardBarriers<Spec> barriers;
  const TilePlace tile;

  Ring<Spec::kStages> queries, last;  // of the present block and of the one before
  Ring<1> p_place;                    // of P of the block that is published next

  __device__ __forceinline__ RoleBase(const BackwardCall& params, unsigned shared_address, BackwardBarriers<Spec> of, TilePlace of_keys)
      : p(params), shared(shared_address), barriers(of), tile(of_keys) {}

  __device__ __forceinline__ int steps() const { return tile.blocks() * p.call.group; }
  __device__ __forceinline__ bool first_lane() const { return own_lane() == 0; }
  __device__ __forceinline__ auto keys() const { return tile.keys<Shape::kLengths, Shape::kPacked>(); }  // of the batch entry

  static constexpr bool kWatches = Watch<Spec>::kWatches;
  // Takes Inf and NaN out of the block, if the tile meets some in q or dout. By both roles, behind S and dP of the block, before it is published.
  __device__ __forceinline__ void take_nonfinite_out() const {
    if (!Watch<Spec>{tile}.queries_careful()) return;
    ptx::mbarrier_wait(barriers.q_full(last.stage), last.parity);  // what this thread has not seen of it yet
    ptx::mbarrier_wait(barriers.dout_full(last.stage), last.parity);
    clear_block<Element, typename Shape::TileQ, typename Shape::TileDout>(q_tile(), dout_tile(), static_cast<int>(threadIdx.x) - 128, 256);
  }
  __device__ __forceinline__ unsigned q_tile() const { return shared + static_cast<unsigned>(Shape::kOffsetQ) + last.stage * Shape::TileQ::kBytes; }
  __device__ __forceinline__ unsigned dout_tile() const {
    return shared + static_cast<unsigned>(Shape::kOffsetDout) + last.stage * Shape::TileDout::kBytes;
  }

  template <class TileA, class TileB, int kWidth>
  __device__ __forceinline__ void issue_scores(float (&d)[32], int offset_a, int offset_b) const {
    const unsigned a = ptx::wgmma_descriptor(shared + static_cast<unsigned>(offset_a), 0);
    const unsigned b = ptx::wgmma_descriptor(shared + static_cast<unsigned>(offset_b), 0) + queries.stage * (TileB::kBytes / 16);
    ptx::forget(d);
    tile::for_each<0, kWidth / 16>([&](auto step) {
      constexpr int kStep = decltype(step)::value;
      ptx::wgmma<Element, (kStep > 0)>(d, a + TileA::step(kStep), b + TileB::step(kStep));
    });
    ptx::wgmma_commit();
  }
  // In two halves, if one instruction would take more registers than a thread has at launch, which is what ptxas allows it.
  template <class TileB, int kCount>
  __device__ __forceinline__ void issue_sum(float (&d)[kCount], const unsigned (&a)[4][4], int offset_b) const {
    const unsigned b = ptx::wgmma_descriptor(shared + static_cast<unsigned>(offset_b), TileB::kColumnBytes) + last.stage * (TileB::kBytes / 16);
    constexpr int kParts = kCount > 96 ? 2 : 1, kPart = kCount / kParts;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      float(&half)[kPart] = *reinterpret_cast<float(*)[kPart]>(&d[part * kPart]);
#pragma unroll
      for (int step = 0; step < 4; ++step)
        ptx::wgmma<Element, true, ptx::Major::kOther>(half, a[step],
                                                      b + static_cast<unsigned>(part * (kPart / 32) * (TileB::kColumnBytes / 16) + step * 128));
    }
    ptx::wgmma_commit();
  }

  // P is exchanged in the order of registers, because the same thread of the other warpgroup takes it: s[4 i ..] is 2048 i bytes further.
  __device__ __forceinline__ unsigned own_weights() const { return shared + Shape::kOffsetP + ptx::opaque(threadIdx.x) % 128 * 16; }
  __device__ __forceinline__ void next_issued() {
    last = queries;
    queries.next();
  }
};

}  // namespace fattn::v3
