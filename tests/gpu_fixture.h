// The fixture of tests that need a GPU.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "fattn/device.hpp"

namespace fattn::test {

// Without a GPU every test is skipped.
class CudaGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string reason;
    if (cuda::count(&reason) == 0) GTEST_SKIP() << reason;
  }
};

}  // namespace fattn::test
