// Checks of sizes, and the plan of a problem for which there is check(problem): for the units that make plans.
#pragma once

#include "fattn/error.hpp"
#include "ops/backends.h"
#include "shared/text.h"

namespace fattn::ops {

using core::text;

constexpr int64_t kMostSize = int64_t{1} << 31;  // of a size; products of three with 4 bytes each fit 64 bits only below it, and are checked

inline void check_size(const char* name, int64_t n, int64_t least = 1) {
  if (n < least || n >= kMostSize) throw Error(ErrorCode::kInvalidArgument, text(name, " is ", n, "; allowed: ", least, " to 2^31 - 1"));
}
inline void check_product(const char* what, int64_t a, int64_t b) {
  int64_t bytes = 0;
  if (__builtin_mul_overflow(a, b, &bytes) || __builtin_mul_overflow(bytes, int64_t{8}, &bytes))
    throw Error(ErrorCode::kOutOfMemory, text(what, " of ", a, " x ", b, " exceeds 2^63 - 1 bytes; use smaller sizes"));
}
inline void check_dtype(DType dtype) {
  if (dtype != DType::kF32 && dtype != DType::kF16 && dtype != DType::kBF16)
    throw Error(ErrorCode::kUnsupported, text("operations take fp32, fp16 and bf16, not ", name_of(dtype)));
}

// Throw Error; for ops.h in plan.cpp, for training.h in training.cpp.
void check(const Embedding&);
void check(const LayerNorm&);
void check(const Linear&);
void check(const KeysValues&);
void check(const NormLinear&);
void check(const CrossEntropy&);
void check(const Sampling&);
#define FATTN_OPS_CHECK(Problem) void check(const Problem&)
FATTN_OPS_FOR_TRAINING(FATTN_OPS_CHECK);
#undef FATTN_OPS_CHECK

template <class Problem>
int64_t rows_of(const Problem& problem) {
  return problem.rows;
}
inline int64_t rows_of(const NormLinear& problem) { return problem.linear.rows; }

template <class Problem>
std::unique_ptr<const Kernel<Problem>> made(const Problem& problem, const Device& device) {
  check_size("rows", rows_of(problem));
  check(problem);
  switch (device.place) {
    case Place::kReference: return reference::make(problem, device);
    case Place::kCuda: return cuda::make(problem, device);
    case Place::kCpu: break;
  }
  return cpu::make(problem, device);
}

template <class Problem>
Plan<Problem>::Plan(const Problem& problem, const Device& device) : problem_(problem), kernel_(made(problem, device)) {}

template <class Problem>
void Plan<Problem>::execute(const typename Problem::Buffers& buffers, void* workspace, void* stream) const {
  if (buffers.rows < 0 || buffers.rows > rows_of(problem_))
    throw Error(ErrorCode::kInvalidArgument, text("a call has ", buffers.rows, " rows; this plan is for at most ", rows_of(problem_)));
  if (buffers.rows > 0) kernel_->execute(buffers, workspace, stream);
}

}  // namespace fattn::ops
