// Loops that do one thing whose rate is wanted: exponentials, and reads and copies of memory, with the registers of an instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fattn/types.hpp"

namespace fattn::measure {

// Exponentials by the arithmetic of the library's kernels (a polynomial of degree 5, and one addition, as in a softmax).
struct ExpKernel {
  double per_iteration = 0;
  void (*run)(int64_t iterations) = nullptr;
};
ExpKernel exp_kernel(Isa isa);

// `bytes`: a multiple of kMemoryStep. Both go through the memory `rounds` times. Stores are ordinary ones: before a line is written to, most
// processors read it, which is not counted.
constexpr size_t kMemoryStep = 512;
struct MemoryKernel {
  void (*read)(const void* from, size_t bytes, int64_t rounds) = nullptr;
  void (*copy)(void* to, const void* from, size_t bytes, int64_t rounds) = nullptr;
};
MemoryKernel memory_kernel(Isa isa);

}  // namespace fattn::measure
