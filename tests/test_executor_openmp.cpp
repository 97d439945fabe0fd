// Calls from inside of OpenMP parallel regions. Built with -fopenmp where the compiler has it.
#include <gtest/gtest.h>

#include <atomic>
#include <vector>

#include "cpu/executor.h"

namespace fattn::core {
namespace {

#ifdef _OPENMP
TEST(ExecutorOpenMP, EveryThreadOfARegionMayCall) {
  std::atomic<int> errors{0}, calls{0};
#pragma omp parallel num_threads(4)
  for (int call = 0; call < 200; ++call) {
    std::atomic<unsigned> ran{0};
    run_workers(std::nullopt, 6, [&](int worker) { ran.fetch_xor(1u << worker); });
    if (ran.load() != 63) errors.fetch_add(1);
    calls.fetch_add(1);
  }
  EXPECT_EQ(errors.load(), 0);
  EXPECT_EQ(calls.load() % 200, 0);
  EXPECT_GT(calls.load(), 200) << "one thread only: the region tests nothing";
}

TEST(ExecutorOpenMP, ABodyMayOpenARegion) {
  std::atomic<int> total{0};
  run_workers(std::nullopt, 4, [&](int) {
#pragma omp parallel for num_threads(2)
    for (int i = 0; i < 100; ++i) total.fetch_add(1);
  });
  EXPECT_EQ(total.load(), 400);
}

TEST(ExecutorOpenMP, RegionsAndCallsInTurn) {
  std::vector<double> x(4096, 1.0);
  for (int round = 0; round < 200; ++round) {
    std::atomic<int> ran{0};
#pragma omp parallel for num_threads(2)
    for (int i = 0; i < 4096; ++i) x[static_cast<size_t>(i)] *= 1.001;
    run_workers(std::nullopt, 3, [&](int) { ran.fetch_add(1); });
    ASSERT_EQ(ran.load(), 3);
  }
}
#else
TEST(ExecutorOpenMP, EveryThreadOfARegionMayCall) { GTEST_SKIP() << "this compiler was given no OpenMP"; }
#endif

}  // namespace
}  // namespace fattn::core
