// How the library would compute a problem, as its plan says: kernel, tiles, split, workspace. What models of time and memory stand on.
#pragma once

#include <cstdint>
#include <string>

#include "measure/contestant.h"
#include "measure/problem.h"
#include "measure/traffic.h"

namespace fattn::lab {

struct PlanShape {
  enum class Path { kForward, kDecode, kBackward };

  Backend backend = Backend::kCpu;
  Algorithm algorithm = Algorithm::kV2;
  Path path = Path::kForward;
  int threads = 1;  // of the CPU
  std::string kernel, why;
  int64_t workspace_bytes = 0;
  double flops = 0, bytes = 0;  // of the pass; every input read once and every output written once
  // Numbers of `why`; 0 where it has none of that kind.
  int64_t rows = 0;          // queries of a CPU's task or a GPU's tile; in decode all rows of a key head
  int64_t keys = 0;          // of an inner step, or a GPU's tile
  int64_t task_keys = 0;     // CPU: of a super-block (backward) or a chunk (decode)
  int64_t splits = 1;        // CPU, backward: tasks of a key head; decode: chunks or splits
  bool shared = false;       // decode on a GPU: the splits are those of all sequences together
  int64_t heads = 1;         // CPU, decode: key heads of a task
  int64_t grid = 0;          // CTAs
  int64_t shared_bytes = 0;  // of a CTA
  int64_t warps = 0;         // of a CTA
};

// Throws what the library throws of a plan. On a CUDA device its kernels are compiled, unless they are kept from an earlier time.
PlanShape plan_shape(const measure::ProblemSpec& spec, measure::Pass pass, Options options, const measure::Placement& place);

// Tiles of the plans of `pass` on a CUDA device, for the models of traffic; the usual ones where the library has no plan.
measure::CudaTiles cuda_tiles(const measure::ProblemSpec& spec, measure::Pass pass, const Options& options, const measure::Placement& place);

// The same from the words of a plan.
void read_shape(const std::string& why, PlanShape& shape);

// What a call adds to memory over q, k, v and dout, as the record's extra_bytes: outputs, for gradients with o and lse, and the workspace. Of kernels
// of the library these are all bytes that there are.
int64_t extra_bytes(const measure::ProblemSpec& spec, measure::Pass pass, const Options& options, const measure::Placement& place);

}  // namespace fattn::lab
