// Algorithm v3 in fp32, forward: keys and values in two parts, then attention.
#include "backend/cuda/plan/planners.h"
#include "backend/cuda/plan/v3.h"
#include "backend/cuda/v3_forward_f32.h"
#include "shared/text.h"

namespace fattn::core::cuda {
namespace {

bool wanted(const Problem& p, const Target& t) { return wants_v3(p, t) && is_v3_f32(p); }

std::string refusal(const Problem& p, const Target& t) { return v3_refusal_of(p, t, v3_forward_f32_refusal); }

Route route(const Problem& p, const Target& t) {
  const V3ForwardF32Plan plan = plan_v3_forward_f32(p, t.v3);
  Route route = v3_route(p);
  route.why = text("tiles of ", plan.tile.block_m(), " queries x ", kV3F32Block, " keys, ", plan.tile.groups, " warpgroups, ", plan.tile.stages_k,
                   " + ", plan.tile.stages_v, " stages, ", plan.shared_bytes, " bytes of shared memory, grid ", plan.grid,
                   ", keys and values in two parts in the workspace");
  route.workspace_bytes = plan.workspace_bytes;
  auto block = route.parameters<V3ForwardF32Params>([plan](const Call& c) { return v3_forward_f32_params(c.problem, plan, c.buffers); });
  const auto launch = [&](V3ForwardF32Key key, int registers, const CudaLaunch& shape) {
    key.aligned = 0;
    const Kernel unaligned = kernel_of<V3ForwardF32Key, v3_forward_f32_request>(key);
    key.aligned = plan.aligned_strides;
    return Launch{.kernel = kernel_of<V3ForwardF32Key, v3_forward_f32_request>(key),
                  .unaligned = unaligned,
                  .aligned = kForwardRows,
                  .shape = shape,
                  .registers = registers};
  };
  route.add(block, block.example.of_split(), launch(plan.split_key(), 0, shape_of(plan.split_grid, kV3F32SplitThreads, 0)));
  route.add(block, block.example.of_forward(),
            launch(plan.key, plan.tile.launch_registers(), shape_of(plan.grid, plan.threads, plan.shared_bytes, true)));
  return route;
}

}  // namespace

constinit const Planner kV3F32Planner{"v3", true, wanted, refusal, route};

}  // namespace fattn::core::cuda
