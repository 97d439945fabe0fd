#include "gpt2/model/pages.h"

#include <algorithm>
#include <cstddef>

namespace fattn::gpt2 {

Pages::Pages(int64_t page_size, int64_t count, int64_t batch, int64_t columns, int32_t* table)
    : page_size_(page_size), columns_(columns), table_(table), held_(static_cast<size_t>(batch), 0) {
  std::fill_n(table, batch * columns, 0);
  for (int64_t page = count; page-- > 0;) free_.push_back(static_cast<int32_t>(page));
}

int64_t Pages::missing(int64_t sequence, int64_t tokens) const {
  return std::max<int64_t>(pages_of(tokens, page_size_) - held_[static_cast<size_t>(sequence)], 0);
}

void Pages::take(int64_t sequence, int64_t tokens) {
  int64_t& held = held_[static_cast<size_t>(sequence)];
  for (int64_t n = missing(sequence, tokens); n-- > 0; free_.pop_back()) table_[sequence * columns_ + held++] = free_.back();
}

void Pages::give_back(int64_t sequence, int64_t tokens) {
  int64_t& held = held_[static_cast<size_t>(sequence)];
  for (const int64_t needed = pages_of(tokens, page_size_); held > needed;) {
    int32_t& page = table_[sequence * columns_ + --held];
    free_.push_back(page);
    page = 0;
  }
}

int64_t Pages::row(int64_t sequence, int64_t token) const {
  return table_[sequence * columns_ + token / page_size_] * page_size_ + token % page_size_;
}

}  // namespace fattn::gpt2
