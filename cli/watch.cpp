// Reads only: nothing of a GPU or a process is ever set.
#include "cli/watch.h"

#include <fmt/format.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "cli/json_output.h"
#include "cli/output.h"
#include "cli/sanitize.h"
#include "cli/streams.h"
#include "cli/terminal.h"
#include "cli/usage_error.h"
#include "cli/values.h"
#include "cli/watch_reading.h"
#include "cli/watch_view.h"
#include "cli/words.h"

namespace fattn::cli {
namespace {

// Shares of time need two looks: this long lies between the first two.
constexpr std::chrono::milliseconds kFirstLook{200};

struct WatchFlags {
  std::string target, json;
  double interval = 1;
  bool once = false;
};

extern "C" void end_watch(int) {
  if (isatty(STDERR_FILENO)) {
    const ssize_t ignored = write(STDERR_FILENO, "\n", 1);  // leave the line with ^C
    static_cast<void>(ignored);
  }
  _exit(kExitFine);
}

// Ctrl-C is how a watch ends, unless the parent made us ignore it.
void end_by_interrupt() {
  struct sigaction before {};
  if (sigaction(SIGINT, nullptr, &before) != 0 || before.sa_handler == SIG_IGN) return;
  struct sigaction action {};
  action.sa_handler = end_watch;
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, nullptr);
}

// A line for each reading, there as soon as it is read: a watch may end at any time.
class JsonLines {
 public:
  explicit JsonLines(const std::string& target) : target_(target) {
    require_writable(target);
    if (target == "-") file_ = stdout;
    if (!target.empty() && target != "-") file_ = std::fopen(target.c_str(), "we");
    if (!target.empty() && !file_) fail();
  }
  ~JsonLines() {
    if (file_ && file_ != stdout) std::fclose(file_);
  }
  JsonLines(const JsonLines&) = delete;
  JsonLines& operator=(const JsonLines&) = delete;

  void write(const WatchReading& reading) {
    if (!file_) return;
    const std::string line = watch_json(reading).dump() + "\n";
    if (std::fwrite(line.data(), 1, line.size(), file_) != line.size() || std::fflush(file_) != 0) fail();
  }

 private:
  [[noreturn]] void fail() const {
    throw std::runtime_error(
        fmt::format("cannot write to {}: {}", target_ == "-" ? "stdout" : "'" + printable(target_, 300) + "'", std::strerror(errno)));
  }

  const std::string target_;
  std::FILE* file_ = nullptr;
};

// What people see: on a terminal the same lines anew, elsewhere a line for each reading.
class Screens {
 public:
  explicit Screens(bool wanted) : out_(OutputFlags{}), wanted_(wanted), redraws_(takes_escapes(stdout)) {}

  void show(const WatchReading& reading) {
    if (!wanted_) return;
    if (!redraws_) return out_.say_line(watch_line(reading), 2);
    std::string text = watch_screen(reading, out_, width_of(stdout));
    // The cursor cannot go back above the first line of the window.
    size_t lines = 0, end = 0;
    const size_t most = height_of(stdout) - 1;
    while (lines < most && (end = text.find('\n', end)) != std::string::npos) ++lines, ++end;
    if (lines == most) text.resize(end);
    put(stdout, (drawn_ > 0 ? fmt::format("\r\x1b[{}A\x1b[J", drawn_) : "") + text);
    drawn_ = lines;
  }
  void end(const WatchReading& reading) {
    if (wanted_) out_.say(watch_end(reading), 2);
  }

 private:
  const Output out_;
  const bool wanted_, redraws_;
  size_t drawn_ = 0;  // lines
};

int exit_code_of(const std::string& end) { return end == "done" || end == "ended" ? kExitFine : kExitCheckFailed; }

int run_watch(const WatchFlags& flags) {
  if (!(flags.interval > 0)) throw CLI::ValidationError("--interval", "is not above 0");
  end_by_interrupt();
  Watcher watcher(flags.target);
  JsonLines lines(flags.json);
  Screens screens(flags.json != "-");
  if (watcher.read().end.empty()) std::this_thread::sleep_for(kFirstLook);
  for (;;) {
    const WatchReading reading = watcher.read();
    screens.show(reading);
    lines.write(reading);
    if (!reading.end.empty()) {
      screens.end(reading);
      return exit_code_of(reading.end);
    }
    if (flags.once) return kExitFine;
    std::this_thread::sleep_for(std::chrono::duration<double>(flags.interval));
  }
}

}  // namespace

void add_watch(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("watch", "Watch a long command, the GPUs and the machine live");
  auto flags = std::make_shared<WatchFlags>();
  command
      ->add_option("target", flags->target,
                   "What to watch beside the machine: the number of a process, a status file, which long commands write with --status FILE, or a "
                   "folder that has one")
      ->type_name("PID|DIR|FILE");
  command->add_option("--interval", flags->interval, "Seconds from one reading to the next")
      ->check(number(0.1, 3600))
      ->type_name("SECONDS")
      ->capture_default_str();
  command->add_flag("--once", flags->once, "One reading, then end");
  command
      ->add_option("--json", flags->json,
                   "Write each reading as a line of JSON (docs/RECORD.md) to a file, or - for stdout, which then holds nothing else")
      ->type_name("FILE|-")
      ->group("Output");
  command->footer(
      "On a terminal the same lines are written anew, elsewhere a line for each reading. Of a GPU: how busy it is, memory, clock, power, "
      "temperature, "
      "what holds its clock back, and which processes have how much of its memory, as the driver says (NVML). Nothing is set: no clock, no mode, no "
      "limit.\n"
      "It ends with what is watched, and says how that ended: exit 0 if it is done or its process has ended, 1 if it failed, was interrupted or has "
      "gone without a last word. Ctrl-C ends it with 0.\n\n"
      "Examples:\n"
      "  fattn watch\n"
      "  fattn sweep --preset ci --status status.json & fattn watch status.json\n"
      "  fattn watch 4711 --interval 5 --json readings.jsonl\n"
      "  fattn watch --once --json -");
  command->callback([flags, &exit_code] { exit_code = run_watch(*flags); });
}

}  // namespace fattn::cli
