// Providers: peers in processes of their own that speak the protocol of providers/README.md.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "measure/contestant.h"

namespace fattn::measure {

struct ProviderOptions {
  std::string name;     // of the row: "torch-sdpa"
  std::string program;  // a .py file, run by one of `pythons`, or an executable
  std::string variant;  // which of the provider's implementations; "": its first
  Placement place;
  int threads = 0;                   // 0: as many as the library uses
  std::vector<std::string> pythons;  // tried in order until one says hello
  double timeout_seconds = 300;      // of one answer
};

// Starts no process before `prepare`; a process that cannot be started, dies, hangs or answers nonsense is a Failure.
std::unique_ptr<Contestant> make_provider_contestant(const ProviderOptions& options);

// Why the provider cannot run here on its device: what it needs is not installed, or it has no such device; "" if it can. Starts a process and ends
// it.
std::string why_unavailable(const ProviderOptions& options);

struct ProviderProgram {
  std::string name, program;
};
// The providers of a directory: NAME.py and executables, "torch_sdpa.py" being named "torch-sdpa", but for those that begin with "_". Sorted by name.
std::vector<ProviderProgram> find_providers(const std::string& directory);

}  // namespace fattn::measure
