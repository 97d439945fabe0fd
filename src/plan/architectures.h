// The GPU architectures that kernels are compiled for, and where they were run.
#pragma once

namespace fattn::core {

struct Architecture {
  int capability;  // 10 * major + minor
  const char* name;
  const char* executed_on;  // a device on which they were run and compared with float64; empty: compiled only, by the tests
};

inline constexpr Architecture kArchitectures[] = {
    {75, "Turing", ""},     {80, "Ampere", ""},     {86, "Ampere", ""}, {89, "Ada", ""}, {90, "Hopper", "NVIDIA H200"},
    {100, "Blackwell", ""}, {120, "Blackwell", ""},
};

// What to compile for a device of this capability: machine code runs on later minor versions of the same major one. Null: none is known.
constexpr const Architecture* architecture_for(int capability) {
  const Architecture* best = nullptr;
  for (const Architecture& a : kArchitectures)
    if (a.capability / 10 == capability / 10 && a.capability <= capability) best = &a;
  return best;
}

}  // namespace fattn::core
