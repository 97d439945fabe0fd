// The way of text to tokens: repaired, split at added tokens, split into pieces, each looked up or merged.
#include <algorithm>
#include <cstring>

#include "gpt2/tokenizer/merge.h"
#include "gpt2/tokenizer/piece_cache.h"
#include "gpt2/tokenizer/splitter.h"
#include "gpt2/tokenizer/tokenizer.h"
#include "gpt2/tokenizer/utf8.h"

namespace fattn::gpt2 {
namespace {

// 1 MiB and 512 KiB: what a core has of its own.
using ShortCache = PieceCache<2, 11>;
using LongCache = PieceCache<6, 19>;
constexpr int kShortBits = 14, kLongBits = 12;

constexpr size_t kFedAtOnce = 1 << 16;  // bytes that wait before a place to cut is looked for

const uint8_t* bytes_of(std::string_view text) { return reinterpret_cast<const uint8_t*>(text.data()); }

}  // namespace

struct Encoder::Caches {
  explicit Caches(const Vocabulary& vocabulary) : merger(vocabulary) {}

  ShortCache short_pieces{kShortBits};
  LongCache long_pieces{kLongBits};
  Splitter splitter;
  Merger merger;
};

Encoder::Encoder(const Tokenizer& tokenizer, bool special_as_text)
    : tokenizer_(tokenizer), special_as_text_(special_as_text), caches_(std::make_unique<Caches>(tokenizer.vocabulary())) {}

Encoder::~Encoder() = default;

std::vector<Token> Encoder::encode(std::string_view text) {
  std::vector<Token> tokens;
  encode(text, tokens);
  return tokens;
}

void Encoder::encode(std::string_view text, std::vector<Token>& to) {
  if (is_utf8(text)) return encode_valid(text, true, to);
  repaired_.clear();
  append_repaired(text, true, repaired_);
  encode_valid(repaired_, true, to);
}

void Encoder::feed(std::string_view part, std::vector<Token>& to) {
  waiting_bytes_ += part;
  waiting_bytes_.erase(0, append_repaired(waiting_bytes_, false, waiting_));
  if (waiting_.size() < kFedAtOnce || !tokenizer_.can_be_cut()) return;
  // White space that follows something else begins a piece, whatever comes behind it, and no added token reaches over it.
  const auto is_blank = [&](size_t i) { return waiting_[i] == ' ' || waiting_[i] == '\n'; };
  const auto is_solid = [&](size_t i) { return static_cast<uint8_t>(waiting_[i]) > ' ' && static_cast<uint8_t>(waiting_[i]) < 0x7f; };
  for (size_t cut = waiting_.size() - 1; cut > std::max<size_t>(searched_, 1); --cut) {
    if (!is_blank(cut) || !is_solid(cut - 1)) continue;
    encode_valid(std::string_view(waiting_).substr(0, cut), !began_, to);
    began_ = true;
    waiting_.erase(0, cut);
    searched_ = 0;
    return;
  }
  searched_ = waiting_.size() - 1;
}

void Encoder::finish(std::vector<Token>& to) {
  append_repaired(waiting_bytes_, true, waiting_);
  encode_valid(waiting_, !began_, to);
  waiting_bytes_.clear();
  waiting_.clear();
  searched_ = 0;
  began_ = false;
}

// `begins`: nothing of the text came before.
void Encoder::encode_valid(std::string_view text, bool begins, std::vector<Token>& to) {
  if (tokenizer_.first_added().empty()) return encode_between(text, begins, to);
  parts_.clear();
  tokenizer_.first_added().split(text, special_as_text_, parts_);
  for (const Part& part : parts_) {
    if (part.id >= 0)
      to.push_back(part.id);
    else
      encode_between(text.substr(part.begin, part.end - part.begin), begins || part.begin > 0, to);
  }
}

void Encoder::encode_between(std::string_view text, bool begins, std::vector<Token>& to) {
  inner_parts_.clear();
  if (tokenizer_.second_added().empty()) {
    if (!text.empty()) inner_parts_.push_back({0, text.size(), -1});
  } else {
    tokenizer_.second_added().split(text, special_as_text_, inner_parts_);
  }
  for (const Part& part : inner_parts_) {
    const std::string_view plain = text.substr(part.begin, part.end - part.begin);
    if (part.id >= 0) {
      to.push_back(part.id);
    } else if (tokenizer_.adds_prefix_space() && plain[0] != ' ' && (begins || part.begin > 0)) {
      prefixed_.assign(1, ' ').append(plain);
      encode_plain(prefixed_, to);
    } else {
      encode_plain(plain, to);
    }
  }
}

void Encoder::merge_piece(std::string_view piece, std::vector<Token>& to) {
  const Vocabulary& vocabulary = tokenizer_.vocabulary();
  const Token whole = vocabulary.has_whole_pieces() ? vocabulary.whole_piece(piece) : -1;
  if (whole >= 0)
    to.push_back(whole);
  else
    caches_->merger.merge(piece, to);
}

void Encoder::encode_plain(std::string_view text, std::vector<Token>& to) {
  Caches& caches = *caches_;
  // Most tokens go through a buffer: growing the vector is looked at once for many of them.
  constexpr size_t kBuffered = 1024;
  Token buffer[kBuffered + 32];
  size_t buffered = 0;
  const auto flush = [&] {
    to.insert(to.end(), buffer, buffer + buffered);
    buffered = 0;
  };
  const auto from = [&](auto& cache, const uint8_t* at, size_t bytes, size_t readable) {
    const auto key = cache.key_of(at, bytes, readable);
    auto& entry = cache.place(key);
    constexpr size_t most = std::size(decltype(entry.tokens){});
    if (cache.holds(entry, key)) {
      std::memcpy(buffer + buffered, entry.tokens, sizeof entry.tokens);
      buffered += entry.count;
      if (buffered > kBuffered) flush();
      return;
    }
    flush();
    const size_t before = to.size();
    merge_piece({reinterpret_cast<const char*>(at), bytes}, to);
    const size_t count = to.size() - before;
    if (count > most) return;
    entry.key = key;
    entry.count = static_cast<uint32_t>(count);
    std::memcpy(entry.tokens, to.data() + before, count * sizeof(Token));
  };
  const uint8_t *at = bytes_of(text), *end = at + text.size();
  while (at < end) {
    const uint8_t* next = caches.splitter.piece_end(at, end);
    const auto bytes = static_cast<size_t>(next - at), readable = static_cast<size_t>(end - at);
    if (bytes <= ShortCache::kMostBytes) {
      from(caches.short_pieces, at, bytes, readable);
    } else if (bytes <= LongCache::kMostBytes) {
      from(caches.long_pieces, at, bytes, readable);
    } else {
      flush();
      merge_piece({reinterpret_cast<const char*>(at), bytes}, to);
    }
    at = next;
  }
  flush();
}

}  // namespace fattn::gpt2
