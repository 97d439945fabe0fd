// Documents are copied piece by piece: a piece ends with its document, its file or the row.
#include "gpt2/data/rows.h"

#include <algorithm>
#include <numeric>

namespace fattn::gpt2 {

void Rows::pad(const Row& to, uint64_t from, int32_t document) const {
  std::fill(to.ids + from, to.ids + seqlen_, set_.end_of_text());
  std::fill(to.targets + from, to.targets + seqlen_, -1);
  std::iota(to.positions + from, to.positions + seqlen_, 0);
  std::fill(to.documents + from, to.documents + seqlen_, document);
}

int64_t Rows::fill(uint64_t i, const Row& to) const {
  uint64_t token = i * seqlen_, filled = 0;
  int64_t targets = 0;
  int32_t number = 0;
  size_t f = set_.file_of(token);
  uint64_t document = set_.file(f).document_of(token - set_.file_begin(f));
  while (filled < seqlen_ && token < set_.tokens()) {
    TokenFile& file = set_.file(f);
    const uint64_t begin = token - set_.file_begin(f), document_end = file.document_begin(document + 1);
    const uint64_t count = std::min(document_end - begin, seqlen_ - filled), end = begin + count;
    const bool goes_on = end < document_end;
    file.read(begin, count, to.ids + filled);
    std::copy(to.ids + filled + 1, to.ids + filled + count, to.targets + filled);
    int32_t& last = to.targets[filled + count - 1];
    last = -1;
    if (goes_on) file.read(end, 1, &last);
    targets += static_cast<int64_t>(count - (goes_on ? 0 : 1));
    // A token that is no target takes the one from the token before it, if that is in this piece.
    file.for_spans(begin + 1, goes_on ? end + 1 : end, [&](uint64_t from, uint64_t until) {
      std::fill(to.targets + filled + (from - 1 - begin), to.targets + filled + (until - 1 - begin), -1);
      targets -= static_cast<int64_t>(until - from);
    });
    std::iota(to.positions + filled, to.positions + filled + count, 0);
    std::fill(to.documents + filled, to.documents + filled + count, number++);
    filled += count;
    token += count;
    if (goes_on) break;
    if (end == file.tokens()) {
      ++f;
      document = 0;
    } else {
      ++document;
    }
  }
  if (filled < seqlen_) pad(to, filled, number);
  return targets;
}

}  // namespace fattn::gpt2
