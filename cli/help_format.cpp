// Two columns: what is typed, and what it means.
#include "cli/help_format.h"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>
#include <utility>
#include <vector>

#include "cli/table_lines.h"
#include "cli/terminal.h"
#include "cli/words.h"

namespace fattn::cli {
namespace {

using Entry = std::pair<std::string, std::string>;

constexpr size_t kMostLeft = 26;  // a longer name has its meaning on the next line

std::string title(const std::string& text) { return shows_colour(stdout) ? painted(text, Mood::kTitle) : text; }

std::string listed(const char* name, const std::vector<Entry>& entries, size_t width) {
  if (entries.empty()) return "";
  size_t column = 0;
  for (const Entry& entry : entries)
    if (const size_t left = display_width(entry.first); left <= kMostLeft) column = std::max(column, left);
  column += 4;  // two spaces on each side
  std::string text = "\n" + title(name) + ":\n";
  for (const auto& [left, right] : entries) {
    const bool fits = display_width(left) + 4 <= column;
    text += "  " + left;
    if (!fits) text += "\n";
    bool first = fits;
    for (const std::string& line : wrapped(right, width - column)) {
      text += std::string(first ? column - 2 - display_width(left) : column, ' ') + line + "\n";
      first = false;
    }
  }
  return text;
}

// Of CLI11's "N:limit:limit": the type, and the limits.
Entry type_and_limits(const CLI::Option& option) {
  const std::string name = option.get_type_name();
  const size_t colon = std::min(name.find(':'), name.size());
  std::string type = name.substr(0, colon), limits = name.substr(std::min(colon + 1, name.size()));
  if (type == "INT" || type == "UINT") type = "N";
  if (type == "FLOAT") type = "X";
  for (size_t at = 0; (at = limits.find(':', at)) != std::string::npos; at += 2) limits.replace(at, 1, ", ");
  return {type, limits};
}

Entry entry_of(const CLI::Option& option, bool positional) {
  const auto [type, limits] = type_and_limits(option);
  std::string left = positional ? option.get_name(true, false) : option.get_name(false, true), right = option.get_description();
  for (size_t at = 0; (at = left.find(',', at)) != std::string::npos; at += 2) left.replace(at, 1, ", ");
  if (const size_t brace = left.find("{false}"); brace != std::string::npos) left.erase(brace, 7);  // of --no-causal
  if (option.get_type_size() == 0) return {left, right};                                            // it takes no value
  if (!positional && !type.empty()) left += " " + type;
  // Descriptions may end with the default, in brackets.
  std::string otherwise;
  if (const size_t bracket = right.rfind(" ["); bracket != std::string::npos && right.back() == ']') {
    otherwise = right.substr(bracket);
    right.erase(bracket);
  } else if (!option.get_default_str().empty()) {
    otherwise = " [" + option.get_default_str() + "]";
  }
  if (positional && option.nonpositional()) return {left, "As " + option.get_name(false, false)};
  if (!limits.empty()) right += " (" + limits + ")";
  return {left, right + otherwise};
}

std::string usage_of(const CLI::App& app, const std::string& name) {
  std::string text = title("Usage") + ": " + name;
  for (const CLI::Option* option : app.get_options())
    if (option->get_positional()) text += " " + option->get_name(true, false);
  text += " [OPTIONS]";
  return text + (app.get_subcommands(nullptr).empty() ? "" : " COMMAND") + "\n";
}

// A flag stays beside its value, and what goes on behind a '\' can be copied.
std::string command_lines(const std::string& line, size_t width) {
  if (display_width(line) <= width) return line + "\n";
  // From a flag to the next one nothing is broken.
  std::string glued;
  for (size_t at = 0; at < line.size();) {
    const size_t next = std::min(line.find(" --", at + 1), line.size());
    glued += at == 0 ? line.substr(0, next) : " " + unbroken(line.substr(at + 1, next - at - 1));
    at = next;
  }
  std::string text = laid_out(glued, width - 2, 4);
  for (size_t at = text.find('\n'); at + 1 < text.size(); at = text.find('\n', at + 3)) text.insert(at, " \\");
  return text;
}

// Lines of words, each a paragraph; one that begins with "  fattn " is a command.
std::string footer_of(const CLI::App& app, size_t width) {
  std::string all, footer = app.get_footer();
  while (!footer.empty()) {
    const size_t end = std::min(footer.find('\n'), footer.size());
    const std::string line = footer.substr(0, end);
    footer.erase(0, end + 1);
    if (line.rfind("  fattn ", 0) == 0)
      all += command_lines(line, width);
    else
      all += line.empty() ? "\n" : laid_out(line, width);
  }
  return all;
}

}  // namespace

std::string HelpFormat::make_help(const CLI::App* app, std::string name, CLI::AppFormatMode) const {
  const size_t width = width_of(stdout);
  if (name.empty()) name = app->get_name();
  std::string text = laid_out(app->get_description(), width) + "\n" + laid_out(usage_of(*app, name), width, 4);
  std::vector<Entry> commands, files;
  for (const CLI::App* command : app->get_subcommands([](const CLI::App* one) { return !one->get_name().empty(); }))
    commands.emplace_back(command->get_name(), command->get_description());
  for (const CLI::Option* option : app->get_options())
    if (option->get_positional()) files.push_back(entry_of(*option, true));
  text += listed("Commands", commands, width) + listed("Arguments", files, width);
  for (const std::string& group : app->get_groups()) {
    std::vector<Entry> options;
    for (const CLI::Option* option : app->get_options())
      if (option->get_group() == group && option->nonpositional()) options.push_back(entry_of(*option, false));
    if (!group.empty()) text += listed(group.c_str(), options, width);
  }
  const std::string footer = footer_of(*app, width);
  return text + (footer.empty() ? "" : "\n" + footer);
}

}  // namespace fattn::cli
