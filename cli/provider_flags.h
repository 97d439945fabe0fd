// Where providers (peers in processes of their own) and the Python for them are found: --providers, --python, --timeout.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cli/parser.h"
#include "measure/provider.h"

namespace fattn::cli {

class ProviderFlags {
 public:
  void add_to(CLI::App& command);

  std::vector<measure::ProviderProgram> found() const;
  // `name` is one of found(), with ":VARIANT" or without. Throws CLI::ValidationError, naming those that exist.
  std::unique_ptr<measure::Contestant> make(const std::string& name, int threads, const measure::Placement& place) const;
  std::string why_unavailable(const std::string& name, int threads, const measure::Placement& place) const;  // "" if it can run here
  std::vector<std::string> repeating_flags() const;

 private:
  measure::ProviderOptions options_of(const std::string& name, int threads, const measure::Placement& place) const;
  std::string directory() const;

  std::string directory_, python_;
  double timeout_ = 300;
};

}  // namespace fattn::cli
