// What the operations share on the host's side: the kernels of an instruction set, workers, dtypes.
#pragma once

#include <algorithm>
#include <atomic>
#include <optional>

#include "cpu/executor.h"
#include "cpu/workspace_layout.h"
#include "device/cpu_info.h"
#include "fattn/error.hpp"
#include "ops/cpu/kernels.h"
#include "ops/ops.h"
#include "shared/text.h"

namespace fattn::ops::cpu {

inline const OpsKernels& kernels_of(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::kAvx2: return *ops_avx2();
    case Isa::kAvx512: return *ops_avx512();
    case Isa::kAvx512Bf16:
    case Isa::kAmx: return *ops_avx512_bf16();
#elif defined(__aarch64__)
    case Isa::kNeon: return *ops_neon();
#endif
    default: return *ops_scalar();
  }
}

inline KernelDType kernel_dtype(DType dtype) { return dtype == DType::kF32 ? kKernelF32 : dtype == DType::kF16 ? kKernelF16 : kKernelBF16; }

inline const OpsKernels& kernels_of(const Device& device) {
  const core::CpuInfo info = core::cpu_info();
  if (device.isa != Isa::kAuto && !info.available(device.isa))
    throw Error(ErrorCode::kUnsupported, core::text("this processor has no ", name_of(device.isa), "; leave the choice to the library"));
  return kernels_of(device.isa == Isa::kAuto ? info.isa_default : device.isa);
}

// Who works for a plan.
class Workers {
 public:
  explicit Workers(const Device& device) {
    threads_ = device.threads > 0 ? device.threads : core::cpu_info().usable_threads;
    if (device.executor) {
      host_ = *device.executor;
      threads_ = std::min(threads_, std::max(1, device.executor->concurrency));
    }
  }
  int most(int64_t tasks) const { return static_cast<int>(std::clamp<int64_t>(tasks, 1, threads_)); }

  // task(index, worker) for every index in [0, tasks), each taken by the next free worker.
  template <class Task>
  void run(int64_t tasks, const Task& task) const {
    const int workers = most(tasks);
    if (workers == 1) {
      for (int64_t i = 0; i < tasks; ++i) task(i, 0);
      return;
    }
    std::atomic<int64_t> next{0};
    core::run_workers(host_, workers, [&](int worker) {
      for (int64_t i = next.fetch_add(1, std::memory_order_relaxed); i < tasks; i = next.fetch_add(1, std::memory_order_relaxed)) task(i, worker);
    });
  }

 private:
  int threads_ = 1;
  std::optional<fattn_executor> host_;
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class T>
const char* bytes_at(const T* base, int64_t element, size_t size) {
  return base ? reinterpret_cast<const char*>(base) + element * static_cast<int64_t>(size) : nullptr;
}
inline const char* bytes_at(const void* base, int64_t element, size_t size) { return bytes_at(static_cast<const char*>(base), element, size); }
inline char* bytes_at(void* base, int64_t element, size_t size) { return static_cast<char*>(base) + element * static_cast<int64_t>(size); }

// Rows of a task so that many cores have some, and none so few that handing them out takes longer.
constexpr int64_t kRowsOfTask = 8;

// rows(begin, end) for all rows, some of them a task.
template <class Rows>
void by_rows(const Workers& workers, int64_t count, const Rows& rows) {
  workers.run(ceil_div(count, kRowsOfTask), [&](int64_t i, int) { rows(i * kRowsOfTask, std::min(count, (i + 1) * kRowsOfTask)); });
}

}  // namespace fattn::ops::cpu
