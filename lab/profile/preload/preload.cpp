// libfattn_profile.so: loaded into a program beside libfattn.so (LD_PRELOAD, CUDA_INJECTION64_PATH, or by the Python package), it writes what the
// library and the GPU do into trace.PID in the folder that it was loaded from, until the program ends.
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <pthread.h>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "lab/profile/gpu_trace.h"
#include "lab/profile/recorder.h"
#include "lab/profile/trace_file.h"

#define FATTN_PROFILE_API extern "C" __attribute__((visibility("default")))

namespace fattn::lab::profile {
namespace {

std::atomic<int> file{-1};
char folder[512];
std::atomic<bool> gpu_watched{false};

bool write_all(int to, const void* data, size_t bytes) {
  const auto* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = write(to, at, bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    at += written;
    bytes -= static_cast<size_t>(written);
  }
  return true;
}

// What the header says that could not be watched.
void note(const std::string& text) {
  TraceHeader header;
  copy_text(header.notes, sizeof header.notes, text.c_str());
  char path[640];
  std::snprintf(path, sizeof path, "%s/trace.%d", folder, getpid());
  const int opened = open(path, O_WRONLY | O_CLOEXEC);  // the other descriptor appends
  if (opened < 0) return;
  [[maybe_unused]] const ssize_t written = pwrite(opened, header.notes, sizeof header.notes, offsetof(TraceHeader, notes));
  close(opened);
}

void write_events(const TraceEvent* events, size_t count, void*) {
  const int to = file.load();
  if (to >= 0 && !write_all(to, events, count * sizeof(TraceEvent))) close(file.exchange(-1));  // a full disk ends the trace, not the program
}

void name_program(char* to, size_t size) {
  char line[4096];
  const int from = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
  const ssize_t read_bytes = from >= 0 ? read(from, line, sizeof line - 1) : 0;
  if (from >= 0) close(from);
  const ssize_t length = read_bytes > 0 ? read_bytes : 0;
  for (ssize_t i = 0; i + 1 < length; ++i)
    if (line[i] == 0) line[i] = ' ';
  line[length] = 0;
  copy_text(to, size, line);
}

// Where this library was loaded from.
bool find_folder() {
  Dl_info info{};
  if (!dladdr(reinterpret_cast<const void*>(&find_folder), &info) || !info.dli_fname) return false;
  copy_text(folder, sizeof folder, info.dli_fname);
  char* const slash = std::strrchr(folder, '/');
  if (!slash) return false;
  *slash = 0;
  return true;
}

bool start(const char* to) {
  if (file.load() >= 0) return true;
  char path[640];
  std::snprintf(path, sizeof path, "%s/trace.%d", to, getpid());
  const int opened = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_APPEND | O_NOFOLLOW, 0600);
  if (opened < 0) return false;
  TraceHeader header;
  header.process = getpid();
  header.begin_ns = now_ns();
  name_program(header.program, sizeof header.program);
  if (!write_all(opened, &header, sizeof header)) {
    close(opened);
    return false;
  }
  file = opened;
  record_to(write_events, nullptr);
  return true;
}

void stop_gpu() {
  if (gpu_watched.exchange(false)) stop_gpu_trace();
}

// Once the program has a GPU: then the libraries that it brings are loaded, and its own CUPTI is the one to take. In the folder is a link to the one
// that `fattn profile` found.
std::string watch_gpu() {
  if (file.load() < 0) return "nothing records";
  static const Cupti cupti = [] {  // CUPTI's threads may look at it until the process ends
    std::vector<std::string> candidates = {std::string(folder) + "/libcupti.so"};
    for (const std::string& name : cupti_candidates({})) candidates.push_back(name);
    return open_cupti(candidates);
  }();
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  if (gpu_watched.exchange(true)) return "";
  static const int at_exit = std::atexit(stop_gpu);  // before the driver ends; this library's destructor may come after it
  static_cast<void>(at_exit);
  std::string refused = start_gpu_trace(cupti, {true, true});
  if (!refused.empty()) note(refused);
  return refused;
}

void stop() {
  stop_gpu();
  record_to(nullptr, nullptr);
  if (const int opened = file.exchange(-1); opened >= 0) close(opened);
}

// A forked child that does not become another program goes on in a trace of its own.
void in_child() {
  after_fork_in_child();
  if (const int opened = file.exchange(-1); opened >= 0) {
    close(opened);
    start(folder);
  }
}

// Only where `fattn profile` put a link to this library: in a folder of its own. Who loads it otherwise starts it.
__attribute__((constructor)) void loaded() {
  if (!find_folder() || !std::strstr(folder, "/fattn-profile-")) return;
  if (start(folder)) pthread_atfork(before_fork, after_fork_in_parent, in_child);
}
__attribute__((destructor)) void unloaded() { stop(); }

}  // namespace
}  // namespace fattn::lab::profile

// libfattn.so, loaded later, tells from its first call on.
FATTN_PROFILE_API const fattn_trace fattn_trace_preloaded;
const fattn_trace fattn_trace_preloaded = fattn::lab::profile::kRecordingTrace;

// The driver calls it as soon as a program initialises CUDA (CUDA_INJECTION64_PATH). It is no error where nothing can be watched.
FATTN_PROFILE_API int InitializeInjection() {
  fattn::lab::profile::watch_gpu();
  return 1;
}

// For the Python package. 0: it records; 1: it did before; -1: the folder cannot be written.
FATTN_PROFILE_API int fattn_profile_start(const char* folder) {
  if (fattn::lab::profile::file.load() >= 0) return 1;
  fattn::lab::profile::copy_text(fattn::lab::profile::folder, sizeof fattn::lab::profile::folder, folder);
  return fattn::lab::profile::start(folder) ? 0 : -1;
}
// GPUs too, where the process has one. Null: they are watched; else why not.
FATTN_PROFILE_API const char* fattn_profile_watch_gpu() {
  static std::string refused;
  refused = fattn::lab::profile::watch_gpu();
  return refused.empty() ? nullptr : refused.c_str();
}
FATTN_PROFILE_API void fattn_profile_stop() { fattn::lab::profile::stop(); }
FATTN_PROFILE_API const fattn_trace* fattn_profile_trace() { return &fattn_trace_preloaded; }
FATTN_PROFILE_API double fattn_profile_now() { return static_cast<double>(fattn::lab::profile::now_ns()) * 1e-9; }
// An operator of torch and the like: seconds of CLOCK_MONOTONIC.
FATTN_PROFILE_API void fattn_profile_event(const char* name, const char* detail, double begin, double end, int thread, double flops) {
  fattn::lab::profile::TraceEvent event;
  event.kind = fattn::lab::profile::EventKind::kOperator;
  event.begin_ns = static_cast<int64_t>(begin * 1e9);
  event.end_ns = static_cast<int64_t>(end * 1e9);
  event.thread = thread;
  event.flops = flops;
  fattn::lab::profile::copy_text(event.name, sizeof event.name, name);
  fattn::lab::profile::copy_text(event.detail, sizeof event.detail, detail);
  if (fattn::lab::profile::is_sound(event)) fattn::lab::profile::record(event);
}
// A named range of this thread.
FATTN_PROFILE_API void fattn_profile_begin(const char* name) { fattn::lab::profile::begin_range(name); }
FATTN_PROFILE_API void fattn_profile_end() { fattn::lab::profile::end_range(); }
