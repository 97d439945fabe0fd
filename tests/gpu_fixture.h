// The fixtures of tests that need a GPU, and that a problem is taken.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "fattn/device.hpp"
#include "fattn/problem.hpp"

namespace fattn::test {

// Without a GPU every test is skipped.
class CudaGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string reason;
    if (cuda::count(&reason) == 0) GTEST_SKIP() << reason;
  }
};

// Whether algorithm v3 is to compute here what it has kernels for.
inline bool has_v3(const fattn_cuda_info& gpu) { return gpu.capability_major == 9 && gpu.capability_minor == 0; }

// Of algorithm v3, which is Hopper's alone: skipped on another GPU, too. On Hopper what v3 refuses is a failure of the test: see taken().
class HopperGpu : public CudaGpu {
 protected:
  void SetUp() override {
    CudaGpu::SetUp();
    if (IsSkipped()) return;
    const fattn_cuda_info gpu = cuda::info(0);
    if (!has_v3(gpu))
      GTEST_SKIP() << gpu.name << " has compute capability " << gpu.capability_major << "." << gpu.capability_minor << ", algorithm v3 needs 9.0";
  }
};

// For ASSERT_TRUE: whether the planner takes the problem; if not, its reason.
inline ::testing::AssertionResult taken(const fattn_problem& problem) {
  const Support support = supported(problem);
  return support ? ::testing::AssertionSuccess() : ::testing::AssertionFailure() << support.reason;
}

}  // namespace fattn::test
