// How fast cuBLASLt multiplies matrices of bf16 on a GPU: what records of training are divided by, so that those of different machines compare.
//   time_matmul [N]      FLOP/s of N^3 (8192), the median of batches, as a line of JSON
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <vector>

#include "fattn/device.hpp"
#include "ops/training.h"

namespace {

using namespace fattn;

double flops_per_second(int64_t n) {
  const ops::Product product{n, n, n, false, false, DType::kBF16, DType::kBF16, DType::kBF16};
  const ops::Plan<ops::Product> plan(product, {.place = ops::Place::kCuda});
  const auto count = static_cast<size_t>(n * n);
  // Random numbers in (-1, 1): zeros would take less power, and be faster.
  std::vector<uint16_t> numbers(count);
  uint32_t state = 1;
  for (uint16_t& x : numbers) {
    state = state * 1664525 + 1013904223;
    x = static_cast<uint16_t>((state >> 16 & 0x807f) | (0x3e00 + (state >> 24 & 0x100)));
  }
  cuda::Buffer a(0, 2 * count), b(0, 2 * count), c(0, 2 * count), workspace(0, plan.workspace_bytes());
  a.copy_from(numbers.data(), 2 * count);
  b.copy_from(numbers.data(), 2 * count);
  const cuda::Stream stream(0);
  const auto run = [&](int times) {
    for (int i = 0; i < times; ++i) plan.execute({n, a.get(), b.get(), nullptr, nullptr, c.get()}, workspace.get(), stream.get());
  };
  run(20);
  constexpr int kBatches = 15, kTimes = 20;
  std::vector<double> seconds;
  cuda::Event begin(0), end(0);
  for (int i = 0; i < kBatches; ++i) {
    begin.record(stream.get());
    run(kTimes);
    end.record(stream.get());
    seconds.push_back(begin.seconds_to(end) / kTimes);
  }
  std::nth_element(seconds.begin(), seconds.begin() + kBatches / 2, seconds.end());
  return 2 * std::pow(static_cast<double>(n), 3) / seconds[kBatches / 2];
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t n = argc > 1 ? std::atoll(argv[1]) : 8192;
  if (n < 8 || n > 65536) {
    std::fprintf(stderr, "N is %lld; allowed: 8 to 65536\n", static_cast<long long>(n));
    return 2;
  }
  try {
    std::printf("{\"n\": %lld, \"flops_per_s\": %.6g}\n", static_cast<long long>(n), flops_per_second(n));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "time_matmul: %s\n", error.what());
    return 1;
  }
  return 0;
}
