// Short pieces are searched for the lowest rank again and again, which is quickest for them; long ones keep a heap.
#include "gpt2/tokenizer/merge.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "gpt2/error.h"

namespace fattn::gpt2 {
namespace {

constexpr size_t kShort = 96;  // bytes: about here the heap becomes quicker
constexpr uint32_t kNone = 0xffffffff;

}  // namespace

void Merger::merge(std::string_view piece, std::vector<Token>& to) {
  if (piece.size() == 1) {
    to.push_back(vocabulary_.of_byte(static_cast<uint8_t>(piece[0])));
  } else if (piece.size() <= kShort) {
    merge_short(piece, to);
  } else {
    merge_long(piece, to);
  }
}

void Merger::merge_short(std::string_view piece, std::vector<Token>& to) const {
  Token ids[kShort];
  int32_t ranks[kShort];  // of the pair that begins here; signed, because every processor has the minimum of these
  Token results[kShort];
  size_t n = piece.size();
  for (size_t i = 0; i < n; ++i) ids[i] = vocabulary_.of_byte(static_cast<uint8_t>(piece[i]));
  const auto look_up = [&](size_t i) {
    const Vocabulary::Merged merged = vocabulary_.merged(ids[i], ids[i + 1]);
    ranks[i] = static_cast<int32_t>(merged.rank);
    results[i] = merged.result;
  };
  for (size_t i = 0; i + 1 < n; ++i) look_up(i);
  while (n > 1) {
    int32_t lowest = static_cast<int32_t>(Vocabulary::kNoRank);
    for (size_t i = 0; i + 1 < n; ++i) lowest = std::min(lowest, ranks[i]);
    if (lowest == static_cast<int32_t>(Vocabulary::kNoRank)) break;
    size_t at = 0;
    while (ranks[at] != lowest) ++at;
    ids[at] = results[at];
    --n;
    for (size_t i = at + 1; i < n; ++i) ids[i] = ids[i + 1];
    for (size_t i = at + 1; i + 1 < n; ++i) {
      ranks[i] = ranks[i + 1];
      results[i] = results[i + 1];
    }
    if (at > 0) look_up(at - 1);
    if (at + 1 < n) look_up(at);
  }
  to.insert(to.end(), ids, ids + n);
}

void Merger::merge_long(std::string_view piece, std::vector<Token>& to) {
  if (piece.size() >= kNone) throw Error("a piece of text without a break has 2^32 bytes or more; split the text");
  const auto n = static_cast<uint32_t>(piece.size());
  symbols_.resize(n);
  heap_.clear();
  for (uint32_t i = 0; i < n; ++i) symbols_[i] = {vocabulary_.of_byte(static_cast<uint8_t>(piece[i])), i ? i - 1 : kNone, i + 1 < n ? i + 1 : kNone};
  const auto entry = [&](uint32_t left, uint64_t& value) {
    const uint32_t right = symbols_[left].after;
    if (right == kNone) return false;
    const Vocabulary::Merged merged = vocabulary_.merged(symbols_[left].id, symbols_[right].id);
    value = static_cast<uint64_t>(merged.rank) << 32 | left;
    return merged.result >= 0;
  };
  uint64_t value = 0;
  for (uint32_t i = 0; i < n; ++i)
    if (entry(i, value)) heap_.push_back(value);
  const std::greater<uint64_t> lowest_first;
  std::make_heap(heap_.begin(), heap_.end(), lowest_first);
  const auto push = [&](uint32_t left) {
    if (!entry(left, value)) return;
    heap_.push_back(value);
    std::push_heap(heap_.begin(), heap_.end(), lowest_first);
  };
  while (!heap_.empty()) {
    std::pop_heap(heap_.begin(), heap_.end(), lowest_first);
    const uint64_t top = heap_.back();
    heap_.pop_back();
    const auto left = static_cast<uint32_t>(top);
    Symbol& symbol = symbols_[left];
    if (symbol.id < 0 || symbol.after == kNone) continue;
    const uint32_t right = symbol.after;
    const Vocabulary::Merged merged = vocabulary_.merged(symbol.id, symbols_[right].id);
    if (merged.rank != static_cast<uint32_t>(top >> 32)) continue;  // the pair is another one by now
    symbol.id = merged.result;
    symbol.after = symbols_[right].after;
    if (symbol.after != kNone) symbols_[symbol.after].before = left;
    symbols_[right].id = -1;
    if (symbol.before != kNone) push(symbol.before);
    push(left);
  }
  for (uint32_t i = 0; i != kNone; i = symbols_[i].after) to.push_back(symbols_[i].id);
}

}  // namespace fattn::gpt2
