// Near names are found among those that the command knows, and those that others use.
#include "cli/usage_error.h"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "cli/nearest.h"
#include "cli/output.h"
#include "cli/sanitize.h"
#include "cli/words.h"

namespace fattn::cli {
namespace {

// What other libraries call a flag of ours.
constexpr std::pair<const char*, const char*> kElsewhere[] = {
    {"--seq-len", "--seqlen"},       {"--sequence-length", "--seqlen"}, {"--seqlen-q", "--seqlen"},
    {"--heads", "--nheads"},         {"--num-heads", "--nheads"},       {"--n-heads", "--nheads"},
    {"--kv-heads", "--nheads-k"},    {"--num-kv-heads", "--nheads-k"},  {"--num-key-value-heads", "--nheads-k"},
    {"--head-dim", "--headdim"},     {"--head-size", "--headdim"},      {"--is-causal", "--causal"},
    {"--batch-size", "--batch"},     {"--dropout-p", "--dropout"},      {"--scale", "--softmax-scale"},
    {"--type", "--dtype"},           {"--precision", "--dtype"},        {"--attn-mask", "--mask"},
    {"--forward-only", "--no-grad"}, {"--fwd-only", "--no-grad"},
};

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
  std::string near = is_flag ? nearest(flag, flags_of(app)) : has_commands ? nearest(first, commands_of(app)) : "";
  const std::vector<std::string> flags = flags_of(app);
  for (const auto& [other, ours] : kElsewhere)
    if (flag == other && std::find(flags.begin(), flags.end(), ours) != flags.end()) near = ours;
  std::string text = fmt::format("{} has no {} '{}'", full_name,
                                 is_flag        ? "flag"
                                 : has_commands ? "command"
                                                : "argument",
                                 printable(is_flag ? flag : first, 200));
  if (!near.empty()) text += fmt::format("; did you mean '{}'?", near);
  return text;
}

// CLI11 says what it counted; `command` is the innermost one that was given. What is not known here stays as it is.
std::string in_our_words(const CLI::App& command, const std::string& name, const CLI::ParseError& error) {
  const std::string said = error.what(), required = " is required", missing = " missing", value_of = " required ",
                    twice = ": At Most 1 required but received ";
  if (said == "A subcommand" + required) return fmt::format("{} needs a command: {}", name, any_of(commands_of(command)));
  const size_t colon = said.find(": ");
  if (const size_t value = said.find(value_of); value != std::string::npos && colon < value && said.ends_with(missing)) {
    const size_t begin = value + value_of.size();
    std::string wanted = said.substr(begin, said.size() - missing.size() - begin);  // "N:a whole number, 1 or more"
    if (const size_t at = wanted.find(':'); at != std::string::npos) wanted.replace(at, 1, ", ");
    return fmt::format("{} needs a value behind it: {}", said.substr(0, colon), wanted);
  }
  if (colon != std::string::npos && said.compare(colon, twice.size(), twice) == 0)
    return fmt::format("{} is given {} times; give it once", said.substr(0, colon), said.substr(colon + twice.size()));
  if (said.ends_with(required))
    if (const CLI::Option* option = command.get_option_no_throw(said.substr(0, said.size() - required.size())))
      return fmt::format("{}: {}", said, option->get_description());
  return said;
}

}  // namespace

int report_parse_error(const CLI::App& app, const CLI::ParseError& error) {
  if (error.get_exit_code() == kExitFine) return app.exit(error);  // --help, --version

  std::string name = app.get_name(), unknown = unknown_argument(app, name);
  const CLI::App* at = &app;
  // Down the commands that were given: fattn, cache, warm.
  while (!at->get_subcommands().empty()) {
    at = at->get_subcommands().front();
    name += " " + at->get_name();
    if (unknown.empty()) unknown = unknown_argument(*at, name);
  }
  const auto is = [&](CLI::ExitCodes code) { return error.get_exit_code() == static_cast<int>(code); };
  const bool about_names = is(CLI::ExitCodes::ExtrasError) || is(CLI::ExitCodes::RequiredError);
  print_error(fmt::format("{}\nSee `{} --help`.", about_names && !unknown.empty() ? unknown : printable(in_our_words(*at, name, error)), name));
  return kExitBadInput;
}

}  // namespace fattn::cli
