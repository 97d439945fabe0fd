// The GPU architectures that kernels are compiled for, and where they were run.
#pragma once

#include <string>

namespace fattn::core {

struct Architecture {
  int capability;  // 10 * major + minor
  const char* name;
  int shared_kib;           // of a multiprocessor (CUDA C++ Programming Guide, technical specifications)
  const char* executed_on;  // a device on which they were run and compared with float64; empty: compiled only, by the tests
};

inline constexpr Architecture kArchitectures[] = {
    {75, "Turing", 64, ""},      {80, "Ampere", 164, ""},
    {86, "Ampere", 100, ""},     {87, "Ampere, Jetson Orin", 164, ""},
    {89, "Ada", 100, ""},        {90, "Hopper", 228, "NVIDIA H200"},
    {100, "Blackwell", 228, ""}, {120, "Blackwell", 100, ""},
};

// Devices of the Tegra family (TX1, TX2, Xavier, Orin, Thor under its two numbers), and 8.8, of which nothing is known.
constexpr bool is_alone(int capability) {
  for (const int alone : {53, 62, 72, 87, 88, 101, 110})
    if (capability == alone) return true;
  return false;
}

// What to compile for a device of this capability. Machine code runs on later minor versions of the same major one, but neither
// between Tegra and the others nor from one Tegra device to the next (CUDA C++ Programming Guide, binary compatibility). Null: there are no
// kernels for it.
constexpr const Architecture* architecture_for(int capability) {
  const Architecture* best = nullptr;
  for (const Architecture& a : kArchitectures) {
    const bool runs = is_alone(capability) || is_alone(a.capability) ? a.capability == capability
                                                                     : a.capability / 10 == capability / 10 && a.capability <= capability;
    if (runs) best = &a;
  }
  return best;
}

// "75, 80, ...", for messages.
inline std::string known_architectures() {
  std::string names;
  for (const Architecture& a : kArchitectures) names += (names.empty() ? "" : ", ") + std::to_string(a.capability);
  return names;
}

}  // namespace fattn::core
