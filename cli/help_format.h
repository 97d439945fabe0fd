// How `--help` writes an option: " TYPE=DEFAULT". CLI11's own form differs from version to version, and docs/cli holds what the help says.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace fattn::cli {

class HelpFormat : public CLI::Formatter {
 public:
  std::string make_option_opts(const CLI::Option* option) const override {
    if (!option->get_option_text().empty()) return " " + option->get_option_text();
    std::string text;
    if (option->get_type_size() == 0) return text;
    if (!option->get_type_name().empty()) text += " " + option->get_type_name();
    if (!option->get_default_str().empty()) text += "=" + option->get_default_str();
    if (option->get_expected_max() == CLI::detail::expected_max_vector_size) text += " ...";
    if (option->get_required()) text += " REQUIRED";
    return text;
  }
};

}  // namespace fattn::cli
