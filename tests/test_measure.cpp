// Statistics, sampling, memory accounting, inputs and peaks of the measure library.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <ctime>
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
#include "measure/rate_kernels.h"
#include "measure/sampling.h"
#include "measure/statistics.h"
#include "measure/subprocess.h"
#include "measure/traffic.h"
#include "plan/plan.h"

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
TEST(Statistics, SpreadIsThatOfTheMiddleHalf) {
  const Statistics s = summarize({8, 1, 2, 3, 4, 5, 6, 100});
  EXPECT_EQ(s.quartile_low, 3);
  EXPECT_EQ(s.quartile_high, 6);
  EXPECT_DOUBLE_EQ(s.spread(), 3 / 4.5);
  EXPECT_EQ(summarize({7}).spread(), 0);
}

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

TEST(Statistics, WhatARecordKeepsOfATurn) {
  EXPECT_EQ(kept_of_turn({3.25e-3, 1.23456789e-3}), (std::vector<double>{3.25e-3, 1.23457e-3}));
  std::vector<double> many;
  for (int i = 0; i < 160; ++i) many.push_back(1 + (i * 77 % 160));
  EXPECT_EQ(kept_of_turn(many), (std::vector<double>{11, 31, 51, 71, 91, 111, 131, 151}));
  EXPECT_EQ(kept_of_turn(std::vector<double>(9, 2.0)), std::vector<double>(8, 2.0));
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
      samplers, options, [&](size_t i, const std::exception&) { failed = i; }, [](size_t, bool) {});
  EXPECT_EQ(failed, 1u);
  EXPECT_GE(samples[0].seconds.size(), 10u);
  EXPECT_EQ(samples[0].turn_medians, std::vector<double>(5, 0.01));
  EXPECT_EQ(samples[0].turns, std::vector<std::vector<double>>(5, {0.01, 0.01}));
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
  EXPECT_EQ(sample_in_turns(one, options, fail, [](size_t, bool) {})[0].seconds.size(), 100u);
  options.max_samples = 50;
  EXPECT_EQ(sample_in_turns(one, options, fail, [](size_t, bool) {})[0].seconds.size(), 50u);
  options.min_seconds = 0;
  EXPECT_EQ(sample_in_turns(one, options, fail, [](size_t, bool) {})[0].seconds.size(), 5u);
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

TEST(Problem, CostCountsWhatLengthsAndDocumentsLeave) {
  ProblemSpec plain;
  plain.batch = 3, plain.seqlen_q = plain.seqlen_k = 10, plain.nheads = plain.nheads_k = 2, plain.headdim = plain.headdim_v = 8;
  const double pair = 2 * 4 * 8;  // of both heads
  ProblemSpec s = plain;
  s.least_seqused_k = 4;  // 4, 7 and 10
  EXPECT_EQ(cost_of(s, Pass::kForward).flops, pair * 10 * (4 + 7 + 10));
  EXPECT_EQ(cost_of(s, Pass::kForward).flops_nominal, pair * 10 * 30);
  s.causal = true;  // aligned with each one's last key: 4 of 10 queries see any of 4
  EXPECT_EQ(cost_of(s, Pass::kForward).flops, pair * (4 * 5 / 2 + 7 * 8 / 2 + 10 * 11 / 2));
  s = plain;
  s.least_packed = 4;
  EXPECT_EQ(s.rows_before(3), 21);
  EXPECT_EQ(s.q_bytes(), 21 * 2 * 8 * 4);
  EXPECT_EQ(s.lse_bytes(), 21 * 2 * 4);
  EXPECT_EQ(cost_of(s, Pass::kForward).flops, pair * (16 + 49 + 100));
  EXPECT_EQ(cost_of(s, Pass::kBackward).flops_nominal, 2.5 * pair * (16 + 49 + 100));
  s = plain;
  s.documents = 3;  // of 4, 3 and 3 rows
  s.causal = true;
  EXPECT_EQ(cost_of(s, Pass::kForward).flops, pair * 3 * (10 + 6 + 6));
  s = plain;
  s.bias = PairShape::kHeads, s.bias_f32 = true, s.dbias = true, s.mask = PairShape::kKeys, s.dtype = DType::kBF16;
  EXPECT_EQ(cost_of(s, Pass::kForward).flops, pair * 3 * 100);
  EXPECT_EQ(s.bias_bytes(), 2 * 100 * 4);
  EXPECT_EQ(s.input_bytes(false), s.q_bytes() + s.k_bytes() + s.v_bytes() + 2 * 100 * 4 + 3 * 10);
  EXPECT_EQ(s.output_bytes(true) - s.output_bytes(false), s.q_bytes() + s.k_bytes() + s.v_bytes() + s.bias_bytes());
  EXPECT_EQ(cost_of(s, Pass::kForward).bytes - cost_of(plain, Pass::kForward).bytes / 2 - 60 * 4 / 2, 2 * 100 * 4 + 3 * 10);  // lse stays in fp32
}

TEST(Problem, SizesOfTermsThatOverflowAreRefused) {
  ProblemSpec s;
  s.seqlen_q = s.seqlen_k = int64_t{1} << 31, s.nheads = s.nheads_k = 4, s.headdim = s.headdim_v = 1;
  s.mask = PairShape::kHeads;
  EXPECT_EQ(status_of([&] { cost_of(s, Pass::kForward); }), Status::kOutOfMemory);
}

TEST(Problem, IsDescribedWithItsOptions) {
  ProblemSpec s;
  EXPECT_EQ(describe_options(s), "");
  EXPECT_FALSE(s.has_terms());
  s.dtype = DType::kBF16, s.causal = true, s.window_left = 5, s.p_dropout = 0.5, s.alibi = true, s.bias = PairShape::kOne, s.bias_f32 = true;
  s.dbias = true, s.mask = PairShape::kKeys, s.documents = 2;
  EXPECT_TRUE(s.has_terms());
  EXPECT_EQ(describe(s), "B1 S1024 H8 D64 bf16 causal window 5,-1 dropout 0.5 ALiBi bias one in fp32 with gradient mask keys documents 2");
  const auto json = to_json(s);
  EXPECT_EQ(json["bias"], "one");
  EXPECT_EQ(json["bias_dtype"], "fp32");
  EXPECT_EQ(json["mask"], "keys");
  EXPECT_FALSE(json.contains("least_packed"));
}

template <class T>
std::vector<T> numbers_of(const Pages& pages) {
  const auto* data = static_cast<const T*>(pages.data());
  return std::vector<T>(data, data + pages.size() / sizeof(T));
}

TEST(Terms, AreWhatTheProblemSays) {
  ProblemSpec s;
  s.batch = 3, s.seqlen_q = s.seqlen_k = 7, s.nheads = s.nheads_k = 4;
  s.least_seqused_k = 2, s.alibi = true, s.p_dropout = 0.5, s.seed = 9;
  ScorePages pages = make_score_pages(s);
  EXPECT_EQ(numbers_of<int32_t>(pages[kSequsedK]), (std::vector<int32_t>{2, 4, 7}));
  EXPECT_EQ(numbers_of<float>(pages[kAlibiSlopes]), (std::vector<float>{0.25F, 0.0625F, 0.015625F, 0.00390625F}));
  EXPECT_EQ(numbers_of<int64_t>(pages[kDropoutState]), (std::vector<int64_t>{9, 0}));
  EXPECT_EQ(pages[kMask].data(), nullptr);
  const ScoreTensors t = score_views(s, addresses_of(pages));
  EXPECT_TRUE(t.seqused_k && t.alibi_slopes && t.dropout_state);
  EXPECT_FALSE(t.bias || t.mask || t.cu_seqlens_q || t.document_k);

  ProblemSpec packed;
  packed.batch = 3, packed.seqlen_q = packed.seqlen_k = 7, packed.least_packed = 2;
  EXPECT_EQ(numbers_of<int32_t>(make_score_pages(packed)[kCuSeqlens]), (std::vector<int32_t>{0, 2, 6, 13}));
  packed.batch = 1;
  EXPECT_EQ(numbers_of<int32_t>(make_score_pages(packed)[kCuSeqlens]), (std::vector<int32_t>{0, 2}));

  ProblemSpec pairs;
  pairs.batch = 2, pairs.seqlen_q = pairs.seqlen_k = 500, pairs.mask = PairShape::kBatch, pairs.documents = 3, pairs.bias = PairShape::kKeys;
  pages = make_score_pages(pairs);
  const std::vector<uint8_t> mask = numbers_of<uint8_t>(pages[kMask]);
  ASSERT_EQ(mask.size(), 2u * 500 * 500);
  EXPECT_NEAR(static_cast<double>(std::count(mask.begin(), mask.end(), 1)) / 5e5, 0.75, 0.005);
  EXPECT_EQ(std::count(mask.begin(), mask.end(), 0) + std::count(mask.begin(), mask.end(), 1), 500000);
  const std::vector<int32_t> ids = numbers_of<int32_t>(pages[kDocuments]);
  EXPECT_EQ(std::count(ids.begin(), ids.end(), 0), 2 * 167);
  EXPECT_EQ(ids[499], 2);
  EXPECT_EQ(ids[500], 0);
  EXPECT_EQ(numbers_of<float>(pages[kBias]).size(), 1000u);
}

TEST(RateKernels, CopyWhatTheyAreToldAndNoMore) {
  const fattn_cpu_info cpu = cpu_info();
  for (const Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kNeon}) {
    if (!available(cpu, isa)) continue;
    const MemoryKernel kernel = memory_kernel(isa);
    for (const size_t bytes : {kMemoryStep, 3 * kMemoryStep}) {
      alignas(64) char from[4 * kMemoryStep], to[4 * kMemoryStep];
      for (size_t i = 0; i < sizeof from; ++i) from[i] = static_cast<char>(i * 7 + 1), to[i] = 99;
      kernel.copy(to, from, bytes, 2);
      kernel.read(from, bytes, 2);
      EXPECT_EQ(std::memcmp(to, from, bytes), 0) << name_of(isa);
      for (size_t i = bytes; i < sizeof to; ++i) ASSERT_EQ(to[i], 99) << name_of(isa) << " wrote byte " << i << " of " << bytes;
    }
    EXPECT_GT(exp_kernel(isa).per_iteration, 0);
    exp_kernel(isa).run(10);
  }
}

TEST(Traffic, SaysNothingOfWhatItDoesNotCount) {
  ProblemSpec s;
  EXPECT_TRUE(moved_bytes("v2", s, Pass::kForward));
  s.window_left = 3;
  EXPECT_FALSE(moved_bytes("v2", s, Pass::kForward));
  s.window_left = -1, s.alibi = true;
  EXPECT_FALSE(moved_bytes("v2", s, Pass::kForwardBackward));
}

TEST(Traffic, CountsWhatAnAlgorithmMoves) {
  ProblemSpec s;
  s.batch = 2, s.nheads = 4, s.nheads_k = 2, s.seqlen_q = s.seqlen_k = 256, s.headdim = s.headdim_v = 64, s.dtype = DType::kBF16;
  const double row = 64 * 2, heads = 8, matrix = heads * 256 * 256 * 2;
  // Two tiles of 256 x 128 scores: queries twice, keys once.
  EXPECT_EQ(*moved_bytes("standard", s, Pass::kForward), 4 * matrix + heads * 256 * (2 * row + 4) + 4 * 256 * 2 * row + heads * 256 * row);
  // Two blocks of keys: o goes out once and comes in once.
  EXPECT_EQ(*moved_bytes("v1", s, Pass::kForward), heads * (256 * 2 * row + 2 * 256 * row + 2 * 256 * 66 * 4 + 256 * (row + 4)));
  // Two tiles of queries with all keys, or, under a causal mask, the first with half of them.
  EXPECT_EQ(*moved_bytes("v2", s, Pass::kForward), heads * (256 * (2 * row + 4) + 2 * 256 * 2 * row));
  s.causal = true;
  EXPECT_EQ(*moved_bytes("v3", s, Pass::kForward), heads * (256 * (2 * row + 4) + (128 + 256) * 2 * row));
  // v1 reads dq's sums and writes them for three pairs of a tile of 128 keys and 128 queries, v2 adds to them.
  EXPECT_EQ(*moved_bytes("v1", s, Pass::kBackward) - *moved_bytes("v2", s, Pass::kBackward), heads * 3 * 128 * 64 * 4);
  // A plan's own tiles: one of 256 queries reads keys once.
  s.causal = false;
  EXPECT_EQ(*moved_bytes("v3", s, Pass::kForward, {.forward_rows = 256}), heads * (256 * (2 * row + 4) + 256 * 2 * row));
  EXPECT_EQ(*moved_bytes("v3", s, Pass::kBackward, {.backward_keys = 256}),
            *moved_bytes("v3", s, Pass::kBackward) - heads * 256 * (2 * row + 8 + 64 * 4));
  EXPECT_GT(*moved_bytes("standard", s, Pass::kBackward), *moved_bytes("v2", s, Pass::kBackward));
  EXPECT_EQ(*moved_bytes("v1", s, Pass::kForwardBackward), *moved_bytes("v1", s, Pass::kForward) + *moved_bytes("v1", s, Pass::kBackward));
  EXPECT_FALSE(moved_bytes("flash", s, Pass::kForward));
}

// The CPU's models, from what the planner decides and a walk over every task.
core::CpuPlan plan_on_cpu(const ProblemSpec& s, Algorithm algorithm, Isa isa, Pass pass) {
  core::CpuInfo cpu;
  cpu.isas_available = ~0u, cpu.isa_default = isa, cpu.usable_threads = 2;
  Options options;
  options.causal = s.causal, options.cpu_isa = isa, options.algorithm = algorithm;
  const Tensor q = q_view(s, nullptr), k = k_view(s, nullptr), v = v_view(s, nullptr), o = o_view(s, nullptr), lse = lse_view(s, nullptr);
  const auto problem = pass == Pass::kForward ? describe(ForwardTensors{q, k, v, o, lse, {}, {}}, options)
                                              : describe(BackwardTensors{q, k, v, o, lse, o, q, k, v, {}, {}}, options);
  return core::make_plan(core::validate(problem), cpu, [](int) -> const core::CudaDeviceInfo& { throw std::logic_error("no GPU"); }).cpu;
}

double walked_on_cpu(const ProblemSpec& s, Isa isa, Pass pass) {
  const core::CpuPlan plan = plan_on_cpu(s, Algorithm::kV2, isa, pass);
  const int64_t element = static_cast<int64_t>(size_of(s.dtype)), d = s.headdim * element, dv = s.headdim_v * element;
  const int64_t shift = s.seqlen_k - s.seqlen_q, heads = s.batch * s.nheads, heads_k = s.batch * s.nheads_k;
  const auto seen = [&](int64_t row) { return s.causal ? std::clamp<int64_t>(row + 1 + shift, 0, s.seqlen_k) : s.seqlen_k; };
  int64_t bytes = 0;
  switch (plan.path) {
    case core::CpuPlan::Path::kForward:
      for (int64_t row = 0; row < s.seqlen_q; row += plan.rows) {
        const int64_t end = std::min(row + plan.rows, s.seqlen_q);
        bytes += heads * ((end - row) * (d + dv + 4) + seen(end - 1) * (d + dv));
      }
      break;
    case core::CpuPlan::Path::kDecode:
      EXPECT_EQ(plan.rows, s.nheads / s.nheads_k * s.seqlen_q);
      bytes = heads_k * (s.seqlen_k * (d + dv) + plan.rows * (plan.splits * (d + 2 * 4 * (s.headdim_v + 2)) + dv + 4));
      break;
    case core::CpuPlan::Path::kBackward: {
      const int64_t tile = isa == Isa::kAmx && s.dtype == DType::kBF16 ? 128 : plan.rows;
      for (int64_t key = 0; key < s.seqlen_k; key += plan.task_k)
        for (int64_t row = 0; row < s.seqlen_q; row += tile) {
          const int64_t end = std::min(row + tile, s.seqlen_q);
          if (seen(end - 1) > key) bytes += heads * (end - row) * (d + dv + 8 + 2 * 4 * s.headdim);
        }
      bytes += heads_k * s.seqlen_k * 2 * (d + dv);
      bytes += heads * s.seqlen_q * (2 * dv + 4 + 4 * s.headdim);                     // delta, and zeros for dq
      if (s.dtype != DType::kF32) bytes += heads * s.seqlen_q * (4 * s.headdim + d);  // dq rounded
      break;
    }
  }
  return static_cast<double>(bytes);
}

// Algorithm v1, block by block.
double walked_by_v1(const ProblemSpec& s, Isa isa, Pass pass) {
  const core::CpuPlan plan = plan_on_cpu(s, Algorithm::kV1, isa, pass);
  const int64_t element = static_cast<int64_t>(size_of(s.dtype)), d = s.headdim * element, dv = s.headdim_v * element;
  const int64_t width = pass == Pass::kForward ? s.headdim_v : s.headdim, sums = 4 * width,
                rounded = s.dtype == DType::kF32 ? 0 : width * (4 + element);
  int64_t bytes = 0;
  for (int64_t head = 0; head < s.batch * (pass == Pass::kForward ? s.nheads : s.nheads_k); ++head) {
    const int64_t group = pass == Pass::kForward ? 1 : s.nheads / s.nheads_k;
    bytes += group * s.seqlen_q * (sums + (pass == Pass::kForward ? 8 : 0));  // o, m and l, or dq, set
    for (int64_t key = 0; key < s.seqlen_k; key += plan.block_k) {
      bytes += (std::min(s.seqlen_k, key + plan.block_k) - key) * (d + dv) * (pass == Pass::kForward ? 1 : 2);
      for (int64_t row = 0; row < s.seqlen_q; row += plan.rows) {
        const int64_t end = std::min(row + plan.rows, s.seqlen_q);
        if (s.causal && end - 1 + s.seqlen_k - s.seqlen_q < key) continue;
        const int64_t read = pass == Pass::kForward ? d + sums + 8 : d + dv + dv + 4 + sums, written = pass == Pass::kForward ? sums + 8 : sums;
        bytes += group * (end - row) * (read + written);
      }
    }
    bytes += group * s.seqlen_q * (rounded + (pass == Pass::kForward ? 12 : 0));  // m and l read, lse written
  }
  return static_cast<double>(bytes);
}

TEST(Traffic, OfTheCpuIsThatOfThePlan) {
  ProblemSpec plain, grouped, wide, decode, small, longer;
  grouped.batch = 3, grouped.nheads = 6, grouped.nheads_k = 2, grouped.seqlen_q = 700, grouped.seqlen_k = 1500, grouped.causal = true;
  wide.headdim = 192, wide.headdim_v = 128, wide.seqlen_q = 2500, wide.seqlen_k = 900, wide.causal = true;
  decode.seqlen_q = 3, decode.seqlen_k = 9000, decode.nheads = 8, decode.nheads_k = 2, decode.batch = 2, decode.causal = true;
  small.seqlen_q = small.seqlen_k = 9, small.nheads = small.nheads_k = 1;
  longer.batch = 2, longer.seqlen_q = longer.seqlen_k = 4096, longer.causal = true;
  for (ProblemSpec s : {plain, grouped, wide, decode, small, longer})
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16})
      for (const Isa isa : {Isa::kScalar, Isa::kAvx512, Isa::kAmx}) {
#ifndef __x86_64__
        if (isa != Isa::kScalar) continue;
#endif
        s.dtype = dtype;
        for (const Pass pass : {Pass::kForward, Pass::kBackward})
          EXPECT_EQ(*moved_bytes_cpu("v2", isa, s, pass), walked_on_cpu(s, isa, pass)) << describe(s) << " " << name_of(isa) << " " << name_of(pass);
        EXPECT_EQ(*moved_bytes_cpu("v2", isa, s, Pass::kForwardBackward),
                  walked_on_cpu(s, isa, Pass::kForward) + walked_on_cpu(s, isa, Pass::kBackward));
        for (const Pass pass : {Pass::kForward, Pass::kBackward})
          EXPECT_EQ(*moved_bytes_cpu("v1", isa, s, pass), walked_by_v1(s, isa, pass)) << describe(s) << " " << name_of(isa) << " " << name_of(pass);
        EXPECT_EQ(*moved_bytes_cpu("v1", isa, s, Pass::kForwardBackward),
                  walked_by_v1(s, isa, Pass::kForward) + walked_by_v1(s, isa, Pass::kBackward));
        EXPECT_GE(*moved_bytes_cpu("v2", isa, s, Pass::kForward), cost_of(s, Pass::kForward).bytes) << "less than every number once";
      }
  EXPECT_FALSE(moved_bytes_cpu("standard", Isa::kAvx512, plain, Pass::kForward));
  ProblemSpec endless;  // of so many blocks that some stand for others
  endless.batch = endless.nheads = endless.nheads_k = 1, endless.seqlen_q = (int64_t{1} << 30) + 77, endless.seqlen_k = endless.seqlen_q + 5000;
  for (const auto& [causal, seqlen_k] : {std::pair(false, endless.seqlen_k), {true, endless.seqlen_k}, {true, int64_t{1000}}}) {
    endless.causal = causal;
    endless.seqlen_k = seqlen_k;
    EXPECT_NEAR(*moved_bytes_cpu("v2", Isa::kScalar, endless, Pass::kForward) / walked_on_cpu(endless, Isa::kScalar, Pass::kForward), 1, 1e-6);
  }
  endless.seqlen_q = endless.seqlen_k = int64_t{1} << 46;
  EXPECT_GT(*moved_bytes_cpu("v1", Isa::kScalar, endless, Pass::kForwardBackward), 0);  // at once
  ProblemSpec other = plain;
  other.window_left = 3;
  EXPECT_FALSE(moved_bytes_cpu("v2", Isa::kAvx512, other, Pass::kForward));
  other = plain, other.dtype = DType::kF64;
  EXPECT_FALSE(moved_bytes_cpu("v2", Isa::kScalar, other, Pass::kForward));
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

TEST(Peaks, AreMeasuredBriefly) {
  const auto processor_time = [](PeakPains pains) {
    const std::clock_t begin = std::clock();
    EXPECT_GT(measure_peaks(Isa::kAuto, 1, pains).fma.rate, 1e8);
    EXPECT_GT(measure_read_bandwidth(1, pains), 1e8);
    return std::clock() - begin;
  };
  const std::clock_t usual = processor_time(PeakPains::kUsual);
  EXPECT_LT(processor_time(PeakPains::kBrief), usual / 2);
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
