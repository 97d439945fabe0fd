// Sizes, views and cost of a problem to measure.
#include "measure/problem.h"

#include "fattn/plan.hpp"
#include "measure/failure.h"
#include "measure/memory.h"

namespace fattn::measure {
namespace {

int64_t tensor_bytes(const char* name, int64_t batch, int64_t seqlen, int64_t nheads, int64_t headdim, DType dtype) {
  int64_t bytes = static_cast<int64_t>(size_of(dtype));
  for (int64_t n : {batch, seqlen, nheads, headdim}) bytes = checked_product(bytes, n, name);
  return bytes;
}

DType lse_dtype(const ProblemSpec& s) { return s.dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

int64_t sum(std::initializer_list<int64_t> parts) {
  int64_t total = 0;
  for (int64_t part : parts)
    if (__builtin_add_overflow(total, part, &total))
      throw Failure(Status::kOutOfMemory, "the tensors together have more bytes than any machine can address; choose smaller sizes");
  return total;
}

Cost cost_of_call(const fattn_problem& problem) {
  const fattn_plan_info info = Plan(problem).info();
  return {info.flops, info.flops_nominal, info.bytes};
}

}  // namespace

int64_t ProblemSpec::q_bytes() const { return tensor_bytes("q", batch, seqlen_q, nheads, headdim, dtype); }
int64_t ProblemSpec::k_bytes() const { return tensor_bytes("k", batch, seqlen_k, nheads_k, headdim, dtype); }
int64_t ProblemSpec::v_bytes() const { return tensor_bytes("v", batch, seqlen_k, nheads_k, headdim_v, dtype); }
int64_t ProblemSpec::o_bytes() const { return tensor_bytes("o", batch, seqlen_q, nheads, headdim_v, dtype); }
int64_t ProblemSpec::lse_bytes() const { return tensor_bytes("lse", batch, seqlen_q, nheads, 1, lse_dtype(*this)); }
int64_t ProblemSpec::input_bytes(bool grad) const { return sum({q_bytes(), k_bytes(), v_bytes(), grad ? o_bytes() : 0}); }
int64_t ProblemSpec::output_bytes(bool grad) const {
  return sum({o_bytes(), lse_bytes(), grad ? q_bytes() : 0, grad ? k_bytes() : 0, grad ? v_bytes() : 0});
}

void ProblemSpec::apply_to(Options& options) const {
  options.causal = causal;
  options.window_left = window_left;
  options.window_right = window_right;
  options.softcap = softcap;
}

Tensor q_view(const ProblemSpec& s, const void* data) { return Tensor(data, s.dtype, {s.batch, s.seqlen_q, s.nheads, s.headdim}); }
Tensor k_view(const ProblemSpec& s, const void* data) { return Tensor(data, s.dtype, {s.batch, s.seqlen_k, s.nheads_k, s.headdim}); }
Tensor v_view(const ProblemSpec& s, const void* data) { return Tensor(data, s.dtype, {s.batch, s.seqlen_k, s.nheads_k, s.headdim_v}); }
Tensor o_view(const ProblemSpec& s, const void* data) { return Tensor(data, s.dtype, {s.batch, s.seqlen_q, s.nheads, s.headdim_v}); }
Tensor lse_view(const ProblemSpec& s, const void* data) { return Tensor(data, lse_dtype(s), {s.batch, s.nheads, s.seqlen_q}); }

Cost cost_of(const ProblemSpec& spec, Pass pass) {
  // Views have strides: sizes whose product overflows are refused before any is made.
  spec.input_bytes(true);
  spec.output_bytes(true);
  Options options;
  spec.apply_to(options);
  options.backend = Backend::kReference;  // plans every valid problem, and the cost does not depend on the backend
  const Tensor q = q_view(spec, nullptr), k = k_view(spec, nullptr), v = v_view(spec, nullptr), o = o_view(spec, nullptr);
  const Tensor lse = lse_view(spec, nullptr);
  Cost cost;
  for (const bool backward : {false, true}) {
    if ((backward && pass == Pass::kForward) || (!backward && pass == Pass::kBackward)) continue;
    const Cost call = cost_of_call(backward ? fattn::describe(BackwardTensors{q, k, v, o, lse, o, q, k, v}, options)
                                            : fattn::describe(ForwardTensors{q, k, v, o, lse, {}}, options));
    cost.flops += call.flops;
    cost.flops_nominal += call.flops_nominal;
    cost.bytes += call.bytes;
  }
  return cost;
}

nlohmann::ordered_json to_json(const ProblemSpec& s) {
  nlohmann::ordered_json all = {{"batch", s.batch},          {"seqlen_q", s.seqlen_q}, {"seqlen_k", s.seqlen_k},   {"nheads", s.nheads},
                                {"nheads_k", s.nheads_k},    {"headdim", s.headdim},   {"headdim_v", s.headdim_v}, {"causal", s.causal},
                                {"dtype", name_of(s.dtype)}, {"seed", s.seed}};
  if (s.windowed()) all["window_left"] = s.window_left, all["window_right"] = s.window_right;
  if (s.softcap > 0) all["softcap"] = s.softcap;
  return all;
}

std::string describe(const ProblemSpec& s) {
  std::string text;
  // One operand at a time: g++ 12 warns wrongly about a literal + std::string.
  auto sizes = [&text](const char* name, int64_t first, int64_t second) {
    text.append(name).append(std::to_string(first));
    if (second != first) text.append("/").append(std::to_string(second));
  };
  sizes("B", s.batch, s.batch);
  sizes(" S", s.seqlen_q, s.seqlen_k);
  sizes(" H", s.nheads, s.nheads_k);
  sizes(" D", s.headdim, s.headdim_v);
  text.append(" ").append(name_of(s.dtype)).append(s.causal ? " causal" : "");
  if (s.windowed()) text.append(" window ").append(std::to_string(s.window_left)).append(",").append(std::to_string(s.window_right));
  if (s.softcap > 0) text.append(" softcap ").append(nlohmann::json(s.softcap).dump());
  return text;
}

}  // namespace fattn::measure
