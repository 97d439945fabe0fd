#include "cli/profile_program.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <stdexcept>

#include "cli/sanitize.h"
#include "lab/profile/cupti_here.h"
#include "lab/profile/program.h"
#include "lab/profile/recorder.h"
#include "lab/profile/trace_file.h"
#include "lab/record_error.h"
#include "measure/environment.h"

namespace fattn::cli {
namespace {

namespace fs = std::filesystem;
using namespace lab::profile;

constexpr const char* kPreloaded = "libfattn_profile.so";

// Beside this program as it is installed, else where it was built. Empty: it is nowhere.
std::string preloaded_library() {
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  for (const fs::path& folder :
       {program.parent_path() / ".." / "lib", program.parent_path() / ".." / FATTN_LIBRARY_FOLDER, fs::path(FATTN_BUILT_PROFILE)})
    if (const fs::path file = folder / kPreloaded; access(file.c_str(), R_OK) == 0) return fs::canonical(file, error).string();
  return "";
}

// A folder of its own without blanks or colons in its path, which LD_PRELOAD would cut: what is preloaded writes where it was loaded from.
class TraceFolder {
 public:
  TraceFolder() {
    char name[] = "/tmp/fattn-profile-XXXXXX";
    if (!mkdtemp(name)) throw std::runtime_error(fmt::format("no folder for traces can be made in /tmp: {}", std::strerror(errno)));
    path_ = name;
  }
  ~TraceFolder() {
    std::error_code error;
    fs::remove_all(path_, error);
  }
  TraceFolder(const TraceFolder&) = delete;
  TraceFolder& operator=(const TraceFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// The program's environment: this one's, with what is loaded into the program. Made before the fork, where memory may be allocated.
class ProgramEnvironment {
 public:
  explicit ProgramEnvironment(const std::string& library) {
    std::string preload = library;
    bool injected = false;
    for (char** one = environ; *one; ++one) {
      const std::string_view variable = *one;
      injected = injected || variable.starts_with("CUDA_INJECTION64_PATH=");
      if (!library.empty() && variable.starts_with("LD_PRELOAD="))
        preload += ":" + std::string(variable.substr(variable.find('=') + 1));
      else
        all_.emplace_back(variable);
    }
    if (!library.empty()) all_.push_back("LD_PRELOAD=" + preload);
    if (!library.empty() && !injected) all_.push_back("CUDA_INJECTION64_PATH=" + library);
    for (std::string& variable : all_) pointers_.push_back(variable.data());
    pointers_.push_back(nullptr);
  }
  ProgramEnvironment(const ProgramEnvironment&) = delete;
  ProgramEnvironment& operator=(const ProgramEnvironment&) = delete;
  char* const* get() const { return pointers_.data(); }

 private:
  std::vector<std::string> all_;
  std::vector<char*> pointers_;
};

// In the child: waits until it is counted, then becomes the program. Async-signal-safe functions alone: the driver may have threads here.
[[noreturn]] void become(char* const* arguments, char* const* environment, int go, int failed) {
  char byte;
  while (read(go, &byte, 1) < 0 && errno == EINTR) {
  }
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGPIPE}) signal(number, SIG_DFL);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  execvpe(arguments[0], arguments, environment);
  const int error = errno;
  [[maybe_unused]] const ssize_t written = write(failed, &error, sizeof error);
  _exit(127);
}

struct Pipe {
  int ends[2] = {-1, -1};
  Pipe() {
    if (pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error(fmt::format("no pipe can be made: {}", std::strerror(errno)));
  }
  ~Pipe() {
    close_end(0);
    close_end(1);
  }
  void close_end(int end) {
    if (ends[end] >= 0) close(ends[end]);
    ends[end] = -1;
  }
};

// Ctrl-C goes to the whole group of processes: the program decides, and this one writes down what there is.
class InterruptsIgnored {
 public:
  InterruptsIgnored() {
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
      struct sigaction note {};
      note.sa_handler = [](int number) { seen_ = number; };
      sigaction(signal, &note, &before_[signal == SIGINT ? 0 : signal == SIGTERM ? 1 : 2]);
    }
  }
  ~InterruptsIgnored() {
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) sigaction(signal, &before_[signal == SIGINT ? 0 : signal == SIGTERM ? 1 : 2], nullptr);
  }
  static int seen() { return seen_; }

 private:
  struct sigaction before_[3] = {};
  static inline volatile sig_atomic_t seen_ = 0;
};

}  // namespace

int exit_code_of(const ProgramRun& run) { return run.signal > 0 ? 128 + run.signal : run.exit_code; }

void take_traces(Profile& profile, const std::string& folder, bool needed) {
  std::error_code error;
  std::vector<std::string> files;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, error))
    if (const std::string name = entry.path().filename().string(); name.starts_with("trace.")) files.push_back(entry.path().string());
  if (files.empty() && needed) throw std::runtime_error("'" + printable(folder, 200) + "' holds no trace; give the folder that a recording left");
  std::sort(files.begin(), files.end());
  for (const std::string& file : files) {
    Trace trace;
    try {
      trace = read_trace(file);
    } catch (const lab::RecordError& problem) {
      profile.notes.emplace_back(problem.what());
      continue;
    }
    Lane& lane = profile.lanes.emplace_back();
    lane.name = printable(trace.program, 120) + fmt::format(" ({})", trace.process);
    lane.process = trace.process;
    lane.events = std::move(trace.events);
    if (!trace.notes.empty()) profile.notes.push_back(lane.name + ": " + printable(trace.notes, 500));
    if (trace.left_out > 0)
      profile.notes.push_back(fmt::format("{}: {} events beyond the first {} were left out", lane.name, trace.left_out, kMostEvents));
  }
  if (profile.program) profile.program->processes = static_cast<int>(profile.lanes.size());
}

Profile profile_program(const std::vector<std::string>& command) {
  Profile profile;
  profile.device = "program";
  profile.program = ProgramRun{command};
  const std::string library = preloaded_library();
  if (library.empty())
    profile.notes.push_back(fmt::format("{} is not beside this program, so calls and kernels inside of the program are not recorded", kPreloaded));
  const TraceFolder traces;
  const std::string link = traces.path() + "/" + kPreloaded;
  if (!library.empty() && symlink(library.c_str(), link.c_str()) != 0)
    throw std::runtime_error(fmt::format("no link can be made in '{}': {}", traces.path(), std::strerror(errno)));
  const auto& cupti = cupti_candidates(toolkit_libraries());  // a program without one of its own takes this
  if (!cupti.empty() && cupti.front()[0] == '/' && symlink(cupti.front().c_str(), (traces.path() + "/libcupti.so").c_str()) != 0)
    profile.notes.push_back(fmt::format("no link to CUPTI can be made in '{}': {}", traces.path(), std::strerror(errno)));
  Pipe go, failed;
  const ProgramEnvironment environment(library.empty() ? "" : link);
  std::vector<char*> arguments;
  for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  const InterruptsIgnored interrupts;
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child < 0) throw std::runtime_error(fmt::format("no process can be started: {}", std::strerror(errno)));
  if (child == 0) become(arguments.data(), environment.get(), go.ends[0], failed.ends[1]);
  failed.close_end(1);
  PerfCounters perf(child, true);
  profile.begin_ns = now_ns();
  MemoryWatch memory(child);
  [[maybe_unused]] const ssize_t written = write(go.ends[1], "g", 1);
  int error = 0;
  if (read(failed.ends[0], &error, sizeof error) != static_cast<ssize_t>(sizeof error)) error = 0;  // ends when the program has begun
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR)
    if (InterruptsIgnored::seen() != SIGINT) kill(child, InterruptsIgnored::seen());  // a terminal sends the program its own
  const int64_t end = now_ns();
  if (error != 0)
    throw std::runtime_error(fmt::format("the program '{}' cannot be started: {}; give a program that PATH finds, or its path",
                                         printable(command[0], 100), std::strerror(error)));
  ProgramRun& run = *profile.program;
  if (WIFSIGNALED(status)) run.signal = WTERMSIG(status);
  run.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + run.signal;
  if (InterruptsIgnored::seen() > 0) profile.interrupted = "what the program left until it was interrupted";
  take_traces(profile, traces.path(), false);

  profile.environment = measure::environment();
  Side& side = profile.sides.emplace_back();
  side.name = printable(fs::path(command[0]).filename().string(), 60);
  side.memory.samples = memory.stop();
  if (side.memory.samples.empty()) side.memory.samples_reason = "it ended before anybody could look";
  PassProfile& pass = side.passes.emplace_back();
  pass.pass = "all";
  pass.seconds = static_cast<double>(end - profile.begin_ns) * 1e-9;
  pass.counters = perf.read();
  summarise(profile, pass);
  side.memory.changes = memory_changes(all_events(profile));
  return profile;
}

}  // namespace fattn::cli
