// Advice: parameters are exact, memory adds up and is never exceeded, more memory never gives less, refusals say what would fit, and it does.
#include <gtest/gtest.h>

#include <cmath>

#include "lab/advise/advice.h"
#include "lab/advise/settings.h"
#include "lab/advise/step_time.h"
#include "lab/crossing.h"

namespace fattn::lab {
namespace {

constexpr double kGiB = 1024.0 * 1024 * 1024;

ModelSize model(const std::string& name) {
  std::string why;
  const std::optional<ModelSize> m = model_of(name, why);
  EXPECT_TRUE(m) << name << " " << why;
  return *m;
}

TEST(ModelSizeSmall, ParametersOfGpt2AreExact) {
  EXPECT_EQ(model("small").parameters(1024), 124439808);
  EXPECT_EQ(model("medium").parameters(1024), 354823168);
  EXPECT_EQ(model("large").parameters(1024), 774030080);
  EXPECT_EQ(model("xl").parameters(1024), 1557611200);
  EXPECT_EQ(model("small").parameters(512), 124439808);
  EXPECT_EQ(model("small").parameters(4096), 124439808 + 3072 * 768);
}

TEST(ModelSizeSmall, AnyNumberOfParameters) {
  for (const auto& [text, count] : {std::pair{"params=7B", 7e9},
                                    {"params=350M", 350e6},
                                    {"params=1.5e9", 1.5e9},
                                    {"params=20000", 2e4},
                                    {"params=1T", 1e12},
                                    {"params=124439808", 124439808.0}}) {
    const ModelSize m = model(text);
    EXPECT_EQ(static_cast<double>(m.parameters(1024)), count);
    EXPECT_EQ(m.width % m.nheads, 0);
    EXPECT_GE(m.layers, 1);
    EXPECT_NEAR(static_cast<double>(m.shape_parameters()) / count, 1, count >= 2e7 ? 0.1 : 1e6) << text;
  }
  std::string why;
  for (const char* text : {"tiny", "params=", "params=x", "params=-5", "params=0", "params=nan", "params=1e30", "params=7Q", "params=7 B", ""})
    EXPECT_FALSE(model_of(text, why)) << text;
}

struct Case {
  const char* name;
  Task task;
  Precision precision;
  int64_t seqlen, effective;
};
const Case kCases[] = {{"small", Task::kTrain, Precision::kBF16, 1024, 32},     {"small", Task::kTrain, Precision::kFP32, 128, 7},
                       {"medium", Task::kTrain, Precision::kFP16, 2048, 32},    {"large", Task::kTrain, Precision::kBF16, 512, 100},
                       {"xl", Task::kTrain, Precision::kBF16, 8192, 16},        {"params=7B", Task::kTrain, Precision::kBF16, 4096, 64},
                       {"params=20000", Task::kTrain, Precision::kBF16, 16, 1}, {"small", Task::kInfer, Precision::kBF16, 1024, 256},
                       {"xl", Task::kInfer, Precision::kFP32, 16384, 4},        {"params=70B", Task::kInfer, Precision::kFP16, 4096, 8},
                       {"params=1T", Task::kTrain, Precision::kBF16, 131072, 1}};

AdviceRequest request_of(const Case& c, double memory) { return {memory, model(c.name), c.task, c.precision, c.seqlen, c.effective}; }

TEST(AdviceSmall, NeverExceedsTheMemoryAndMoreIsNeverWorse) {
  for (const Case& c : kCases) {
    int64_t batch = 0;
    bool fitted = false;
    for (double memory = 0.25 * kGiB; memory < 200 * kGiB; memory *= 1.07) {
      const Advice a = advise(request_of(c, memory));
      const std::string where = std::string(c.name) + " in " + std::to_string(memory / kGiB) + " GiB";
      EXPECT_TRUE(a.fits || !fitted) << where;
      fitted = a.fits;
      if (!a.fits) {
        EXPECT_FALSE(a.why.empty()) << where;
        EXPECT_FALSE(a.would_fit.empty()) << where;
        EXPECT_GT(a.memory.bytes, memory) << where;
        continue;
      }
      EXPECT_GE(a.plan.batch, 1) << where;
      EXPECT_GE(a.accumulation, 1) << where;
      EXPECT_LE(a.memory.bytes, memory) << where;
      EXPECT_GE(a.plan.batch, batch) << where;
      if (c.task == Task::kTrain) {
        EXPECT_GE(a.effective_batch(), c.effective) << where;
        EXPECT_LT(a.plan.batch * (a.accumulation - 1), c.effective) << where;
      }
      batch = a.plan.batch;
      EXPECT_GE(a.standard.bytes, a.memory.bytes * 0.999) << where;
    }
  }
}

TEST(AdviceSmall, LinesAddUpAndDependOnWhatTheyName) {
  for (const Case& c : kCases)
    for (const bool standard : {false, true}) {
      StepPlan plan{model(c.name), c.task, c.precision, c.seqlen, 3, false, standard};
      const StepMemory memory = memory_of(plan);
      double sum = 0;
      for (const MemoryLine& line : memory.lines) {
        EXPECT_GE(line.bytes, 0) << line.what;
        EXPECT_FALSE(line.arithmetic.empty()) << line.what;
        sum += line.bytes;
      }
      EXPECT_DOUBLE_EQ(sum, memory.bytes);
      plan.batch = 6;
      EXPECT_GT(memory_of(plan).bytes, memory.bytes);
      plan.batch = 3;
      plan.checkpointing = true;
      EXPECT_LE(memory_of(plan).bytes, c.task == Task::kTrain && plan.model.layers > 2 ? 0.999 * memory.bytes : 1.5 * memory.bytes);
    }
  // 16 bytes a parameter in fp32, 18 where products are of 16 bits.
  const auto fixed = [](Precision p, size_t lines) {
    double bytes = 0;
    const StepMemory m = memory_of({model("small"), Task::kTrain, p, 1024, 1, false, false});
    for (size_t i = 0; i < lines; ++i) bytes += m.lines[i].bytes;
    return bytes / 124439808;
  };
  EXPECT_DOUBLE_EQ(fixed(Precision::kFP32, 3), 16);
  EXPECT_DOUBLE_EQ(fixed(Precision::kBF16, 4), 18);
  // The KV cache of GPT-2 small: 2 * 12 * 768 * 2 bytes a token.
  EXPECT_DOUBLE_EQ(memory_of({model("small"), Task::kInfer, Precision::kBF16, 100, 1, false, false}).lines[1].bytes, 2.0 * 12 * 768 * 2 * 100);
}

TEST(AdviceSmall, WhatWouldFitDoes) {
  for (const Case& c : kCases) {
    const Advice refused = advise(request_of(c, 0.3 * kGiB));
    ASSERT_FALSE(refused.fits);
    EXPECT_TRUE(advise(request_of(c, refused.memory.bytes)).fits) << c.name;
    EXPECT_FALSE(advise(request_of(c, refused.memory.bytes * 0.9999)).fits) << c.name;
  }
  const Advice a = advise({4 * kGiB, model("large"), Task::kTrain, Precision::kBF16, 1024, 32});
  EXPECT_NE(a.why.find("weights, gradients and Adam's moments alone"), std::string::npos) << a.why;
  EXPECT_NE(a.would_fit.find("--model small"), std::string::npos) << a.would_fit;
  EXPECT_NE(a.would_fit.find("--task infer"), std::string::npos) << a.would_fit;
  const Advice longer = advise({8 * kGiB, model("small"), Task::kTrain, Precision::kBF16, 65536, 32});
  const size_t at = longer.would_fit.find("sequences of up to ");
  ASSERT_NE(at, std::string::npos) << longer.would_fit;
  const int64_t seqlen = std::stoll(longer.would_fit.substr(at + 19));
  EXPECT_TRUE(advise({8 * kGiB, model("small"), Task::kTrain, Precision::kBF16, seqlen, 32}).fits);
  EXPECT_FALSE(advise({8 * kGiB, model("small"), Task::kTrain, Precision::kBF16, seqlen + 1, 32}).fits);
}

TEST(AdviceSmall, SettingsKeepTheLastAccumulationAndScaleWhatNeedsIt) {
  const auto text_of = [](Precision p, size_t i) { return settings_of(advise({16 * kGiB, model("small"), Task::kTrain, p, 1024, 32}))[i].text; };
  const std::string bf16 = text_of(Precision::kBF16, 0), fp16 = text_of(Precision::kFP16, 0), fp32 = text_of(Precision::kFP32, 0);
  for (const std::string* text : {&bf16, &fp16, &fp32}) {
    EXPECT_NE(text->find("or i + 1 == len(loader)"), std::string::npos);
    EXPECT_EQ(text->find(".half()"), std::string::npos);
  }
  EXPECT_EQ(bf16.find("GradScaler"), std::string::npos);
  EXPECT_NE(fp16.find("GradScaler"), std::string::npos);
  EXPECT_EQ(fp32.find("autocast"), std::string::npos);
  EXPECT_NE(text_of(Precision::kFP16, 1).find("fp16=True"), std::string::npos);
  for (const Case& c : kCases) {
    const Advice a = advise(request_of(c, 1e16));
    ASSERT_TRUE(a.fits);
    for (const Settings& s : settings_of(a)) EXPECT_FALSE(s.text.empty());
  }
}

TEST(StepTimeSmall, ByStatedRates) {
  StepRates rates;
  rates.flops_per_s = 100e12;
  rates.bytes_per_s = 1e12;
  const StepPlan plan{model("small"), Task::kTrain, Precision::kBF16, 1024, 8, false, false};
  StepPlan standard = plan, again = plan;
  standard.standard = true;
  again.checkpointing = true;
  const StepTime time = time_of(plan, rates);
  double sum = 0;
  for (const TimeLine& line : time.lines) sum += line.seconds;
  EXPECT_DOUBLE_EQ(sum, time.seconds);
  // 6 FLOP for each parameter that multiplies and token.
  EXPECT_NEAR(time.lines[0].seconds, 6.0 * (12 * 12 * 768.0 * 768 + 50257 * 768.0) * 8192 / 100e12, 1e-12);
  EXPECT_GT(time_of(standard, rates).attention, time.attention);
  EXPECT_GT(time_of(again, rates).seconds, time.seconds);
  EXPECT_NEAR(optimizer_seconds(plan, rates), 28 * 124439808.0 / 1e12, 1e-12);
}

// As if times were a and b microseconds, 1 % apart from sample to sample.
Duel duel(int64_t seqlen, double a, double b) {
  const auto around = [](double t) {
    std::vector<double> samples;
    for (int i = 0; i < 20; ++i) samples.push_back(t * (1 + 0.001 * (i - 10)));
    return measure::summarize(samples);
  };
  Duel d;
  d.seqlen = seqlen;
  d.a = around(a), d.b = around(b);
  return d;
}

TEST(CrossingSmall, IsFoundBetweenNeighbouringLengths) {
  for (const double crossing : {20.0, 100.0, 900.0}) {
    const Crossing c =
        find_crossing(8, 2048, 1.5, [&](int64_t n) { return duel(n, static_cast<double>(n), 0.5 * static_cast<double>(n) + crossing / 2); });
    EXPECT_LE(static_cast<double>(c.slower_until), crossing * 1.02);
    EXPECT_GE(static_cast<double>(c.faster_from), crossing);
    EXPECT_LE(static_cast<double>(c.faster_from), 1.5 * static_cast<double>(c.slower_until));
    EXPECT_LT(c.duels.size(), 12U);
    for (size_t i = 1; i < c.duels.size(); ++i) EXPECT_LT(c.duels[i - 1].seqlen, c.duels[i].seqlen);
  }
}

TEST(CrossingSmall, NeverAlwaysAndUndecided) {
  EXPECT_TRUE(find_crossing(8, 64, 1.5, [](int64_t n) { return duel(n, 1, 2); }).never);
  EXPECT_TRUE(find_crossing(8, 64, 1.5, [](int64_t n) { return duel(n, 2, 1); }).always);
  const Crossing even = find_crossing(8, 64, 1.5, [](int64_t n) { return duel(n, 1, 1); });
  EXPECT_TRUE(even.never);
  EXPECT_EQ(even.duels[0].verdict(), 0);
  // Between 50 and 200 nobody can tell: that is not yet faster.
  const Crossing band = find_crossing(8, 2048, 1.5, [](int64_t n) { return duel(n, n > 200 ? 2 : 1, n < 50 ? 2 : 1); });
  EXPECT_GT(band.faster_from, 200);
  EXPECT_LE(band.faster_from, 300);
  EXPECT_LE(band.slower_until, 200);
  Duel alone = duel(8, 1, 2);
  alone.a.reset();
  EXPECT_EQ(alone.verdict(), 1);
  alone.b.reset();
  EXPECT_EQ(alone.verdict(), 0);
}

}  // namespace
}  // namespace fattn::lab
