// Sizes, views and cost of a problem to measure.
#include "measure/problem.h"

#include <algorithm>

#include "fattn/plan.hpp"
#include "measure/failure.h"
#include "measure/memory.h"
#include "measure/score_terms.h"

namespace fattn::measure {
namespace {

// Of a tensor of queries or of keys.
int64_t rows_bytes(const char* name, const ProblemSpec& s, int64_t seqlen, int64_t nheads, int64_t headdim, DType dtype) {
  if (s.packed()) return tensor_bytes(name, {s.rows_before(s.batch), nheads, headdim}, dtype);
  return tensor_bytes(name, {s.batch, seqlen, nheads, headdim}, dtype);
}

Tensor rows_view(const ProblemSpec& s, const void* data, int64_t seqlen, int64_t nheads, int64_t headdim) {
  if (s.packed()) return Tensor(data, s.dtype, {s.rows_before(s.batch), nheads, headdim});
  return Tensor(data, s.dtype, {s.batch, seqlen, nheads, headdim});
}

Tensor keys_view(const ProblemSpec& s, const void* data, int64_t headdim) {
  if (s.page_size > 0) return Tensor(data, s.dtype, {s.batch * (s.seqlen_k / s.page_size), s.page_size, s.nheads_k, headdim});
  return rows_view(s, data, s.seqlen_k, s.nheads_k, headdim);
}

DType lse_dtype(const ProblemSpec& s) { return s.dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

int64_t sum(std::initializer_list<int64_t> parts) {
  int64_t total = 0;
  for (int64_t part : parts)
    if (__builtin_add_overflow(total, part, &total))
      throw Failure(Status::kOutOfMemory, "the tensors together have more bytes than any machine can address; choose smaller sizes");
  return total;
}

// From `least`, the first, to `most`, the last.
int64_t evenly(int64_t least, int64_t most, int64_t entry, int64_t entries) {
  if (entries == 1) return least;
  const int64_t whole = (most - least) / (entries - 1), rest = (most - least) % (entries - 1);  // apart, so that no product overflows
  return least + whole * entry + rest * entry / (entries - 1);
}

Cost cost_of_call(const fattn_problem& problem) {
  const fattn_plan_info info = Plan(problem).info();
  return {info.flops, info.flops_nominal, info.bytes};
}

// Of tensors that are not there.
Cost cost_of_pass(const ProblemSpec& spec, bool backward) {
  Options options;
  spec.apply_to(options);
  options.backend = Backend::kReference;  // plans every valid problem, and the cost does not depend on the backend
  const Tensor q = q_view(spec, nullptr), k = k_view(spec, nullptr), v = v_view(spec, nullptr), o = o_view(spec, nullptr);
  const Tensor lse = lse_view(spec, nullptr), dbias = spec.dbias ? pair_view(spec, spec.bias, spec.bias_dtype(), nullptr) : Tensor();
  const ScoreTensors scores = score_views(spec, {});
  return cost_of_call(backward ? fattn::describe(BackwardTensors{q, k, v, o, lse, o, q, k, v, scores, dbias}, options)
                               : fattn::describe(ForwardTensors{q, k, v, o, lse, {}, scores}, options));
}

// What lengths and documents leave of a problem: smaller ones without them.
std::vector<ProblemSpec> parts_of(const ProblemSpec& spec) {
  ProblemSpec part = spec;
  part.least_seqused_k = part.least_packed = part.documents = part.page_size = 0;
  std::vector<ProblemSpec> parts;
  if (spec.documents > 0) {
    for (int64_t document = 0; document < spec.documents; ++document) {
      part.seqlen_q = part.seqlen_k = spec.document_begin(document + 1) - spec.document_begin(document);
      parts.push_back(part);
    }
  } else {
    part.batch = 1;
    for (int64_t entry = 0; entry < spec.batch; ++entry) {
      part.seqlen_q = spec.rows_of(entry);
      part.seqlen_k = spec.keys_of(entry);
      parts.push_back(part);
    }
  }
  return parts;
}

}  // namespace

int64_t tensor_bytes(const char* name, std::initializer_list<int64_t> shape, DType dtype) {
  int64_t bytes = static_cast<int64_t>(size_of(dtype));
  for (int64_t n : shape) bytes = checked_product(bytes, n, name);
  return bytes;
}

int64_t ProblemSpec::q_bytes() const { return rows_bytes("q", *this, seqlen_q, nheads, headdim, dtype); }
int64_t ProblemSpec::k_bytes() const { return rows_bytes("k", *this, seqlen_k, nheads_k, headdim, dtype); }
int64_t ProblemSpec::v_bytes() const { return rows_bytes("v", *this, seqlen_k, nheads_k, headdim_v, dtype); }
int64_t ProblemSpec::o_bytes() const { return rows_bytes("o", *this, seqlen_q, nheads, headdim_v, dtype); }
int64_t ProblemSpec::lse_bytes() const { return rows_bytes("lse", *this, seqlen_q, nheads, 1, lse_dtype(*this)); }
int64_t ProblemSpec::bias_bytes() const { return bytes_of(*this, kBias); }
int64_t ProblemSpec::input_bytes(bool grad) const {
  int64_t total = sum({q_bytes(), k_bytes(), v_bytes(), grad ? o_bytes() : 0});
  for (int input = 0; input < kScoreInputs; ++input) total = sum({total, bytes_of(*this, static_cast<ScoreInput>(input))});
  return total;
}
int64_t ProblemSpec::output_bytes(bool grad) const {
  return sum({o_bytes(), lse_bytes(), grad ? q_bytes() : 0, grad ? k_bytes() : 0, grad ? v_bytes() : 0, grad && dbias ? bias_bytes() : 0});
}

bool ProblemSpec::has_terms() const {
  return p_dropout > 0 || alibi || bias != PairShape::kNone || mask != PairShape::kNone || least_seqused_k > 0 || packed() || documents > 0 ||
         page_size > 0;
}
int64_t ProblemSpec::rows_of(int64_t entry) const { return packed() ? evenly(least_packed, seqlen_q, entry, batch) : seqlen_q; }
int64_t ProblemSpec::keys_of(int64_t entry) const {
  return packed() ? rows_of(entry) : least_seqused_k > 0 ? evenly(least_seqused_k, seqlen_k, entry, batch) : seqlen_k;
}
int64_t ProblemSpec::rows_before(int64_t entry) const {
  int64_t rows = 0;
  for (int64_t b = 0; b < entry; ++b) rows = sum({rows, rows_of(b)});
  return rows;
}

void ProblemSpec::apply_to(Options& options) const {
  options.causal = causal;
  options.window_left = window_left;
  options.window_right = window_right;
  options.softcap = softcap;
  options.p_dropout = p_dropout;
  if (packed()) options.max_seqlen_q = options.max_seqlen_k = seqlen_q;
}

Tensor q_view(const ProblemSpec& s, const void* data) { return rows_view(s, data, s.seqlen_q, s.nheads, s.headdim); }
Tensor k_view(const ProblemSpec& s, const void* data) { return keys_view(s, data, s.headdim); }
Tensor v_view(const ProblemSpec& s, const void* data) { return keys_view(s, data, s.headdim_v); }
Tensor o_view(const ProblemSpec& s, const void* data) { return rows_view(s, data, s.seqlen_q, s.nheads, s.headdim_v); }
Tensor lse_view(const ProblemSpec& s, const void* data) {
  if (s.packed()) return Tensor(data, lse_dtype(s), {s.nheads, s.rows_before(s.batch)});
  return Tensor(data, lse_dtype(s), {s.batch, s.nheads, s.seqlen_q});
}
std::array<int64_t, 4> pair_sizes(const ProblemSpec& s, PairShape shape) {
  const bool batches = shape == PairShape::kAll || shape == PairShape::kBatch || shape == PairShape::kKeys;
  const bool heads = shape == PairShape::kAll || shape == PairShape::kHeads;
  return {batches ? s.batch : 1, heads ? s.nheads : 1, shape == PairShape::kKeys ? 1 : s.seqlen_q, shape == PairShape::kNone ? 0 : s.seqlen_k};
}
Tensor pair_view(const ProblemSpec& s, PairShape shape, DType dtype, const void* data) {
  if (shape == PairShape::kNone) return {};
  const auto [batches, heads, rows, keys] = pair_sizes(s, shape);
  return Tensor(data, dtype, {batches, heads, rows, keys});
}

Cost cost_of(const ProblemSpec& spec, Pass pass) {
  // Views have strides: sizes whose product overflows are refused before any is made.
  spec.input_bytes(true);
  spec.output_bytes(true);
  Cost cost;
  for (const bool backward : {false, true}) {
    if ((backward && pass == Pass::kForward) || (!backward && pass == Pass::kBackward)) continue;
    Cost call = cost_of_pass(spec, backward);
    if (spec.least_seqused_k > 0 || spec.packed() || spec.documents > 0) {  // which the library does not know when it plans
      Cost parts;
      for (const ProblemSpec& part : parts_of(spec)) {
        const Cost one = cost_of_pass(part, backward);
        parts.flops += one.flops;
        parts.flops_nominal += one.flops_nominal;
      }
      call.flops = parts.flops;
      if (spec.packed()) call.flops_nominal = parts.flops_nominal;
    }
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
  if (s.p_dropout > 0) all["p_dropout"] = s.p_dropout;
  if (s.alibi) all["alibi"] = true;
  if (s.bias != PairShape::kNone) all["bias"] = name_of(s.bias), all["bias_dtype"] = name_of(s.bias_dtype()), all["dbias"] = s.dbias;
  if (s.mask != PairShape::kNone) all["mask"] = name_of(s.mask);
  if (s.least_seqused_k > 0) all["least_seqused_k"] = s.least_seqused_k;
  if (s.packed()) all["least_packed"] = s.least_packed;
  if (s.documents > 0) all["documents"] = s.documents;
  if (s.page_size > 0) all["page_size"] = s.page_size;
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
  return text.append(describe_options(s));
}

std::string describe_options(const ProblemSpec& s) {
  std::string text;
  const auto number = [](double value) { return nlohmann::json(value).dump(); };
  if (s.windowed()) text.append(" window ").append(std::to_string(s.window_left)).append(",").append(std::to_string(s.window_right));
  if (s.softcap > 0) text.append(" softcap ").append(number(s.softcap));
  if (s.p_dropout > 0) text.append(" dropout ").append(number(s.p_dropout));
  if (s.alibi) text.append(" ALiBi");
  if (s.bias != PairShape::kNone) text.append(" bias ").append(name_of(s.bias)).append(s.bias_f32 && s.dtype != DType::kF32 ? " in fp32" : "");
  if (s.dbias) text.append(" with gradient");
  if (s.mask != PairShape::kNone) text.append(" mask ").append(name_of(s.mask));
  if (s.least_seqused_k > 0) text.append(" lengths from ").append(std::to_string(s.least_seqused_k));
  if (s.packed()) text.append(" packed from ").append(std::to_string(s.least_packed));
  if (s.documents > 0) text.append(" documents ").append(std::to_string(s.documents));
  if (s.page_size > 0) text.append(" pages of ").append(std::to_string(s.page_size));
  return text;
}

}  // namespace fattn::measure
