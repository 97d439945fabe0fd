// How `--help` is laid out: in the width of the terminal, options with their limits in words and the default in brackets. CLI11's own form differs
// from version to version, and docs/cli holds what the help says.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace fattn::cli {

class HelpFormat : public CLI::Formatter {
 public:
  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override;
};

}  // namespace fattn::cli
