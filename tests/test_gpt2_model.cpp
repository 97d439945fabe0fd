// The model against itself: in float64, in parts, in batches, on other threads; and what it refuses.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "gpt2/compare/output_error.h"
#include "gpt2/error.h"
#include "gpt2/evaluate/evaluate.h"
#include "gpt2/generate/stops.h"
#include "gpt2/model/session.h"
#include "gpt2_files.h"

namespace fattn::gpt2 {
namespace {

class Gpt2ModelSmall : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Variants, Gpt2ModelSmall, testing::Values("gpt2", "rotary", "gqa", "scales", "two_sided", "own_head"),
                         [](const auto& one) { return std::string(one.param); });

TEST_P(Gpt2ModelSmall, AgreesWithFloat64) {
  const Files files(variant(GetParam()));
  const std::vector<Token> ids = text(33, 5);
  const std::vector<float> exact = all_logits(files.load({.reference = true}), ids);
  const double scale = scale_of(exact);
  ASSERT_GT(scale, 0.1);
  for (const auto& [dtype, allowed] : {std::pair(DType::kF32, 2e-5), std::pair(DType::kF16, 2e-2), std::pair(DType::kBF16, 1e-1)}) {
    const std::vector<float> got = all_logits(files.load({.dtype = dtype}), ids);
    EXPECT_TRUE(error_of(got.data(), exact.data(), got.size()) <= allowed * scale)
        << name_of(dtype) << " " << error_of(got.data(), exact.data(), got.size()) / scale;
  }
}

TEST_P(Gpt2ModelSmall, CachedAsUncached) {
  const Config config = variant(GetParam());
  if (!config.causal) GTEST_SKIP() << "has no cache";
  const Files files(config);
  const Model model = files.load();
  const std::vector<Token> ids = text(40, 9);
  const std::vector<float> whole = all_logits(model, ids);
  const auto padded = static_cast<size_t>(config.padded_vocab());
  for (const Algorithm algorithm : {Algorithm::kAuto, Algorithm::kStandard, Algorithm::kV1, Algorithm::kV2}) {
    Session session(model, {.batch = 1, .rows = 16, .algorithm = algorithm});
    const std::vector<NewTokens> prompt{{0, std::span(ids).first(20)}};
    session.prefill(prompt);
    for (size_t i = 20;; ++i) {
      EXPECT_TRUE(error_of(session.logits(0), whole.data() + (i - 1) * padded, padded) <= 2e-5 * scale_of(whole)) << i << name_of(algorithm);
      if (i == ids.size()) break;
      session.step({{0, std::span(ids).subspan(i, 1)}});
    }
  }
}

// Prompts of unequal lengths, one of which takes several chunks, beside each other and alone: bit by bit if that is asked for.
TEST_P(Gpt2ModelSmall, NeighboursChangeNothing) {
  const Config config = variant(GetParam());
  const Files files(config);
  const Model model = files.load();
  const std::vector<std::vector<Token>> prompts{text(3, 1), text(37, 2), text(11, 3)};
  const auto padded = static_cast<size_t>(config.padded_vocab());
  for (const bool invariant : {false, true}) {
    SessionOptions options{.batch = 3, .context = 48, .rows = config.causal ? 16 : 64, .batch_invariant = invariant};
    Session together(model, options);
    std::vector<NewTokens> parts;
    for (size_t i = 0; i < 3; ++i) parts.push_back({static_cast<int64_t>(i), prompts[i]});
    const std::vector<Token> next = text(3, 77);
    together.prefill(parts);
    std::vector<float> first(together.logits(0), together.logits(3));
    if (config.causal) together.step({{0, std::span(next).first(1)}, {1, std::span(next).subspan(1, 1)}, {2, std::span(next).last(1)}});
    options.batch = 1;
    for (size_t i = 0; i < 3; ++i) {
      Session alone(model, options);
      alone.prefill(std::vector<NewTokens>{{0, prompts[i]}});
      const auto agree = [&](const float* a, const float* b) {
        if (invariant)
          EXPECT_EQ(std::memcmp(a, b, padded * 4), 0) << i;
        else
          EXPECT_TRUE(error_of(a, b, padded) <= 2e-5 * scale_of(first)) << i;
      };
      agree(alone.logits(0), first.data() + i * padded);
      if (!config.causal) continue;
      alone.step({{0, std::span(next).subspan(i, 1)}});
      agree(alone.logits(0), together.logits(static_cast<int64_t>(i)));
    }
  }
}

TEST(Gpt2SessionSmall, SameBitsOnAnyNumberOfThreads) {
  const Files files(small());
  const std::vector<Token> ids = text(50, 4);
  const std::vector<float> one = all_logits(files.load({.threads = 1}), ids), three = all_logits(files.load({.threads = 3}), ids);
  EXPECT_EQ(std::memcmp(one.data(), three.data(), one.size() * 4), 0);
}

TEST(Gpt2SessionSmall, PaddedVocabularyIsZero) {
  const Files files(small());
  const std::vector<float> logits = all_logits(files.load(), text(2, 1));
  for (size_t i = 131; i < 192; ++i) EXPECT_EQ(logits[i], 0);
}

TEST(Gpt2SessionSmall, LossesAreThoseOfTheLogits) {
  const Files files(small());
  const Model model = files.load();
  const std::vector<Token> ids = text(20, 6), targets = text(20, 8);
  SessionOptions options;
  options.logit_rows = 20;
  options.hidden = true;
  Session session(model, options);
  session.step({{0, ids, WantLogits::kAll}});
  std::vector<float> loss(20);
  session.losses(targets, loss.data());
  for (int64_t r = 0; r < 20; ++r) {
    double sum = 0;
    for (int64_t i = 0; i < 131; ++i) sum += std::exp(static_cast<double>(session.logits(r)[i]));
    const double expected = std::log(sum) - static_cast<double>(session.logits(r)[targets[static_cast<size_t>(r)]]);
    EXPECT_NEAR(static_cast<double>(loss[static_cast<size_t>(r)]), expected, 1e-5);
  }
}

TEST(Gpt2SessionSmall, GoesBack) {
  const Files files(small());
  const Model model = files.load();
  const std::vector<Token> ids = text(12, 6);
  Session session(model, {});
  session.step({{0, ids}});
  const std::vector<float> expected(session.logits(0), session.logits(1));
  session.truncate(0, 5);
  session.step({{0, std::span(ids).subspan(5)}});
  EXPECT_TRUE(error_of(session.logits(0), expected.data(), 131) <= 2e-5 * scale_of(expected));
}

TEST(Gpt2SessionSmall, RefusesWhatItDoesNotHave) {
  const Files files(small());
  const Model model = files.load();
  const auto says = [](const std::string& text, const char* part) { EXPECT_NE(text.find(part), std::string::npos) << text; };
  says(thrown_by([&] { Session(model, {.context = 65}); }), "positions for 1 to 64 tokens");
  says(thrown_by([&] { Session(model, {.batch = 0}); }), "batch is 0");
  says(thrown_by([&] { Session(model, {.batch = int64_t{1} << 40}); }), "2^31");
  says(thrown_by([&] { Session(model, {.batch = 4, .rows = 2}); }), "less than one");
  Session session(model, {.batch = 2, .context = 8, .rows = 8});
  const std::vector<Token> nine = text(9, 1), one = text(1, 1), wrong{131}, below{-1};
  says(thrown_by([&] { session.prefill(std::vector<NewTokens>{{0, nine}}); }), "the cache holds 8");
  says(thrown_by([&] { session.step({{0, wrong}}); }), "token 131 is not in the model's vocabulary; allowed: 0 to 130");
  says(thrown_by([&] { session.step({{0, below}}); }), "token -1");
  says(thrown_by([&] { session.step({{1, one}, {0, one}}); }), "ascending");
  says(thrown_by([&] { session.step({{2, one}}); }), "below the batch of 2");
  says(thrown_by([&] { session.step({{0, {}}}); }), "no token");
  EXPECT_EQ(session.length(0), 0);
  says(thrown_by([&] { session.truncate(0, 1); }), "has 0 tokens");
  EXPECT_EQ(session.length(0), 0);
  Config two_sided = small();
  two_sided.causal = false;
  const Files other(two_sided);
  const Model whole = other.load();
  Session once(whole, {});
  once.step({{0, one}});
  says(thrown_by([&] { once.step({{0, one}}); }), "not causal");
}

TEST(Gpt2SessionSmall, TakesWhatItSaid) {
  const Files files(small());
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Model model = files.load({.dtype = dtype});
    const SessionPlans plans(model.config(), dtype, model.compute(), model.device(), {.batch = 3, .context = 20});
    EXPECT_EQ(plans.memory().cache, 6 * ((60 * 48 * size_of(dtype) + 63) / 64 * 64));
    EXPECT_GT(plans.memory().arena(), 60 * 48 * 4);
    // The tables of embeddings that are in the files count as weights too.
    const size_t tables = (131 + 64) * 48 * size_of(dtype);
    EXPECT_NEAR(static_cast<double>(weight_bytes(model.config(), dtype, model.device())),
                static_cast<double>(model.bytes() + (dtype == DType::kF32 ? tables : 0)), 64.0 * 40);
  }
}

TEST(Gpt2StopsSmall, TextEndsBeforeTheFirst) {
  const std::string text = "one two tw three";
  for (const auto& [strings, expected, found] : {std::tuple(std::vector<std::string>{"thr", "two"}, "one ", true),
                                                 std::tuple(std::vector<std::string>{"twx", "ee."}, "one two tw three", false),
                                                 std::tuple(std::vector<std::string>{"tw t", ""}, "one two ", true)})
    for (size_t step = 1; step <= text.size(); ++step) {
      Stops stops(strings);
      std::string said;
      bool stopped = false;
      for (size_t at = 0; at < text.size() && !stopped; at += step) stopped = stops.feed(std::string_view(text).substr(at, step), said);
      if (!stopped) stops.finish(said);
      EXPECT_EQ(said, expected);
      EXPECT_EQ(stopped, found);
    }
}

TEST(Gpt2WindowsSmall, EveryTokenOnce) {
  for (const int64_t tokens : {2, 3, 9, 10, 11, 50})
    for (const int64_t context : {1, 4, 10})
      for (int64_t stride = 1; stride <= context; ++stride) {
        int64_t next = 1;
        for (const Window& w : windows_of(tokens, context, stride)) {
          EXPECT_LE(w.inputs, context);
          EXPECT_GE(w.counted, 1);
          EXPECT_EQ(w.begin + w.inputs + 1 - w.counted, next);
          next += w.counted;
        }
        EXPECT_EQ(next, tokens);
      }
  EXPECT_THROW(windows_of(1, 4, 4), Error);
  EXPECT_THROW(windows_of(9, 4, 5), Error);
}

TEST(Gpt2CompareSmall, NothingButRoundingPasses) {
  const double deviation = rounding_deviation(small(), DType::kBF16, 64);
  std::vector<float> a(1000), b;
  for (size_t i = 0; i < a.size(); ++i) a[i] = std::sin(static_cast<float>(i));
  b = a;
  EXPECT_TRUE(compare_outputs(a, b, deviation).passed);
  b[7] += static_cast<float>(deviation);
  EXPECT_TRUE(compare_outputs(a, b, deviation).passed);
  b[7] += static_cast<float>(30 * deviation);
  EXPECT_FALSE(compare_outputs(a, b, deviation).passed);
  b = a;
  b[999] = std::nanf("");
  EXPECT_FALSE(compare_outputs(a, b, deviation).passed);
  EXPECT_FALSE(compare_outputs(b, b, deviation).passed);
  b = a;
  b[0] = HUGE_VALF;
  EXPECT_FALSE(compare_outputs(b, b, deviation).passed);
}

}  // namespace
}  // namespace fattn::gpt2
