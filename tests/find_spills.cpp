// Whether the rules on registers (src/backend/cuda/tiles) are true, without a GPU: compiles for each up to so many `witnesses`, kernels that would be
// chosen if it were not there, until `enough` spill or are refused by an assertion of their own, and a sample of those that are chosen, which may
// not. Fails where a sample spills, or where a rule says other bytes than were found. Kernels that have not changed come from the disk cache. Ends
// with the line `N passed, N failed`.
//   find_spills [-j N] [--witnesses N] [--enough N] [--chosen N] [--filter TEXT] [--json FILE]
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "fattn/error.hpp"
#include "fattn/fattn.h"
#include "files/json_text.h"
#include "in_processes.h"
#include "jit/jit.h"
#include "jit/nvrtc.h"
#include "spill_families.h"

namespace {

using namespace fattn::test::spilling;

// Whose bytes the rules say; of another NVRTC they are only shown.
constexpr int kMajor = 13, kMinor = 0;

struct Arguments {
  int jobs = 1, witnesses = 5, enough = 1, chosen = 6;
  std::string filter, json;
};

bool parse(int argc, char** argv, Arguments& to) {
  for (int i = 1; i < argc; i += 2) {
    const std::string flag = argv[i];
    const char* value = i + 1 < argc ? argv[i + 1] : nullptr;
    if (value && flag == "-j") {
      to.jobs = std::clamp(std::atoi(value), 1, 256);
    } else if (value && flag == "--witnesses") {
      to.witnesses = std::clamp(std::atoi(value), 0, 1000);
    } else if (value && flag == "--enough") {
      to.enough = std::clamp(std::atoi(value), 1, 1000);
    } else if (value && flag == "--chosen") {
      to.chosen = std::clamp(std::atoi(value), 0, 100000);
    } else if (value && flag == "--filter") {
      to.filter = value;
    } else if (value && flag == "--json") {
      to.json = value;
    } else {
      std::fprintf(stderr,
                   "find_spills: '%s' is no flag or has no value; allowed: -j N, --witnesses N, --enough N, --chosen N, --filter TEXT, --json FILE\n",
                   flag.c_str());
      return false;
    }
  }
  return true;
}

// What a kernel spills: bytes that a thread stores or loads, the more of the two. Below 0: it does not compile, as its own assertions have it.
int spilled(const fattn::core::jit::Request& request) {
  try {
    const fattn::core::jit::Resources r = fattn::core::jit::build(request).resources;
    return r.known ? std::max({r.spill_store_bytes, r.spill_load_bytes, r.stack_bytes}) : -1;
  } catch (const fattn::Error&) {
    return -1;
  }
}

std::string name_of(const fattn::core::jit::Request& request) {
  const std::string comment = request.source.starts_with("// ") ? request.source.substr(3, request.source.find('\n') - 3) : request.entry;
  return fattn::core::jit::target_name(request.arch, request.arch_specific) + ", " + comment;
}

// What was found of a rule, or of a family's sample. Processes share it.
struct Found {
  int kernels = 0, spills = 0, refused = 0, least = 0, most = 0;
  char most_in[256] = "";

  void add(int bytes, const fattn::core::jit::Request& request) {
    ++kernels;
    refused += bytes < 0;
    if (bytes <= 0) return;
    least = spills == 0 ? bytes : std::min(least, bytes);
    if (bytes > most) most = bytes, std::snprintf(most_in, sizeof most_in, "%s", name_of(request).c_str());
    ++spills;
  }
  std::string text() const {
    const std::string of = std::to_string(spills) + " of " + std::to_string(kernels) + " spill";
    const std::string bytes = spills == 0 ? "" : ", " + std::to_string(least) + " to " + std::to_string(most) + " bytes (" + most_in + ")";
    return of + bytes + (refused == 0 ? "" : ", " + std::to_string(refused) + " do not compile");
  }
};

// Kernels of which as many are compiled as it takes for so many to spill.
struct Job {
  const Family* family;
  const Rule* rule;  // null: a sample of those that are chosen
  std::vector<fattn::core::jit::Request> requests;
  int enough = 0;

  std::string name() const { return std::string(family->name) + ": " + (rule ? std::string(rule->name) : "chosen"); }
};

std::vector<Found> found_of(const std::vector<Job>& jobs, size_t processes) {
  const size_t bytes = std::max<size_t>(1, jobs.size()) * sizeof(Found);
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw fattn::Error(fattn::ErrorCode::kInternal, "there is no memory that processes can share");
  auto* const shared = static_cast<Found*>(memory);
  std::uninitialized_fill_n(shared, jobs.size(), Found{});
  fattn::test::in_processes<int>(processes, [&](size_t process) {
    for (size_t i = process; i < jobs.size(); i += processes) {
      for (const fattn::core::jit::Request& request : jobs[i].requests) {
        shared[i].add(spilled(request), request);
        if (shared[i].spills + shared[i].refused >= jobs[i].enough) break;
      }
      std::fprintf(stderr, "%s: %s\n", jobs[i].name().c_str(), shared[i].text().c_str());
    }
    return 0;
  });
  std::vector<Found> all(shared, shared + jobs.size());
  munmap(memory, bytes);
  return all;
}

nlohmann::ordered_json row_of(const Job& job, const Found& found) {
  nlohmann::ordered_json row = {{"family", job.family->name}};
  if (job.rule) row["kind"] = job.rule->kind, row["rule"] = job.rule->name;
  row["kernels"] = found.kernels, row["spill"] = found.spills, row["do_not_compile"] = found.refused;
  if (job.rule) row["least_bytes"] = found.least, row["most_bytes"] = found.most;
  if (found.spills > 0) row["most_in"] = found.most_in;
  return row;
}

void write_record(const std::string& path, const nlohmann::ordered_json& record) {
  {
    std::ofstream out(path + ".new");
    out << fattn::files::json_text(record);
    if (!out.flush()) throw fattn::Error(fattn::ErrorCode::kInvalidArgument, "'" + path + "' cannot be written");
  }
  std::filesystem::rename(path + ".new", path);
}

int run(const Arguments& arguments) {
  const fattn::core::jit::Nvrtc& compiler = fattn::core::jit::nvrtc();
  if (!compiler) {
    std::printf("%s\n0 passed, 1 failed\n", compiler.reason.c_str());
    return 1;
  }
  const std::string version = std::to_string(compiler.version.major) + "." + std::to_string(compiler.version.minor);
  std::printf("NVRTC %s, %s\n", version.c_str(), compiler.path.c_str());
  const std::vector<Family> all = families();
  std::vector<Job> jobs;
  for (const Family& family : all) {
    const auto add = [&](const Rule* rule, std::vector<fattn::core::jit::Request> requests, int enough) {
      jobs.push_back({&family, rule, std::move(requests), enough});
    };
    const auto wanted = [&](std::string_view name) {
      return (std::string(family.name) + ": " + std::string(name)).find(arguments.filter) != std::string::npos;
    };
    for (const Rule& rule : family.rules)
      if (wanted(rule.name)) add(&rule, witnesses(family, rule, static_cast<size_t>(arguments.witnesses)), arguments.enough);
    if (wanted("chosen")) add(nullptr, chosen(family, static_cast<size_t>(arguments.chosen)), std::numeric_limits<int>::max());
  }
  const std::vector<Found> found = found_of(jobs, std::min<size_t>(static_cast<size_t>(arguments.jobs), std::max<size_t>(1, jobs.size())));

  char date[32];
  const std::time_t now = std::time(nullptr);
  std::strftime(date, sizeof date, "%Y-%m-%d", std::gmtime(&now));
  nlohmann::ordered_json record = {{"command", "find_spills"},
                                   {"date", date},
                                   {"nvrtc", version},
                                   {"library_version", fattn_version()},
                                   {"witnesses", arguments.witnesses},
                                   {"enough", arguments.enough},
                                   {"rules", nlohmann::ordered_json::array()},
                                   {"chosen", nlohmann::ordered_json::array()}};
  int passed = 0, failed = 0;
  for (size_t i = 0; i < jobs.size(); ++i) {
    const Rule* const rule = jobs[i].rule;
    const SpillBytes said = rule ? rule->bytes : SpillBytes{};
    const bool judged = !rule || (compiler.version.major == kMajor && compiler.version.minor == kMinor);
    const bool same = !judged || (found[i].least == said.least && found[i].most == said.most),
               good = same && (rule || found[i].refused == 0) && found[i].kernels > 0;
    ++(good ? passed : failed);
    std::printf("%s %s: %s%s\n", good ? "ok    " : "FAILED", jobs[i].name().c_str(), found[i].text().c_str(),
                same ? "" : ("; the rule says " + std::to_string(said.least) + " to " + std::to_string(said.most)).c_str());
    record[rule ? "rules" : "chosen"].push_back(row_of(jobs[i], found[i]));
  }
  if (!arguments.json.empty()) write_record(arguments.json, record);
  if (jobs.empty()) {
    std::printf("FAILED there is nothing to compile\n");
    failed = 1;
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed ? 1 : 0;
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  if (!parse(argc, argv, arguments)) return 2;
  try {
    return run(arguments);
  } catch (const fattn::Error& error) {
    std::printf("%s\n0 passed, 1 failed\n", error.what());
    return 1;
  }
}
