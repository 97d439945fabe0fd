// What algorithms of the CPU backend share on the host's side: the kernels of an instruction set, places in tensors and in the workspace, workers.
#pragma once

#include <algorithm>
#include <atomic>
#include <type_traits>

#include "backend/cpu/kernels.h"
#include "cpu/executor.h"
#include "cpu/subnormals.h"
#include "cpu/workspace_layout.h"
#include "plan/plan.h"
#include "shared/text.h"
#include "shared/trace.h"

namespace fattn::core {

inline const CpuKernels& kernels_of(Isa isa) {
  const CpuKernels* kernels = nullptr;
  switch (isa) {
#if defined(__x86_64__)
    case Isa::kAvx2: kernels = kernels_avx2(); break;
    case Isa::kAvx512: kernels = kernels_avx512(); break;
    case Isa::kAvx512Bf16: kernels = kernels_avx512_bf16(); break;
    case Isa::kAmx: kernels = kernels_amx(); break;
#elif defined(__aarch64__)
    case Isa::kNeon: kernels = kernels_neon(); break;
#endif
    default: kernels = kernels_scalar(); break;
  }
  if (!kernels) throw Error(ErrorCode::kInternal, text("no kernels for instruction set ", name_of(isa)));
  return *kernels;
}

inline KernelDType kernel_dtype(DType dtype) { return dtype == DType::kF32 ? kKernelF32 : dtype == DType::kF16 ? kKernelF16 : kKernelBF16; }

// An element of a tensor that may be absent (null, of a dimension of 0): no offset is added to null.
template <class T>
T* at(T* base, int64_t element, size_t element_size) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return base ? static_cast<T*>(static_cast<Byte*>(base) + element * static_cast<int64_t>(element_size)) : nullptr;
}
template <class T>
T* at(T* base, int64_t element) {
  return base ? base + element : nullptr;
}

// Where the rows of a batch entry and head begin, in elements.
inline int64_t place(const Strides& s, int64_t n, int64_t row, int64_t h) { return n * s.batch + row * s.row + h * s.head; }

inline int workers_of(const Plan& plan, int64_t tasks) { return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(plan.cpu.threads, tasks))); }

// Runs task(index, worker) for every index in [0, tasks), each taken by the next free worker. `name` is for profilers: what a worker does of it.
template <class Task>
void run_tasks(const Plan& plan, const char* name, int64_t tasks, const Task& task) {
  if (tasks <= 0) return;
  std::atomic<int64_t> next{0};
  run_workers(plan.problem.executor, workers_of(plan, tasks), [&](int worker) {
    const Traced traced(name);
    const SubnormalsAreZero zero;
    for (int64_t i = next.fetch_add(1, std::memory_order_relaxed); i < tasks; i = next.fetch_add(1, std::memory_order_relaxed)) task(i, worker);
  });
}

}  // namespace fattn::core
