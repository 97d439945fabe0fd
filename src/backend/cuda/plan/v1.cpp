// Algorithm v1: one kernel forward; backward v2's around one of its own.
#include "backend/cuda/v1.h"

#include "backend/cuda/plan/planners.h"
#include "shared/text.h"

namespace fattn::core::cuda {
namespace {

bool wanted(const Problem& p, const Target&) { return p.algorithm == Algorithm::kV1; }

std::string refusal(const Problem& p, const Target& t) {
  std::string why = v1_refusal(p, t.v2);
  return why.empty() && p.backward ? v2_backward_refusal(p, t.v2) : why;
}

Route backward(const Problem& p, const Target& t) {
  const V2BackwardPlan plan = plan_v1_backward(p, t.v2);
  Route route = route_for(Algorithm::kV1, "v1 backward", p, t);
  route.why =
      text("asked for; tiles of ", plan.tile.block_m, " queries x ", plan.tile.block_n, " keys, one CTA for each of ", plan.main.grid, " key heads");
  add_v2_backward(route, plan);
  return route;
}

Route forward(const Problem& p, const Target& t) {
  const V1ForwardPlan plan = plan_v1_forward(p, t.v2);
  Route route = route_for(Algorithm::kV1, "v1 forward", p, t);
  route.why =
      text("asked for; tiles of ", kV1TileRows, " queries x ", kV1BlockN, " keys, ", kV1Warps, " warps, one CTA for each of ", plan.grid, " heads");
  route.workspace_bytes = plan.workspace_bytes;
  auto block = route.parameters<V1Params>([plan](const Call& c) { return v1_forward_params(c.problem, plan, c.buffers); });
  const auto kernel = [&](bool aligned) { return kernel_of<V1ForwardKey, v1_forward_request>(v1_forward_key(plan, aligned)); };
  route.add(
      block, block.example.pointers(),
      {.kernel = kernel(true), .unaligned = kernel(false), .aligned = kForwardRows, .shape = shape_of(plan.grid, plan.threads, plan.shared_bytes)});
  return route;
}

Route route(const Problem& p, const Target& t) { return p.backward ? backward(p, t) : forward(p, t); }

}  // namespace

constinit const Planner kV1Planner{"v1", true, wanted, refusal, route};

}  // namespace fattn::core::cuda
