// How near a text is to another: exact match and F1 of answers as SQuAD has them, ROUGE-L of summaries.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace fattn::gpt2 {

// Of SQuAD (Rajpurkar et al. 2016, its evaluation script): in lower case, without punctuation and the words a, an, the, one space between words.
// Letters outside ASCII stay as they are.
std::string normalised_answer(std::string_view text);
// Whether an answer is one of those that are right, normalised.
bool exact_match(std::string_view answer, const std::vector<std::string>& right);
// 2 P R / (P + R) of the words that both have, normalised; the best of those that are right. Without words on either side: 1 if both have none.
double answer_f1(std::string_view answer, const std::vector<std::string>& right);

// Lin 2004, section 3.1: the longest common subsequence of words, over the words of the reference (recall) and of the candidate (precision).
// Words are runs of letters and digits in lower case; letters outside ASCII are letters.
struct RougeL {
  static constexpr double kBeta = 1;  // F = (1 + beta^2) P R / (R + beta^2 P)
  double precision = 0, recall = 0, f = 0;
};
RougeL rouge_l(std::string_view candidate, std::string_view reference);

}  // namespace fattn::gpt2
