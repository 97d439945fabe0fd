// The names are the library's own (types.hpp), so that a flag and a record say the same.
#include "cli/target_flags.h"

#include <CLI/CLI.hpp>

#include "cli/nearest.h"
#include "cli/sanitize.h"
#include "cli/values.h"

namespace fattn::cli {
namespace {

constexpr Backend kBackends[] = {Backend::kAuto, Backend::kReference, Backend::kCpu, Backend::kCuda};
constexpr Algorithm kAlgorithms[] = {Algorithm::kAuto, Algorithm::kStandard, Algorithm::kV1, Algorithm::kV2, Algorithm::kV3};
constexpr Isa kIsas[] = {Isa::kAuto, Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16, Isa::kAmx, Isa::kNeon};

template <class T, size_t N>
CLI::Validator name_from(const T (&values)[N], std::vector<std::pair<std::string, std::string>> also = {}) {
  std::vector<std::string> names;
  for (T value : values) names.emplace_back(name_of(value));
  return one_of(std::move(names), std::move(also));
}

// Names as they are in papers and in torch.
std::vector<std::pair<std::string, std::string>> algorithms_elsewhere() {
  return {{"math", "standard"}, {"flashattention1", "v1"}, {"fa1", "v1"}, {"flashattention2", "v2"},
          {"fa2", "v2"},        {"flashattention3", "v3"}, {"fa3", "v3"}};
}

template <class T, size_t N>
T value_of(const std::string& name, const T (&values)[N]) {
  for (T value : values)
    if (name == name_of(value)) return value;
  return T::kAuto;  // the parser has refused every other name
}

}  // namespace

std::string not_a_device(const std::string& text) {
  if (text == "cpu" || text == "cuda") return {};
  const std::string digits = text.rfind("cuda:", 0) == 0 ? text.substr(5) : "";
  if (digits.empty() || digits.size() > 3 || digits.find_first_not_of("0123456789") != std::string::npos)
    return "'" + printable(text, 40) + "' is no device; allowed: cpu, cuda, cuda:0, cuda:1, ..." +
           (text == "gpu" || nearest(text, {"cuda"}) == "cuda" ? "; did you mean 'cuda'?" : "");
  return {};
}

CLI::Option* add_device(CLI::App& command, std::string& device) {
  return command.add_option("--device", device, "Where the tensors are: cpu, cuda or cuda:INDEX; `fattn info` lists the devices")
      ->check(CLI::Validator(not_a_device, ""))
      ->type_name("DEVICE")
      ->capture_default_str();
}

int TargetFlags::device_index() const { return device.size() > 5 ? std::stoi(device.substr(5)) : 0; }

void TargetFlags::add_to(CLI::App& command) {
  command.option_defaults()->group("Where and how to compute");
  add_device(command, device);
  command.add_option("--backend", backend, "What computes: reference is the float64 oracle, cpu and cuda the fast kernels")
      ->transform(name_from(kBackends, {{"gpu", "cuda"}}))
      ->type_name("NAME")
      ->capture_default_str();
  command
      .add_option("--algorithm", algorithm,
                  "standard: textbook attention, O(seqlen^2) memory; v1: the first FlashAttention; v2: FlashAttention-2; v3: for Hopper GPUs")
      ->transform(name_from(kAlgorithms, algorithms_elsewhere()))
      ->type_name("NAME")
      ->capture_default_str();
  command.add_option("--isa", isa, "Instruction set of the CPU kernels; `fattn info` lists those that run here")
      ->transform(name_from(kIsas))
      ->type_name("NAME")
      ->capture_default_str();
  command.add_option("--threads", threads, "Threads; 0: all that affinity and the control group allow")
      ->check(whole_number(0, 1024))
      ->capture_default_str();
  command.add_flag("--deterministic", deterministic, "CUDA: a backward pass that gives the same bits every run; the CPU always does");
  command.add_flag("--batch-invariant", batch_invariant,
                   "A forward pass where the bits of a row do not depend on what else is in the call, nor on how its sequence is divided");
  command.add_option("--cuda-level", cuda_level, "CUDA: kernels for this compute capability; 0: the best for the device")
      ->transform(one_of({"0", "75", "80"}))
      ->type_name("N")
      ->capture_default_str();
  command.option_defaults()->group("Options");
}

void TargetFlags::apply_to(Options& options) const {
  options.backend = value_of(backend, kBackends);
  options.algorithm = value_of(algorithm, kAlgorithms);
  options.cpu_isa = value_of(isa, kIsas);
  options.num_threads = threads;
  options.deterministic = deterministic;
  options.batch_invariant = batch_invariant;
  options.cuda_level = cuda_level;
  if (on_cuda() && options.backend == Backend::kAuto) options.backend = Backend::kCuda;
}

std::vector<std::string> TargetFlags::repeating_flags() const {
  std::vector<std::string> flags = {"--device", device,  "--backend", backend,     "--algorithm",
                                    algorithm,  "--isa", isa,         "--threads", std::to_string(threads)};
  if (deterministic) flags.emplace_back("--deterministic");
  if (batch_invariant) flags.emplace_back("--batch-invariant");
  if (cuda_level != 0) flags.insert(flags.end(), {"--cuda-level", std::to_string(cuda_level)});
  return flags;
}

}  // namespace fattn::cli
