// Algorithm v3: one kernel forward, three backward; before it those that list tiles of packed sequences, find what documents leave, or make words of
// a mask of pairs.
#include "backend/cuda/plan/v3.h"

#include "backend/cuda/plan/planners.h"
#include "backend/cuda/v3_backward.h"
#include "backend/cuda/v3_forward.h"
#include "backend/cuda/v3_mask_words.h"
#include "device_abi/v3_documents.h"
#include "device_abi/v3_packed_tiles.h"

namespace fattn::core::cuda {
namespace {

bool wanted(const Problem& p, const Target& t) { return wants_v3(p, t) && !is_v3_f32(p); }

std::string refusal(const Problem& p, const Target& t) {
  return v3_refusal_of(p, t, [](const Problem& problem, const V3Target& target) {
    return problem.backward ? v3_backward_refusal(problem, target) : v3_forward_refusal(problem, target);
  });
}

Route forward(const Problem& p, const Target& t) {
  const V3ForwardPlan plan = plan_v3_forward(p, t.v3);
  Route route = v3_route(p);
  route.why = text("tiles of ", plan.tile.block_m(), " queries x ", plan.tile.block_n, " keys, ", plan.tile.groups, " warpgroups, ",
                   plan.tile.stages_k, " + ", plan.tile.stages_v, " stages, ", plan.shared_bytes, " bytes of shared memory, grid ", plan.grid);
  route.workspace_bytes = plan.workspace_bytes;
  if (plan.grid == 0) return route;
  auto block = route.parameters<V3ForwardParams>(
      [plan](const Call& c, V3ForwardParams& params) { set_v3_forward_params(params, c.problem, plan, c.device, c.buffers); });
  const auto add = [&](const Kernel& kernel, const CudaLaunch& shape, int registers = 0) {
    route.add(block, block.example.pointers(), {.kernel = kernel, .shape = shape, .registers = registers});
  };
  if (p.has_documents)
    add(kernel_of<V3DocumentRangesKey, v3_document_ranges_request>(v3_document_ranges_key(plan)),
        shape_of(plan.document_grid, kV3DocumentThreads, 0));
  if (p.packed) {
    const V3PackedTilesKey key = v3_packed_tiles_key(p, plan);
    const bool waits = key.documents != 0;  // for what the one before finds
    add(kernel_of<V3PackedTilesKey, v3_packed_tiles_request>(key), shape_of(1, kV3PackThreads, 0, waits));
  }
  if (p.pair_mask.given) add(kernel_of<V3MaskWordsKey, v3_mask_words_request>(v3_mask_words_key(p)), shape_of(plan.mask_grid, plan.mask_threads, 0));
  const bool early = p.packed || p.has_documents || plan.mask_grid > 0;
  add(kernel_of<V3ForwardKey, v3_forward_request>(plan.key), shape_of(plan.grid, plan.threads, plan.shared_bytes, early),
      plan.tile.launch_registers());
  return route;
}

// All but the first come up while the one before ends, but for those of dbias. Of packed sequences the first is the list of tiles, for which the one
// behind it waits at its end.
Route backward(const Problem& p, const Target& t) {
  const V3BackwardPlan plan = plan_v3_backward(p, t.v3);
  Route route = v3_route(p);
  route.why = text("tiles of ", kV3BackwardRows, " queries x ", plan.tile.block_n(), " keys, ", plan.threads / 128, " warpgroups, ",
                   plan.shared_bytes, " bytes of shared memory, grid ", plan.grid);
  route.workspace_bytes = plan.workspace_bytes;
  auto block = route.parameters<V3BackwardParams>(
      [plan](const Call& c, V3BackwardParams& params) { set_v3_backward_params(params, c.problem, plan, c.device, c.buffers); });
  const auto add = [&](const Kernel& kernel, const CudaLaunch& shape, int registers = 0) {
    route.add(block, block.example.pointers(), {.kernel = kernel, .shape = shape, .registers = registers});
  };
  const auto pass = [&](const V3BackwardKey& key) { return kernel_of<V3BackwardKey, v3_backward_request>(key); };
  const auto beside_dbias = [&](KernelKind kind) { return kernel_of<V2BackwardKey, v2_backward_request>(dbias_key(p, kV3Arch, kind)); };
  add(beside_dbias(KernelKind::kV2DbiasZero), shape_of(plan.dbias_grid, kDbiasThreads, 0));
  const bool lists = p.packed && plan.grid > 0;
  if (lists) add(kernel_of<V3PackedKeyTilesKey, v3_packed_key_tiles_request>(v3_packed_key_tiles_key(p, plan)), shape_of(1, kV3PackThreads, 0));
  add(pass(plan.prepare), shape_of(plan.prepare_grid, kV3PrepareThreads, 0, lists));
  if (p.has_documents)
    add(kernel_of<V3DocumentRangesKey, v3_document_ranges_request>(v3_document_ranges_key(plan)),
        shape_of(plan.document_grid, kV3DocumentThreads, 0, true));
  if (p.pair_mask.given)
    add(kernel_of<V3MaskWordsKey, v3_mask_words_request>(v3_mask_words_key(p)), shape_of(plan.mask_grid, plan.mask_threads, 0, true));
  add(pass(plan.main), shape_of(plan.grid, plan.threads, plan.shared_bytes, true), plan.tile.launch_registers());
  add(pass(plan.finish), shape_of(plan.finish_grid, kV3FinishThreads, plan.finish_shared_bytes, true));
  if (plan.dbias_tiles > 0) {
    CudaLaunch shape = shape_of(plan.dbias_ctas, kV3DbiasThreads, plan.dbias_shared_bytes);
    shape.grid_y = static_cast<unsigned>(plan.dbias_parts);
    route.add(block, block.example.of_dbias(), {.kernel = pass(plan.dbias), .shape = shape, .registers = v3_launch_registers(kV3DbiasThreads)});
  }
  if (!dbias_in_place(p)) add(beside_dbias(KernelKind::kV2DbiasFinish), shape_of(plan.dbias_grid, kDbiasThreads, 0));
  // Whether these are launched follows from lengths, on which no other kernel depends.
  if (p.dbias.given) route.add_sibling(beside_dbias(KernelKind::kV2DbiasZero));
  if (p.dbias.given && !dbias_in_place(p)) route.add_sibling(beside_dbias(KernelKind::kV2DbiasFinish));
  for (const V3BackwardKey& key : other_keys_of(p, plan)) route.add_sibling(pass(key));
  return route;
}

Route route(const Problem& p, const Target& t) {
  Route made = p.backward ? backward(p, t) : forward(p, t);
  made.needs_16 = rows_of_pass(p);
  if (p.backward && p.bias.given) made.needs_4 = tensor_set({"bias"});
  return made;
}

}  // namespace

constinit const Planner kV3Planner{"v3", false, wanted, refusal, route};

}  // namespace fattn::core::cuda
