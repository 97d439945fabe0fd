// Prints kernels/ops/planned.txt from the tables of src/ops/cuda: build/tests/make_planned_ops > kernels/ops/planned.txt
#include <cstdio>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "fattn/types.hpp"
#include "jit/planned.h"
#include "ops/cuda/planned.h"

namespace {

using fattn::core::jit::Planned;

// The kernels of all architectures, a line each and list: what is quick is common, the others are packed without being compiled by `make test`.
std::vector<Planned> lines() {
  std::vector<Planned> all;
  std::map<std::pair<std::string, Planned::List>, size_t> places;
  for (const int arch : {80, 86, 89, 90, 100, 120})
    for (const auto& [key, quick] : fattn::ops::cuda::planned_kernels(arch)) {
      // `make test` looks at all of one architecture, and of the others at what they have least registers for.
      const bool narrow = key.dtype == static_cast<int32_t>(fattn::DType::kBF16) || key.dtype == 0;
      const bool looked_at = quick && (arch == 90 || (arch != 86 && arch != 89 && narrow && key.rows != 8));
      Planned one{looked_at ? Planned::List::kCommon : Planned::List::kPacked, key.kind == fattn::ops::cuda::KernelKind::kDraw ? 64 : 255, {}, {}};
      one.request = request_of(key);
      const auto [at, is_new] = places.try_emplace({one.request.source, one.list}, all.size());
      if (is_new) all.push_back(one);
      all[at->second].targets.push_back({arch, false});
    }
  return all;
}

}  // namespace

int main() {
  std::printf(
      "# Kernels of operations that are compiled without being asked for, as those of kernels/planned.txt.\n"
      "# Made by build/tests/make_planned_ops from the tables of src/ops/cuda; do not edit.\n");
  for (const Planned& one : lines()) std::printf("%s\n", planned_line(one).c_str());
}
