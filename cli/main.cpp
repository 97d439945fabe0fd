// The command line `fattn`: registers the commands, runs the one that was asked for, and turns errors into exit codes.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <memory>
#include <new>

#include "cli/advise.h"
#include "cli/bench.h"
#include "cli/cache.h"
#include "cli/calibrate.h"
#include "cli/check.h"
#include "cli/check_python.h"
#include "cli/compare.h"
#include "cli/gpt2.h"
#include "cli/help_format.h"
#include "cli/info.h"
#include "cli/interrupt.h"
#include "cli/lab.h"
#include "cli/memory.h"
#include "cli/output.h"
#include "cli/predict.h"
#include "cli/profile.h"
#include "cli/regress.h"
#include "cli/report_page.h"
#include "cli/run.h"
#include "cli/sanitize.h"
#include "cli/streams.h"
#include "cli/support.h"
#include "cli/sweep.h"
#include "cli/usage_error.h"
#include "cli/watch.h"
#include "fattn/system.hpp"

namespace fattn::cli {
namespace {

constexpr const char* kFooter =
    "`fattn COMMAND --help` is the manual of a command. Every command takes --json FILE to write what it found as a record; with --json - stdout "
    "holds nothing else. Those with tables take --wide and --format markdown|csv. Lines fit the terminal, or COLUMNS where that is set, or 80 "
    "columns where there is no terminal; NO_COLOR=1 leaves colours out.\n"
    "Exit codes: 0 fine, 1 a check failed, 2 bad usage or input, 130 interrupted.\n\n"
    "To begin with:\n"
    "  fattn info\n"
    "  fattn compare --preset gpt2-small\n"
    "  fattn run examples/data/small.safetensors out.safetensors --causal --verify";

int run_command_line(int argc, char** argv) {
  int exit_code = kExitFine;
  CLI::App app("Exact, IO-aware attention (FlashAttention) on this machine.", "fattn");
  app.formatter(std::make_shared<HelpFormat>());
  app.set_version_flag("--version", std::string("fattn ") + fattn_version(), "Print the version and exit");
  app.set_help_flag("-h,--help", "Print this help and exit");
  app.require_subcommand(0, 1);
  add_info(app, exit_code);
  add_support(app, exit_code);
  add_run(app, exit_code);
  add_check(app, exit_code);
  add_bench(app, exit_code);
  add_compare(app, exit_code);
  add_sweep(app, exit_code);
  add_memory(app, exit_code);
  add_calibrate(app, exit_code);
  add_predict(app, exit_code);
  add_advise(app, exit_code);
  add_profile(app, exit_code);
  add_regress(app, exit_code);
  add_report(app, exit_code);
  add_watch(app, exit_code);
  add_cache(app, exit_code);
  add_gpt2(app, exit_code);
  add_lab(app, exit_code);
  app.footer(kFooter);  // last, so that the commands do not have it, too
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return report_parse_error(app, error);
  }
  if (app.get_subcommands().empty()) put(stdout, app.help());
  return exit_code;
}

}  // namespace
}  // namespace fattn::cli

int main(int argc, char** argv) {
  using namespace fattn::cli;
  hold_standard_streams();
  if (measures_in_python(argc, argv)) return become_python(argc, argv);
  install_interrupt_handlers();
  int exit_code = kExitBadInput;
  try {
    exit_code = run_command_line(argc, argv);
  } catch (const std::bad_alloc&) {
    print_error(fmt::format("out of memory; {} bytes are free; use a smaller problem or free memory", fattn::cpu_info().memory_available_bytes));
  } catch (const std::exception& error) {
    print_error(printable(error.what()));
  }
  // Text that did not reach its reader (a full disk) is no success.
  if (exit_code == kExitFine && !all_was_written()) exit_code = kExitBadInput;
  return exit_code;
}
