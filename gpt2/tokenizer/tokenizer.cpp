// What a tokenizer is made of, and the way back from tokens to text.
#include "gpt2/tokenizer/tokenizer.h"

#include <algorithm>
#include <iterator>

#include "gpt2/error.h"
#include "gpt2/tokenizer/utf8.h"

namespace fattn::gpt2 {
namespace {

std::vector<AddedToken> of_pass(const std::vector<AddedToken>& all, bool normalized) {
  std::vector<AddedToken> tokens;
  std::copy_if(all.begin(), all.end(), std::back_inserter(tokens), [&](const AddedToken& t) { return t.normalized == normalized; });
  return tokens;
}

}  // namespace

Tokenizer::Tokenizer(VocabularySource source)
    : vocabulary_(source), first_(of_pass(source.added, false)), second_(of_pass(source.added, true)), add_prefix_space_(source.add_prefix_space) {}

void Decoder::feed(Token id, std::string& to) {
  const Vocabulary& vocabulary = tokenizer_.vocabulary();
  if (!vocabulary.has(id))
    throw Error("no token has the id " + std::to_string(id) + "; this vocabulary has ids from 0 to " + std::to_string(vocabulary.size() - 1));
  if (skip_special_ && vocabulary.is_special(id)) return;
  const std::string_view bytes = vocabulary.bytes(id);
  if (waiting_.empty()) {
    waiting_.assign(bytes.substr(append_repaired(bytes, false, to)));
    return;
  }
  waiting_ += bytes;
  waiting_.erase(0, append_repaired(waiting_, false, to));
}

void Decoder::finish(std::string& to) {
  append_repaired(waiting_, true, to);
  waiting_.clear();
}

std::string decode(const Tokenizer& tokenizer, const std::vector<Token>& ids, bool skip_special) {
  Decoder decoder(tokenizer, skip_special);
  std::string text;
  for (const Token id : ids) decoder.feed(id, text);
  decoder.finish(text);
  return text;
}

}  // namespace fattn::gpt2
