// Pairs that merge lie in an open table that is at most half full.
#include "gpt2/tokenizer/vocabulary.h"

#include <algorithm>
#include <string>

#include "files/printable.h"
#include "gpt2/error.h"
#include "gpt2/tokenizer/byte_alphabet.h"

namespace fattn::gpt2 {
namespace {

// Ids are places in tables: those of a damaged file must not make them large.
constexpr int64_t kFreeIds = 65536;

std::string show(const std::string& token) { return "'" + files::printable(token, 80) + "'"; }

}  // namespace

Vocabulary::Vocabulary(const VocabularySource& source) {
  lay_out(source);
  std::fill(std::begin(of_byte_), std::end(of_byte_), -1);
  for (const SourceToken& token : source.tokens) {
    if (!token.in_text) continue;
    if (token.bytes.size() == 1) of_byte_[static_cast<uint8_t>(token.bytes[0])] = token.id;
    if (source.whole_pieces) by_bytes_.emplace(bytes(token.id), token.id);
  }
  std::string missing;
  for (int byte = 0; byte < 256; ++byte)
    if (of_byte_[byte] < 0) missing += (missing.empty() ? "" : ", ") + std::to_string(byte);
  if (!missing.empty())
    throw Error("the vocabulary lacks tokens of single bytes: " + files::printable(missing, 100) + "; a byte-level vocabulary has all 256 of them");
  add_merges(source.merges);
}

void Vocabulary::lay_out(const VocabularySource& source) {
  if (source.tokens.empty()) throw Error("the vocabulary is empty");
  const auto most = static_cast<int64_t>(2 * (source.tokens.size() + source.added.size())) + kFreeIds;
  std::vector<const std::string*> by_id;
  const auto place = [&](const std::string& token, Token id) {
    if (id < 0 || id >= most)
      throw Error("the token " + show(token) + " has the id " + std::to_string(id) + "; for a vocabulary of this size ids from 0 to " +
                  std::to_string(most - 1) + " are allowed");
    if (static_cast<size_t>(id) >= by_id.size()) by_id.resize(static_cast<size_t>(id) + 1, nullptr);
    const std::string*& at = by_id[static_cast<size_t>(id)];
    if (at && *at != token) throw Error("the id " + std::to_string(id) + " belongs to two tokens, " + show(*at) + " and " + show(token));
    at = &token;
  };
  for (const SourceToken& token : source.tokens) place(token.bytes, token.id);
  std::vector<std::string> added_bytes;  // as Hugging Face's decoder has them: text in the alphabet stands for bytes here, too
  added_bytes.reserve(source.added.size());
  for (const AddedToken& added : source.added) place(added_bytes.emplace_back(bytes_of_token(added.content)), added.id);
  begin_.assign(by_id.size() + 1, 0);
  known_.assign(by_id.size(), 0);
  for (size_t id = 0; id < by_id.size(); ++id) {
    if (by_id[id]) {
      bytes_ += *by_id[id];
      known_[id] = 1;
      longest_ = std::max(longest_, by_id[id]->size());
    }
    if (bytes_.size() > UINT32_MAX / 2) throw Error("the vocabulary's tokens have more than 2^31 bytes in all");
    begin_[id + 1] = static_cast<uint32_t>(bytes_.size());
  }
  for (const AddedToken& added : source.added)
    if (added.special) known_[static_cast<size_t>(added.id)] = 2;
}

void Vocabulary::add_merges(const std::vector<Merge>& merges) {
  int bits = 4;
  while ((size_t{1} << bits) < 2 * merges.size()) ++bits;
  slots_.resize(size_t{1} << bits);
  mask_ = slots_.size() - 1;
  shift_ = 64 - bits;
  for (const Merge& merge : merges) {
    for (const Token id : {merge.left, merge.right, merge.result})
      if (!has(id)) throw Error("a merge names the id " + std::to_string(id) + ", which no token has");
    const uint64_t key = key_of(merge.left, merge.right);
    size_t i = slot_of(key);
    while (slots_[i].key != kFree && slots_[i].key != key) i = (i + 1) & mask_;
    slots_[i] = {key, {merge.result, merge.rank}};
  }
}

Token Vocabulary::whole_piece(std::string_view bytes) const {
  const auto at = by_bytes_.find(bytes);
  return at == by_bytes_.end() ? -1 : at->second;
}

}  // namespace fattn::gpt2
