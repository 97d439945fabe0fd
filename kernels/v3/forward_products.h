// A consumer's products (v3/forward_consumer.h): S = Q K^T and O += P V on the tensor cores, whose turn it is there, what is waited for and given
// back.
#pragma once

#include "kernels/ptx/wgmma.h"
#include "kernels/tile/for_each.h"
#include "kernels/v3/forward_consumer.h"

namespace fattn::v3 {

// --- what the tensor cores are given ---

// S = Q K^T
template <class Spec>
__device__ __forceinline__ void Consumer<Spec>::issue_scores(unsigned buffer) {
  ptx::forget(s);
  const unsigned a = ptx::wgmma_descriptor(shared + static_cast<unsigned>(group * 64 * 128), 0) + buffer * (Shape::kQueryBytes / 16);
  const unsigned b = ptx::wgmma_descriptor(shared + Shape::kOffsetK, 0) + k.stage * (Shape::TileK::kBytes / 16);
  tile::for_each<0, Shape::kDepth>([&](auto step) {
    constexpr int kStep = decltype(step)::value;
    ptx::wgmma<Element, (kStep > 0)>(s, a + Shape::TileQ::step(kStep), b + Shape::TileK::step(kStep));
  });
  ptx::wgmma_commit();
}

// O += P V
template <class Spec>
__device__ __forceinline__ void Consumer<Spec>::issue_output() {
  const unsigned b = ptx::wgmma_descriptor(shared + Shape::kOffsetV, Shape::TileV::kColumnBytes) + v.stage * (Shape::TileV::kBytes / 16);
#pragma unroll
  for (int step = 0; step < kBlockN / 16; ++step)
    ptx::wgmma<Element, true, ptx::Major::kOther>(o, weights[step], b + static_cast<unsigned>(step * 128));
  ptx::wgmma_commit();
}

// Both products, in this warpgroup's turn.
template <class Spec>
__device__ __forceinline__ void Consumer<Spec>::issue_products(unsigned buffer) {
  wait_k();
  wait_turn();
  ptx::pin(o);
  ptx::pin(weights);
  ptx::wgmma_fence();
  issue_scores(buffer);
  wait_v();
  ptx::wgmma_fence();  // ptxas puts one here in any case: a loop stands between the products
  issue_output();
  pass_turn();
  k.next();
  v.next();
  k_is_there = kLooksEarly && ptx::mbarrier_test(barriers.k_full(k.stage), k.parity);
}

// The last product of a tile that the next is not joined to; under way until output_done().
template <class Spec>
__device__ __forceinline__ void Consumer<Spec>::issue_last_product() {
  wait_v();
  ptx::pin(o);
  ptx::pin(weights);
  ptx::wgmma_fence();
  issue_output();
  v.next();
}

// --- what is waited for and given back ---

// The scores are there, q and k multiplied; o is under way until output_done().
template <class Spec>
__device__ __forceinline__ void Consumer<Spec>::products_done() {
  ptx::wgmma_wait<1>();
  ptx::pin(s);
}

// The same, and with softcap capped.
template <class Spec>
__device__ __forceinline__ void Consumer<Spec>::scores_done() {
  products_done();
  Spec::Score::apply(s, p.call);
}

template <class Spec>
__device__ __forceinline__ void Consumer<Spec>::output_done() {
  ptx::wgmma_wait<0>();
  ptx::pin(o);
  ptx::pin(weights);
  free_v();
}

// Turns at the tensor cores: one warpgroup computes weights while another multiplies.
template <class Spec>
__device__ __forceinline__ void Consumer<Spec>::wait_turn() const {
  if constexpr (kTurns) ptx::bar_sync(1 + group, 256);
}

template <class Spec>
__device__ __forceinline__ void Consumer<Spec>::pass_turn() const {
  if constexpr (kTurns) ptx::bar_arrive(1 + (group + 1 == kGroups ? 0 : group + 1), 256);
}

template <class Spec>
__device__ __forceinline__ void Consumer<Spec>::wait_k() const {
  if (!k_is_there) ptx::mbarrier_wait(barriers.k_full(k.stage), k.parity);
}

template <class Spec>
__device__ __forceinline__ void Consumer<Spec>::wait_v() const {
  if constexpr (kHidesPairs<Spec>) ptx::mbarrier_wait(barriers.v_good(v.stage), v.parity);
  if constexpr (!kHidesPairs<Spec> || kStaged) ptx::mbarrier_wait(barriers.v_full(v.stage), v.parity);
}

// The blocks that the latest products read; the rings are one further already.
template <class Spec>
__device__ __forceinline__ void Consumer<Spec>::free_k() const {
  if (lane() == 0) ptx::mbarrier_arrive(barriers.k_empty(k.last()));
}

template <class Spec>
__device__ __forceinline__ void Consumer<Spec>::free_v() const {
  if (lane() == 0) ptx::mbarrier_arrive(barriers.v_empty(v.last()));
}

// Where consumers do this: their last scores of the tile are done.
template <class Spec>
__device__ __forceinline__ void Consumer<Spec>::free_queries(unsigned buffer) const {
  ptx::warp_sync();
  if (lane() == 0) ptx::mbarrier_arrive(barriers.q_empty(buffer, static_cast<unsigned>(group)));
}

}  // namespace fattn::v3
