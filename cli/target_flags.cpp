// The names are the library's own (types.hpp), so that a flag and a record say the same.
#include "cli/target_flags.h"

#include "cli/sanitize.h"

namespace fattn::cli {
namespace {

constexpr Backend kBackends[] = {Backend::kAuto, Backend::kReference, Backend::kCpu, Backend::kCuda};
constexpr Algorithm kAlgorithms[] = {Algorithm::kAuto, Algorithm::kStandard, Algorithm::kV1, Algorithm::kV2, Algorithm::kV3};
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

// "cpu", "cuda" (device 0) or "cuda:2"; empty if the text is one of them.
std::string not_a_device(const std::string& text) {
  if (text == "cpu" || text == "cuda") return {};
  const std::string digits = text.rfind("cuda:", 0) == 0 ? text.substr(5) : "";
  if (digits.empty() || digits.size() > 3 || digits.find_first_not_of("0123456789") != std::string::npos)
    return "'" + printable(text, 40) + "' is no device; allowed: cpu, cuda, cuda:0, cuda:1, ...";
  return {};
}

}  // namespace

int TargetFlags::device_index() const { return device.size() > 5 ? std::stoi(device.substr(5)) : 0; }

void TargetFlags::add_to(CLI::App& command) {
  command.add_option("--device", device, "Where the tensors are: cpu, cuda or cuda:INDEX; `fattn info` lists the devices")
      ->check(CLI::Validator(not_a_device, ""))
      ->type_name("DEVICE")
      ->capture_default_str();
  command.add_option("--backend", backend, "What computes: reference is the float64 oracle, cpu and cuda the fast kernels")
      ->check(one_of(kBackends))
      ->capture_default_str();
  command
      .add_option(
          "--algorithm", algorithm,
          "standard: textbook attention, O(seqlen^2) memory; v1: the first FlashAttention, on GPUs; v2: FlashAttention-2; v3: for Hopper GPUs")
      ->check(one_of(kAlgorithms))
      ->capture_default_str();
  command.add_option("--isa", isa, "Instruction set of the CPU kernels; `fattn info` lists those that run here")
      ->check(one_of(kIsas))
      ->capture_default_str();
  command.add_option("--threads", threads, "Threads; 0: all that affinity and the control group allow")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  command.add_flag("--deterministic", deterministic, "CUDA: a backward pass that gives the same bits every run; the CPU always does");
  command.add_option("--cuda-level", cuda_level, "CUDA: kernels for this compute capability; 0: the best for the device")
      ->check(CLI::IsMember({0, 75, 80}))
      ->capture_default_str();
}

void TargetFlags::apply_to(Options& options) const {
  options.backend = value_of(backend, kBackends);
  options.algorithm = value_of(algorithm, kAlgorithms);
  options.cpu_isa = value_of(isa, kIsas);
  options.num_threads = threads;
  options.deterministic = deterministic;
  options.cuda_level = cuda_level;
  if (on_cuda() && options.backend == Backend::kAuto) options.backend = Backend::kCuda;
}

std::vector<std::string> TargetFlags::repeating_flags() const {
  std::vector<std::string> flags = {"--device", device,  "--backend", backend,     "--algorithm",
                                    algorithm,  "--isa", isa,         "--threads", std::to_string(threads)};
  if (deterministic) flags.emplace_back("--deterministic");
  if (cuda_level != 0) flags.insert(flags.end(), {"--cuda-level", std::to_string(cuda_level)});
  return flags;
}

}  // namespace fattn::cli
