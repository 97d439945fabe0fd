// Problems of one dtype, head size and mask have kernels in common, so one process compiles all of them, one group after another.
#include "cli/compile_beside.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <tuple>
#include <utility>

#include "fattn/cache.hpp"
#include "fattn/system.hpp"
#include "measure/subprocess.h"

namespace fattn::cli {
namespace {

using measure::ProblemSpec;

constexpr double kMostSeconds = 600;  // of one problem's kernels: some minutes on a busy processor

using Group = std::vector<const ProblemSpec*>;

// The largest first, so that none is left alone at the end.
std::vector<Group> groups_of(const std::vector<ProblemSpec>& specs) {
  std::map<std::tuple<DType, int64_t, int64_t, bool>, Group> by_kernels;
  for (const ProblemSpec& s : specs) by_kernels[{s.dtype, s.headdim, s.headdim_v, s.causal}].push_back(&s);
  std::vector<Group> groups;
  for (auto& [key, group] : by_kernels) groups.push_back(std::move(group));
  std::stable_sort(groups.begin(), groups.end(), [](const Group& a, const Group& b) { return a.size() > b.size(); });
  return groups;
}

}  // namespace

void compile_beside(const std::vector<ProblemSpec>& specs, const Options& library, const std::function<void(double share)>& progress) {
  if (specs.empty() || library.algorithm != Algorithm::kAuto || !cache::info().usable) return;
  const std::vector<Group> groups = groups_of(specs);
  std::vector<std::string> argv = {"/proc/self/exe", "cache", "warm", "--stdin"};
  if (library.deterministic) argv.emplace_back("--deterministic");
  if (library.batch_invariant) argv.emplace_back("--batch-invariant");
  if (library.cuda_level > 0) argv.insert(argv.end(), {"--cuda-level", std::to_string(library.cuda_level)});
  std::atomic<size_t> next{0};
  std::mutex mutex;
  size_t done = 0;
  const auto work = [&] {
    try {
      measure::Subprocess compiler(argv);
      for (size_t g = next.fetch_add(1); g < groups.size(); g = next.fetch_add(1)) {
        for (const ProblemSpec* spec : groups[g]) {
          compiler.ask(measure::to_json(*spec).dump(), kMostSeconds);
          const std::lock_guard lock(mutex);
          progress(static_cast<double>(++done) / static_cast<double>(specs.size()));
        }
      }
    } catch (const std::exception&) {  // the kernels that are missing are compiled where they are called
    }
  };
  std::vector<std::thread> threads;
  const size_t count = std::min<size_t>(groups.size(), static_cast<size_t>(std::max(1, cpu_info().usable_threads)));
  for (size_t i = 1; i < count; ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
}

}  // namespace fattn::cli
