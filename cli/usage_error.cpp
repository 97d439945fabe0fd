// Near names are found by edit distance among the names that the command knows.
#include "cli/usage_error.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "cli/sanitize.h"

namespace fattn::cli {
namespace {

// Levenshtein; the texts are a few words long.
size_t distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

// The nearest of `known`, or "" if none is near.
std::string nearest(const std::string& given, const std::vector<std::string>& known) {
  std::string best;
  size_t best_distance = std::min<size_t>(given.size() / 3 + 1, 3);
  for (const std::string& name : known)
    if (given.size() <= 100 && distance(given, name) <= best_distance) best_distance = distance(given, name), best = name;
  return best;
}

std::vector<std::string> flags_of(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::Option* option : command.get_options())
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  return names;
}

std::vector<std::string> commands_of(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands(nullptr)) names.push_back(command->get_name());
  return names;
}

// What was not understood: an argument of a command, or the command itself. "" if everything was.
std::string unknown_argument(const CLI::App& app, const std::string& full_name) {
  const bool has_commands = !commands_of(app).empty();
  const std::vector<std::string> extras = app.remaining();
  if (extras.empty()) return "";
  const std::string& first = extras.front();
  const bool is_flag = first.size() > 1 && first[0] == '-';
  const std::string flag = first.substr(0, first.find('='));
  const std::string near = is_flag ? nearest(flag, flags_of(app)) : has_commands ? nearest(first, commands_of(app)) : "";
  std::string text = fmt::format("{} has no {} '{}'", full_name,
                                 is_flag        ? "flag"
                                 : has_commands ? "command"
                                                : "argument",
                                 printable(is_flag ? flag : first, 200));
  if (!near.empty()) text += fmt::format("; did you mean '{}'?", near);
  return text;
}

}  // namespace

int report_parse_error(const CLI::App& app, const CLI::ParseError& error) {
  if (error.get_exit_code() == kExitFine) return app.exit(error);  // --help, --version

  std::string name = app.get_name(), unknown = unknown_argument(app, name);
  // Down the commands that were given: fattn, cache, warm.
  for (const CLI::App* at = &app; !at->get_subcommands().empty();) {
    at = at->get_subcommands().front();
    name += " " + at->get_name();
    if (unknown.empty()) unknown = unknown_argument(*at, name);
  }
  const auto is = [&](CLI::ExitCodes code) { return error.get_exit_code() == static_cast<int>(code); };
  const bool about_names = is(CLI::ExitCodes::ExtrasError) || is(CLI::ExitCodes::RequiredError);
  fmt::print(stderr, "fattn: {}\nSee `{} --help`.\n", about_names && !unknown.empty() ? unknown : printable(error.what()), name);
  return kExitBadInput;
}

}  // namespace fattn::cli
