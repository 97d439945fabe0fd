// Compares the machine code of the planned kernels between two copies of the project, without a GPU: each kernel is compiled with the headers of
// BEFORE and with those of AFTER (kernels/, src/device_abi) and said to be the same or different. A kernel none of whose headers has changed is not
// compiled. Its list is the copy's own kernels/planned.txt, with that of the operations. Ends with the line `N passed, N failed`.
//   compare_planned BEFORE AFTER [-j N] [--full] [--filter TEXT] [--targets 90a,80] [--every N] [--verbose]
// tools/compare_cubins.py runs it, also on commits.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "fattn/error.hpp"
#include "in_processes.h"
#include "jit/jit.h"
#include "jit/key.h"
#include "jit/nvrtc.h"
#include "jit/planned.h"
#include "machine_code.h"

namespace {

using namespace fattn::core::jit;

struct Arguments {
  std::string before, after, filter;
  std::vector<std::string> targets;  // none: all
  int jobs = 1, every = 1;
  bool full = false, verbose = false;
};

bool parse(int argc, char** argv, Arguments& to) {
  int folders = 0;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const char* value = i + 1 < argc ? argv[i + 1] : nullptr;
    if (flag == "--full") {
      to.full = true;
    } else if (flag == "--verbose") {
      to.verbose = true;
    } else if (flag == "-j" && value) {
      to.jobs = std::clamp(std::atoi(value), 1, 256), ++i;
    } else if (flag == "--every" && value) {
      to.every = std::clamp(std::atoi(value), 1, 1 << 20), ++i;
    } else if (flag == "--filter" && value) {
      to.filter = value, ++i;
    } else if (flag == "--targets" && value) {
      std::istringstream names(value);
      for (std::string name; std::getline(names, name, ',');) to.targets.push_back("sm_" + name);
      ++i;
    } else if (!flag.starts_with("-") && folders < 2) {
      (folders++ == 0 ? to.before : to.after) = flag;
    } else {
      folders = 3;
      std::fprintf(stderr, "compare_planned: '%s' is no flag or has no value\n", argv[i]);
      break;
    }
  }
  if (folders == 2) return true;
  std::fprintf(
      stderr,
      "compare_planned BEFORE AFTER, two folders with copies of the project; allowed besides: -j N, --full, --filter TEXT, --targets 90a,80, "
      "--every N, --verbose\n");
  return false;
}

// One copy of the project. What it reads stays where it is: sources point into it.
struct Tree {
  std::deque<std::string> held;
  std::vector<Source> sources;
  std::vector<Planned> list;
};
Tree before, after;
// Requests have functions that know their sources.
Sources sources_before() { return before.sources; }
Sources sources_after() { return after.sources; }

std::string content_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file)
    throw fattn::Error(fattn::ErrorCode::kInvalidArgument, "'" + path.string() + "' cannot be read; give a folder with a copy of the project");
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

void read_tree(const std::string& folder, SourceTable table, Tree& to) {
  namespace fs = std::filesystem;
  const fs::path root(folder);
  for (const char* list : {"kernels/planned.txt", "kernels/ops/planned.txt"}) {
    if (list != std::string("kernels/planned.txt") && !fs::exists(root / list)) continue;
    for (Planned& planned : parse_planned(content_of(root / list))) {
      planned.request.sources = table;
      to.list.push_back(std::move(planned));
    }
  }
  const auto add = [&](const fs::path& below) {
    std::error_code failed;
    for (fs::recursive_directory_iterator at(root / below, failed), end; !failed && at != end; at.increment(failed)) {
      const std::string suffix = at->path().extension().string();
      if (!at->is_regular_file(failed) || (suffix != ".h" && suffix != ".cuh")) continue;
      std::string name = at->path().lexically_relative(root).generic_string();
      if (name.starts_with("src/")) name.erase(0, 4);
      const std::string& path = to.held.emplace_back(std::move(name));
      to.sources.push_back({path, to.held.emplace_back(content_of(at->path()))});
    }
  };
  add("kernels");
  add("src/device_abi");
  std::sort(to.sources.begin(), to.sources.end(), [](const Source& a, const Source& b) { return a.path < b.path; });
}

struct Job {
  std::string name;
  Request request;
};

// With what is special about it, which its source begins with.
std::string name_of(const Request& request) {
  const std::string& source = request.source;
  return request.entry + " " + target_name(request.arch, request.arch_specific) +
         (source.starts_with("// ") ? " (" + source.substr(3, source.find('\n') - 3) + ")" : "");
}

// `unknown`: architectures that this NVRTC does not know.
std::vector<Job> jobs_of(const Tree& tree, const Arguments& arguments, const Nvrtc& compiler, std::set<std::string>& unknown) {
  std::vector<Job> jobs;
  for (const Planned& planned : tree.list) {
    if (!planned.quick() && !arguments.full) continue;
    for (const Target& target : planned.targets) {
      const std::string of = target_name(target.arch, target.arch_specific);
      if (!arguments.targets.empty() && std::find(arguments.targets.begin(), arguments.targets.end(), of) == arguments.targets.end()) continue;
      if (std::find(compiler.architectures.begin(), compiler.architectures.end(), target.arch) == compiler.architectures.end()) {
        unknown.insert(of);
        continue;
      }
      Job job{"", planned.on(target)};
      job.name = name_of(job.request);
      if (job.name.find(arguments.filter) != std::string::npos) jobs.push_back(std::move(job));
    }
  }
  return jobs;
}

struct Pair {
  const Job* before = nullptr;
  const Job* after = nullptr;
};

// A kernel of one list is that of the other with the same source, else, in turn, with the same name.
std::vector<Pair> pairs_of(const std::vector<Job>& of_before, const std::vector<Job>& of_after) {
  std::vector<Pair> pairs;
  std::vector<const Job*> left, right;
  for (const Job& job : of_before) left.push_back(&job);
  for (const Job& job : of_after) right.push_back(&job);
  const auto match = [&](const auto& key) {
    std::multimap<std::string, const Job*> found;
    for (const Job* job : right) found.emplace(key(*job), job);
    std::vector<const Job*> alone;
    for (const Job* job : left) {
      const auto at = found.lower_bound(key(*job));
      if (at == found.end() || at->first != key(*job)) {
        alone.push_back(job);
        continue;
      }
      pairs.push_back({job, at->second});
      found.erase(at);
    }
    left = std::move(alone);
    right.clear();
    for (const auto& [unused, job] : found) right.push_back(job);
  };
  match([](const Job& job) { return job.name + "\n" + job.request.source; });
  match([](const Job& job) { return job.name; });
  for (const Job* job : left) pairs.push_back({job, nullptr});
  for (const Job* job : right) pairs.push_back({nullptr, job});
  return pairs;
}

struct Counts {
  int same = 0, unchanged = 0, failed = 0;
};

std::string change(const char* what, long long from, long long to) {
  return std::string(what) + " " + std::to_string(from) + (from == to ? "" : " -> " + std::to_string(to));
}

// Nothing, if they are the same.
std::string difference(const Pair& pair) {
  const Cubin from = build(pair.before->request), to = build(pair.after->request);
  const auto code_before = fattn::test::machine_code(from.image), code_after = fattn::test::machine_code(to.image);
  if (code_before.bytes.empty() || code_after.bytes.empty()) return "a cubin without machine code";
  const Resources &r = from.resources, &s = to.resources;
  if (code_before.bytes == code_after.bytes && r.registers == s.registers) return "";
  return change("registers", r.registers, s.registers) + ", " +
         change("spilled bytes", r.spill_store_bytes + r.spill_load_bytes, s.spill_store_bytes + s.spill_load_bytes) + ", " +
         change("bytes of code", static_cast<long long>(code_before.code), static_cast<long long>(code_after.code));
}

// Every processes-th pair: neighbours in the list cost alike, so the processes end together.
Counts work(const std::vector<Pair>& pairs, size_t process, size_t processes, bool verbose) {
  Counts counts;
  for (size_t i = process; i < pairs.size(); i += processes) {
    const Pair& pair = pairs[i];
    if (pair.before == nullptr || pair.after == nullptr) {
      std::printf("only %s: %s\n", pair.after ? "after" : "before", (pair.after ? pair.after : pair.before)->name.c_str());
      ++counts.failed;
      continue;
    }
    const std::string& name = pair.after->name;
    try {
      const bool unchanged = key_of(pair.before->request, before.sources) == key_of(pair.after->request, after.sources);
      const std::string different = unchanged ? "" : difference(pair);
      if (!different.empty())
        std::printf("different: %s: %s\n", name.c_str(), different.c_str());
      else if (verbose)
        std::printf("same: %s%s\n", name.c_str(), unchanged ? ", whose sources are the same" : "");
      ++(different.empty() ? counts.same : counts.failed);
      counts.unchanged += unchanged;
    } catch (const fattn::Error& error) {
      std::printf("FAILED %s: %s\n", name.c_str(), error.what());
      ++counts.failed;
    }
    std::fflush(stdout);
  }
  std::fflush(stdout);  // the process ends without it
  return counts;
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
    read_tree(arguments.before, sources_before, before);
    read_tree(arguments.after, sources_after, after);
    std::set<std::string> unknown;
    const std::vector<Job> jobs_before = jobs_of(before, arguments, compiler, unknown), jobs_after = jobs_of(after, arguments, compiler, unknown);
    for (const std::string& name : unknown) std::printf("not looked at: %s, which this NVRTC does not know\n", name.c_str());
    std::vector<Pair> pairs = pairs_of(jobs_before, jobs_after);
    if (arguments.every > 1) {
      std::vector<Pair> some;
      for (size_t i = 0; i < pairs.size(); i += static_cast<size_t>(arguments.every)) some.push_back(pairs[i]);
      pairs = std::move(some);
    }
    std::fflush(stdout);
    const auto start = std::chrono::steady_clock::now();
    const size_t processes = std::min(static_cast<size_t>(arguments.jobs), std::max<size_t>(pairs.size(), 1));
    Counts all;
    for (const Counts& part :
         fattn::test::in_processes<Counts>(processes, [&](size_t process) { return work(pairs, process, processes, arguments.verbose); }))
      all.same += part.same, all.unchanged += part.unchanged, all.failed += part.failed;
    if (const int missing = static_cast<int>(pairs.size()) - all.same - all.failed; missing > 0) {
      std::printf("FAILED %d kernels of processes that died\n", missing);
      all.failed += missing;
    }
    if (pairs.empty()) {
      std::printf("FAILED there is nothing to compare\n");
      all.failed = 1;
    }
    std::printf("%d the same, of which %d have the same sources and were not compiled, in %.1f s\n%d passed, %d failed\n", all.same, all.unchanged,
                std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), all.same, all.failed);
    return all.failed ? 1 : 0;
  } catch (const fattn::Error& error) {
    std::printf("%s\n0 passed, 1 failed\n", error.what());
    return 1;
  }
}
