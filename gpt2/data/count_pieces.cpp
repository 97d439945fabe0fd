// Each thread counts by itself what it reads; the sums do not depend on who read what.
#include "gpt2/data/count_pieces.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string_view>
#include <unordered_map>

#include "files/checksum.h"
#include "gpt2/data/records.h"
#include "gpt2/data/workers.h"
#include "gpt2/error.h"
#include "gpt2/tokenizer/splitter.h"
#include "gpt2/tokenizer/utf8.h"

namespace fattn::gpt2 {
namespace {

constexpr uint64_t kAtOnce = 1 << 20;

struct HashOfPiece {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return files::xxh64(text.data(), text.size()); }
};
using Counts = std::unordered_map<std::string, uint64_t, HashOfPiece, std::equal_to<>>;

class PieceCounter {
 public:
  PieceCounter(Counts& counts, bool by_line) : counts_(counts), by_line_(by_line) {}

  void add(std::string_view text) {
    if (!is_utf8(text)) {
      repaired_.clear();
      append_repaired(text, true, repaired_);
      text = repaired_;
    }
    while (by_line_ && !text.empty()) {
      const size_t end = std::min(text.find('\n'), text.size() - 1) + 1;
      split(text.substr(0, end));
      text.remove_prefix(end);
    }
    split(text);
  }

 private:
  void split(std::string_view text) {
    const auto* at = reinterpret_cast<const uint8_t*>(text.data());
    for (const uint8_t* end = at + text.size(); at < end;) {
      const uint8_t* next = splitter_.piece_end(at, end);
      const std::string_view piece(reinterpret_cast<const char*>(at), static_cast<size_t>(next - at));
      if (const auto found = counts_.find(piece); found != counts_.end())
        ++found->second;
      else
        counts_.emplace(piece, 1);
      at = next;
    }
  }

  Counts& counts_;
  const bool by_line_;
  const Splitter splitter_;
  std::string repaired_;
};

// Returns how many lines were no document.
uint64_t add_lines(const TextPart& part, TextFormat format, PieceCounter& counter) {
  uint64_t bad = 0;
  for (const LineOfPart& line : lines_of(part)) {
    try {
      for (const RecordPart& piece : parse_record(line.text, format)) counter.add(piece.text);
    } catch (const Error&) {
      ++bad;
    }
  }
  return bad;
}

}  // namespace

PieceCounts count_pieces(const TextFiles& texts, bool by_line, int threads, const std::function<void(uint64_t)>& progress) {
  TextReader reader(texts, kAtOnce);
  std::mutex reading, adding;
  Counts all;
  std::atomic<uint64_t> bad{0};
  const auto work = [&] {
    Counts counts;
    PieceCounter counter(counts, by_line);
    for (uint64_t bytes = 0;; bytes = 0) {
      std::vector<TextPart> parts;
      {
        const std::lock_guard lock(reading);
        parts = reader.next(kAtOnce);
      }
      if (parts.empty()) break;
      for (const TextPart& part : parts) {
        const TextFormat format = texts.files[part.file].format;
        bytes += part.bytes.size();
        if (holds_lines(format))
          bad += add_lines(part, format, counter);
        else
          counter.add(part.bytes);
      }
      if (progress) progress(bytes);
    }
    const std::lock_guard lock(adding);
    if (all.empty())
      all = std::move(counts);
    else
      for (const auto& [piece, count] : counts) all[piece] += count;
  };
  run_on_threads(threads, work);
  PieceCounts result;
  result.bad_lines = bad;
  result.pieces.reserve(all.size());
  while (!all.empty()) {
    auto node = all.extract(all.begin());
    result.pieces.push_back({std::move(node.key()), node.mapped()});
  }
  std::sort(result.pieces.begin(), result.pieces.end(), [](const CountedPiece& a, const CountedPiece& b) { return a.bytes < b.bytes; });
  return result;
}

}  // namespace fattn::gpt2
