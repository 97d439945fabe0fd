// Numbers of any dtype as float64, and a kernel that is a function: what the reference's operations are made of.
#pragma once

#include "ops/ops.h"
#include "shared/half.h"

namespace fattn::ops::reference {

inline double read(const void* p, DType dtype, int64_t i) {
  if (dtype == DType::kF32) return static_cast<const float*>(p)[i];
  const uint16_t bits = static_cast<const uint16_t*>(p)[i];
  return dtype == DType::kF16 ? core::f16_to_float(bits) : core::bf16_to_float(bits);
}
inline void write(void* p, DType dtype, int64_t i, double x) {
  const auto single = static_cast<float>(x);
  if (dtype == DType::kF32)
    static_cast<float*>(p)[i] = single;
  else
    static_cast<uint16_t*>(p)[i] = dtype == DType::kF16 ? core::float_to_f16(single) : core::float_to_bf16(single);
}

double activated(Activation activation, double x);

// A kernel that is a function of problem and buffers.
template <class Problem, void (*compute)(const Problem&, const typename Problem::Buffers&)>
class Computed final : public Kernel<Problem> {
 public:
  explicit Computed(const Problem& problem) : problem_(problem) {}
  void execute(const typename Problem::Buffers& buffers, void*, void*) const override { compute(problem_, buffers); }

 private:
  const Problem problem_;
};

}  // namespace fattn::ops::reference
