// Counts of pairs are kept up to date by what each merge changes; a heap has the pairs, with counts that may be old, which is seen when one comes up.
#include "gpt2/tokenizer/train.h"

#include <algorithm>
#include <unordered_map>

#include "gpt2/error.h"
#include "gpt2/tokenizer/byte_alphabet.h"

namespace fattn::gpt2 {
namespace {

constexpr uint32_t kNone = ~uint32_t{0};

uint64_t pair_of(Token left, Token right) { return static_cast<uint64_t>(left) << 32 | static_cast<uint32_t>(right); }

// A pair of tokens beside each other in some words.
struct Candidate {
  uint64_t count;
  uint64_t pair;
  uint32_t words;  // which list of them

  // The heap's top is the largest: most often, then the lowest ids, then the one that came first.
  bool operator<(const Candidate& o) const { return count != o.count ? count < o.count : pair != o.pair ? pair > o.pair : words > o.words; }
};

class Trainer {
 public:
  Trainer(const std::vector<CountedPiece>& pieces, const BpeTraining& how) : how_(how) {
    add_letters();
    for (const CountedPiece& piece : pieces) {
      begin_.push_back(static_cast<uint32_t>(symbols_.size()));
      length_.push_back(static_cast<uint32_t>(piece.bytes.size()));
      counts_.push_back(static_cast<int64_t>(piece.count));
      for (const char c : piece.bytes) symbols_.push_back(of_byte_[static_cast<uint8_t>(c)]);
      if (symbols_.size() >= kNone) throw Error("the pieces of the text have 2^32 bytes or more; give less text");
    }
  }

  TrainedBpe run() {
    for (uint32_t word = 0; word < begin_.size(); ++word) {
      const Token* at = symbols_.data() + begin_[word];
      for (uint32_t i = 0; i + 1 < length_[word]; ++i) change(pair_of(at[i], at[i + 1]), 1, word);
    }
    put_candidates();
    while (static_cast<Token>(bpe_.tokens.size()) < how_.vocab_size && !heap_.empty()) {
      std::pop_heap(heap_.begin(), heap_.end());
      Candidate top = heap_.back();
      heap_.pop_back();
      const auto now = static_cast<uint64_t>(pairs_.at(top.pair).count);
      if (top.count != now) {
        top.count = now;
        put(top);
        continue;
      }
      if (top.count < std::max<uint64_t>(how_.min_frequency, 1)) break;
      merge(top);
      if (how_.progress) how_.progress();
    }
    return std::move(bpe_);
  }

 private:
  struct Pair {
    int64_t count = 0;
    uint32_t words = kNone;  // the list that the merge at hand fills
  };

  // <|endoftext|>, and the letters of bytes in the order of their code points.
  void add_letters() {
    bpe_.tokens.emplace_back("<|endoftext|>");
    std::vector<std::pair<std::string, uint8_t>> letters;
    for (int byte = 0; byte < 256; ++byte) letters.emplace_back(letter_of_byte(static_cast<uint8_t>(byte)), byte);
    std::sort(letters.begin(), letters.end());  // UTF-8 sorts as code points do
    for (const auto& [letter, byte] : letters) {
      of_byte_[byte] = static_cast<Token>(bpe_.tokens.size());
      bpe_.tokens.emplace_back(1, static_cast<char>(byte));
    }
    for (size_t id = 1; id < bpe_.tokens.size(); ++id) ids_.emplace(bpe_.tokens[id], static_cast<Token>(id));
  }

  // `by` more of a pair in a word.
  void change(uint64_t pair, int by, uint32_t word) {
    Pair& found = pairs_[pair];
    found.count += by * counts_[word];
    if (by < 0) return;
    if (found.words == kNone) {
      found.words = static_cast<uint32_t>(words_.size());
      words_.emplace_back();
      fresh_.push_back(pair);
    }
    if (std::vector<uint32_t>& words = words_[found.words]; words.empty() || words.back() != word) words.push_back(word);
  }

  void put(const Candidate& candidate) {
    heap_.push_back(candidate);
    std::push_heap(heap_.begin(), heap_.end());
  }

  // Pairs that appeared since the last time.
  void put_candidates() {
    for (const uint64_t pair : fresh_) {
      Pair& found = pairs_[pair];
      if (found.count > 0) put({static_cast<uint64_t>(found.count), pair, found.words});
      found.words = kNone;
    }
    fresh_.clear();
  }

  void merge(const Candidate& top) {
    const auto left = static_cast<Token>(top.pair >> 32), right = static_cast<Token>(top.pair & 0xffffffff);
    std::string bytes = bpe_.tokens[static_cast<size_t>(left)] + bpe_.tokens[static_cast<size_t>(right)];
    const auto [at, added] = ids_.emplace(std::move(bytes), static_cast<Token>(bpe_.tokens.size()));
    const Token result = at->second;
    if (added) bpe_.tokens.push_back(at->first);
    bpe_.merges.emplace_back(left, right);
    const std::vector<uint32_t> words = std::move(words_[top.words]);
    words_[top.words] = {};
    for (const uint32_t word : words) merge_in(word, left, right, result);
    put_candidates();
  }

  void merge_in(uint32_t word, Token left, Token right, Token result) {
    Token* const at = symbols_.data() + begin_[word];
    const uint32_t n = length_[word];
    uint32_t to = 0;
    for (uint32_t i = 0; i < n; ++i, ++to) {
      if (at[i] != left || i + 1 == n || at[i + 1] != right) {
        at[to] = at[i];
        continue;
      }
      if (to > 0) {
        change(pair_of(at[to - 1], left), -1, word);
        change(pair_of(at[to - 1], result), 1, word);
      }
      ++i;
      at[to] = result;
      if (i + 1 < n) {
        change(pair_of(right, at[i + 1]), -1, word);
        change(pair_of(result, at[i + 1]), 1, word);
      }
    }
    length_[word] = to;
  }

  const BpeTraining& how_;
  TrainedBpe bpe_;
  Token of_byte_[256] = {};
  std::unordered_map<std::string, Token> ids_;
  std::vector<Token> symbols_;  // of all words
  std::vector<uint32_t> begin_, length_;
  std::vector<int64_t> counts_;
  std::unordered_map<uint64_t, Pair> pairs_;
  std::vector<std::vector<uint32_t>> words_;
  std::vector<uint64_t> fresh_;
  std::vector<Candidate> heap_;
};

}  // namespace

TrainedBpe train_bpe(const std::vector<CountedPiece>& pieces, const BpeTraining& how) {
  if (how.vocab_size < kSmallestVocabulary)
    throw Error("a vocabulary of " + std::to_string(how.vocab_size) + " tokens was asked for; at least " + std::to_string(kSmallestVocabulary) +
                " are needed: <|endoftext|> and a token for each byte");
  return Trainer(pieces, how).run();
}

}  // namespace fattn::gpt2
