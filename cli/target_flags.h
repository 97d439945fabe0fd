// The flags that say where and how to compute: --device, --backend, --algorithm, --isa, --threads, ....
#pragma once

#include <string>
#include <vector>

#include "cli/parser.h"
#include "fattn/problem.hpp"

namespace fattn::cli {

// "cpu", "cuda" (device 0) or "cuda:2"; empty if the text is one of them. Words that others have for a GPU are not taken: they may mean another one.
std::string not_a_device(const std::string& text);
// --device alone: cpu, cuda or cuda:INDEX.
CLI::Option* add_device(CLI::App& command, std::string& device);

struct TargetFlags {
  std::string device = "cpu", backend = "auto", algorithm = "auto", isa = "auto";
  int threads = 0, cuda_level = 0;
  bool deterministic = false, batch_invariant = false;

  bool on_cuda() const { return device != "cpu"; }
  int device_index() const;  // of a CUDA device

  void add_to(CLI::App& command);
  void apply_to(Options& options) const;  // backend auto on a CUDA device: cuda
  std::vector<std::string> repeating_flags() const;
};

}  // namespace fattn::cli
