// Statistics, sampling, memory accounting, inputs and peaks of the measure library.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <vector>

#include "fattn/system.hpp"
#include "measure/convert.h"
#include "measure/failure.h"
#include "measure/memory.h"
#include "measure/peak_kernels.h"
#include "measure/peaks.h"
#include "measure/problem.h"
#include "measure/sampling.h"
#include "measure/statistics.h"
#include "measure/subprocess.h"
#include "measure/traffic.h"

namespace fattn::measure {
namespace {

template <typename Body>
Status status_of(const Body& body) {
  try {
    body();
  } catch (const Failure& failure) {
    return failure.status();
  }
  return Status::kOk;
}

TEST(Statistics, OfKnownSamples) {
  const Statistics s = summarize({4, 1, 3, 2});
  EXPECT_EQ(s.samples, 4u);
  EXPECT_EQ(s.min, 1);
  EXPECT_EQ(s.max, 4);
  EXPECT_EQ(s.median, 2.5);
  EXPECT_DOUBLE_EQ(s.mean, 2.5);
  EXPECT_NEAR(s.stddev, std::sqrt(5.0 / 3.0), 1e-15);
  EXPECT_EQ(summarize({7}).stddev, 0);
}

// Ranks from published tables of the 95 % interval of a median: n = 10: 2nd to 9th; n = 20: 6th to 15th; n = 100: 40th to 61st.
TEST(Statistics, IntervalOfTheMedianMatchesTables) {
  struct {
    int n, low, high;
  } const table[] = {{5, 1, 5}, {6, 1, 6}, {8, 1, 8}, {9, 2, 8}, {10, 2, 9}, {20, 6, 15}, {100, 40, 61}};
  for (const auto& row : table) {
    std::vector<double> samples;
    for (int i = row.n; i >= 1; --i) samples.push_back(i);
    const Statistics s = summarize(samples);
    EXPECT_EQ(s.ci_low, row.low) << "n = " << row.n;
    EXPECT_EQ(s.ci_high, row.high) << "n = " << row.n;
    if (row.n >= 6) {
      EXPECT_GE(s.ci_level, 0.95) << "n = " << row.n;
    }
  }
  EXPECT_NEAR(summarize({1, 2, 3, 4, 5}).ci_level, 1 - 2.0 / 32, 1e-12);
  EXPECT_EQ(summarize({1}).ci_level, 0);
}

TEST(Statistics, ManySamplesDoNotUnderflow) {
  std::vector<double> samples;
  for (int i = 0; i < 5000; ++i) samples.push_back(i + 1);
  const Statistics s = summarize(samples);
  // Normal approximation: 2500 -+ 1.96 * sqrt(5000) / 2.
  EXPECT_NEAR(s.ci_low, 2431, 2);
  EXPECT_NEAR(s.ci_high, 2570, 2);
}

TEST(Statistics, RefusesWhatIsNoSample) {
  EXPECT_THROW(summarize({}), std::invalid_argument);
  EXPECT_THROW(summarize({1, std::nan("")}), std::invalid_argument);
  EXPECT_THROW(summarize({std::numeric_limits<double>::infinity()}), std::invalid_argument);
}

TEST(Statistics, UndecidedWhereIntervalsOverlap) {
  Statistics a, b;
  a.ci_low = 1, a.ci_high = 2, b.ci_low = 1.5, b.ci_high = 3;
  EXPECT_TRUE(undecided(a, b));
  EXPECT_TRUE(undecided(b, a));
  b.ci_low = 2.1;
  EXPECT_FALSE(undecided(a, b));
  EXPECT_FALSE(undecided(b, a));
}

TEST(Sampling, TakesTurnsAndEndsOnlyTheOneThatFails) {
  std::vector<int> order;
  int calls = 0;
  const std::vector<Sampler> samplers = {[&](int samples, int) {
                                           order.push_back(0);
                                           return std::vector<double>(static_cast<size_t>(samples), 0.01);
                                         },
                                         [&](int samples, int) -> std::vector<double> {
                                           if (++calls > 3) throw std::runtime_error("died");
                                           return std::vector<double>(static_cast<size_t>(samples), 0.02);
                                         },
                                         [&](int samples, int) {
                                           order.push_back(2);
                                           return std::vector<double>(static_cast<size_t>(samples), 0.03);
                                         }};
  SamplingOptions options;
  options.repeats = 10;
  options.min_seconds = 0;
  options.warmup = 0;
  size_t failed = 99;
  const auto samples = sample_in_turns(
      samplers, options, [&](size_t i, const std::exception&) { failed = i; }, [] {});
  EXPECT_EQ(failed, 1u);
  EXPECT_GE(samples[0].seconds.size(), 10u);
  EXPECT_EQ(samples[0].turn_medians, std::vector<double>(5, 0.01));
  EXPECT_TRUE(samples[1].seconds.empty() && samples[1].turn_medians.empty());
  EXPECT_GE(samples[2].seconds.size(), 10u);
  // After the warm-up of each: 0 2 0 2 ...
  for (size_t i = 0; i < order.size(); ++i) EXPECT_EQ(order[i], i % 2 == 0 ? 0 : 2);
}

TEST(Sampling, MeetsBothStopRules) {
  const std::vector<Sampler> one = {[](int samples, int) { return std::vector<double>(static_cast<size_t>(samples), 1e-3); }};
  SamplingOptions options;
  options.repeats = 5;
  options.min_seconds = 0.1;
  const auto fail = [](size_t, const std::exception&) { ADD_FAILURE(); };
  EXPECT_EQ(sample_in_turns(one, options, fail, [] {})[0].seconds.size(), 100u);
  options.max_samples = 50;
  EXPECT_EQ(sample_in_turns(one, options, fail, [] {})[0].seconds.size(), 50u);
  options.min_seconds = 0;
  EXPECT_EQ(sample_in_turns(one, options, fail, [] {})[0].seconds.size(), 5u);
}

TEST(Sampling, RepeatsShortCallsInsideOneSample) {
  int calls = 0;
  // Calls of nanoseconds each; a few tries, because a thread that is interrupted just then seems to take long.
  for (int tries = 0; tries < 20 && calls <= 100; ++tries) {
    calls = 0;
    const std::vector<double> seconds = time_calls([&] { ++calls; }, 4, 2);
    EXPECT_EQ(seconds.size(), 4u);
    for (double s : seconds) EXPECT_LT(s, kMinSampleSeconds);
  }
  EXPECT_GT(calls, 100);
}

TEST(Memory, RefusesBySizeBeforeAllocating) {
  EXPECT_EQ(status_of([] { require_memory(int64_t{1} << 60, 0, "x"); }), Status::kOutOfMemory);
  EXPECT_EQ(status_of([] { require_memory(2000, 1000, "x"); }), Status::kOutOfMemory);
  EXPECT_EQ(status_of([] { require_memory(1000, 1000, "x"); }), Status::kOk);
  ProblemSpec s;
  s.batch = s.seqlen_q = int64_t{1} << 40;
  EXPECT_EQ(status_of([&] { s.q_bytes(); }), Status::kOutOfMemory);
}

TEST(Memory, ResidentPeakSeesWhatIsTouched) {
  const ResidentPeak peak;
  if (!peak.measurable()) GTEST_SKIP() << "the kernel does not let this process reset its mark";
  constexpr size_t kBytes = 64 << 20;
  {
    const Pages pages(kBytes);
    std::memset(pages.data(), 1, kBytes / 2);
  }
  EXPECT_NEAR(static_cast<double>(peak.bytes_added()), kBytes / 2, 4 << 20);
  EXPECT_LT(ResidentPeak().bytes_added(), 4 << 20);
}

TEST(Memory, SharedPagesAreSeenUnderTheirDescriptor) {
  const Pages pages(4096, Pages::Kind::kShared);
  ASSERT_GE(pages.descriptor(), 0);
  std::memset(pages.data(), 42, 4096);
  Pages other;
  EXPECT_EQ(other.data(), nullptr);
  EXPECT_EQ(pages.size(), 4096u);
}

TEST(Inputs, RoundLikeTheLibrary) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const double value = from_fp16(half);
    if (!std::isnan(value)) {
      EXPECT_EQ(to_fp16(static_cast<float>(value)), half);
    }
    const double wide = from_bf16(half);
    if (!std::isnan(wide)) {
      EXPECT_EQ(to_bf16(static_cast<float>(wide)), half);
    }
  }
  // Ties to even, the step to infinity, and subnormals.
  EXPECT_EQ(to_fp16(1.0F + 0x1p-11F), 0x3C00);
  EXPECT_EQ(to_fp16(1.0F + 3 * 0x1p-11F), 0x3C02);
  EXPECT_EQ(to_fp16(65519.0F), 0x7BFF);
  EXPECT_EQ(to_fp16(65520.0F), 0x7C00);
  EXPECT_EQ(to_fp16(0x1p-25F), 0);
  EXPECT_EQ(to_fp16(3 * 0x1p-25F), 2);
  EXPECT_EQ(to_bf16(1.0F + 0x1p-8F), 0x3F80);
}

TEST(Inputs, AreNormalAndTheSameForTheSameSeed) {
  constexpr int64_t kCount = 300001;
  std::vector<float> a(kCount), b(kCount), c(kCount);
  fill_normal(a.data(), DType::kF32, kCount, 7, 0);
  fill_normal(b.data(), DType::kF32, kCount, 7, 0);
  fill_normal(c.data(), DType::kF32, kCount, 7, 1);
  EXPECT_EQ(a, b);
  EXPECT_NE(a, c);
  double mean = 0, square = 0, product = 0;
  for (int64_t i = 0; i < kCount; ++i) {
    const size_t at = static_cast<size_t>(i);
    mean += static_cast<double>(a[at]) / kCount;
    square += static_cast<double>(a[at]) * static_cast<double>(a[at]) / kCount;
    product += static_cast<double>(a[at]) * static_cast<double>(c[at]) / kCount;
  }
  EXPECT_NEAR(mean, 0, 0.01);
  EXPECT_NEAR(square, 1, 0.01);
  EXPECT_NEAR(product, 0, 0.01);
}

TEST(Inputs, NanIsNoSmallDifference) {
  const float numbers[2] = {1, 2}, nans[2] = {1, std::nanf("")};
  EXPECT_EQ(max_difference(numbers, numbers, DType::kF32, 2), 0);
  EXPECT_TRUE(std::isinf(max_difference(numbers, nans, DType::kF32, 2)));
  EXPECT_FALSE(all_finite(nans, DType::kF32, 2));
}

TEST(Problem, CostCountsVisiblePairs) {
  ProblemSpec s;
  s.batch = 2, s.seqlen_q = s.seqlen_k = 4, s.nheads = s.nheads_k = 3, s.headdim = s.headdim_v = 8;
  EXPECT_EQ(cost_of(s, Pass::kForward).flops, 2 * 3 * 16 * 4 * 8);
  s.causal = true;
  EXPECT_EQ(cost_of(s, Pass::kForward).flops, 2 * 3 * 10 * 4 * 8);
  EXPECT_EQ(cost_of(s, Pass::kForward).flops_nominal, 2 * 3 * 8 * 4 * 8);
  EXPECT_EQ(cost_of(s, Pass::kBackward).flops, 2.5 * 2 * 3 * 10 * 4 * 8);
  EXPECT_EQ(cost_of(s, Pass::kForwardBackward).flops, 3.5 * 2 * 3 * 10 * 4 * 8);
}

TEST(Traffic, CountsWhatAnAlgorithmMoves) {
  ProblemSpec s;
  s.batch = 2, s.nheads = 4, s.nheads_k = 2, s.seqlen_q = s.seqlen_k = 256, s.headdim = s.headdim_v = 64, s.dtype = DType::kBF16;
  const double row = 64 * 2, heads = 8, matrix = heads * 256 * 256 * 2;
  EXPECT_EQ(*moved_bytes("standard", s, Pass::kForward), 4 * matrix + heads * 256 * (2 * row + 4) + 4 * 256 * 2 * row);
  // Two blocks of keys: o goes out once and comes in once.
  EXPECT_EQ(*moved_bytes("v1", s, Pass::kForward), heads * (256 * 2 * row + 2 * 256 * row + 2 * 256 * 66 * 4 + 256 * (row + 4)));
  // Two tiles of queries with all keys, or, under a causal mask, the first with half of them.
  EXPECT_EQ(*moved_bytes("v2", s, Pass::kForward), heads * (256 * (2 * row + 4) + 2 * 256 * 2 * row));
  s.causal = true;
  EXPECT_EQ(*moved_bytes("v3", s, Pass::kForward), heads * (256 * (2 * row + 4) + (128 + 256) * 2 * row));
  EXPECT_EQ(*moved_bytes("v1", s, Pass::kBackward), *moved_bytes("v2", s, Pass::kBackward));
  EXPECT_GT(*moved_bytes("standard", s, Pass::kBackward), *moved_bytes("v2", s, Pass::kBackward));
  EXPECT_EQ(*moved_bytes("v1", s, Pass::kForwardBackward), *moved_bytes("v1", s, Pass::kForward) + *moved_bytes("v1", s, Pass::kBackward));
  EXPECT_FALSE(moved_bytes("flash", s, Pass::kForward));
}

TEST(Peaks, AreMeasuredForEveryInstructionSetHere) {
  const fattn_cpu_info cpu = cpu_info();
  for (Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16, Isa::kAmx, Isa::kNeon}) {
    if (!available(cpu, isa)) continue;
    const Peaks peaks = measure_peaks(isa, 1);
    EXPECT_GT(peaks.fma.rate, 1e8) << name_of(isa);
    EXPECT_LT(peaks.fma.rate, 2e12) << name_of(isa);
    EXPECT_EQ(static_cast<bool>(bf16_kernel(isa)), peaks.bf16.rate > 0) << name_of(isa);
    EXPECT_GE(peaks.ceiling(DType::kBF16), peaks.of(DType::kBF16).rate);
  }
}

TEST(PeaksSmall, OfFp32OnADeviceAreThatOfSplitProductsWhereItIsHigher) {
  Peaks peaks;
  peaks.device = "cuda:0";
  peaks.fma = {"fp32 FMA", 60e12};
  peaks.bf16 = {"matrix", 900e12};
  peaks.split = {"three of matrix", 300e12};
  EXPECT_EQ(peaks.of(DType::kF32).rate, 300e12);
  EXPECT_EQ(peaks.ceiling(DType::kF32), 300e12);
  EXPECT_EQ(peaks.of(DType::kBF16).rate, 900e12);
  peaks.split.rate = 40e12;
  EXPECT_EQ(peaks.of(DType::kF32).rate, 60e12);
  EXPECT_EQ(peaks.ceiling(DType::kF32), 60e12);
}

TEST(Subprocess, AnswersDiesAndHangs) {
  Subprocess echo({"cat"});
  EXPECT_EQ(echo.ask("one", 30), "one");
  EXPECT_EQ(echo.ask("two", 30), "two");

  EXPECT_EQ(status_of([] { Subprocess missing({"/nonexistent/program"}); }), Status::kUnavailable);

  Subprocess dies({"sh", "-c", "echo why >&2; exit 7"});
  try {
    dies.ask("hello", 30);
    FAIL() << "a dead process answered";
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.status(), Status::kFailed);
    EXPECT_NE(std::string(failure.what()).find("exit code 7"), std::string::npos) << failure.what();
    EXPECT_NE(std::string(failure.what()).find("why"), std::string::npos) << failure.what();
  }
  EXPECT_FALSE(dies.running());

  Subprocess hangs({"sleep", "600"});
  EXPECT_EQ(status_of([&] { hangs.ask("hello", 0.2); }), Status::kTimeout);
  EXPECT_FALSE(hangs.running());
}

}  // namespace
}  // namespace fattn::measure
