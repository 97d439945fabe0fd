#include "lab/memory/report.h"

#include "lab/plan_shape.h"
#include "measure/environment.h"

namespace fattn::lab {
namespace {

using Json = nlohmann::ordered_json;
using measure::MovedTerm;
using measure::Pass;

Json known(double value) { return value > 0 ? Json(value) : Json(nullptr); }
Json text_or_null(const std::string& text) { return text.empty() ? Json(nullptr) : Json(text); }

Json as_json(const MovedTerm& t) { return {{"what", t.what}, {"arithmetic", t.arithmetic}, {"bytes", t.bytes}}; }

Json as_json(const LevelTerm& t) {
  Json json = as_json(t.moved);
  json["once_bytes"] = t.moved.once;
  json["reused_bytes"] = t.reused_bytes;
  json["missed_fraction"] = t.missed;
  json["dram_bytes"] = t.dram_bytes;
  return json;
}

Json as_json(const Traffic& t) {
  if (!t.reason.empty()) return {{"algorithm", t.algorithm}, {"reason", t.reason}};
  Json papers = Json::array(), terms = Json::array(), limits = Json::array();
  for (const MovedTerm& term : t.papers) papers.push_back(as_json(term));
  for (const LevelTerm& term : t.terms) terms.push_back(as_json(term));
  for (const Limit& limit : t.limits)
    limits.push_back({{"name", limit.name},
                      {"seconds", limit.arithmetic.empty() ? Json(nullptr) : Json(limit.seconds)},
                      {"arithmetic", text_or_null(limit.arithmetic)}});
  return {{"algorithm", t.algorithm},
          {"reason", nullptr},
          {"papers_bytes", t.papers_bytes},
          {"papers_terms", papers},
          {"counted_by", t.by_our_loops ? "our loops" : "the papers' loops"},
          {"moved_bytes", t.moved_bytes},
          {"dram_bytes", t.dram_bytes},
          {"terms", terms},
          {"flops", t.flops},
          {"exponentials", t.exponentials},
          {"flops_per_byte_moved", t.intensity()},
          {"flops_per_byte_dram", t.dram_intensity()},
          {"on_chip_bytes", known(t.on_chip_bytes)},
          {"on_chip_arithmetic", t.on_chip},
          {"limits", limits},
          {"binding", t.bound_known ? Json(t.limits[t.binding].name) : Json(nullptr)},
          {"bound_s", t.bound_known ? Json(t.bound_seconds()) : Json(nullptr)}};
}

Json as_json(const AttentionStepMemory& m) {
  if (!m.reason.empty()) return {{"algorithm", m.algorithm}, {"reason", m.reason}};
  Json tensors = Json::array();
  for (const StepTensor& t : m.tensors)
    tensors.push_back(
        {{"name", t.name}, {"bytes", t.bytes}, {"arithmetic", t.arithmetic}, {"forward", t.forward}, {"backward", t.backward}, {"saved", t.saved}});
  return {{"algorithm", m.algorithm},
          {"reason", nullptr},
          {"exact", m.exact},
          {"tensors", tensors},
          {"forward_bytes", m.forward_bytes()},
          {"backward_bytes", m.backward_bytes() > 0 ? Json(m.backward_bytes()) : Json(nullptr)},
          {"saved_bytes", m.saved_bytes()},
          {"peak_bytes", m.peak_bytes()}};
}

}  // namespace

MemoryReport memory_report(const measure::ProblemSpec& spec, bool grad, const std::vector<std::string>& algorithms, const MemoryMachine& machine,
                           const std::function<void()>& planned) {
  MemoryReport report;
  report.spec = spec;
  report.grad = grad;
  report.machine = machine;
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    if (pass == Pass::kBackward && !grad) continue;
    PassTraffic traffic;
    traffic.pass = pass;
    traffic.compulsory_bytes = measure::cost_of(spec, pass).bytes;
    for (const std::string& algorithm : algorithms) {
      const measure::Placement place = measure::placement_of(machine.device);
      traffic.algorithms.push_back(traffic_of(algorithm, spec, pass, machine, cuda_tiles(spec, pass, options_of(algorithm, place), place)));
    }
    report.passes.push_back(std::move(traffic));
  }
  for (const std::string& algorithm : algorithms) {
    if (algorithm != "v3" || machine.cuda) report.steps.push_back(planned_step(algorithm, spec, grad, machine.device));
    if (planned) planned();
  }
  report.steps.push_back(textbook_step(spec, grad));
  return report;
}

Json to_json(const MemoryReport& r) {
  const MemoryMachine& m = r.machine;
  Json passes = Json::array(), steps = Json::array();
  for (const PassTraffic& p : r.passes) {
    Json algorithms = Json::array();
    for (const Traffic& t : p.algorithms) algorithms.push_back(as_json(t));
    passes.push_back({{"pass", name_of(p.pass)}, {"compulsory_bytes", p.compulsory_bytes}, {"algorithms", algorithms}});
  }
  for (const AttentionStepMemory& step : r.steps) steps.push_back(as_json(step));
  return {{"fattn_memory", 1},
          {"problem", measure::to_json(r.spec)},
          {"grad", r.grad},
          {"machine",
           {{"device", m.device},
            {"name", m.name},
            {"workers", m.workers},
            {"chip", m.chip},
            {"chip_bytes", m.chip_bytes},
            {"cache", m.cache},
            {"cache_bytes", known(m.cache_bytes)},
            {"flops_per_s", known(m.flops_per_s(r.spec.dtype))},
            {"exp_per_s", known(m.exp_per_s)},
            {"cache_bytes_per_s", known(m.cache_bytes_per_s)},
            {"dram_bytes_per_s", known(m.dram_bytes_per_s)},
            {"start_s", known(m.start_s)},
            {"lacks", text_or_null(m.lacks)}}},
          {"passes", passes},
          {"steps", steps},
          {"environment", measure::environment()}};
}

}  // namespace fattn::lab
