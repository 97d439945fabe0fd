// Providers are installed beside the program; the build tree uses those of the source tree.
#include "cli/provider_flags.h"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <filesystem>

#include "cli/pythons.h"
#include "cli/sanitize.h"
#include "cli/values.h"

namespace fattn::cli {

void ProviderFlags::add_to(CLI::App& command) {
  command.option_defaults()->group("Other implementations");
  command.add_option("--providers", directory_, "Folder of the providers [share/fattn/providers beside the program]")
      ->check(CLI::Validator(CLI::ExistingDirectory).description(""))
      ->type_name("DIR");
  command.add_option("--python", python_, "Python for providers that are scripts [the one beside this program, then python3 of PATH]")
      ->type_name("PATH");
  command.add_option("--timeout", timeout_, "Seconds to wait for one answer of a provider")->check(number(0.1, 86400))->capture_default_str();
  command.option_defaults()->group("Options");
}

std::string ProviderFlags::directory() const {
  namespace fs = std::filesystem;
  if (!directory_.empty()) return directory_;
  std::error_code error;
  const fs::path bin = fs::read_symlink("/proc/self/exe", error).parent_path();
  const fs::path installed = bin / ".." / "share" / "fattn" / "providers";
  if (fs::is_directory(installed, error)) return installed.string();
#ifdef FATTN_SOURCE_PROVIDERS
  return FATTN_SOURCE_PROVIDERS;
#else
  return {};
#endif
}

std::vector<measure::ProviderProgram> ProviderFlags::found() const { return measure::find_providers(directory()); }

measure::ProviderOptions ProviderFlags::options_of(const std::string& name, int threads, const measure::Placement& place) const {
  measure::ProviderOptions options;
  const size_t colon = name.find(':');
  options.name = name.substr(0, colon);
  if (colon != std::string::npos) options.variant = name.substr(colon + 1);
  options.threads = threads;
  options.place = place;
  options.timeout_seconds = timeout_;
  options.pythons = python_.empty() ? usual_pythons() : std::vector<std::string>{python_};
  std::string known;
  for (const measure::ProviderProgram& provider : found()) {
    if (provider.name == options.name) options.program = provider.program;
    known += ", " + provider.name;
  }
  if (options.program.empty())
    throw CLI::ValidationError("--provider",
                               fmt::format("there is no provider {}; there are fattn, standard{}", printable(options.name), printable(known)));
  return options;
}

std::unique_ptr<measure::Contestant> ProviderFlags::make(const std::string& name, int threads, const measure::Placement& place) const {
  return measure::make_provider_contestant(options_of(name, threads, place));
}

std::string ProviderFlags::why_unavailable(const std::string& name, int threads, const measure::Placement& place) const {
  return measure::why_unavailable(options_of(name, threads, place));
}

std::vector<std::string> ProviderFlags::repeating_flags() const {
  std::vector<std::string> flags;
  if (!directory_.empty()) flags.insert(flags.end(), {"--providers", directory_});
  if (!python_.empty()) flags.insert(flags.end(), {"--python", python_});
  return flags;
}

}  // namespace fattn::cli
