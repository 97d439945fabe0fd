// The model on a GPU: against float64 on the host, in parts, by graph, in batches; and what it refuses. Skipped without a device.
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
#include "gpt2/generate/generate.h"
#include "gpt2/memory.h"
#include "gpt2_files.h"
#include "gpu_fixture.h"

namespace fattn::gpt2 {
namespace {

// Heads of 16, which attention on a GPU takes with 16-byte copies.
Config on_gpu(const std::string& name) {
  Config c = variant(name);
  c.n_embd = 64;
  c.n_inner = 200;
  return c;
}

class Gpt2Gpu : public test::CudaGpu, public testing::WithParamInterface<const char*> {};
INSTANTIATE_TEST_SUITE_P(Variants, Gpt2Gpu, testing::Values("gpt2", "rotary", "gqa", "scales", "two_sided", "own_head"),
                         [](const auto& one) { return std::string(one.param); });

TEST_P(Gpt2Gpu, AgreesWithFloat64) {
  const Files files(on_gpu(GetParam()));
  for (const int64_t n : {33, 7}) {  // products of cuBLASLt, and our own
    const std::vector<Token> ids = text(n, 5);
    const std::vector<float> exact = all_logits(files.load({.reference = true}), ids);
    const double scale = scale_of(exact);
    ASSERT_GT(scale, 0.1);
    for (const auto& [dtype, allowed] : {std::pair(DType::kF32, 2e-5), std::pair(DType::kF16, 2e-2), std::pair(DType::kBF16, 1e-1)}) {
      const std::vector<float> got = all_logits(files.load({.dtype = dtype, .gpu = 0}), ids);
      EXPECT_TRUE(error_of(got.data(), exact.data(), got.size()) <= allowed * scale)
          << name_of(dtype) << " " << error_of(got.data(), exact.data(), got.size()) / scale;
    }
  }
}

TEST_P(Gpt2Gpu, CachedAsUncachedWithAndWithoutGraph) {
  const Config config = on_gpu(GetParam());
  if (!config.causal) GTEST_SKIP() << "has no cache";
  const Files files(config);
  const std::vector<Token> ids = text(40, 9);
  const auto padded = static_cast<size_t>(config.padded_vocab());
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Model model = files.load({.dtype = dtype, .gpu = 0});
    const std::vector<float> whole = all_logits(model, ids);
    const double allowed = (dtype == DType::kF32 ? 2e-5 : 5e-2) * scale_of(whole);
    for (const Algorithm algorithm : {Algorithm::kAuto, Algorithm::kStandard, Algorithm::kV1, Algorithm::kV2})
      for (const bool graph : {true, false}) {
        if (algorithm == Algorithm::kV1 && dtype == DType::kF32) continue;  // there is none on a GPU
        SCOPED_TRACE(std::string(name_of(algorithm)) + (graph ? ", graph" : ""));
        Session session(model, {.batch = 1, .rows = 16, .algorithm = algorithm, .graph = graph});
        const std::vector<NewTokens> prompt{{0, std::span(ids).first(20)}};
        session.prefill(prompt);
        for (size_t i = 20;; ++i) {
          const double error = error_of(session.logits(0), whole.data() + (i - 1) * padded, padded);
          EXPECT_TRUE(error <= allowed) << i << ": " << error << " of " << allowed;
          if (i == ids.size()) break;
          // The token that is drawn is not the one that comes next, so the host sends it.
          const std::vector<NewTokens> part{{0, std::span(ids).subspan(i, 1)}};
          Token drawn = -1;
          session.step_and_draw(part, std::vector<ops::Choice>(1), &drawn);
          EXPECT_EQ(drawn, std::max_element(session.logits(0), session.logits(0) + 131) - session.logits(0));
        }
      }
  }
}

std::vector<std::vector<Token>> texts_of(const Model& model, const GenerateOptions& options, const SessionOptions& with) {
  const std::vector<std::vector<Token>> prompts{text(3, 1), text(37, 2), text(11, 3), text(1, 4), text(20, 5)};
  Session session(model, with);
  std::vector<std::vector<Token>> all;
  for (const Generated& one : generate(model, session, nullptr, prompts, options)) all.push_back(one.tokens);
  return all;
}

class Gpt2GpuText : public test::CudaGpu {};

TEST_F(Gpt2GpuText, TheSameOnEveryRunAndByGraph) {
  const Files files(on_gpu("gpt2"));
  const GenerateOptions drawn{.max_new_tokens = 20, .temperature = 0.9, .top_k = 50, .top_p = 0.95, .repetition_penalty = 1.2, .seed = 7};
  const GenerateOptions greedy{.max_new_tokens = 20};
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Model model = files.load({.dtype = dtype, .gpu = 0});
    for (const GenerateOptions& options : {greedy, drawn}) {
      const auto first = texts_of(model, options, {.batch = 3, .rows = 16});
      EXPECT_EQ(texts_of(model, options, {.batch = 3, .rows = 16}), first);
      EXPECT_EQ(texts_of(model, options, {.batch = 3, .rows = 16, .graph = false}), first);
      for (const auto& tokens : first) EXPECT_EQ(tokens.size(), 20u);
    }
  }
  // In fp32 roundings are too small to change a token: the host draws the same.
  const Model host = files.load({.dtype = DType::kF32});
  const Model gpu = files.load({.dtype = DType::kF32, .gpu = 0});
  for (const GenerateOptions& options : {greedy, drawn})
    EXPECT_EQ(texts_of(gpu, options, {.batch = 3, .rows = 16}), texts_of(host, options, {.batch = 3, .rows = 16}));
}

TEST_F(Gpt2GpuText, TheSameInPages) {
  const Files files(on_gpu("gpt2"));
  const Model model = files.load({.dtype = DType::kF32, .gpu = 0});
  for (const double temperature : {0.0, 0.9}) {
    const GenerateOptions options{.max_new_tokens = 20, .temperature = temperature, .seed = 7};
    const auto wanted = texts_of(model, options, {.batch = 5, .context = 60, .rows = 16});
    for (const int64_t page_size : {1, 5, 16})
      for (const bool graph : {true, false})
        EXPECT_EQ(texts_of(model, options, {.batch = 5, .context = 60, .rows = 16, .graph = graph, .page_size = page_size, .cache_tokens = 64}),
                  wanted)
            << page_size;
  }
}

TEST_F(Gpt2GpuText, NeighboursChangeNothing) {
  const Files files(on_gpu("gpt2"));
  const GenerateOptions options{.max_new_tokens = 24, .temperature = 1.1, .seed = 3};
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Model model = files.load({.dtype = dtype, .gpu = 0});
    const auto alone = texts_of(model, options, {.batch = 1, .rows = 64, .batch_invariant = true});
    for (const int64_t batch : {2, 5, 40}) EXPECT_EQ(texts_of(model, options, {.batch = batch, .rows = 64, .batch_invariant = true}), alone) << batch;
  }
}

TEST_F(Gpt2GpuText, LossesTruncationAndHidden) {
  const Files files(on_gpu("gpt2"));
  const std::vector<Token> ids = text(61, 3);
  const Model exact = files.load({.reference = true});
  const Model model = files.load({.dtype = DType::kF32, .gpu = 0});
  const auto windows = windows_of(61, 20, 10);
  const SessionOptions options{.batch = 2, .context = 20, .rows = 40, .hidden = true};
  Session a(exact, options), b(model, options);
  EXPECT_NEAR(evaluate(b, ids, windows).loss, evaluate(a, ids, windows).loss, 1e-5);
  a.truncate(0, 5), b.truncate(0, 5);
  const std::vector<Token> more = text(6, 8);
  a.step({{0, more}});
  b.step({{0, more}});
  EXPECT_TRUE(error_of(b.logits(0), a.logits(0), 131) <= 2e-5);
  EXPECT_TRUE(error_of(static_cast<const float*>(b.hidden()), static_cast<const float*>(a.hidden()), 6 * 64) <= 2e-5);
}

TEST_F(Gpt2GpuText, SaysWhatIsAllowed) {
  const Files files(on_gpu("gpt2"));
  const Model model = files.load({.gpu = 0});
  Session session(model, {.batch = 2, .context = 20, .hidden = true});
  const std::vector<Token> bad{1, 131}, one{1};
  EXPECT_NE(thrown_by([&] { session.step({{0, bad}}); }).find("not in the model's vocabulary"), std::string::npos);
  session.step({{0, one}});
  float loss = 0;
  EXPECT_NE(thrown_by([&] { session.losses(std::vector<int32_t>{131}, &loss); }).find("target 131"), std::string::npos);
  Token token = 0;
  EXPECT_NE(thrown_by([&] { session.draw(std::vector<ops::Choice>{{.temperature = -1}}, &token); }).find("temperature"), std::string::npos);
  Config large = on_gpu("gpt2");
  large.n_positions = 1 << 20;
  const Files files_of_large(large);
  const Model wide = files_of_large.load({.gpu = 0});
  const std::string why = thrown_by([&] { Session(wide, {.batch = 1000}); });
  EXPECT_NE(why.find("bytes"), std::string::npos) << why;
  EXPECT_NE(why.find("are free"), std::string::npos) << why;
  EXPECT_EQ(session.length(0), 1) << "the session before goes on";
  session.step({{0, one}});
  EXPECT_FALSE(std::isnan(session.logits(0)[0]));
}

}  // namespace
}  // namespace fattn::gpt2
