#include "cli/profile_tools.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <sstream>

#include "cli/sanitize.h"

namespace fattn::cli {
namespace {

using lab::profile::Tool;
using Words = std::vector<std::string>;

constexpr int kLongest_s = 600;

std::string in_path(const std::string& name) {
  const char* const path = std::getenv("PATH");
  std::istringstream folders(path ? path : "");
  for (std::string folder; std::getline(folders, folder, ':');)
    if (const std::string file = folder + "/" + name; !folder.empty() && access(file.c_str(), X_OK) == 0) return file;
  return "";
}

// Its output goes to files. The exit code; -1: it could not be started, or took too long and was ended.
int run(const Words& words, const std::string& out, const std::string& errors) {
  const auto open_for = [](const std::string& file) { return open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644); };
  const int out_file = open_for(out), error_file = open_for(errors);
  if (out_file < 0 || error_file < 0) return -1;
  std::vector<char*> arguments;
  for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    setpgid(0, 0);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
    dup2(out_file, STDOUT_FILENO);
    dup2(error_file, STDERR_FILENO);
    execv(arguments[0], arguments.data());
    _exit(127);
  }
  close(out_file);
  close(error_file);
  if (child < 0) return -1;
  int status = 0;
  for (int waited = 0; waitpid(child, &status, WNOHANG) == 0; ++waited) {
    if (waited == kLongest_s * 10) {
      kill(-child, SIGKILL);
      waitpid(child, &status, 0);
      return -1;
    }
    usleep(100'000);
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

struct Kind {
  const char *name, *title, *report;
  Words before;              // of the command
  std::vector<Words> after;  // statistics of the report, each with the file that it fills first
};

Tool run_tool(const Kind& kind, const Words& command, const std::string& folder) {
  Tool tool;
  tool.name = kind.name;
  const std::string program = in_path(kind.name);
  if (program.empty()) {
    tool.status = "absent";
    tool.words =
        fmt::format("{} ({}) is not in PATH; NVIDIA's CUDA toolkit has it, and so has developer.nvidia.com/tools-overview", kind.title, kind.name);
    return tool;
  }
  const std::string base = folder + "/" + kind.name, log = base + ".log";
  Words words = {program};
  words.insert(words.end(), kind.before.begin(), kind.before.end());
  words.insert(words.end(), {"-o", base});
  words.insert(words.end(), command.begin(), command.end());
  const int code = run(words, base + ".out", log);
  std::filesystem::remove(base + ".out");
  tool.files.push_back(std::string(kind.name) + ".log");
  const std::string report = std::string(kind.name) + kind.report;
  if (code != 0 || access((folder + "/" + report).c_str(), R_OK) != 0) {
    tool.status = "failed";
    tool.words = code < 0 ? fmt::format("{} could not be started, or took longer than {} s", kind.title, kLongest_s)
                          : fmt::format("{} ended with exit code {} and left {}; {}.log says why", kind.title, code, code == 0 ? "no report" : "none",
                                        kind.name);
    return tool;
  }
  tool.status = "ran";
  tool.files.push_back(report);
  for (const Words& statistics : kind.after) {
    Words line = {program};
    line.insert(line.end(), statistics.begin() + 1, statistics.end());
    line.push_back(folder + "/" + report);
    if (run(line, folder + "/" + statistics[0], log) == 0) tool.files.push_back(statistics[0]);
  }
  tool.words = fmt::format("{}: {} opens in its window; {} are its statistics", kind.title, report, tool.files.size() - 2);
  return tool;
}

const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all = {
      {"nsys",
       "Nsight Systems",
       ".nsys-rep",
       {"profile", "--force-overwrite", "true", "--trace", "cuda,nvtx,osrt", "--cuda-graph-trace", "node"},
       {{"nsys_kernels.csv", "stats", "--format", "csv", "--report", "cuda_gpu_kern_sum"},
        {"nsys_memory.csv", "stats", "--format", "csv", "--report", "cuda_gpu_mem_time_sum"}}},
      {"ncu",
       "Nsight Compute",
       ".ncu-rep",
       {"--force-overwrite", "--set", "full", "--clock-control", "none", "--launch-count", "12"},
       {{"ncu_details.csv", "--csv", "--page", "details", "--import"}, {"ncu_raw.csv", "--csv", "--page", "raw", "--import"}}}};
  return all;
}

}  // namespace

std::vector<Tool> run_nsight(const Words& command, const std::string& folder) {
  std::vector<Tool> tools;
  for (const Kind& kind : kinds()) tools.push_back(run_tool(kind, command, folder));
  return tools;
}

std::vector<Tool> no_nsight(const std::string& why) {
  std::vector<Tool> tools;
  for (const Kind& kind : kinds()) tools.push_back({kind.name, "not asked", why, {}});
  return tools;
}

Words bench_command(const Words& flags) {
  std::error_code error;
  Words command = {std::filesystem::read_symlink("/proc/self/exe", error).string(), "bench"};
  command.insert(command.end(), flags.begin(), flags.end());
  return command;
}

}  // namespace fattn::cli
