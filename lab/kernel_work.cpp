// What processors and GPUs have in common: masks, tasks and workers, caches.
#include "lab/kernel_work.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <queue>

#include "fattn/device.hpp"
#include "fattn/system.hpp"

namespace fattn::lab {

MachineSizes machine_sizes(const measure::Placement& place) {
  MachineSizes m;
  if (place.device == Device::kCpu) {
    const fattn_cpu_info cpu = cpu_info();
    constexpr double kUnknownL2 = 1 << 20;
    m.l2_bytes = cpu.l2_bytes > 0 ? static_cast<double>(cpu.l2_bytes) : kUnknownL2;
    m.l3_bytes = std::max(static_cast<double>(cpu.l3_bytes), 2 * m.l2_bytes);
    return m;
  }
  const fattn_cuda_info gpu = cuda::info(place.index);
  m.cuda = true;
  m.l2_bytes = static_cast<double>(gpu.l2_bytes);
  m.multiprocessors = gpu.multiprocessors;
  m.shared_per_multiprocessor = gpu.shared_per_multiprocessor;
  return m;
}

Work work_of(const measure::ProblemSpec& spec, const PlanShape& shape, const MachineSizes& machine) {
  return shape.backend == Backend::kCuda ? cuda_work(spec, shape, machine) : cpu_work(spec, shape, machine);
}

KeyRange keys_seen(const measure::ProblemSpec& s, int64_t row) {
  KeyRange keys{0, s.seqlen_k};
  const int64_t own = row + s.seqlen_k - s.seqlen_q;
  const auto inside = [&](int64_t key) { return std::clamp<int64_t>(key, 0, s.seqlen_k); };
  if (s.causal)
    keys.end = inside(own + 1);
  else if (s.window_right >= 0)
    keys.end = inside(own + 1 + std::min(s.window_right, s.seqlen_k));
  if (s.window_left >= 0) keys.begin = inside(own - std::min(s.window_left, s.seqlen_k));
  return keys;
}

double largest_share(std::vector<Tasks> tasks, double workers) {
  double all = 0, count = 0, largest = 0;
  for (const Tasks& t : tasks) all += t.size * t.count, count += t.count, largest = std::max(largest, t.size);
  if (!(all > 0) || workers <= 1) return 1;
  constexpr double kFew = 4096;
  if (count > kFew || workers > kFew) return std::min(1.0, 1 / workers + largest * (workers - 1) / workers / 2 / all);
  std::stable_sort(tasks.begin(), tasks.end(), [](const Tasks& a, const Tasks& b) { return a.size > b.size; });
  std::priority_queue<double, std::vector<double>, std::greater<>> ends;
  for (int i = 0; i < static_cast<int>(workers); ++i) ends.push(0);
  double last = 0;
  for (const Tasks& t : tasks)
    for (int i = 0; i < static_cast<int>(t.count); ++i) {
      const double end = ends.top() + t.size;
      ends.pop();
      ends.push(end);
      last = std::max(last, end);
    }
  return last / all;
}

double share_beyond(double working_set, double cache_bytes) {
  if (!(cache_bytes > 0)) return 1;
  const double x = std::pow(working_set / cache_bytes, 3);
  return x / (1 + x);
}

}  // namespace fattn::lab
