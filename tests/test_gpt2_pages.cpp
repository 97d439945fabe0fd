// A cache in pages that sequences share: the numbers of a cache of its own, in less memory; and what it refuses.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "gpt2/error.h"
#include "gpt2/generate/generate.h"
#include "gpt2/memory.h"
#include "gpt2/model/session.h"
#include "gpt2_files.h"

namespace fattn::gpt2 {
namespace {

TEST(Gpt2PagesSmall, AreTakenAndGivenBack) {
  std::vector<int32_t> table(3 * 4, -1);
  Pages pages(5, 6, 3, 4, table.data());
  EXPECT_EQ(pages.missing(0, 0), 0);
  EXPECT_EQ(pages.missing(0, 11), 3);
  pages.take(0, 11);
  pages.take(2, 5);
  pages.take(0, 12);
  EXPECT_EQ(pages.free(), 2);
  EXPECT_EQ(table, (std::vector<int32_t>{0, 1, 2, 0, 0, 0, 0, 0, 3, 0, 0, 0}));
  EXPECT_EQ(pages.row(0, 11), 11);
  EXPECT_EQ(pages.row(2, 4), 19);
  pages.give_back(0, 6);  // its last page goes
  EXPECT_EQ(pages.free(), 3);
  pages.take(1, 8);
  EXPECT_EQ(table, (std::vector<int32_t>{0, 1, 0, 0, 2, 4, 0, 0, 3, 0, 0, 0}));
  EXPECT_EQ(pages.row(1, 7), 22);
}

class Gpt2PagedSmall : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Variants, Gpt2PagedSmall, testing::Values("gpt2", "rotary", "gqa", "scales", "own_head"),
                         [](const auto& one) { return std::string(one.param); });

// Sequences of unequal lengths grow in turns, so that their pages lie among each other; one goes back and on with other tokens.
TEST_P(Gpt2PagedSmall, LogitsAreThoseOfACacheOfItsOwn) {
  const Files files(variant(GetParam()));
  const Model model = files.load();
  const auto padded = static_cast<size_t>(model.config().padded_vocab());
  const std::vector<std::vector<Token>> prompts{text(3, 1), text(33, 2), text(11, 3)};
  for (const bool invariant : {false, true})
    for (const int64_t page_size : {1, 4, 16, 100}) {
      const SessionOptions own{.batch = 3, .context = 48, .rows = 16, .batch_invariant = invariant};
      SessionOptions shared = own;
      shared.page_size = page_size;
      if (page_size < 100) shared.cache_tokens = 80;  // of 144
      Session a(model, own), b(model, shared);
      const auto agree = [&](int64_t rows) {
        for (int64_t r = 0; r < rows; ++r)
          EXPECT_TRUE(error_of(a.logits(r), b.logits(r), padded) <= 2e-5 * scale_of({a.logits(r), a.logits(r + 1)})) << page_size << " row " << r;
      };
      for (Session* session : {&a, &b}) {
        std::vector<NewTokens> parts;
        for (size_t i = 0; i < 3; ++i) parts.push_back({static_cast<int64_t>(i), prompts[i]});
        session->prefill(parts);
      }
      agree(3);
      const std::vector<Token> next = text(18, 77);
      for (size_t i = 0; i < 5; ++i) {
        for (Session* session : {&a, &b})
          session->step(
              {{0, std::span(next).subspan(3 * i, 1)}, {1, std::span(next).subspan(3 * i + 1, 1)}, {2, std::span(next).subspan(3 * i + 2, 1)}});
        agree(3);
      }
      for (Session* session : {&a, &b}) {
        session->truncate(1, 2);
        session->step({{0, std::span(next).first(7)}, {1, std::span(next).subspan(2, 9)}});
      }
      agree(2);
    }
}

std::vector<std::vector<Token>> texts_of(const Model& model, const SessionOptions& with, const GenerateOptions& options) {
  const std::vector<std::vector<Token>> prompts{text(3, 1), text(37, 2), text(11, 3), text(1, 4), text(20, 5), text(9, 6)};
  Session session(model, with);
  std::vector<std::vector<Token>> all;
  for (const Generated& one : generate(model, session, nullptr, prompts, options)) all.push_back(one.tokens);
  return all;
}

// Six texts of up to 57 tokens, where there is room for one of the longest, or for some of the others.
TEST(Gpt2PagedTextSmall, TheSameInLessMemory) {
  const Files files(small());
  const Model model = files.load();
  for (const double temperature : {0.0, 0.9}) {
    const GenerateOptions options{.max_new_tokens = 21, .temperature = temperature, .seed = 5};
    const auto wanted = texts_of(model, {.batch = 6, .context = 60, .rows = 16}, options);
    for (const int64_t page_size : {1, 7, 16}) {
      const SessionOptions with{.batch = 6, .context = 60, .rows = 16, .page_size = page_size, .cache_tokens = 64};
      EXPECT_EQ(texts_of(model, with, options), wanted) << page_size;
      EXPECT_EQ(texts_of(model, with, options), wanted) << page_size;
    }
  }
  const auto bytes = [&](const SessionOptions& options) {
    return SessionPlans(model.config(), DType::kF32, model.compute(), model.device(), options).memory().cache;
  };
  EXPECT_EQ(bytes({.batch = 6, .context = 60, .page_size = 16, .cache_tokens = 64}), 6u * 64 * 48 * 4);
  EXPECT_EQ(bytes({.batch = 6, .context = 60, .cache_tokens = 60}), 6u * 60 * 48 * 4) << "a page is no larger than the cache";
  EXPECT_EQ(bytes({.batch = 6, .context = 60, .page_size = 16}), 6u * 6 * 64 * 48 * 4) << "room for all";
}

TEST(Gpt2PagedTextSmall, SaysWhatIsAllowed) {
  const Files files(small());
  const Model model = files.load();
  const auto says = [](const std::string& text, const char* part) { EXPECT_NE(text.find(part), std::string::npos) << text; };
  says(thrown_by([&] { Session(model, {.page_size = -1}); }), "page_size is -1; allowed: 0 (no pages) to 2^31 - 1");
  says(thrown_by([&] { Session(model, {.cache_tokens = -7}); }), "cache_tokens is -7; allowed: 0 (batch times context)");
  EXPECT_EQ(
      SessionPlans(model.config(), DType::kF32, model.compute(), model.device(), {.page_size = (1 << 30), .cache_tokens = 1}).options().cache_tokens,
      1 << 30);
  says(thrown_by([&] { Session(model, {.batch = 1 << 20, .page_size = 1 << 20}); }), "2^31 tokens or more");
  Session session(model, {.batch = 2, .context = 40, .rows = 40, .page_size = 8, .cache_tokens = 41});
  const std::vector<Token> ids = text(40, 1);
  session.step({{0, std::span(ids).first(33)}});
  says(thrown_by([&] { session.step({{1, std::span(ids).first(9)}}); }), "this step needs 2 more pages of 8 tokens; the cache has 1 left");
  says(thrown_by([&] { session.prefill(std::vector<NewTokens>{{0, std::span(ids).first(7)}, {1, std::span(ids).first(9)}}); }), "needs 2 more pages");
  EXPECT_EQ(session.length(0), 33);
  EXPECT_EQ(session.length(1), 0);
  session.step({{0, std::span(ids).first(7)}, {1, std::span(ids).first(8)}});
  EXPECT_FALSE(session.reserve(1, 9));
  session.truncate(0, 32);
  EXPECT_TRUE(session.reserve(1, 9));
  EXPECT_TRUE(session.reserve(1, 9));
  says(thrown_by([&] { session.reserve(1, 49); }), "a sequence of 49 tokens; the cache holds 40 of one");
  says(thrown_by([&] { session.reserve(0, -1); }), "a sequence of -1 tokens");
  says(thrown_by([&] { session.reserve(2, 1); }), "there is no sequence 2");
  const GenerateOptions options{.max_new_tokens = 30};
  Session narrow(model, {.batch = 2, .context = 60, .cache_tokens = 32});
  const std::vector<std::vector<Token>> prompts{text(2, 1), text(4, 1)};
  says(thrown_by([&] { generate(model, narrow, nullptr, prompts, options); }), "prompt 1 and its new tokens need room for 33; the cache holds 32");
}

}  // namespace
}  // namespace fattn::gpt2
