// A tree of bytes: one walk at each place where a token may start.
#include "gpt2/tokenizer/added_tokens.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "gpt2/tokenizer/character_classes.h"
#include "gpt2/tokenizer/utf8.h"

namespace fattn::gpt2 {
namespace {

const uint8_t* bytes_of(std::string_view text) { return reinterpret_cast<const uint8_t*>(text.data()); }

// Where the character before `at` begins.
size_t before(std::string_view text, size_t at) {
  do --at;
  while (at > 0 && (static_cast<uint8_t>(text[at]) & 0xc0) == 0x80);
  return at;
}

bool word_before(std::string_view text, size_t at) {
  return at > 0 && CharacterClasses::instance().in_word(code_point_at(bytes_of(text) + before(text, at)).value);
}

bool word_at(std::string_view text, size_t at) {
  return at < text.size() && CharacterClasses::instance().in_word(code_point_at(bytes_of(text) + at).value);
}

bool is_space(const CodePoint& c) { return CharacterClasses::instance().of(c.value) == kSpace; }

size_t spaces_begin(std::string_view text, size_t at) {
  while (at > 0 && is_space(code_point_at(bytes_of(text) + before(text, at)))) at = before(text, at);
  return at;
}

size_t spaces_end(std::string_view text, size_t at) {
  while (at < text.size()) {
    const CodePoint c = code_point_at(bytes_of(text) + at);
    if (!is_space(c)) break;
    at += c.bytes;
  }
  return at;
}

bool has_space(std::string_view text) {
  for (size_t at = 0; at < text.size(); at += code_point_at(bytes_of(text) + at).bytes)
    if (is_space(code_point_at(bytes_of(text) + at))) return true;
  return false;
}

}  // namespace

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)), nodes_(1) {
  for (size_t i = 0; i < tokens_.size(); ++i) {
    const AddedToken& token = tokens_[i];
    touches_space_ |= token.lstrip || token.rstrip || has_space(token.content);
    starts_[static_cast<uint8_t>(token.content[0])] = true;
    uint32_t at = 0;
    for (const char c : token.content) {
      const auto byte = static_cast<uint8_t>(c);
      std::vector<Edge>& edges = nodes_[at].edges;
      const auto edge = std::lower_bound(edges.begin(), edges.end(), byte, [](const Edge& e, uint8_t b) { return e.byte < b; });
      if (edge != edges.end() && edge->byte == byte) {
        at = edge->node;
      } else {
        const auto node = static_cast<uint32_t>(nodes_.size());
        edges.insert(edge, {byte, node});
        nodes_.emplace_back();
        at = node;
      }
    }
    nodes_[at].token = static_cast<int>(i);
  }
  if (std::count(std::begin(starts_), std::end(starts_), true) == 1) only_start_ = static_cast<uint8_t>(tokens_[0].content[0]);
}

size_t AddedTokens::next_start(std::string_view text, size_t from) const {
  if (only_start_ >= 0) {
    const void* at = from < text.size() ? std::memchr(text.data() + from, only_start_, text.size() - from) : nullptr;
    return at ? static_cast<size_t>(static_cast<const char*>(at) - text.data()) : text.size();
  }
  while (from < text.size() && !starts_[static_cast<uint8_t>(text[from])]) ++from;
  return from;
}

int AddedTokens::longest_at(std::string_view text, size_t at) const {
  int longest = -1;
  uint32_t node = 0;
  for (; at < text.size(); ++at) {
    const std::vector<Edge>& edges = nodes_[node].edges;
    const auto byte = static_cast<uint8_t>(text[at]);
    const auto edge = std::lower_bound(edges.begin(), edges.end(), byte, [](const Edge& e, uint8_t b) { return e.byte < b; });
    if (edge == edges.end() || edge->byte != byte) break;
    node = edge->node;
    if (nodes_[node].token >= 0) longest = nodes_[node].token;
  }
  return longest;
}

void AddedTokens::split(std::string_view text, bool special_as_text, std::vector<Part>& parts) const {
  size_t done = 0;
  for (size_t at = empty() ? text.size() : next_start(text, 0); at < text.size();) {
    const int found = longest_at(text, at);
    if (found < 0) {
      at = next_start(text, at + 1);
      continue;
    }
    const AddedToken& token = tokens_[static_cast<size_t>(found)];
    size_t begin = at, end = at + token.content.size();
    at = next_start(text, end);
    if (token.special && special_as_text) continue;
    if (token.single_word && (word_before(text, begin) || word_at(text, end))) continue;
    if (token.lstrip) begin = std::max(spaces_begin(text, begin), done);
    if (token.rstrip) end = spaces_end(text, end);
    if (done < begin) parts.push_back({done, begin, -1});
    parts.push_back({begin, end, token.id});
    done = end;
  }
  if (done < text.size()) parts.push_back({done, text.size(), -1});
}

}  // namespace fattn::gpt2
