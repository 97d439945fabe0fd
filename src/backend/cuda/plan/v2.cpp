// Algorithm v2, which takes any address: one kernel forward; backward row sums and zeros, the gradients with dq in fp32, and dq in its dtype.
#include "backend/cuda/plan/planners.h"
#include "backend/cuda/v2_forward.h"
#include "shared/text.h"

namespace fattn::core::cuda {
namespace {

bool wanted(const Problem& p, const Target&) { return wants_v2(p); }

std::string refusal(const Problem& p, const Target& t) { return p.backward ? v2_backward_refusal(p, t.v2) : v2_forward_refusal(p, t.v2); }

Route backward(const Problem& p, const Target& t) {
  const V2BackwardPlan plan = plan_v2_backward(p, t.v2);
  Route route = route_for(Algorithm::kV2, "v2 backward", p, t);
  if (p.deterministic) route.title += " deterministic";
  route.why = text("tiles of ", plan.tile.block_m, " queries x ", plan.tile.block_n, " keys, ", plan.main.threads / 32, " warps, ",
                   plan.main.shared_bytes, " bytes of shared memory, grid ", plan.main.grid);
  add_v2_backward(route, plan);
  return route;
}

Route forward(const Problem& p, const Target& t) {
  const V2ForwardPlan plan = plan_v2_forward(p, t.v2);
  Route route = route_for(Algorithm::kV2, "v2 forward", p, t);
  route.why = text("tiles of ", plan.tile.block_m(), " queries x ", plan.tile.block_n, " keys, ", plan.tile.warps, " warps, ", plan.tile.stages,
                   " stages, ", plan.shared_bytes, " bytes of shared memory, grid ", plan.grid);
  const auto block = route.parameters<PagedParams>([plan](const Call& c) { return v2_forward_params(c.problem, plan, c.buffers); });
  const auto kernel = [&](bool aligned) { return kernel_of<V2ForwardKey, v2_forward_request>(v2_forward_key(plan, aligned)); };
  route.add(
      block,
      {.kernel = kernel(true), .unaligned = kernel(false), .aligned = kForwardRows, .shape = shape_of(plan.grid, plan.threads, plan.shared_bytes)});
  return route;
}

Route route(const Problem& p, const Target& t) { return p.backward ? backward(p, t) : forward(p, t); }

}  // namespace

void add_v2_backward(Route& route, const V2BackwardPlan& plan) {
  route.workspace_bytes = plan.workspace_bytes;
  auto block = route.parameters<V2BackwardParams>([plan](const Call& c) { return v2_backward_params(c.problem, plan, c.buffers); });
  const V2BackwardKeys keys = v2_backward_keys(plan, true), unaligned = v2_backward_keys(plan, false);
  const auto add = [&](V2BackwardKey V2BackwardKeys::*key, const V2BackwardLaunch& shape) {
    route.add(block, block.example.pointers(),
              {.kernel = kernel_of<V2BackwardKey, v2_backward_request>(keys.*key),
               .unaligned = kernel_of<V2BackwardKey, v2_backward_request>(unaligned.*key),
               .aligned = kBackwardRows,
               .shape = shape_of(shape.grid, shape.threads, shape.shared_bytes)});
  };
  add(&V2BackwardKeys::dbias_zero, plan.dbias_zero);
  add(&V2BackwardKeys::prepare, plan.prepare);
  add(&V2BackwardKeys::split, plan.split);
  add(&V2BackwardKeys::main, plan.main);
  add(&V2BackwardKeys::finish, plan.finish);
  add(&V2BackwardKeys::dbias_finish, plan.dbias_finish);
}

constinit const Planner kV2Planner{"v2", true, wanted, refusal, route};

}  // namespace fattn::core::cuda
