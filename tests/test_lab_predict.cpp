// Predictions: what a plan says is read, work is counted as the library counts it, constants are found again, memory is right to the byte, scores
// are.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <random>

#include "fattn/system.hpp"
#include "lab/call_timer.h"
#include "lab/fit.h"
#include "lab/held_out.h"
#include "lab/predict.h"
#include "lab/prediction_score.h"
#include "lab/shapes.h"
#include "measure/environment.h"

namespace fattn::lab {
namespace {

using Json = nlohmann::ordered_json;
using measure::Pass;
using measure::ProblemSpec;

ProblemSpec spec_of(int64_t batch, int64_t seqlen_q, int64_t seqlen_k, int64_t nheads, int64_t nheads_k, int64_t headdim, bool causal,
                    DType dtype = DType::kF32) {
  ProblemSpec s;
  s.batch = batch, s.seqlen_q = seqlen_q, s.seqlen_k = seqlen_k, s.nheads = nheads, s.nheads_k = nheads_k;
  s.headdim = s.headdim_v = headdim, s.causal = causal, s.dtype = dtype;
  return s;
}

TEST(PlanShape, ReadsWhatPlansOfTheCpuSay) {
  const PlanShape forward = plan_shape(spec_of(2, 300, 300, 16, 16, 64, true), Pass::kForward, {}, {});
  EXPECT_EQ(forward.path, PlanShape::Path::kForward);
  EXPECT_EQ(forward.rows % 64, 0);
  EXPECT_GT(forward.rows, 0);
  EXPECT_GT(forward.keys, 0);
  const PlanShape decode = plan_shape(spec_of(2, 2, 5000, 8, 2, 64, false), Pass::kForward, {}, {});
  EXPECT_EQ(decode.path, PlanShape::Path::kDecode);
  EXPECT_EQ(decode.rows, 2 * 8 / 2);
  EXPECT_GE(decode.splits * decode.task_keys, 5000);
  EXPECT_LT((decode.splits - 1) * decode.task_keys, 5000);
  EXPECT_GE(decode.heads, 1);
  const PlanShape backward = plan_shape(spec_of(1, 2000, 2000, 2, 2, 64, false), Pass::kBackward, {}, {});
  EXPECT_EQ(backward.path, PlanShape::Path::kBackward);
  EXPECT_GT(backward.task_keys, backward.keys);
  EXPECT_GE(backward.splits * backward.task_keys, 2000);
}

TEST(PlanShape, ReadsWhatPlansOfAGpuSay) {
  PlanShape s;
  read_shape("tiles of 128 queries x 176 keys, 2 warpgroups, 2 + 2 stages, 214016 bytes of shared memory, grid 132", s);
  EXPECT_EQ(s.rows, 128);
  EXPECT_EQ(s.keys, 176);
  EXPECT_EQ(s.shared_bytes, 214016);
  EXPECT_EQ(s.grid, 132);
  PlanShape decode;
  read_shape(
      "8 rows of a key head in tiles of 16, 4 teams of 1 warp with steps of 32 keys and 3 stages, keys in 7 splits, 90112 bytes of shared memory, "
      "grid 56",
      decode);
  EXPECT_EQ(decode.rows, 8);
  EXPECT_EQ(decode.splits, 7);
  EXPECT_FALSE(decode.shared);
  EXPECT_EQ(decode.warps, 4);
  EXPECT_EQ(decode.grid, 56);
  read_shape("steps of 16 keys and 3 stages, keys of all sequences in 33 splits by their lengths, 102464 bytes of shared memory, grid 264", decode);
  EXPECT_EQ(decode.splits, 33);
  EXPECT_TRUE(decode.shared);
}

TEST(KernelWorkSmall, SeesTheKeysThatTheLibraryCounts) {
  for (const auto& [left, right, causal] : {std::tuple{-1, -1, false}, {-1, -1, true}, {17, 0, false}, {5, 9, false}, {40, -1, true}, {-1, 3, false}})
    for (const auto& [q, k] : {std::pair{50, 50}, {13, 90}, {90, 13}}) {
      ProblemSpec s = spec_of(1, q, k, 1, 1, 32, causal);
      s.window_left = left, s.window_right = right;
      double pairs = 0;
      for (int64_t row = 0; row < q; ++row) pairs += static_cast<double>(keys_seen(s, row).count());
      EXPECT_EQ(pairs * 2 * 64, measure::cost_of(s, Pass::kForward).flops) << q << " " << k << " " << left << " " << right;
    }
}

double count_of(const Work& work, const std::string& name) {
  for (const Amount& a : work.amounts)
    if (a.name == name) return a.count;
  ADD_FAILURE() << "no " << name;
  return 0;
}

// Products follow the pairs that a mask leaves, in whole tiles; on processors and GPUs, in both passes.
TEST(KernelWorkSmall, MasksCostWhatTheyLeave) {
  const int64_t n = 4096;
  const ProblemSpec whole = spec_of(2, n, n, 4, 2, 64, false, DType::kBF16), causal = spec_of(2, n, n, 4, 2, 64, true, DType::kBF16);
  ProblemSpec window = whole;
  window.window_left = 255, window.window_right = 0;
  for (const bool cuda : {false, true})
    for (const auto path : {PlanShape::Path::kForward, PlanShape::Path::kBackward}) {
      PlanShape shape;
      shape.backend = cuda ? Backend::kCuda : Backend::kCpu;
      shape.path = path;
      shape.kernel = "cpu v2 forward bf16 avx512_bf16";
      shape.threads = 1, shape.rows = 128, shape.keys = 128, shape.task_keys = 1024, shape.shared_bytes = 100000, shape.warps = 4;
      MachineSizes machine;
      machine.cuda = cuda, machine.l2_bytes = 1 << 20, machine.l3_bytes = 1 << 25, machine.multiprocessors = 1,
      machine.shared_per_multiprocessor = 120000;
      const auto products = [&](const ProblemSpec& s) { return count_of(work_of(s, shape, machine), "products"); };
      const auto visible = [](const ProblemSpec& s) { return measure::cost_of(s, Pass::kForward).flops; };
      const double all = products(whole) / visible(whole);
      for (const ProblemSpec* s : {&causal, static_cast<const ProblemSpec*>(&window)}) {
        const double more = products(*s) / visible(*s) / all;  // 1: not a pair that is hidden
        EXPECT_GE(more, 0.99) << cuda << " " << measure::describe(*s);
        EXPECT_LE(more, s == &causal ? 1.1 : 1.8) << cuda << " " << measure::describe(*s);
      }
    }
}

TEST(KernelWorkSmall, ShareOfTheBusiestWorker) {
  EXPECT_DOUBLE_EQ(largest_share({{1, 4}}, 2), 0.5);
  EXPECT_DOUBLE_EQ(largest_share({{1, 5}}, 2), 0.6);
  EXPECT_DOUBLE_EQ(largest_share({{1, 1}}, 8), 1);
  EXPECT_DOUBLE_EQ(largest_share({{3, 1}, {1, 3}}, 2), 0.5);
  EXPECT_DOUBLE_EQ(largest_share({{1, 133}}, 132), 2.0 / 133);
  EXPECT_DOUBLE_EQ(largest_share({{1, 1}, {5, 1}}, 2), 5.0 / 6);
  EXPECT_NEAR(largest_share({{1, 1e6}}, 100), 0.01, 1e-5);
  EXPECT_DOUBLE_EQ(largest_share({}, 4), 1);
}

TEST(Fit, FindsConstantsAgainBesideDisturbedSamples) {
  std::mt19937_64 random(7);
  const auto uniform = [&] { return static_cast<double>(random() >> 11) * 0x1p-53; };
  std::vector<std::array<double, 3>> counts;
  std::vector<double> seconds;
  const double each[] = {2e-6, 3e-9, 5e-11};
  for (int i = 0; i < 60; ++i) {
    counts.push_back({1, std::pow(10, 5 * uniform()), std::pow(10, 3 + 6 * uniform())});
    double t = 0;
    for (size_t j = 0; j < 3; ++j) t += counts.back()[j] * each[j];
    seconds.push_back(t * (1 + 0.02 * (uniform() - 0.5)) * (i % 12 == 0 ? 3 : 1));
  }
  const Model model = [&](size_t i, const std::vector<double>& c) { return counts[i][0] * c[0] + counts[i][1] * c[1] + counts[i][2] * c[2]; };
  const std::vector<double> found = fit(model, seconds, {1e-7, 1e-10, 1e-12}, {1e-4, 1e-4, 1e-4});
  for (size_t j = 0; j < 3; ++j) EXPECT_NEAR(found[j] / each[j], 1, 0.06) << j;
}

TEST(KernelTimes, AFamilyPredictsWhatItWasNotFittedTo) {
  // A GPU's: the longer of computing and memory.
  std::mt19937_64 random(3);
  const auto uniform = [&] { return static_cast<double>(random() >> 11) * 0x1p-53; };
  const auto sample = [&] {
    TimedWork t;
    t.work.family = "f";
    t.work.overlap = 4;
    const double products = std::pow(10, 6 + 5 * uniform()), bytes = std::pow(10, 5 + 4 * uniform());
    t.work.add("products", Part::kCompute, products);
    t.work.add("bytes", Part::kMemory, bytes);
    t.work.add("launches", Part::kCall, 1);
    t.seconds = 4e-6 + std::pow(std::pow(products * 3e-14, 4) + std::pow(bytes * 3e-13, 4), 0.25);
    return t;
  };
  std::vector<TimedWork> samples;
  for (int i = 0; i < 40; ++i) samples.push_back(sample());
  KernelTimes times;
  times.families["f"] = fit_family(samples, {{"bytes", 2.5e-13}});
  times.seconds = 1;
  EXPECT_LT(times.of("f")->mean_error, 0.03);
  EXPECT_EQ(times.of("g"), nullptr);
  const KernelTimes read = kernel_times_from_json(to_json(times));
  for (int i = 0; i < 20; ++i) {
    const TimedWork t = sample();
    EXPECT_NEAR(breakdown_of(t.work, *read.of("f")).seconds / t.seconds, 1, 0.05);
  }
  Json broken = to_json(times);
  broken["families"]["f"]["seconds_each"]["bytes"] = -1;
  EXPECT_THROW(kernel_times_from_json(broken), std::invalid_argument);
  broken["families"]["f"].erase("seconds_each");
  EXPECT_THROW(kernel_times_from_json(broken), std::invalid_argument);
  EXPECT_THROW(kernel_times_from_json(Json::array()), std::invalid_argument);
}

TEST(Predict, MemoryIsRightToTheByte) {
  Shapes shapes(5, {});
  ShapeLimit limit = limit_of(0.02, 20e9, 20e9, int64_t{1} << 30);
  const Predictor predictor({}, {}, {});
  for (int i = 0; i < 24; ++i) {
    const ProblemSpec spec = shapes.within(limit);
    const auto contestant = measure::make_library_contestant("fattn", {});
    const measure::Inputs inputs = repeated_inputs(spec, true);
    contestant->prepare(spec, inputs, true, 0);
    for (const Pass pass : {Pass::kForward, Pass::kBackward, Pass::kForwardBackward}) {
      const Prediction p = predictor.of(spec, pass);
      EXPECT_EQ(p.extra_bytes, contestant->memory(pass).extra_bytes) << describe(spec) << " " << measure::name_of(pass);
      EXPECT_FALSE(p.seconds.has_value());
      EXPECT_NE(p.unknown.find("no constants"), std::string::npos);
    }
  }
}

TEST(Predict, ShapesThatWouldBeCountedForSecondsHaveNoTime) {
  const Predictor predictor({}, {}, {});
  for (const ProblemSpec& spec : {spec_of(1, int64_t{1} << 27, int64_t{1} << 27, 2, 2, 64, true), spec_of(1 << 20, 1024, 1024, 8, 8, 64, false)}) {
    const Prediction p = predictor.of(spec, Pass::kBackward);
    EXPECT_FALSE(p.seconds.has_value());
    EXPECT_NE(p.unknown.find("the model of time counts up to"), std::string::npos) << p.unknown;
    EXPECT_GT(p.extra_bytes, 0);
  }
}

TEST(Predict, OptionsThatAreNotModelledSaySo) {
  ProblemSpec s = spec_of(1, 64, 64, 2, 2, 32, false);
  EXPECT_EQ(not_modelled(s), "");
  s.p_dropout = 0.1;
  s.alibi = true;
  EXPECT_EQ(not_modelled(s), "dropout, ALiBi");
  s.bias = measure::PairShape::kHeads;
  s.dbias = s.bias_f32 = true;
  EXPECT_EQ(not_modelled(without_what_is_not_modelled(s)), "");
  EXPECT_TRUE(without_what_is_not_modelled(s) == spec_of(1, 64, 64, 2, 2, 32, false));
}

TEST(ShapesSmall, AreTheSameForTheSameSeedAndWithinTheirLimit) {
  const ShapeLimit limit = limit_of(0.1, 100e9, 50e9, int64_t{1} << 32);
  Shapes a(9, {}), b(9, {}), c(10, {});
  int same = 0, odd = 0, decode = 0, grouped = 0, causal = 0;
  for (int i = 0; i < 300; ++i) {
    const ProblemSpec s = a.within(limit);
    EXPECT_EQ(s, b.within(limit));
    same += s == c.within(limit) ? 1 : 0;
    EXPECT_TRUE(limit.admits(s));
    EXPECT_LE(measure::cost_of(s, Pass::kForwardBackward).flops, s.dtype == DType::kF64 ? 0.1e9 : s.dtype == DType::kF32 ? 2e9 : 4e9);
    EXPECT_EQ(s.nheads % s.nheads_k, 0);
    EXPECT_TRUE(s.headdim % 8 == 0 && s.headdim >= 32 && s.headdim <= 256);
    odd += static_cast<int>(s.seqlen_k % 2);
    decode += s.seqlen_q != s.seqlen_k ? 1 : 0;
    grouped += s.nheads_k < s.nheads ? 1 : 0;
    causal += s.causal ? 1 : 0;
  }
  EXPECT_LT(same, 3);
  for (const int count : {odd, decode, grouped, causal}) EXPECT_GT(count, 30);
}

Scored scored(Pass pass, double predicted, double measured, int64_t batch) {
  Scored row;
  row.prediction.spec = spec_of(batch, 64, 64, 2, 2, 32, false);
  row.prediction.pass = pass;
  row.prediction.seconds = predicted;
  row.prediction.low = 0.9 * predicted, row.prediction.high = 1.1 * predicted;
  row.measured.emplace();
  row.measured->median = measured;
  return row;
}

TEST(ScoreSmall, ByHand) {
  std::vector<Scored> rows = {scored(Pass::kForward, 1.1, 1, 1), scored(Pass::kForward, 0.5, 1, 2), scored(Pass::kBackward, 2, 1, 3),
                              scored(Pass::kForward, 1, 1, 4)};
  rows[3].prediction.seconds.reset();
  rows[0].measured_bytes = 0;
  rows[1].measured_bytes = 7;
  const Score s = score_of(rows, Pass::kForward);
  EXPECT_EQ(s.count, 2);
  EXPECT_NEAR(s.mean_error, 0.3, 1e-12);
  EXPECT_NEAR(s.bias, -0.2, 1e-12);
  EXPECT_NEAR(s.error_95, 0.5, 1e-12);
  EXPECT_NEAR(s.worst_error, -0.5, 1e-12);
  EXPECT_EQ(s.worst, measure::describe(rows[1].prediction.spec));
  EXPECT_DOUBLE_EQ(s.covered, 0.5);
  EXPECT_EQ(s.memory_count, 2);
  EXPECT_EQ(s.memory_exact, 1);
  EXPECT_EQ(score_of(rows, Pass::kForwardBackward).count, 0);
  EXPECT_TRUE(to_json(score_of(rows, Pass::kForwardBackward))["mean_absolute_error_fraction"].is_null());
}

std::string refusal(const Json& record) {
  try {
    score_record(record, measure::environment(), {}, {});
  } catch (const RecordError& error) {
    return error.what();
  }
  return "";
}

TEST(ScoreSmall, RecordsThatCannotBeScoredAreRefused) {
  EXPECT_NE(refusal(Json::array()).find("no 'rows'"), std::string::npos);
  EXPECT_NE(refusal({{"rows", Json::array()}, {"environment", Json::object()}}).find("another machine"), std::string::npos);
  const Json here = measure::environment();
  EXPECT_NE(refusal({{"rows", Json::array()}, {"environment", here}}).find("no row"), std::string::npos);
  Json row = measure::to_json(spec_of(1, 64, 64, 2, 2, 32, false));
  row["provider"] = "fattn", row["status"] = "ok", row["time_median_s"] = 1.0, row["pass"] = "sideways";
  EXPECT_NE(refusal({{"rows", {row}}, {"environment", here}}).find("'pass'"), std::string::npos);
  row["pass"] = "fwd", row["batch"] = "many";
  EXPECT_NE(refusal({{"rows", {row}}, {"environment", here}}).find("'batch'"), std::string::npos);
}

TEST(ScoreSmall, ProblemsComeBackFromTheirJson) {
  ProblemSpec s = spec_of(3, 17, 40, 8, 2, 64, true, DType::kBF16);
  s.window_left = 9;
  s.softcap = 30;
  s.p_dropout = 0.25;
  s.alibi = true;
  s.bias = measure::PairShape::kHeads;
  s.bias_f32 = true;
  s.seed = 5;
  EXPECT_EQ(spec_from_json(measure::to_json(s)), s);
  Json missing = measure::to_json(s);
  missing.erase("headdim");
  EXPECT_THROW(spec_from_json(missing), RecordError);
}

}  // namespace
}  // namespace fattn::lab
