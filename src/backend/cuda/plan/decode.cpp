// Decode, by the name of algorithm v2: one kernel, and where the keys are split a second, which puts the splits together.
#include "backend/cuda/decode.h"

#include "backend/cuda/plan/planners.h"
#include "backend/cuda/v2_forward.h"
#include "shared/text.h"

namespace fattn::core::cuda {
namespace {

bool wanted(const Problem& p, const Target& t) { return wants_v2(p) && decode_takes(p, t.decode); }

std::string refusal(const Problem&, const Target&) { return {}; }

Route route(const Problem& p, const Target& t) {
  const DecodePlan plan = plan_decode(p, t.decode);
  const DecodeTile& tile = plan.tile;
  Route route = route_for(Algorithm::kV2, "v2 decode", p, t);
  route.why = text(plan.rows, " rows of a key head in tiles of ", tile.rows(), ", ", tile.teams, " teams of ", tile.row_warps,
                   tile.row_warps == 1 ? " warp" : " warps", " with steps of ", tile.block_n, " keys and ", tile.stages, " stages, ",
                   plan.key.shares != 0 ? "keys of all sequences in " : "keys in ", plan.splits, plan.splits == 1 ? " split" : " splits",
                   plan.key.shares != 0 ? " by their lengths, " : ", ", plan.shared_bytes, " bytes of shared memory, grid ", plan.grid);
  route.workspace_bytes = plan.workspace_bytes;
  route.needs_16 = kForwardRows;
  route.else_why = "only the decode kernels, which take no other, can compute the problem; align it";
  auto block = route.parameters<DecodeParams>([plan](const Call& c) { return decode_params(c.problem, plan, c.buffers); });
  route.add(
      block, block.example.pointers(),
      {.kernel = kernel_of<DecodeKey, decode_request>(plan.key), .shape = shape_of(plan.grid, tile.threads(), plan.shared_bytes, plan.early())});
  route.add(block, block.example.pointers(),
            {.kernel = kernel_of<DecodeKey, decode_request>(plan.combine_key()),
             .shape = shape_of(plan.combine_grid, kDecodeCombineThreads, 0, plan.early())});
  return route;
}

}  // namespace

constinit const Planner kDecodePlanner{"decode", false, wanted, refusal, route};

}  // namespace fattn::core::cuda
