// Compiles the planned kernels (kernels/planned.txt) for every architecture that the NVRTC at hand knows, without a GPU, and judges what
// ptxas says: spills, local memory, serialised wgmma and more registers than the budget are failures. Kernels whose key has not
// changed come from the disk cache; --operations: those of kernels/ops/planned.txt, too. Ends with the line `N passed, N failed`.
//   compile_planned [-j N] [--full] [--list FILE] [--operations] [--filter TEXT] [--verbose]
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "fattn/error.hpp"
#include "jit/jit.h"
#include "jit/nvrtc.h"
#include "jit/planned.h"
#include "ops/cuda/kernels.h"

namespace {

using namespace fattn::core::jit;

struct Arguments {
  int jobs = 1;
  bool full = false, verbose = false, operations = false;
  std::string list, filter;
};

struct Job {
  Request request;
  int budget = 0;
};

struct Counts {
  int passed = 0, failed = 0, compiled = 0;
};

bool parse(int argc, char** argv, Arguments& to) {
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const char* value = i + 1 < argc ? argv[i + 1] : nullptr;
    if (flag == "--full") {
      to.full = true;
    } else if (flag == "--operations") {
      to.operations = true;
    } else if (flag == "--verbose") {
      to.verbose = true;
    } else if (flag == "-j" && value) {
      to.jobs = std::clamp(std::atoi(value), 1, 256), ++i;
    } else if (flag == "--list" && value) {
      to.list = value, ++i;
    } else if (flag == "--filter" && value) {
      to.filter = value, ++i;
    } else {
      std::fprintf(stderr,
                   "compile_planned: '%s' is no flag or has no value; allowed: -j N, --full, --list FILE, --operations, --filter TEXT, --verbose\n",
                   argv[i]);
      return false;
    }
  }
  return true;
}

// Empty, or what is wrong with the kernel.
std::string problem_of(const Job& job, const Cubin& cubin) {
  const Resources& r = cubin.resources;
  std::string all;
  const auto add = [&](const std::string& problem) { all += (all.empty() ? "" : ", ") + problem; };
  if (!r.known) add("ptxas does not say how many registers it uses");
  if (r.spill_store_bytes > 0 || r.spill_load_bytes > 0)
    add("spills " + std::to_string(r.spill_store_bytes) + " + " + std::to_string(r.spill_load_bytes) + " bytes");
  if (r.stack_bytes > 0) add(std::to_string(r.stack_bytes) + " bytes of local memory");
  if (r.degraded) add("ptxas gave something up (C75xx)");
  if (r.registers > job.budget) add(std::to_string(r.registers) + " registers, budget " + std::to_string(job.budget));
  return all;
}

// The comment that a kernel's source begins with: what is special about it. Or nothing.
std::string comment_of(const std::string& source) { return source.starts_with("// ") ? " (" + source.substr(3, source.find('\n') - 3) + ")" : ""; }

// Every jobs.size() / workers-th kernel: neighbours in the list cost alike, so the workers end together.
Counts work(const std::vector<Job>& jobs, size_t worker, size_t workers, bool verbose) {
  Counts counts;
  for (size_t i = worker; i < jobs.size(); i += workers) {
    const Job& job = jobs[i];
    const std::string name = job.request.entry + " " + target_name(job.request.arch, job.request.arch_specific) + comment_of(job.request.source);
    std::string problem, log;
    Cubin cubin;
    try {
      cubin = build(job.request);
      problem = problem_of(job, cubin);
      counts.compiled += cubin.origin == Origin::kNvrtc;
      log = cubin.log;
    } catch (const fattn::Error& error) {
      problem = error.what();
    }
    if (!problem.empty())
      std::printf("FAILED %s: %s\n%s%s", name.c_str(), problem.c_str(), log.c_str(), log.empty() || log.back() == '\n' ? "" : "\n");
    else if (verbose)
      std::printf("ok     %s: %d registers, %zu bytes, %s in %.2f s\n", name.c_str(), cubin.resources.registers, cubin.image.size(),
                  name_of(cubin.origin), cubin.seconds);
    std::fflush(stdout);
    ++(problem.empty() ? counts.passed : counts.failed);
  }
  return counts;
}

std::vector<Job> jobs_of(const Arguments& arguments, const Nvrtc& compiler) {
  std::vector<Planned> all;
  if (!arguments.list.empty()) {
    std::ifstream file(arguments.list, std::ios::binary);
    if (!file) throw fattn::Error(fattn::ErrorCode::kInvalidArgument, "'" + arguments.list + "' cannot be read");
    all = parse_planned(std::string(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()));
  } else {
    all = parse_planned(embedded_planned());
  }
  if (arguments.operations)
    for (Planned& one : parse_planned(fattn::ops::cuda::embedded_planned())) {
      one.request.sources = fattn::ops::cuda::embedded_sources;
      all.push_back(std::move(one));
    }
  std::vector<Job> jobs;
  std::vector<std::string> unknown;
  for (const Planned& planned : all) {
    if ((!planned.quick() && !arguments.full) || planned.request.entry.find(arguments.filter) == std::string::npos) continue;
    for (const Target& target : planned.targets) {
      const std::string name = target_name(target.arch, target.arch_specific);
      if (std::find(compiler.architectures.begin(), compiler.architectures.end(), target.arch) != compiler.architectures.end())
        jobs.push_back({planned.on(target), planned.budget});
      else if (std::find(unknown.begin(), unknown.end(), name) == unknown.end())
        unknown.push_back(name);
    }
  }
  for (const std::string& name : unknown) std::printf("not looked at: %s, which this NVRTC does not know\n", name.c_str());
  return jobs;
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  if (!parse(argc, argv, arguments)) return 2;
  try {
    const Nvrtc& compiler = nvrtc();
    if (!compiler) {
      std::printf("%s\n0 passed, 1 failed\n", compiler.reason.c_str());
      return 1;
    }
    std::printf("NVRTC %d.%d, %s\n", compiler.version.major, compiler.version.minor, compiler.path.c_str());
    const std::vector<Job> jobs = jobs_of(arguments, compiler);
    std::fflush(stdout);
    const auto start = std::chrono::steady_clock::now();
    // Processes, because NVRTC lets one thread at a time compile.
    const size_t workers = std::min(static_cast<size_t>(arguments.jobs), std::max<size_t>(jobs.size(), 1));
    int channel[2];
    if (pipe(channel) != 0) return 1;
    std::vector<pid_t> children;
    for (size_t worker = 0; worker < workers; ++worker) {
      const pid_t child = fork();
      if (child == 0) {
        const Counts counts = work(jobs, worker, workers, arguments.verbose);
        _exit(write(channel[1], &counts, sizeof counts) == sizeof counts ? 0 : 1);
      }
      children.push_back(child);
    }
    close(channel[1]);
    Counts all;
    for (Counts part; read(channel[0], &part, sizeof part) == sizeof part;)
      all.passed += part.passed, all.failed += part.failed, all.compiled += part.compiled;
    for (const pid_t child : children)
      if (child > 0) waitpid(child, nullptr, 0);
    // A worker that died has not said what it found.
    if (const int missing = static_cast<int>(jobs.size()) - all.passed - all.failed; missing > 0) {
      std::printf("FAILED %d kernels of workers that died\n", missing);
      all.failed += missing;
    }
    if (jobs.empty()) {
      std::printf("FAILED there is nothing to compile\n");
      all.failed = 1;
    }
    std::printf("%d compiled, the others unchanged, in %.1f s\n%d passed, %d failed\n", all.compiled,
                std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), all.passed, all.failed);
    return all.failed ? 1 : 0;
  } catch (const fattn::Error& error) {
    std::printf("%s\n0 passed, 1 failed\n", error.what());
    return 1;
  }
}
