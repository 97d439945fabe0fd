// Which algorithm takes a problem, and what stands before and behind the launches of any.
#include <algorithm>
#include <iterator>

#include "backend/cuda/limits.h"
#include "backend/cuda/lists.h"
#include "backend/cuda/plan/planners.h"
#include "backend/cuda/sequence_rest.h"
#include "backend/cuda/sinks_gradient.h"
#include "fattn/error.hpp"
#include "shared/text.h"

namespace fattn::core::cuda {
namespace {

// In the order in which they are taken.
constexpr const Planner* kPlanners[] = {&kStandardPlanner, &kV1Planner, &kDecodePlanner, &kV3F32Planner, &kV3Planner, &kV2Planner};

[[noreturn]] void unsupported(const std::string& reason) { throw Error(ErrorCode::kUnsupported, "backend cuda: " + reason); }

// Says ahead of all else which list is out of range.
void add_list_status(Route& route, const Problem& p, const Target& t) {
  if (!p.want_status) return;
  auto block = route.parameters<ListStatusCall>([](const Call& c) { return list_status_params(c.problem, c.buffers); });
  route.add(block, block.example.pointers(),
            {.kernel = kernel_of<ListStatusKey, list_status_request>({.arch = t.v2.arch, .paged = p.paged ? 1 : 0}),
             .shape = shape_of(1, kListStatusThreads, 0)},
            true);
}

// Writes, behind all else, rows of no packed sequence.
void add_sequence_rest(Route& route, const Problem& p, const Target& t) {
  if (!has_sequence_rest(p)) return;
  const auto block = route.parameters<SequenceRestParams>([](const Call& c) { return sequence_rest_params(c.problem, c.buffers); });
  route.add(block, {.kernel = kernel_of<SequenceRestKey, sequence_rest_request>(sequence_rest_key(p, t.v2.arch)),
                    .shape = shape_of(kRestCtas, kRestThreads, 0, t.v2.arch >= 90)});
}

// Sums up, behind a backward pass, the gradient of sinks.
void add_sinks_gradient(Route& route, const Problem& p, const Target& t) {
  if (!p.want_dsinks) return;
  const int64_t parts = sinks_gradient_parts(p), at = ceil_div(route.workspace_bytes, 16) * 16;
  route.workspace_bytes = at + parts * p.nheads * 4;
  const auto block = route.parameters<SinksGradientParams>([at](const Call& c) { return sinks_gradient_params(c.problem, c.buffers, at); });
  const auto kernel = [&](KernelKind kind, DType dtype) {
    return kernel_of<SinksGradientKey, sinks_gradient_request>({.kind = kind, .arch = t.v2.arch, .dtype = static_cast<int32_t>(dtype)});
  };
  route.add(block, {.kernel = kernel(KernelKind::kSinksGradient, p.dtype), .shape = shape_of(parts * p.nheads, kSinksThreads, 0)});
  route.add(block, {.kernel = kernel(KernelKind::kSinksGradientSum, DType::kF32), .shape = shape_of(p.nheads, kSinksThreads, 0)});
}

}  // namespace

Route route_for(Algorithm algorithm, const char* what, const Problem& p, const Target& t) {
  const V2Target& v2 = t.v2;
  Route route;
  route.algorithm = algorithm;
  route.level = v2.level;
  route.title = text("cuda ", what, " ", name_of(p.dtype), " sm_", v2.arch, v2.level / 10 == v2.arch / 10 ? "" : text(" (level ", v2.level, ")"));
  return route;
}

std::vector<Route> plan_routes(const Problem& p, const Target& t) {
  std::vector<Route> routes;
  std::string refused, note;
  for (const Planner* planner : kPlanners) {
    // Behind a route that does not accept every call stands one that does.
    if (!planner->wanted(p, t) || (!routes.empty() && !planner->any_address)) continue;
    if (std::string why = planner->refusal(p, t); !why.empty()) {
      note += text("; not ", planner->name, ": ", why);
      refused = std::move(why);
      continue;
    }
    Route& route = routes.emplace_back(planner->route(p, t));
    if (routes.size() == 1) route.why += note;
    add_list_status(route, p, t);
    add_sinks_gradient(route, p, t);
    add_sequence_rest(route, p, t);
    if (planner->any_address) break;
  }
  if (routes.empty()) unsupported(refused);
  return routes;
}

}  // namespace fattn::core::cuda
