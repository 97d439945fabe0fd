// The names are the library's own (types.hpp), so that a flag and a record say the same.
#include "cli/target_flags.h"

#include <vector>

namespace fattn::cli {
namespace {

constexpr Backend kBackends[] = {Backend::kAuto, Backend::kReference, Backend::kCpu};
constexpr Algorithm kAlgorithms[] = {Algorithm::kAuto, Algorithm::kStandard, Algorithm::kV2};
constexpr Isa kIsas[] = {Isa::kAuto, Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16, Isa::kAmx, Isa::kNeon};

template <class T, size_t N>
CLI::IsMember one_of(const T (&values)[N]) {
  std::vector<std::string> names;
  for (T value : values) names.emplace_back(name_of(value));
  return CLI::IsMember(names);
}

template <class T, size_t N>
T value_of(const std::string& name, const T (&values)[N]) {
  for (T value : values)
    if (name == name_of(value)) return value;
  return T::kAuto;  // the parser has refused every other name
}

}  // namespace

void TargetFlags::add_to(CLI::App& command) {
  command.add_option("--backend", backend, "Where to compute: reference is the float64 oracle, cpu the fast kernels")
      ->check(one_of(kBackends))
      ->capture_default_str();
  command.add_option("--algorithm", algorithm, "standard: textbook attention, O(seqlen^2) memory; v2: FlashAttention-2")
      ->check(one_of(kAlgorithms))
      ->capture_default_str();
  command.add_option("--isa", isa, "Instruction set of the CPU kernels; `fattn info` lists those that run here")
      ->check(one_of(kIsas))
      ->capture_default_str();
  command.add_option("--threads", threads, "Threads; 0: all that affinity and the control group allow")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
}

void TargetFlags::apply_to(Options& options) const {
  options.backend = value_of(backend, kBackends);
  options.algorithm = value_of(algorithm, kAlgorithms);
  options.cpu_isa = value_of(isa, kIsas);
  options.num_threads = threads;
}

}  // namespace fattn::cli
