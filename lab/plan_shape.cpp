#include "lab/plan_shape.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>

#include "fattn/plan.hpp"
#include "measure/library_plans.h"

namespace fattn::lab {
namespace {

using measure::Pass;

// The number directly before `words`; 0 if it is not there.
int64_t before(const std::string& text, const std::string& words) {
  for (size_t at = text.find(words); at != std::string::npos; at = text.find(words, at + 1)) {
    size_t begin = at;
    while (begin > 0 && std::isdigit(static_cast<unsigned char>(text[begin - 1])) != 0) --begin;
    if (begin < at) return std::strtoll(text.c_str() + begin, nullptr, 10);
  }
  return 0;
}

// The number directly behind `words`.
int64_t behind(const std::string& text, const std::string& words) {
  const size_t at = text.find(words);
  return at == std::string::npos ? 0 : std::strtoll(text.c_str() + at + words.size(), nullptr, 10);
}

PlanShape of_plan(const Plan& plan, bool backward) {
  const fattn_plan_info info = plan.info();
  PlanShape shape;
  shape.backend = static_cast<Backend>(info.backend);
  shape.algorithm = static_cast<Algorithm>(info.algorithm);
  shape.threads = std::max(1, static_cast<int>(info.num_threads));
  shape.kernel = info.kernel;
  shape.why = info.why;
  shape.workspace_bytes = static_cast<int64_t>(info.workspace_bytes);
  shape.flops = info.flops;
  shape.bytes = info.bytes;
  const bool decodes = shape.kernel.find(" decode ") != std::string::npos;
  shape.path = backward ? PlanShape::Path::kBackward : decodes ? PlanShape::Path::kDecode : PlanShape::Path::kForward;
  read_shape(shape.why, shape);
  return shape;
}

}  // namespace

void read_shape(const std::string& why, PlanShape& shape) {
  const auto any = [&](std::initializer_list<const char*> names) {
    for (const char* name : names)
      if (const int64_t n = before(why, name); n > 0) return n;
    return int64_t{0};
  };
  shape.rows = any({" query rows", " rows of a key head", " queries x", " the"});
  if (shape.rows == 0) shape.rows = behind(why, "the ");
  shape.keys = behind(why, "steps of ");
  if (shape.keys == 0) shape.keys = behind(why, " queries x ");
  shape.task_keys = behind(why, "super-blocks of ");
  if (shape.task_keys == 0) shape.task_keys = behind(why, "chunks of ");
  shape.splits = std::max<int64_t>(1, any({" chunks of", " tasks of a key head", " splits", " split,"}));
  shape.shared = why.find(" by their lengths") != std::string::npos;
  shape.heads = std::max<int64_t>(1, before(why, " key heads a task"));
  shape.grid = behind(why, "grid ");
  shape.shared_bytes = before(why, " bytes of shared memory");
  if (const int64_t groups = before(why, " warpgroups"); groups > 0)
    shape.warps = 4 * groups + 4;  // and those that copy
  else if (const int64_t teams = before(why, " teams of"); teams > 0)
    shape.warps = teams * std::max<int64_t>(1, behind(why, " teams of "));
  else
    shape.warps = before(why, " warps");
}

PlanShape plan_shape(const measure::ProblemSpec& spec, Pass pass, Options options, const measure::Placement& place) {
  spec.apply_to(options);
  if (pass == Pass::kForward) return of_plan(Plan(measure::forward_tensors(spec, place), options), false);
  return of_plan(Plan(measure::backward_tensors(spec, place), options), true);
}

measure::CudaTiles cuda_tiles(const measure::ProblemSpec& spec, Pass pass, const Options& options, const measure::Placement& place) {
  measure::CudaTiles tiles;
  const auto take = [&](Pass of, int64_t& rows, int64_t& keys) {
    try {
      const PlanShape shape = plan_shape(spec, of, options, place);
      if (shape.path != PlanShape::Path::kDecode && shape.rows > 0 && shape.keys > 0) rows = shape.rows, keys = shape.keys;
    } catch (const std::exception&) {  // the call itself will say why
    }
  };
  if (place.device != Device::kCuda) return tiles;
  if (pass != Pass::kBackward) take(Pass::kForward, tiles.forward_rows, tiles.forward_keys);
  if (pass != Pass::kForward) take(Pass::kBackward, tiles.backward_rows, tiles.backward_keys);
  return tiles;
}

int64_t extra_bytes(const measure::ProblemSpec& spec, Pass pass, const Options& options, const measure::Placement& place) {
  int64_t workspace = 0;
  if (pass != Pass::kBackward) workspace = std::max(workspace, plan_shape(spec, Pass::kForward, options, place).workspace_bytes);
  if (pass != Pass::kForward) workspace = std::max(workspace, plan_shape(spec, Pass::kBackward, options, place).workspace_bytes);
  return spec.output_bytes(pass != Pass::kForward) + workspace;
}

}  // namespace fattn::lab
