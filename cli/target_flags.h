// The flags that say where and how to compute: --backend, --algorithm, --isa, --threads.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "fattn/problem.hpp"

namespace fattn::cli {

struct TargetFlags {
  std::string backend = "auto", algorithm = "auto", isa = "auto";
  int threads = 0;

  void add_to(CLI::App& command);
  void apply_to(Options& options) const;
};

}  // namespace fattn::cli
