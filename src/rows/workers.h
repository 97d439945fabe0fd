// Who computes rows on the CPU: as many workers as the work is worth.
#pragma once

#include <algorithm>
#include <atomic>
#include <optional>

#include "cpu/executor.h"
#include "cpu/subnormals.h"
#include "device/cpu_info.h"
#include "rows/kernels.h"
#include "shared/trace.h"

namespace fattn::core::rows {

inline const RowKernels& kernels_of(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::kAvx2: return *row_kernels_avx2();
    case Isa::kAvx512:  // which has all that these kernels need of those above
    case Isa::kAvx512Bf16:
    case Isa::kAmx: return *row_kernels_avx512();
#elif defined(__aarch64__)
    case Isa::kNeon: return *row_kernels_neon();
#endif
    default: return *row_kernels_scalar();
  }
}

// Runs rows(begin, end) for parts of [0, count), which depend on nothing but `unit`. `row_bytes`: what a row reads and writes. Below kBytesOfWorker
// another worker takes longer to come than it saves.
template <class Problem, class Rows>
void by_rows(const Problem& problem, const char* name, int64_t count, int64_t row_bytes, int64_t unit, const Rows& rows) {
  constexpr int64_t kBytesOfWorker = 256 * 1024, kBytesOfTask = 64 * 1024;
  const int64_t per_task = std::max<int64_t>(1, kBytesOfTask / std::max<int64_t>(1, row_bytes * unit)) * unit;
  const int64_t tasks = count / per_task + (count % per_task != 0 ? 1 : 0);
  int64_t workers = std::min(tasks, std::max<int64_t>(1, count / std::max<int64_t>(1, kBytesOfWorker / std::max<int64_t>(1, row_bytes))));
  if (workers > 1 && problem.num_threads > 0) workers = std::min<int64_t>(workers, problem.num_threads);
  if (workers > 1 && problem.num_threads == 0)
    workers = std::min<int64_t>(workers, problem.executor ? problem.executor->concurrency : usable_threads());
  const auto run = [&](int64_t begin, int64_t end) {
    const SubnormalsAreZero zero;
    rows(begin, end);
  };
  const Traced traced(name);
  if (workers <= 1) return run(0, count);
  std::atomic<int64_t> next{0};
  const auto host = problem.executor ? std::optional<fattn_executor>(*problem.executor) : std::nullopt;
  run_workers(host, static_cast<int>(workers), [&](int) {
    for (int64_t i = next.fetch_add(1, std::memory_order_relaxed); i < tasks; i = next.fetch_add(1, std::memory_order_relaxed))
      run(i * per_task, std::min(count, (i + 1) * per_task));
  });
}

}  // namespace fattn::core::rows
