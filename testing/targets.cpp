#include "testing/targets.h"

namespace fattn::testing {

const std::vector<Target>& all_targets() {
  static const std::vector<Target> targets = [] {
    std::vector<Target> all{{Backend::kReference, Algorithm::kAuto, Isa::kAuto, 0}, {Backend::kCpu, Algorithm::kStandard, Isa::kAuto, 0}};
    for (Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16, Isa::kAmx, Isa::kNeon})
      all.push_back({Backend::kCpu, Algorithm::kV2, isa, 0});
    all.push_back({Backend::kCpu, Algorithm::kV1, Isa::kAuto, 0});
    return all;
  }();
  return targets;
}

std::string name_of(const Target& target) {
  if (target.backend == Backend::kCpu && target.algorithm == Algorithm::kV1)
    return target.isa == Isa::kAuto ? "cpu_v1" : std::string("cpu_v1_") + fattn::name_of(target.isa);
  if (target.backend == Backend::kCpu && target.algorithm != Algorithm::kStandard) return std::string("cpu_") + fattn::name_of(target.isa);
  if (target.backend == Backend::kCuda)
    return std::string("cuda") + (target.algorithm != Algorithm::kAuto ? std::string("_") + fattn::name_of(target.algorithm) : "") +
           (target.cuda_level ? "_" + std::to_string(target.cuda_level) : "") + (target.deterministic ? "_deterministic" : "");
  return target.backend == Backend::kCpu ? "standard" : fattn::name_of(target.backend);
}

namespace {

// Of what a score depends on beside q k, and of dropout.
bool gpu_computes_scores(const Target& target, const Case& c) {
  if (c.page_size > 0 && target.algorithm != Algorithm::kAuto && target.algorithm != Algorithm::kV2) return false;
  const bool dbias = c.backward && c.bias != Pairs::kNone,
             pairs = c.bias != Pairs::kNone || c.mask != Pairs::kNone || c.documents != Documents::kNone;
  if (dbias && target.deterministic && c.bias != Pairs::kAll && c.bias != Pairs::kExpanded) return false;
  if (target.algorithm == Algorithm::kStandard) return !c.varlen;
  if (target.algorithm == Algorithm::kV1 || c.dtype == DType::kF32 || (dbias && c.softcap != 0)) return false;
  const bool lengths_alone = !pairs && c.alibi == Alibi::kNone && c.p_dropout == 0;
  if (c.varlen && target.algorithm == Algorithm::kV3 && c.backward) return false;
  return lengths_alone ? target.algorithm != Algorithm::kV3 || (!c.backward && c.softcap == 0)
                       : target.algorithm != Algorithm::kV3 && (target.cuda_level != 75 || !c.backward);
}

}  // namespace

bool is_to_compute(const Target& target, const Case& c) {
  if (c.fp32_outputs && target.backend == Backend::kCuda &&
      (target.algorithm == Algorithm::kStandard || target.algorithm == Algorithm::kV1 || (target.algorithm == Algorithm::kV3 && c.backward)))
    return false;
  const bool scores = c.has_scores(), window = c.window_left != -1 || c.window_right != -1 || c.softcap != 0;
  return (!scores && !window) || target.backend == Backend::kReference ||
         (target.backend == Backend::kCpu && target.algorithm != Algorithm::kStandard && target.algorithm != Algorithm::kV1) ||
         (target.backend == Backend::kCuda && (scores ? gpu_computes_scores(target, c) : target.algorithm != Algorithm::kV1));
}

std::string why_unavailable(const Target& target, DType dtype) {
  ForwardTensors t;
  t.q = t.k = t.v = t.o = Tensor(nullptr, dtype, {1, 16, 1, 64});
  if (target.device == Device::kCuda) t.q = t.k = t.v = t.o = t.q.on(Device::kCuda, target.device_index, nullptr);
  Options options;
  options.backend = target.backend;
  options.algorithm = target.algorithm;
  options.cpu_isa = target.isa;
  options.cuda_level = target.cuda_level;
  return supported(describe(t, options)).reason;
}

}  // namespace fattn::testing
