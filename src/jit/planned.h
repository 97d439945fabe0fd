// The list of kernels that are compiled without being asked for: by the tests for every architecture, and into pack files.
//
// kernels/planned.txt has one kernel a line, in this order, separated by blanks; # begins a comment line:
//   list         common: what packs and `fattn cache warm` have, embedded in the library, and `make test` compiles; packed: likewise, but compiled by
//                `make test-all` only; quick: compiled by `make test`; full: by `make test-all`
//   budget       registers that the kernel may use at most
//   targets      75,80,86,89,90a,100,120: the suffix a is Request::arch_specific
//   entry        Request::entry
//   source       the rest of the line: Request::source with \n for a new line and \\ for a backslash
#pragma once

#include <string>
#include <string_view>
#include <string_view>
#include <vector>

#include "jit/jit.h"

namespace fattn::core::jit {

struct Target {
  int arch = 0;
  bool arch_specific = false;
};

struct Planned {
  enum class List { kCommon, kPacked, kQuick, kFull };
  List list = List::kFull;
  int budget = 0;
  std::vector<Target> targets;
  Request request;  // but for the architecture

  Request on(const Target& target) const;
  bool embedded() const { return list == List::kCommon || list == List::kPacked; }
  bool quick() const { return list == List::kCommon || list == List::kQuick; }  // compiled by `make test`
};

// Throws Error(kInternal) with the number of the line that is wrong.
std::vector<Planned> parse_planned(std::string_view text);
std::string planned_line(const Planned& planned);  // and back, without the end of the line

// A list beside the embedded one, of kernels from another table of sources: operations define it (src/ops/cuda), where they are linked; libfattn.so
// has none.
struct PlannedList {
  std::string_view (*text)();
  SourceTable sources;
};
[[gnu::weak, gnu::visibility("hidden")]] PlannedList further_planned();

// The common and packed kernels, which are embedded, as requests for one architecture; those of the further list behind them.
std::vector<Request> planned_requests(int arch);

}  // namespace fattn::core::jit
