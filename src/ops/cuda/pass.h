// What passes over numbers have in common: how many CTAs, and whether four numbers can be read at once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "device_abi/ops_params.h"
#include "device_abi/training_params.h"
#include "ops/cuda/kernels.h"

namespace fattn::ops::cuda {

constexpr int64_t kMostCtas = 4096;  // beyond, a CTA takes several pieces

inline int64_t pieces(int64_t n, int64_t of) { return (n + of - 1) / of; }
inline int64_t ctas_for(int64_t count) { return std::clamp<int64_t>(pieces(count, 4 * kOpsThreads), 1, kMostCtas); }

inline bool lie_at(int64_t bytes, std::initializer_list<const void*> pointers) {
  return std::all_of(pointers.begin(), pointers.end(),
                     [&](const void* p) { return static_cast<int64_t>(reinterpret_cast<uintptr_t>(p) % static_cast<uintptr_t>(bytes)) == 0; });
}
// Null pointers do not matter.
inline bool in_fours(DType dtype, std::initializer_list<const void*> pointers) { return lie_at(4 * static_cast<int64_t>(size_of(dtype)), pointers); }

// to = x + bias + add from one dtype to another, or in place.
class Convert {
 public:
  Convert(const Gpu& gpu, DType from, DType to) : from_(from), to_(to), key_(gpu.key_of(KernelKind::kConvert, from)) {
    key_.to = static_cast<int32_t>(to);
    gpu.load(key_);
  }
  // `bias` is of rows of `width` numbers. Null: none.
  void run(const Gpu& gpu, const void* x, int64_t count, int64_t width, const float* bias, const float* add, void* to, void* stream) const {
    const bool wide = in_fours(from_, {x}) && in_fours(to_, {to}) && in_fours(DType::kF32, {add});
    const ConvertParams params{x, bias, add, to, count, static_cast<int>(width), wide ? 1 : 0};
    gpu.launch(key_, ctas_for(count), kOpsThreads, 0, &params, stream);
  }

 private:
  DType from_, to_;
  KernelKey key_;
};

}  // namespace fattn::ops::cuda
