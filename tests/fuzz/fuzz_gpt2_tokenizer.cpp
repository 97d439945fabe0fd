// Fuzzes GPT-2's tokenizer: any bytes as its files give an error in printable text, or a tokenizer that reads any text, whole or in parts, and writes
// it again. The first byte says which file: j tokenizer.json, r ranks, else vocab.json and, behind a zero byte, merges.txt.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "files/printable.h"
#include "gpt2/tokenizer/tokenizer.h"
#include "gpt2/tokenizer/utf8.h"
#include "gpt2/tokenizer/vocabulary_files.h"

namespace {

using namespace fattn::gpt2;

void require(bool condition) {
  if (!condition) std::abort();
}

VocabularySource parse(std::string_view input) {
  const char which = input[0];
  input.remove_prefix(1);
  if (which == 'j') return parse_tokenizer_json(input);
  if (which == 'r') return parse_tiktoken(input);
  const size_t zero = input.find('\0');
  return parse_vocab_and_merges(input.substr(0, zero), zero == std::string_view::npos ? "" : input.substr(zero + 1));
}

void check(const Tokenizer& tokenizer, const VocabularySource& source, std::string_view text) {
  Encoder encoder(tokenizer);
  const std::vector<Token> whole = encoder.encode(text);
  std::vector<Token> parts;
  for (size_t at = 0; at < text.size(); at += 7) encoder.feed(text.substr(at, 7), parts);
  encoder.finish(parts);
  require(parts == whole);
  for (const Token id : whole) require(tokenizer.vocabulary().has(id));
  const std::string back = decode(tokenizer, whole);
  require(is_utf8(back));
  if (!source.added.empty() || source.add_prefix_space) return;  // those take white space, or add it
  std::string repaired;
  append_repaired(text, true, repaired);
  require(back == repaired);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  try {
    const VocabularySource source = parse(input);
    const Tokenizer tokenizer(source);
    check(tokenizer, source, input);
  } catch (const std::runtime_error& error) {  // any other kind is a fault
    const std::string message = error.what();
    require(!message.empty() && message.size() < 5000 && fattn::files::printable(message, 5000) == message);
  }
  return 0;
}
