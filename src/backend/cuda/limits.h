// Limits that all CUDA kernels share, and which addresses and strides their copies take.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "problem/problem.h"

namespace fattn::core::cuda {

inline constexpr int64_t kReservedSharedBytes = 1024;    // of each CTA, by the system
inline constexpr int64_t kMaxSeqlen = int64_t{1} << 30;  // rows and keys are counted in 32 bits, with room for a tile
inline constexpr int64_t kMaxGrid = std::numeric_limits<int32_t>::max();

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Lengths that are too great for a window; empty: they are not.
std::string window_refusal(const Problem& problem);

// Whether 16-byte copies can take rows with these strides. A stride along a dimension of one element is never used.
bool aligned(const Strides& strides, int64_t batch, int64_t rows, int64_t heads, DType dtype);
// The same of pages that follow each other; true without a paged cache.
bool pages_aligned(const Problem& problem);
constexpr int64_t copied_at_once(DType dtype) { return dtype == DType::kF32 ? 4 : 8; }  // elements of 16 bytes
inline bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

}  // namespace fattn::core::cuda
