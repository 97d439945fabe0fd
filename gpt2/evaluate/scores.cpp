#include "gpt2/evaluate/scores.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>

namespace fattn::gpt2 {
namespace {

bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }
bool is_upper(char c) { return c >= 'A' && c <= 'Z'; }
char lower(char c) { return is_upper(c) ? static_cast<char>(c - 'A' + 'a') : c; }
bool is_word(char c) { return (static_cast<unsigned char>(c) & 0x80) != 0 || (c >= '0' && c <= '9') || is_upper(c) || (c >= 'a' && c <= 'z'); }
bool is_punctuation(char c) { return c > ' ' && c < 0x7f && !is_word(c); }

std::vector<std::string> words_of(std::string_view normalised) {
  std::vector<std::string> words;
  std::string word;
  for (const char c : normalised) {
    if (!is_space(c)) word += c;
    if (is_space(c) && !word.empty()) words.push_back(std::exchange(word, ""));
  }
  if (!word.empty()) words.push_back(word);
  return words;
}

double f1_of(const std::vector<std::string>& a, const std::vector<std::string>& b) {
  if (a.empty() || b.empty()) return a.empty() && b.empty() ? 1 : 0;
  std::map<std::string_view, int64_t> left;
  for (const std::string& word : b) ++left[word];
  double common = 0;
  for (const std::string& word : a)
    if (const auto at = left.find(word); at != left.end() && at->second > 0) {
      --at->second;
      ++common;
    }
  return 2 * common / static_cast<double>(a.size() + b.size());
}

// In lower case, what is no letter or digit as a space.
std::string plain_words(std::string_view text) {
  std::string plain;
  for (const char c : text) plain += is_word(c) ? lower(c) : ' ';
  return plain;
}

}  // namespace

std::string normalised_answer(std::string_view text) {
  std::string plain;
  for (const char c : text)
    if (!is_punctuation(c)) plain += lower(c);
  std::string all;
  for (const std::string& word : words_of(plain))
    if (word != "a" && word != "an" && word != "the") all += (all.empty() ? "" : " ") + word;
  return all;
}

bool exact_match(std::string_view answer, const std::vector<std::string>& right) {
  const std::string given = normalised_answer(answer);
  return std::any_of(right.begin(), right.end(), [&](const std::string& one) { return normalised_answer(one) == given; });
}

double answer_f1(std::string_view answer, const std::vector<std::string>& right) {
  const std::vector<std::string> given = words_of(normalised_answer(answer));
  double best = 0;
  for (const std::string& one : right) best = std::max(best, f1_of(given, words_of(normalised_answer(one))));
  return best;
}

RougeL rouge_l(std::string_view candidate, std::string_view reference) {
  const std::vector<std::string> a = words_of(plain_words(candidate)), b = words_of(plain_words(reference));
  RougeL score;
  if (a.empty() || b.empty()) return score;
  std::vector<int64_t> lengths(b.size() + 1, 0);  // of the longest common subsequence of a's words so far and b's first ones
  for (const std::string& word : a) {
    int64_t diagonal = 0;
    for (size_t j = 0; j < b.size(); ++j) {
      const int64_t above = lengths[j + 1];
      lengths[j + 1] = word == b[j] ? diagonal + 1 : std::max(above, lengths[j]);
      diagonal = above;
    }
  }
  const auto common = static_cast<double>(lengths.back());
  score.precision = common / static_cast<double>(a.size());
  score.recall = common / static_cast<double>(b.size());
  constexpr double kSquare = RougeL::kBeta * RougeL::kBeta;
  if (common > 0) score.f = (1 + kSquare) * score.precision * score.recall / (score.recall + kSquare * score.precision);
  return score;
}

}  // namespace fattn::gpt2
