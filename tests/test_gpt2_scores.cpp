// Scores of texts are those computed by hand, and examples of tasks are read as they are written.
#include "gpt2/evaluate/scores.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <string>
#include <vector>

#include "gpt2/error.h"
#include "gpt2/evaluate/tasks.h"
#include "temporary_folder.h"

namespace fattn::gpt2 {
namespace {

TEST(Gpt2ScoresSmall, AnswersAsSquadHasThem) {
  EXPECT_EQ(normalised_answer(" The  Quick, brown-fox\tAN a. "), "quick brownfox");
  EXPECT_EQ(normalised_answer("a the an"), "");
  EXPECT_EQ(normalised_answer("theatre"), "theatre");
  EXPECT_TRUE(exact_match("The cat!", {"dog", "cat"}));
  EXPECT_FALSE(exact_match("cats", {"cat"}));
  // 2 of 3 words, 2 of 4: precision 2/3, recall 1/2
  EXPECT_DOUBLE_EQ(answer_f1("big red dog", {"red dog barks loudly"}), 2 * (2.0 / 3) * 0.5 / (2.0 / 3 + 0.5));
  EXPECT_DOUBLE_EQ(answer_f1("red red red", {"red red blue"}), 2.0 / 3);  // each counts as often as both have it
  EXPECT_DOUBLE_EQ(answer_f1("cat", {"dog", "the cat"}), 1);
  EXPECT_DOUBLE_EQ(answer_f1("the", {"a"}), 1);
  EXPECT_DOUBLE_EQ(answer_f1("", {"cat"}), 0);
}

TEST(Gpt2ScoresSmall, RougeLOfLinsExample) {
  // Lin 2004, section 3.1: S1 police killed the gunman; S2 police kill the gunman: 3/4; S3 the gunman kill police: 2/4.
  EXPECT_DOUBLE_EQ(rouge_l("police kill the gunman", "police killed the gunman").f, 0.75);
  EXPECT_DOUBLE_EQ(rouge_l("the gunman kill police", "police killed the gunman").f, 0.5);
  const RougeL score = rouge_l("A b, c d e f", "b x D");  // "b d": 2 of 6, 2 of 3
  EXPECT_DOUBLE_EQ(score.precision, 2.0 / 6);
  EXPECT_DOUBLE_EQ(score.recall, 2.0 / 3);
  EXPECT_DOUBLE_EQ(score.f, 4.0 / 9);
  EXPECT_EQ(rouge_l("", "b").f, 0);
  EXPECT_EQ(rouge_l("x", "b").f, 0);
}

TEST(Gpt2ScoresSmall, MeansAndTheirIntervals) {
  const Mean mean = mean_of({1, 2, 3, 6});
  EXPECT_DOUBLE_EQ(mean.value, 3);
  EXPECT_NEAR(mean.high - mean.value, 1.959964 * std::sqrt(14.0 / 3 / 4), 1e-12);  // the sample's deviation over sqrt(n)
  EXPECT_TRUE(std::isnan(mean_of({1}).low));
}

TEST(Gpt2ScoresSmall, ExamplesAreReadAndBadOnesNamed) {
  test::TemporaryFolder folder;
  const std::string path = (folder.path() / "x.jsonl").string();
  std::ofstream(path) << R"({"prompt": "p", "completion": "c", "answers": ["d", "e"]})"
                         "\n\n"
                         R"({"prompt": "q", "completion": "f"})"
                         "\n";
  const std::vector<Example> all = read_examples(path, 0);
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[0].answers, (std::vector<std::string>{"c", "d", "e"}));
  EXPECT_EQ(read_examples(path, 1).size(), 1u);
  std::ofstream(path) << R"({"prompt": "p", "completion": "c", "answers": "d"})"
                         "\n";
  try {
    read_examples(path, 0);
    FAIL();
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("line 1: \"answers\" is text; it must be a list of texts"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace fattn::gpt2
