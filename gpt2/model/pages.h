// The pages of a cache that sequences share: which of them each sequence has, and which nobody has. Row r of page p is row p * page_size + r of a
// layer's keys and values.
#pragma once

#include <cstdint>
#include <vector>

namespace fattn::gpt2 {

class Pages {
 public:
  Pages() = default;  // none
  // `table` (batch, columns), which the caller keeps: a sequence's pages in the order of its tokens; 0 where it has none.
  Pages(int64_t page_size, int64_t count, int64_t batch, int64_t columns, int32_t* table);

  static int64_t pages_of(int64_t tokens, int64_t page_size) { return tokens / page_size + (tokens % page_size != 0 ? 1 : 0); }

  int64_t free() const { return static_cast<int64_t>(free_.size()); }
  // Pages that a sequence of so many tokens lacks.
  int64_t missing(int64_t sequence, int64_t tokens) const;
  // Takes them; there must be as many free ones.
  void take(int64_t sequence, int64_t tokens);
  // Gives back those that a sequence of so many tokens does not need.
  void give_back(int64_t sequence, int64_t tokens);
  // The row of a token; its page must be the sequence's.
  int64_t row(int64_t sequence, int64_t token) const;

 private:
  int64_t page_size_ = 0, columns_ = 0;
  int32_t* table_ = nullptr;
  std::vector<int64_t> held_;  // pages of each sequence
  std::vector<int32_t> free_;  // the next one last
};

}  // namespace fattn::gpt2
