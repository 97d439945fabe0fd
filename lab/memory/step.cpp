#include "lab/memory/step.h"

#include <fmt/format.h>

#include <algorithm>

#include "measure/failure.h"
#include "measure/library_plans.h"
#include "measure/memory.h"

namespace fattn::lab {
namespace {

using measure::Pass;
using measure::ProblemSpec;

std::string shape(int64_t a, int64_t b, int64_t c, int64_t d, size_t element) {
  return fmt::format("{} * {} * {} * {} * {} bytes", a, b, c, d, element);
}

// Tensors that every algorithm has, but for lse.
void add_tensors(AttentionStepMemory& m, const ProblemSpec& s, bool grad) {
  const size_t e = size_of(s.dtype);
  const auto add = [&](const char* name, int64_t bytes, const std::string& arithmetic, bool forward, bool backward, bool saved) {
    m.tensors.push_back({name, bytes, arithmetic, forward, backward && grad, saved && grad});
  };
  const std::string q = shape(s.batch, s.seqlen_q, s.nheads, s.headdim, e), o = shape(s.batch, s.seqlen_q, s.nheads, s.headdim_v, e);
  const std::string kv = shape(s.batch, s.seqlen_k, s.nheads_k, s.headdim + s.headdim_v, e);
  add("q", s.q_bytes(), q, true, true, false);
  add("k and v", s.k_bytes() + s.v_bytes(), kv, true, true, false);
  add("o", s.o_bytes(), o, true, true, true);
  if (!grad) return;
  add("dout", s.o_bytes(), o, false, true, false);
  add("dq", s.q_bytes(), q, false, true, false);
  add("dk and dv", s.k_bytes() + s.v_bytes(), kv, false, true, false);
}

int64_t sum(const std::vector<StepTensor>& tensors, bool StepTensor::*there) {
  int64_t bytes = 0;
  for (const StepTensor& t : tensors) bytes += t.*there ? t.bytes : 0;
  return bytes;
}

}  // namespace

int64_t AttentionStepMemory::forward_bytes() const { return sum(tensors, &StepTensor::forward); }
int64_t AttentionStepMemory::backward_bytes() const {
  const bool grad = std::any_of(tensors.begin(), tensors.end(), [](const StepTensor& t) { return !t.forward; });
  return grad ? sum(tensors, &StepTensor::backward) : 0;
}
int64_t AttentionStepMemory::peak_bytes() const { return std::max(forward_bytes(), backward_bytes()); }
int64_t AttentionStepMemory::saved_bytes() const { return sum(tensors, &StepTensor::saved); }

Options options_of(const std::string& algorithm, const measure::Placement& place) {
  Options options;
  for (const Algorithm a : {Algorithm::kStandard, Algorithm::kV1, Algorithm::kV2, Algorithm::kV3})
    if (algorithm == name_of(a)) options.algorithm = a;
  if (place.device == Device::kCuda) options.backend = Backend::kCuda;
  return options;
}

AttentionStepMemory planned_step(const std::string& algorithm, const ProblemSpec& spec, bool grad, const std::string& device) {
  AttentionStepMemory m;
  m.algorithm = algorithm;
  m.exact = true;
  const measure::Placement place = measure::placement_of(device);
  const Options options = options_of(algorithm, place);
  try {
    measure::LibraryPlans plans("fattn", options, place);
    plans.make(spec, grad);
    add_tensors(m, spec, grad);
    m.tensors.push_back({"lse", spec.lse_bytes(),
                         fmt::format("{} * {} * {} * {} bytes", spec.batch, spec.nheads, spec.seqlen_q, spec.dtype == DType::kF64 ? 8 : 4), true,
                         grad, grad});
    m.tensors.push_back({"workspace, forward", static_cast<int64_t>(plans.workspace_bytes(Pass::kForward)), "from the plan", true, false, false});
    if (grad)
      m.tensors.push_back({"workspace, backward", static_cast<int64_t>(plans.workspace_bytes(Pass::kBackward)), "from the plan", false, true, false});
  } catch (const std::exception& error) {
    m.tensors.clear();
    m.reason = measure::as_failure(error).what();
  }
  return m;
}

AttentionStepMemory textbook_step(const ProblemSpec& s, bool grad) {
  AttentionStepMemory m;
  m.algorithm = "textbook";
  add_tensors(m, s, grad);
  const int64_t matrix = measure::tensor_bytes("the weights", {s.batch, s.nheads, s.seqlen_q, s.seqlen_k}, s.dtype);
  const std::string arithmetic = shape(s.batch, s.nheads, s.seqlen_q, s.seqlen_k, size_of(s.dtype));
  m.tensors.push_back({"weights", matrix, arithmetic, true, grad, grad});
  m.tensors.push_back({"scores", matrix, arithmetic, true, false, false});
  if (grad) {
    m.tensors.push_back({"dP", matrix, arithmetic, false, true, false});
    m.tensors.push_back({"dS", matrix, arithmetic, false, true, false});
  }
  return m;
}

}  // namespace fattn::lab
